"""The steps of a context-parallel attention: which blocks of queries and keys meet when, and how they see each other.

At step s the device of group g computes with the keys of group g - s (`rest`), so that the step before it can send them on. A zigzag shard
under a window goes another way (`folded`): early chunks move up and late ones down the axis, and at step s each chunk meets the keys s
chunks before it, so that the walk ends with the window. Blocks masked on every device are in no step.

    own       the same tokens: causal by index
    behind    keys before all queries, or full attention: everything is visible
    partial   keys before all queries, the furthest hidden by a window
    striped   every ring-th token of both: causal by index, strictly so for half of the groups
    masked    only the arrays know: a prefix, windows that are known at run time
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxpar.ops.tiles import Masking
from jaxpar.parallel.context.layout import STRIPED, Layout

OWN, BEHIND, PARTIAL, STRIPES, MASKED = "own", "behind", "partial", "striped", "masked"

Slot: TypeAlias = int | jax.Array


@dataclass(frozen=True)
class Call:
    """Blocks that one kernel call computes, stacked along the batch: (slot of queries, slot of keys) pairs, all of one kind."""

    kind: str
    pairs: tuple[tuple[Slot, Slot], ...]


@dataclass(frozen=True)
class Span:
    """Steps `first` to `last` that run the same calls."""

    first: int
    last: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The steps of one attention. `masking` is that of the whole row; `shard` tokens of a group.

    ordered   False where keys after a query may be visible (full attention, a prefix)
    traced    a window that only the arrays know
    """

    layout: Layout
    masking: Masking
    shard: int
    ordered: bool
    traced: bool

    @property
    def slots(self) -> int:
        """Chunks of a shard that are handled apart: where order decides nothing the shard is one block."""
        return self.layout.slots if self.ordered and self.layout.ring > 1 else 1

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return self.shard // self.slots

    @property
    def reach(self) -> int:
        """Chunks back that a query can see into."""
        everything = self.layout.ring * self.slots - 1
        if not self.masking.window or not self.ordered or self.layout.name == STRIPED:
            return everything
        return min(everything, -(-(self.masking.window - 1) // self.size))

    @property
    def folded(self) -> bool:
        return self.slots == 2 and bool(self.masking.window) and self.reach < self.layout.ring

    @property
    def steps(self) -> int:
        """Times that keys and values are sent on."""
        return self.reach if self.folded else min(self.reach, self.layout.ring - 1)

    @property
    def ends(self) -> bool:
        """Whether a walk up the axis ends at its last group: no query there sees keys that came round."""
        return self.ordered and (self.folded or (self.slots == 1 and self.layout.name != STRIPED))

    @property
    def unordered(self) -> str:
        """The kind of every block where order decides nothing, or not everything (a prefix)."""
        return MASKED if self.masking.causal else BEHIND

    def spans(self) -> list[Span]:
        """Steps 1 to `steps`, those with equal calls together."""
        if not self.steps:
            return []
        if not self.ordered:
            return [Span(1, self.steps, self.unordered)]
        if self.layout.name == STRIPED:
            return [Span(1, self.steps, STRIPES)]
        if self.traced or (self.masking.window and self.slots == 2 and not self.folded):
            return [Span(1, self.steps, MASKED)]
        if not self.masking.window:
            return [Span(1, self.steps, BEHIND)]
        whole = min(self.steps, max(0, self.masking.window // self.size - 1))  # steps at which even the furthest pair is visible
        spans = [Span(1, whole, BEHIND)] if whole else []
        return spans + [Span(step, step, PARTIAL) for step in range(whole + 1, self.steps + 1)]

    def first(self) -> tuple[Call, ...]:
        """What step 0 computes, on this device's own keys."""
        if not self.ordered:
            return (Call(self.unordered, ((0, 0),)),)
        if self.layout.name == STRIPED:
            return (Call(STRIPES, ((0, 0),)),)
        own = Call(OWN, tuple((slot, slot) for slot in range(self.slots)))
        if self.slots == 1 or self.folded:
            return (own,)
        return own, Call(MASKED if self.traced or self.masking.window else BEHIND, ((1, 0),))

    def calls(self, span: Span, step: jax.Array, group: jax.Array) -> tuple[Call, ...]:
        """What a step of a span computes."""
        if self.slots == 1:
            return (Call(span.kind, ((0, 0),)),)
        if self.folded:
            return (Call(span.kind, ((0, 0), (1, 1))),)
        # Keys of a group before this one: its early chunk is before both of ours. After it: both of its chunks are before our late one.
        either = jnp.where(group >= step, 0, 1)
        return (Call(span.kind, ((1, 0), (either, either))),)

    def places(self, step: jax.Array | int, group: jax.Array) -> list[jax.Array]:
        """Where the keys that a step works on lie at home, for each slot: see `Layout.place`."""
        if self.folded:
            return [self.layout.place(jnp.maximum(self.layout.chunk(group, slot) - step, 0)) for slot in range(2)]
        source = (group - step) % self.layout.ring
        return [source * self.slots + slot for slot in range(self.slots)]

    def valid(self, step: jax.Array, group: jax.Array, slot: int | jax.Array) -> jax.Array | None:
        """Whether the keys of a slot came from before this group at all; None where they always did."""
        return (group >= step) | (slot == 1) if self.ends else None

    def indices(self, place: jax.Array) -> jax.Array:
        """The index in the row of each token at one of `places`. [size] int32."""
        per = self.layout.slots // self.slots
        return jnp.concatenate([self.layout.indices(place * per + part, self.size // per) for part in range(per)])

    def block(self, kind: str, step: int) -> Masking:
        """How the kernel sees one block of that kind. `step` only matters to `partial`."""
        if kind == OWN:
            return replace(self.masking, causal=True, ordered=True)
        if kind == STRIPES:
            return replace(self.masking, causal=True, ordered=True, stride=self.layout.ring)
        if kind == BEHIND:
            return replace(self.masking, causal=False, window=0)
        if kind == PARTIAL:
            return replace(self.masking, causal=False, ordered=True, offset=step * self.size)
        return self.masking
