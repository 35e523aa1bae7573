"""Which tokens each device of a context-parallel axis holds.

`n` devices along the axis are `ring` groups of `inner` neighbours (inner > 1 only where Ulysses exchanges heads inside). A row of S tokens
is cut into `ring` shards, and each shard into `inner` runs of neighbours in it. A shard is

    contiguous   tokens g S/ring and on
    zigzag       chunk g and chunk 2 ring - 1 - g of 2 ring: an early and a late one, so that causal work is equal
    striped      tokens g, g + ring, g + 2 ring, ...

The loader puts rows in that order once, on the host (`order`); devices only ever know the place of their tokens (`indices`).
Source: zigzag, Zhu, "ring-flash-attention" (2024) and Llama 3 (2024), section 3.3.2; striped, Brandon et al., "Striped Attention" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import ContextConfig
from jaxpar.config.checks import require

CONTIGUOUS, ZIGZAG, STRIPED = "contiguous", "zigzag", "striped"


@dataclass(frozen=True)
class Layout:
    """How a row lies over `ring` × `inner` devices. `inner` is the faster of the two along the axis."""

    name: str
    ring: int
    inner: int = 1

    @property
    def slots(self) -> int:
        """Chunks of neighbouring tokens in a shard; a striped shard counts as one, and so does the only one."""
        return 2 if self.name == ZIGZAG and self.ring > 1 else 1

    def order(self, length: int) -> np.ndarray:
        """The token that stands at each place of a laid-out row: `row[order]` is what the devices hold, one after another. [S] int64.
        `layout` checks lengths."""
        tokens = np.arange(length)
        if self.name == STRIPED:
            return tokens.reshape(-1, self.ring).T.reshape(-1)
        if self.slots == 2:
            chunks = tokens.reshape(2 * self.ring, -1)
            return np.stack([chunks[: self.ring], chunks[: self.ring - 1 : -1]], axis=1).reshape(-1)
        return tokens

    def chunk(self, group: jax.Array | int, slot: int | jax.Array) -> jax.Array | int:
        """The number in the sequence, of `slots` × `ring`, of the chunk in a slot of a group."""
        return group if self.slots == 1 else jnp.where(slot == 0, group, 2 * self.ring - 1 - group)

    def place(self, chunk: jax.Array) -> jax.Array:
        """Where a chunk lies, counting slots through the groups: the inverse of `chunk`."""
        if self.slots == 1:
            return chunk
        return jnp.where(chunk < self.ring, 2 * chunk, 2 * (2 * self.ring - 1 - chunk) + 1)

    def indices(self, place: jax.Array, size: int) -> jax.Array:
        """The index in the row of each of the `size` tokens at a place (`slots` × group + slot). [size] int32."""
        tokens = jnp.arange(size, dtype=jnp.int32)
        if self.name == STRIPED:
            return tokens * self.ring + place
        return self.chunk(place // self.slots, place % self.slots) * size + tokens

    def tokens(self, device: jax.Array, local: jax.Array, length: int) -> jax.Array:
        """The index in the row of tokens `local` (places on this device, int32) of the device at that place of the axis, which holds
        `length` of them."""
        place = device % self.inner * length + local  # within the shard
        size = length * self.inner // self.slots
        if self.name == STRIPED:
            return place * self.ring + device // self.inner
        slot = place // size
        return self.chunk(device // self.inner, slot) * size + place % size


def layout(context: ContextConfig, devices: int, length: int) -> Layout:
    """The layout of rows of `length` tokens over `devices`. ValueError naming the field, and the multiple that a length must be."""
    ring, inner = context.split(devices)
    unit = context.unit(devices)
    below = length // unit * unit
    require(
        length % unit == 0,
        f"data.sequence: {length} tokens do not divide into the parts that layout {context.layout} ({context.method}) needs over {devices} "
        f"devices; multiples of {unit} work, such as {', '.join(str(size) for size in (below, below + unit) if size)}",
    )
    return Layout(context.layout, ring, inner)
