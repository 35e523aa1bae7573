"""Matmuls of rows that lie in groups, each group with its own weight. Forward, input gradient and weight gradient cost the rows, no more.

    grouped_matmul   x[R, I], weight[G, O, I], sizes[G] -> y[R, O]
    visits, own_rows the work list: which block of rows meets which group
    over             a loop over the visits that have rows
    slices, pick     what a visit reads: its block of rows, its group's weights
    put, add         and writes: its rows among others, its share of a group's weight gradient
    default_block    rows of a block

Rows 0 to sizes[0] - 1 are group 0's, the next group 1's, and so on; rows behind the last group give zeros and get zeros. `lax.ragged_dot`
multiplies every row with every weight on CPU and GPU; here a loop over blocks of rows multiplies each with the weight of its group. A block
in which g groups meet is visited g times, with the other groups' rows masked, so the groups need not be aligned and rows need no padding:
sizes that sum to N cost at most N + (G + 1) block rows, however many rows behind the last group a buffer has to spare. Gale et al.,
MegaBlocks (2022), has the block view; the visits are those of Pallas' "megablox".

Dims: R rows, I inputs, O outputs, G groups, V visits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.ops.variation import same_variation

Carry = TypeVar("Carry")


class Visits(NamedTuple):
    """The work list, [V] int32 each: the visit's group, the first row of its slice of `block` rows, and the rows [first, last) that are its
    group's there. Visits that nobody needs have first = last."""

    group: jax.Array
    start: jax.Array
    first: jax.Array
    last: jax.Array


def default_block(rows: int, groups: int, wanted: int = 16) -> int:
    """Rows of a block: a power of two up to 1024, such that visits beyond the rows cost at most 3% where that leaves 16 or more, and at
    most an eighth where that leaves at most `wanted`: starting a visit takes longer than multiplying few rows, and adding up its weight
    gradients more memory traffic."""
    block = 16
    while block < 1024 and 2 * block * max(groups - 1, 1) * (8 if 2 * block <= wanted else 32) <= rows:
        block *= 2
    return min(block, rows)


