"""How keys and values of other groups reach a device, and how their gradients go home. Both are lists of arrays [slots, B, C, ...].

    Travelling   ring: each step sends them to the next group; gradients travel along and are sent home at the end
    Gathered     gather: an all-gather before the first step; a reduce-scatter of the gradients after the last

    open(parts) -> state      here(state, step) -> parts      on(state) -> state
    sums(shares, keys) -> sums                                collect(sums, shares, step) -> sums
    home(sums, own) -> parts
Shares come in float32 or wider. Parts that are sent together wait for each other (`barrier`): XLA would else join the keys of one step and
the values of the one before it in one transfer, and hide both behind the little that lies between them.
B batch, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import all_gather, barrier, permute, reduce_scatter
from jaxpar.parallel.context.schedule import Schedule

Parts = tuple[jax.Array, ...]
Pairs = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Travelling:
    """A ring over groups of `inner` neighbours each: device g · inner + i only ever sends to devices h · inner + i.

    `again` writes permutations of keys in another order than the forward's, to the same effect: the backward of an engine that computes
    equal operations once would else keep what the forward received. A single pair has no other order and gets one more, which nobody reads.
    """

    schedule: Schedule
    axis: str
    group: jax.Array
    again: bool = False

    def _send(self, x: jax.Array, pairs: Pairs) -> jax.Array:
        """Pairs of groups, some of which may stay where they are; groups that nothing is sent to get zeros."""
        inner = self.schedule.layout.inner
        devices = [(a * inner + i, b * inner + i) for a, b in pairs for i in range(inner)]
        if all(a == b for a, b in devices):
            stays = [a for a, _ in pairs]
            return jnp.where(jnp.isin(self.group, jnp.array(stays, jnp.int32)), x, 0) if stays else jnp.zeros_like(x)
        return permute(x, self.axis, devices[1:] + devices[:1] if self.again else devices)

    def open(self, parts: Parts) -> Parts:
        return parts

    def here(self, state: Parts, step: jax.Array | int) -> Parts:
        return state

    def on(self, state: Parts) -> Parts:
        """Keys and values one step further; where the walk ends, the last group sends nothing."""
        return tuple(self._further(x, round_again=not self.schedule.ends) for x in barrier(state))

    def _further(self, x: jax.Array, round_again: bool) -> jax.Array:
        ring, inner = self.schedule.layout.ring, self.schedule.layout.inner
        up = [(a, a + 1) for a in range(ring - 1)]
        single = self.again and len(up) * inner == 1
        if not self.schedule.folded:
            return self._send(x, up + [(ring - 1, 0)] if round_again or single else up)
        up += [(ring - 1, 0)] if single else []
        early, late = self._send(x[0], up), self._send(x[1], [(b, a) for a, b in up])
        late = jnp.where(self.group == ring - 1, x[0], late)  # the turn: the last group's early chunk is followed by its late one
        early = jnp.where(self.group == 0, x[1], early) if round_again else early
        return jnp.stack([early, late])

    def sums(self, shares: Parts, keys: Parts) -> Parts:
        """The gradients of the keys of step 1, in their dtype, in which they travel."""
        return tuple(x.astype(key.dtype) for x, key in zip(shares, keys, strict=True))

    def before(self, sums: Parts) -> Parts:
        """What has been collected so far for the keys of the next step."""
        return tuple(self._further(x, round_again=True) for x in barrier(sums))

    def collect(self, sums: Parts, shares: Parts, step: jax.Array | int) -> Parts:
        """Added up in the dtype of the shares and rounded to that of the sums, once a step."""
        return tuple(_plus(a, b) for a, b in zip(sums, shares, strict=True))

    def home(self, sums: Parts, own: Parts) -> Parts:
        """What the others collected for this device's own keys comes back in one jump."""
        return tuple(map(self._back, barrier(sums)))

    def _back(self, x: jax.Array) -> jax.Array:
        ring, steps = self.schedule.layout.ring, self.schedule.steps
        if not self.schedule.folded:
            return self._send(x, [(a, (a - steps) % ring) for a in range(ring)])
        chunks = 2 * ring
        moves: dict[tuple[int, int], Pairs] = {}
        for a in range(ring):
            for slot, chunk in enumerate((a, chunks - 1 - a)):
                at_home = (chunk - steps) % chunks
                target = (at_home, 0) if at_home < ring else (chunks - 1 - at_home, 1)
                moves.setdefault((slot, target[1]), []).append((a, target[0]))
        arrived = [sum((self._send(x[slot], pairs) for (slot, to), pairs in moves.items() if to == place), 0) for place in range(2)]
        return jnp.stack(arrived)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Everything on every device of the axis. The sums of gradients have room for all keys, in float32 or wider."""

    schedule: Schedule
    axis: str
    group: jax.Array
    again: bool = False

    def open(self, parts: Parts) -> Parts:
        """[slots, B, C, ...] -> [ring · slots, B, C, ...], by place."""
        return tuple(all_gather(x, self.axis, dim=0) for x in parts)

    def here(self, state: Parts, step: jax.Array | int) -> Parts:
        places = self.schedule.places(step, self.group)
        return tuple(jnp.stack([lax.dynamic_index_in_dim(x, place, keepdims=False) for place in places]) for x in state)

    def on(self, state: Parts) -> Parts:
        return state

    def sums(self, shares: Parts, keys: Parts) -> Parts:
        ring = self.schedule.layout.ring
        wide = tuple(
            jnp.zeros_like(x, shape=(ring * x.shape[0], *x.shape[1:]), dtype=jnp.promote_types(x.dtype, jnp.float32)) for x in shares
        )
        return self.collect(wide, shares, 1)

    def before(self, sums: Parts) -> Parts:
        return sums

    def collect(self, sums: Parts, shares: Parts, step: jax.Array | int) -> Parts:
        for slot, place in enumerate(self.schedule.places(step, self.group)):
            sums = tuple(a.at[place].add(b[slot].astype(a.dtype)) for a, b in zip(sums, shares, strict=True))
        return sums

    def home(self, sums: Parts, own: Parts) -> Parts:
        return tuple(reduce_scatter(x.astype(key.dtype), self.axis, dim=0) for key, x in zip(own, sums, strict=True))


def _plus(a: jax.Array, b: jax.Array) -> jax.Array:
    """a + b in float32 or wider, rounded to the dtype of a."""
    return (a.astype(jnp.promote_types(a.dtype, jnp.float32)) + b).astype(a.dtype)
