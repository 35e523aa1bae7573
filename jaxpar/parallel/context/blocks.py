"""Attention of a context-parallel axis, step by step: a running output and log-sum-exp forward, a custom backward.

`attend` walks a `Schedule`; where keys come from is a `sources` class. The forward keeps q, k, v, o and the log-sum-exp over *all* keys;
the backward gets the keys again, computes each block's scores again from that log-sum-exp, and sums dq here and dk, dv for their owners.
No score matrix is stored and no step waits for the keys of the next: they travel while it computes.

B batch, S tokens of this device, C tokens of a chunk, N query heads, K key/value heads, H head width, W value width. Arrays of chunks are
[slots, B, C, ...].
Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023); log-sum-exp merge, Dao, "FlashAttention-2" (2023), section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.ops.attention import beside_sinks
from jaxpar.parallel.collectives import axis_index, barrier
from jaxpar.parallel.context.kernels import Kernels, Row, Settings
from jaxpar.parallel.context.schedule import Call, Slot, Span
from jaxpar.parallel.context.sources import Gathered, Parts, Travelling

Source = Travelling | Gathered


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(settings: Settings, q: jax.Array, k: jax.Array, v: jax.Array, sinks_N: jax.Array | None, row: Row) -> jax.Array:
    """o_BSNW of q_BSNH, k_BSKH, v_BSKW, which vary over the axis."""
    return _forward(settings, q, k, v, sinks_N, row)[0]


def _attend_forward(settings: Settings, q: jax.Array, k: jax.Array, v: jax.Array, sinks_N: jax.Array | None, row: Row) -> tuple:
    o, lse = _forward(settings, q, k, v, sinks_N, row)
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return o, (q, k, v, sinks_N, o, lse, row)


class _Walk:
    """What forward and backward share: the source of keys, the steps, and the kernels on blocks."""

    def __init__(self, settings: Settings, row: Row, batch: int, again: bool = False) -> None:
        self.schedule, self.batch = settings.schedule, batch
        device = axis_index(settings.axis).astype(jnp.int32)
        self.group = device // self.schedule.layout.inner
        source = Gathered if settings.method == "gather" else Travelling
        self.source: Source = source(schedule=self.schedule, axis=settings.axis, group=self.group, again=again)
        self.kernels = Kernels(settings, row, self.group, batch)

    def chunks(self, x_BS: jax.Array) -> jax.Array:
        """[B, S, ...] -> [slots, B, C, ...]"""
        x = x_BS.reshape(self.batch, self.schedule.slots, self.schedule.size, *x_BS.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def whole(self, x: jax.Array) -> jax.Array:
        """The inverse of `chunks`."""
        return jnp.moveaxis(x, 0, 1).reshape(self.batch, -1, *x.shape[3:])

    def steps(self, state: Parts, carry: Any, body: Callable[[Any, Parts, Span, Any], Any], apart: bool = False) -> Any:
        """carry = body(carry, keys and values, span, step) at every step from 1. `state` is the source's at step 1; the last step sends
        nothing on. `apart`: step 1 is no part of a loop, for it makes what the others carry."""
        spans = self.schedule.spans()
        if apart and spans and spans[0].last > 1:
            spans = [replace(spans[0], last=1), replace(spans[0], first=2), *spans[1:]]
        for number, span in enumerate(spans):
            ends = number == len(spans) - 1
            count = span.last - span.first + (0 if ends else 1)

            def one(both: Any, step: Any, span: Span = span) -> tuple[Any, None]:
                state, carry = both
                following = self.source.on(state)
                return (following, body(carry, self.source.here(state, step), span, step)), None

            if count == 1:
                (state, carry), _ = one((state, carry), span.first)
            elif count:
                (state, carry), _ = lax.scan(one, (state, carry), jnp.arange(span.first, span.first + count, dtype=jnp.int32))
            if ends:
                carry = body(carry, self.source.here(state, span.last), span, span.last)
        return carry


def _stack(x: jax.Array, slots: list[Slot]) -> jax.Array:
    """Chosen chunks of [slots, B, ...], along the batch."""
    return jnp.concatenate([x[slot] if isinstance(slot, int) else lax.dynamic_index_in_dim(x, slot, keepdims=False) for slot in slots])


def _apart(parts: Sequence[jax.Array], slots: list[Slot], count: int) -> jax.Array:
    """[count, B, ...] in float32 or wider: each part at its slot, those of one slot added up."""
    dtype = _statistics(parts[0])

    def at(place: int) -> jax.Array:
        zero = jnp.zeros_like(parts[0], dtype=dtype)
        chosen = [(part.astype(dtype), slot) for part, slot in zip(parts, slots, strict=True) if not isinstance(slot, int) or slot == place]
        return sum((part if isinstance(slot, int) else jnp.where(slot == place, part, 0) for part, slot in chosen), zero)

    return jnp.stack([at(place) for place in range(count)])


def _statistics(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _forward(settings: Settings, q: jax.Array, k: jax.Array, v: jax.Array, sinks_N: jax.Array | None, row: Row) -> tuple:
    walk = _Walk(settings, row, q.shape[0])
    schedule, dtype = walk.schedule, _statistics(q)
    q_chunks = walk.chunks(q)
    state = walk.source.open(tuple(map(walk.chunks, (k, v))) if schedule.steps else ())
    zero = jnp.zeros_like(q_chunks[..., 0], dtype=dtype)  # [slots, B, C, N]
    lse = jnp.moveaxis(zero, 2, 3) - jnp.inf
    total = (jnp.broadcast_to(zero[..., None], (*zero.shape, v.shape[-1])), lse)

    def meet(total: tuple, keys: Parts, call: Call, step: Any, checked: bool) -> tuple:
        q_slots, k_slots = [a for a, _ in call.pairs], [b for _, b in call.pairs]
        o_new, lse_new = walk.kernels.forward(call, step, _stack(q_chunks, q_slots), *(_stack(x, k_slots) for x in keys))
        for slot, o_one, lse_one in zip(q_slots, jnp.split(o_new, len(q_slots)), jnp.split(lse_new, len(q_slots)), strict=True):
            valid = schedule.valid(step, walk.group, slot) if checked else None
            lse_one = lse_one if valid is None else jnp.where(valid, lse_one, -jnp.inf)
            total = _merged(total, slot, o_one.astype(dtype), lse_one)
        return total

    following = walk.source.on(state) if schedule.steps else ()
    own = tuple(map(walk.chunks, (k, v)))
    for call in schedule.first():
        total = meet(total, own, call, 0, checked=False)

    def body(total: tuple, keys: Parts, span: Span, step: Any) -> tuple:
        for call in schedule.calls(span, step, walk.group):
            total = meet(total, keys, call, step, checked=True)
        return total

    o, lse = walk.steps(following, total, body)
    if sinks_N is not None:
        share, lse = beside_sinks(lse, sinks_N)
        o = o * jnp.moveaxis(share, 2, 3)[..., None]
    return walk.whole(o).astype(q.dtype), _rows(lse)


def _rows(lse: jax.Array) -> jax.Array:
    """[slots, B, N, C] -> [B, N, S]"""
    moved = jnp.moveaxis(lse, 0, 2)
    return moved.reshape(*moved.shape[:2], -1)


def _merged(total: tuple, slot: Slot, o_new: jax.Array, lse_new: jax.Array) -> tuple:
    """Running output and log-sum-exp of one chunk with those of another block of keys. -inf is a row that has seen nothing."""
    o, lse = (lax.dynamic_index_in_dim(x, slot, keepdims=False) for x in total)
    both = jnp.logaddexp(lse, lse_new)
    seen = both > -jnp.inf
    old, new = (jnp.where(seen, jnp.exp(x - jnp.where(seen, both, 0)), 0) for x in (lse, lse_new))
    o = o * jnp.moveaxis(old, 1, 2)[..., None] + o_new * jnp.moveaxis(new, 1, 2)[..., None]
    return tuple(lax.dynamic_update_index_in_dim(x, part, slot, 0) for x, part in zip(total, (o, both), strict=True))


def _attend_backward(settings: Settings, residuals: tuple, do: jax.Array) -> tuple:
    q, k, v, sinks_N, o, lse, row = residuals
    walk = _Walk(settings, row, q.shape[0], again=True)
    schedule = walk.schedule
    state = walk.source.open(tuple(map(walk.chunks, (k, v))) if schedule.steps else ())
    following = walk.source.on(state) if schedule.steps else ()
    q_side = (*map(walk.chunks, (q, o)), jnp.moveaxis(lse.reshape(*lse.shape[:2], schedule.slots, -1), 2, 0), walk.chunks(do))
    own = tuple(map(walk.chunks, (k, v)))
    dq = jnp.zeros_like(q_side[0], dtype=_statistics(q))

    def meet(dq: jax.Array, keys: Parts, call: Call, step: Any, checked: bool) -> tuple[jax.Array, Parts]:
        q_slots, k_slots = [a for a, _ in call.pairs], [b for _, b in call.pairs]
        queries, *outputs = (_stack(x, q_slots) for x in q_side)
        k_stacked, v_stacked = (_stack(x, k_slots) for x in keys)
        found = walk.kernels.backward(call, step, queries, k_stacked, v_stacked, tuple(outputs))
        parts = []
        for q_slot, *one in zip(q_slots, *(jnp.split(x, len(q_slots)) for x in found), strict=True):
            valid = schedule.valid(step, walk.group, q_slot) if checked else None
            one = one if valid is None else [jnp.where(valid, x, 0) for x in one]
            dq = dq.at[q_slot].add(one[0].astype(dq.dtype))
            parts.append(one[1:])
        return dq, tuple(_apart(part, k_slots, schedule.slots) for part in zip(*parts, strict=True))

    early, *late = schedule.first()
    dq, shares = meet(dq, own, early, 0, checked=False)
    if schedule.steps:  # what is sent next waits for these, so that they run behind the first transfer, not all behind the second
        following, dq, shares = barrier((following, dq, shares))

    def body(carry: tuple, keys: Parts, span: Span, step: Any) -> tuple:
        dq, sums = carry
        sums = None if sums is None else walk.source.before(sums)
        for call in schedule.calls(span, step, walk.group):
            dq, shares = meet(dq, keys, call, step, checked=True)
            sums = walk.source.sums(shares, keys) if sums is None else walk.source.collect(sums, shares, step)
        return dq, sums

    dq, sums = walk.steps(following, (dq, None), body, apart=True)
    if late:  # these are kept for when sums are on their way home
        sums, own = barrier((sums, own))
    arrived = walk.source.home(sums, own) if schedule.steps else ()
    for call in late:
        dq, more = meet(dq, own, call, 0, checked=False)
        shares = tuple(a + b for a, b in zip(shares, more, strict=True))
    dq, shares, arrived = barrier((dq, shares, arrived))
    if schedule.steps:
        shares = tuple(a + b for a, b in zip(shares, arrived, strict=True))
    dk, dv = (walk.whole(a.astype(x.dtype)) for a, x in zip(shares, own, strict=True))
    dsinks = None
    if sinks_N is not None:
        slope_BNS = jnp.einsum("bsnw,bsnw->bns", do.astype(lse.dtype), o.astype(lse.dtype))
        share_BNS = jnp.exp(sinks_N.astype(lse.dtype)[:, None] - jnp.where(lse > -jnp.inf, lse, 0))
        dsinks = -(share_BNS * slope_BNS).sum((0, 2)).astype(sinks_N.dtype)
    return walk.whole(dq).astype(q.dtype), dk, dv, dsinks, jax.tree.map(lambda _: None, row)


attend.defvjp(_attend_forward, _attend_backward)
