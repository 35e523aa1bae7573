"""Rows sorted by group, and tokens to rows and back: only gathers, in both directions, so that no sum depends on timing.

    sort, sort_limited   which choice each row of a buffer holds, and which row each choice has
    spread               tokens to the rows of their choices
    carry                one number of each choice to its row
    combine              rows to their tokens, added up over a token's choices

Each of T tokens makes K choices of a group, numbered 0 to T K - 1. A row that holds none and a choice that has none are numbered one past
the end, and read zeros.

Dims: T tokens, K choices of a token, R rows, G groups, C rows of a group, D model width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Rows = tuple[jax.Array, jax.Array]


def _flat(group_TK: jax.Array, groups: int) -> jax.Array:
    """Groups of the choices as one row of int32; G for those outside 0 to G - 1, which belong to none."""
    return jnp.where((group_TK >= 0) & (group_TK < groups), group_TK, groups).reshape(-1).astype(jnp.int32)


def _counts(flat: jax.Array, groups: int) -> jax.Array:
    return (flat[:, None] == jnp.arange(groups, dtype=jnp.int32)).sum(0, dtype=jnp.int32)


def sort(group_TK: jax.Array, groups: int, rows: int) -> tuple[Rows, jax.Array, jax.Array]:
    """Choices one after another, group by group, in R rows: ((order[R], place[T, K]), sizes[G], overflow), int32.

    Within a group they stand in the order of their numbers. `order` says which choice a row holds, `place` which row a choice has; `sizes`
    are the rows of each group, `overflow` the choices that found the buffer full. Those outside 0 to G - 1 get no row and count nowhere.
    """
    flat = _flat(group_TK, groups)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts_G = _counts(flat, groups)
    total = counts_G.sum(dtype=jnp.int32)
    kept = jnp.minimum(total, rows)
    place = jnp.argsort(order).astype(jnp.int32)  # the inverse of a permutation, without a scatter
    place_TK = jnp.where(place < kept, place, rows).reshape(group_TK.shape)
    row = jnp.arange(rows, dtype=jnp.int32)
    order_R = jnp.where(row < kept, jnp.take(order, row, mode="fill", fill_value=0), flat.size)
    sizes_G = jnp.diff(jnp.minimum(jnp.cumsum(counts_G), kept), prepend=jnp.zeros_like(kept)[None]).astype(jnp.int32)
    return (order_R, place_TK), sizes_G, total - kept


def sort_limited(group_TK: jax.Array, groups: int, capacity: int, weight_TK: jax.Array | None = None) -> tuple[Rows, jax.Array]:
    """C rows for each group, whether it fills them or not: ((order[G C], place[T, K]), dropped), int32.

    A group that is chosen more often keeps the choices of largest weight, or those of lowest number where no weights are given; `dropped`
    counts the others.
    """
    flat = _flat(group_TK, groups)
    number = jnp.zeros_like(flat) + jnp.arange(flat.size, dtype=jnp.int32)
    first = number if weight_TK is None else jnp.argsort(-weight_TK.reshape(-1), stable=True).astype(jnp.int32)
    order = first[jnp.argsort(flat[first], stable=True)]
    counts_G = _counts(flat, groups)
    starts_G = jnp.cumsum(counts_G) - counts_G
    rank = jnp.argsort(order).astype(jnp.int32) - jnp.take(starts_G, flat, mode="fill", fill_value=0)
    place = jnp.where((flat < groups) & (rank < capacity), flat * capacity + rank, groups * capacity)
    slot_C = jnp.arange(capacity, dtype=jnp.int32)
    order_GC = jnp.take(order, starts_G[:, None] + slot_C, mode="fill", fill_value=0)
    order_GC = jnp.where(slot_C < counts_G[:, None], order_GC, flat.size)
    dropped = jnp.maximum(counts_G - capacity, 0).sum(dtype=jnp.int32)
    return (order_GC.reshape(-1), place.reshape(group_TK.shape).astype(jnp.int32)), dropped


def _read(x_ND: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x by number; N reads zeros."""
    return jnp.take(x_ND, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def spread(x_TD: jax.Array, rows: Rows) -> jax.Array:
    """The token of each row's choice: x[T, D] -> [R, D]. Its transpose adds up the K rows of each token, in float32."""
    # A row that holds no choice has T K there, and T K // K is T, which reads zeros.
    return _read(x_TD, rows[0] // rows[1].shape[1])


def _spread_backward(rows: Rows, dy_RD: jax.Array) -> tuple[jax.Array, None]:
    wide = _read(dy_RD, rows[1]).astype(jnp.promote_types(dy_RD.dtype, jnp.float32))
    return wide.sum(1).astype(dy_RD.dtype), None


spread.defvjp(lambda x_TD, rows: (spread(x_TD, rows), rows), _spread_backward)


def carry(weights_TK: jax.Array, rows: Rows) -> jax.Array:
    """The number of each row's choice: [T, K] -> [R], 0 where a row holds none. Its transpose is a gather too."""
    return spread(weights_TK.reshape(-1, 1), (rows[0], rows[1].reshape(-1, 1)))[:, 0]


@jax.custom_vjp
def combine(y_RD: jax.Array, rows: Rows) -> jax.Array:
    """Each token's rows added up, in float32: y[R, D] -> [T, D] in y's dtype. Its transpose is a gather too."""
    return _spread_backward(rows, y_RD)[0]


combine.defvjp(lambda y_RD, rows: (combine(y_RD, rows), rows), lambda rows, dy_TD: (spread(dy_TD, rows), None))