def visits(sizes_G: jax.Array, rows: int, block: int) -> Visits:
    """ceil(rows / block) + G - 1 visits, enough for any sizes that sum to at most `rows`."""
    groups = sizes_G.shape[0]
    sizes = sizes_G.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first_block = starts // block
    many = jnp.where(sizes > 0, (ends - 1) // block - first_block + 1, 0)
    until = jnp.cumsum(many)
    number = jnp.arange(-(-rows // block) + groups - 1, dtype=jnp.int32)
    group = jnp.minimum((until[None, :] <= number[:, None]).sum(1, dtype=jnp.int32), groups - 1)
    needed = number < until[-1]
    where = jnp.where(needed, first_block[group] + number - (until - many)[group], 0)
    first = jnp.maximum(starts[group], where * block)
    last = jnp.minimum(ends[group], (where + 1) * block)
    return Visits(group, jnp.minimum(where * block, rows - block), first, jnp.where(needed, last, first))


def grouped_matmul(x_RI: jax.Array, weight_GOI: jax.Array, sizes_G: jax.Array, block: int = 0) -> jax.Array:
    """y[r] = weight[group of r] x[r], in x's dtype: x[R, I], weight[G, O, I], sizes[G] -> y[R, O]. `block` 0 chooses.

    Local, no bytes moved. Gradients of x and weight have their dtypes; sums over rows are in float32, or float64 if x is. FLOPs of each of
    the three: 2 I O rows, those of the groups and at most (G + 1) block more; as much memory traffic for zeros as y has.
    """
    rows, groups = x_RI.shape[0], weight_GOI.shape[0]
    assert x_RI.shape[1] == weight_GOI.shape[2] and sizes_G.shape == (groups,), (x_RI.shape, weight_GOI.shape, sizes_G.shape)
    if rows == 0:
        return x_RI @ weight_GOI[0].T
    block = min(block or default_block(rows, groups), rows)
    list_ = visits(sizes_G, rows, block)
    return _grouped(block, *same_variation(x_RI, weight_GOI, beside=[list_.group]), list_)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(block: int, x_RI: jax.Array, weight_GOI: jax.Array, list_: Visits) -> jax.Array:
    return _rows(block, x_RI, weight_GOI, list_, out=1)


def _forward(block: int, x_RI: jax.Array, weight_GOI: jax.Array, list_: Visits) -> tuple[jax.Array, tuple]:
    return _rows(block, x_RI, weight_GOI, list_, out=1), (x_RI, weight_GOI, list_)


def _backward(block: int, residuals: tuple, dy_RO: jax.Array) -> tuple:
    x_RI, weight_GOI, list_ = residuals
    dx_RI = _rows(block, dy_RO, weight_GOI, list_, out=2)
    return dx_RI, _weights(block, x_RI, dy_RO, list_, weight_GOI.shape[0]).astype(weight_GOI.dtype), None


_grouped.defvjp(_forward, _backward)


def over(list_: Visits, body: Callable[[Carry, Visits], Carry], start: Carry) -> Carry:
    """`body` for every visit that has rows, one after another. Those come first; there are at most `count`, which is how a reader of the
    compiled program bounds the loop. Rows that a buffer has to spare cost nothing. No scan: the count is known at run time."""
    count = list_.group.shape[0]
    needed = (list_.first < list_.last).sum(dtype=jnp.int32)

    def step(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        number, carry = state
        return number + 1, body(carry, Visits(*(lax.dynamic_index_in_dim(a, number, keepdims=False) for a in list_)))

    return lax.while_loop(lambda state: (state[0] < count) & (state[0] < needed), step, (jnp.int32(0), start))[1]


def own_rows(block: int, visit: Visits) -> jax.Array:
    """Which rows of a visit's slice are its group's: bool [block, 1]."""
    row = visit.start + jnp.arange(block, dtype=jnp.int32)[:, None]
    return (row >= visit.first) & (row < visit.last)


def slices(block: int, here: Visits, *arrays: jax.Array) -> list[jax.Array]:
    """The visit's block of rows of each array [R, ...]."""
    return [lax.dynamic_slice_in_dim(a, here.start, block) for a in arrays]


def pick(here: Visits, *arrays: jax.Array) -> list[jax.Array]:
    """The visit's group of each array [G, ...]."""
    return [lax.dynamic_index_in_dim(a, here.group, keepdims=False) for a in arrays]


def put(block: int, here: Visits, total: jax.Array, new: jax.Array) -> jax.Array:
    """`total` [R, O] with the visit's rows of `new` [block, O] in the place of its own."""
    (old,) = slices(block, here, total)
    return lax.dynamic_update_slice_in_dim(total, jnp.where(own_rows(block, here), new.astype(total.dtype), old), here.start, axis=0)


def add(here: Visits, total: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    """`total` [G, O, I] with the sum over the block of left[r] right[r] added to the visit's group, in total's dtype. Rows of others are
    zeros in one of the two."""
    part = lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=total.dtype)
    (old,) = pick(here, total)
    return lax.dynamic_update_index_in_dim(total, old + part, here.group, 0)


def _rows(block: int, x_RI: jax.Array, weight_GOI: jax.Array, list_: Visits, out: int) -> jax.Array:
    """Every row times its group's weight, whose dim `out` is not summed: [R, weight.shape[out]]."""

    def visit(y: jax.Array, here: Visits) -> jax.Array:
        (x,), (weight,) = slices(block, here, x_RI), pick(here, weight_GOI)
        return put(block, here, y, lax.dot_general(x, weight, (((1,), (2 - out,)), ((), ()))))

    return over(list_, visit, jnp.zeros_like(x_RI, shape=(x_RI.shape[0], weight_GOI.shape[out])))


def _weights(block: int, x_RI: jax.Array, dy_RO: jax.Array, list_: Visits, groups: int) -> jax.Array:
    """Sum over each group's rows of dy[r] x[r]: [G, O, I] in float32, or float64 if x is."""

    def visit(total: jax.Array, here: Visits) -> jax.Array:
        x, dy = slices(block, here, x_RI, dy_RO)
        return add(here, total, jnp.where(own_rows(block, here), dy, 0), x)

    dtype = jnp.promote_types(x_RI.dtype, jnp.float32)
    return over(list_, visit, jnp.zeros_like(x_RI, shape=(groups, dy_RO.shape[1], x_RI.shape[1]), dtype=dtype))
