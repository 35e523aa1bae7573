"""The kernel calls of context-parallel attention: stacked blocks of queries and keys, through cuDNN where it covers them.

    Row        what every device knows of the whole row
    Settings   what is static of one attention
    Kernels    forward and backward of the blocks of a call

B batch, C tokens of a chunk, P blocks stacked along the batch, N query heads, K key/value heads, H head width, W value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.ops import blockwise, cudnn
from jaxpar.ops.tiles import Marks
from jaxpar.parallel.context.schedule import BEHIND, OWN, STRIPES, Call, Schedule, Slot

Three = tuple[jax.Array, jax.Array, jax.Array]


class Row(NamedTuple):
    """What every device knows of the whole row, in laid-out order: segments [B, S], the keys that earlier queries see too (prefix), both or
    either None; and a window that is known at run time."""

    segments: jax.Array | None
    prefix: jax.Array | None
    window: jax.Array | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`method` is ring or gather; `cudnn` uses cuDNN for the kinds of blocks it can do."""

    schedule: Schedule
    method: str
    axis: str
    cudnn: bool


@dataclass(frozen=True, eq=False)
class Kernels:
    """Blocks on the device of one group. q, k, v are [P · B, C, ...], the blocks of `call.pairs` one after another."""

    settings: Settings
    row: Row
    group: jax.Array
    batch: int

    def forward(self, call: Call, step: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(o, log-sum-exp [P · B, N, C]) over these keys only."""
        masking = self.settings.schedule.block(call.kind, step)
        if not self.on_cudnn(call.kind):
            return blockwise.block_forward(masking, q, k, v, self.marks(call, step))
        if call.kind != STRIPES:
            return cudnn.block_forward(masking.causal, masking.window, masking.scale, q, k, v)
        strict = self.strict(step)
        o, lse = cudnn.block_forward(True, 0, masking.scale, _shifted(strict, q, -1, 1), k, v)
        lse = _shifted(strict, lse, 1, 2)
        return _shifted(strict, o, 1, 1), lse.at[:, :, 0].set(jnp.where(strict, -jnp.inf, lse[:, :, 0]))

    def backward(self, call: Call, step: Any, q: jax.Array, k: jax.Array, v: jax.Array, outputs: tuple[jax.Array, ...]) -> Three:
        """(dq, dk, dv) of these blocks, given o, log-sum-exp (both over all keys) and do."""
        masking = self.settings.schedule.block(call.kind, step)
        o, lse, do = outputs
        if not self.on_cudnn(call.kind):
            return blockwise.block_backward(masking, q, k, v, o, lse, do, self.marks(call, step))
        if call.kind != STRIPES:
            return cudnn.block_backward(masking.causal, masking.window, masking.scale, q, k, v, o, lse, do)
        strict = self.strict(step)
        # The first query moves behind the last one, where it must not count though it meets keys after it: a finite log-sum-exp below their
        # scores would make its weights infinite, and infinity times 0 is no number.
        do = do.at[:, 0].set(jnp.where(strict, 0, do[:, 0]))
        lse = lse.at[:, :, 0].set(jnp.where(strict, 1e30, lse[:, :, 0]))
        q, o, do = (_shifted(strict, x, -1, 1) for x in (q, o, do))
        dq, dk, dv = cudnn.block_backward(True, 0, masking.scale, q, k, v, o, _shifted(strict, lse, -1, 2), do)
        return _shifted(strict, dq, 1, 1), dk, dv

    def on_cudnn(self, kind: str) -> bool:
        striped = kind == STRIPES and not self.settings.schedule.masking.window
        return self.settings.cudnn and (kind in (OWN, BEHIND) or striped)

    def strict(self, step: Any) -> jax.Array:
        """Whether striped keys come from a group behind this one: query i then sees keys before i, not key i. A kernel that is causal by
        index gets the queries one place earlier."""
        return self.group < step

    def marks(self, call: Call, step: Any) -> Marks:
        """Indices, segments and prefix of the blocks."""
        schedule, (segments, prefix, window) = self.settings.schedule, self.row
        places = schedule.places(step, self.group)

        def of_keys(slot: Slot) -> jax.Array:
            return places[slot] if isinstance(slot, int) else jnp.stack(places)[slot]

        q_places = [self.group * schedule.slots + q_slot for q_slot, _ in call.pairs]
        k_places = [of_keys(k_slot) for _, k_slot in call.pairs]

        def index(places: list[jax.Array]) -> jax.Array:
            return jnp.concatenate([jnp.broadcast_to(schedule.indices(place), (self.batch, schedule.size)) for place in places])

        def picked(x_BS: jax.Array | None, places: list[jax.Array]) -> jax.Array | None:
            if x_BS is None:
                return None
            chunks = x_BS.reshape(self.batch, -1, schedule.size)
            return jnp.concatenate([lax.dynamic_index_in_dim(chunks, place, 1, keepdims=False) for place in places])

        return Marks(
            index(q_places), index(k_places), picked(segments, q_places), picked(segments, k_places), window, picked(prefix, k_places)
        )


def _shifted(strict: jax.Array, x: jax.Array, by: int, dim: int) -> jax.Array:
    return jnp.where(strict, jnp.roll(x, by, dim), x)
