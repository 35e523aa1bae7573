"""Expert parallelism: tokens travel to the devices that hold their experts, and the results travel back.

    Dispatch   how: over which axes, by which method, with how large a buffer
    moe        x[T, D], the chosen experts of each token and their weights -> y[T, D]

E experts lie over `axes` (one or several, folded), E/n consecutive ones on each of n devices, each with T tokens of its own. Inside a
device rows are sorted by expert (stable, so nothing depends on timing), a grouped matmul serves them, and each token adds up its K results
in float32 by reading them: a gather forward and a gather backward, never a scatter-add.

    gather    x[T_axes, D] -> all-gather -> experts on the rows of their own -> sums of each token's results -> reduce-scatter
              sends (n-1)/n · nT·D values for either, T·K/n < T of which a device needs: for small n or large K

Shapes are static, so the rows of a device's own experts go into a buffer of `buffer_factor` times what it would get if the load were
balanced. Rows beyond it are not computed and are *counted*: a step whose `overflow` is not 0 must be repeated with factor n, which nothing
overflows. One device needs no factor.

Dims: T tokens of a device, D model width, E experts in all, G experts of a device, K experts of a token, R rows of the buffer.
Source: Lepikhin et al., GShard (2020), section 3.2; Gale et al., MegaBlocks (2022); Liu et al., MoE parallel folding (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.parallel import collectives

METHODS = ("gather",)
Experts = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """`experts` in all, split over `axes`. `buffer_factor` is the receive buffer in units of the balanced load; at least 1."""

    experts: int
    axes: tuple[str, ...]
    method: str = "gather"
    buffer_factor: float = 1.5

    def __post_init__(self) -> None:
        assert self.method in METHODS and self.buffer_factor >= 1, self

    def rows(self, tokens: int, k: int) -> int:
        """Rows of the buffer of a device, each of whose peers has `tokens` tokens of `k` experts. Never more than all there could be: a
        token's experts differ, so at most min(k, G) of them are here."""
        ways = collectives.axis_size(self.axes)
        worst = ways * tokens * min(k, self.experts // ways)
        return min(worst, math.ceil(self.buffer_factor * tokens * k)) if ways > 1 else worst


def moe(x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, experts: Experts, dispatch: Dispatch) -> tuple[jax.Array, jax.Array]:
    """Each token through its experts, results weighted and added: (y[T, D] in x's dtype, overflow int32).

    `chosen` holds numbers from 0 to E - 1, different ones in each token; anything else goes nowhere and gives zeros. `experts(rows[R, D],
    sizes[G]) -> [R, D]` serves this device's experts, rows sorted by expert; rows behind the last are zeros and are not read. `overflow` is
    how many rows this device's buffer could not hold.

    Runs inside shard_map, all arguments varying over `axes`; the transpose sends what the forward sends, in reverse.
    """
    ways = collectives.axis_size(dispatch.axes)
    assert dispatch.experts % ways == 0, f"{dispatch.experts} experts over {ways} devices"
    held, rows = dispatch.experts // ways, dispatch.rows(*chosen_TK.shape)
    if ways > 1:
        x_TD, weights_TK, chosen_TK = (collectives.all_gather(a, dispatch.axes, 0) for a in (x_TD, weights_TK, chosen_TK))
        chosen_TK = chosen_TK - collectives.axis_index(dispatch.axes).astype(chosen_TK.dtype) * held
    order_R, place_TK, sizes_G, overflow = sort(chosen_TK, held, rows)
    y_RD = experts(spread(x_TD, order_R, place_TK), sizes_G)
    y_TD = combine(y_RD, weights_TK, order_R, place_TK).astype(x_TD.dtype)
    return (collectives.reduce_scatter(y_TD, dispatch.axes, 0) if ways > 1 else y_TD), overflow


def sort(group_TK: jax.Array, groups: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows of a buffer, sorted by group: (order[R], place[T, K], sizes[G], overflow), int32.

    `group` is what each choice belongs to; those outside 0 to G - 1 belong to none. Row r holds choice order[r], a number in the flat
    [T K]; rows that hold none have T K there. `place` is the inverse, R where a choice has no row. `sizes` are the rows of each group,
    `overflow` the choices that found the buffer full.
    """
    flat = jnp.where((group_TK >= 0) & (group_TK < groups), group_TK, groups).reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts_G = (flat[:, None] == jnp.arange(groups, dtype=jnp.int32)).sum(0, dtype=jnp.int32)
    total = counts_G.sum()
    kept = jnp.minimum(total, rows)
    number = jnp.arange(flat.size, dtype=jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32)  # the inverse of a permutation, without a scatter
    place = jnp.where(place < kept, place, rows)
    order = jnp.where(number < kept, order, flat.size)[:rows]
    ends = jnp.minimum(jnp.cumsum(counts_G), kept)
    return order, place.reshape(group_TK.shape), jnp.diff(ends, prepend=jnp.zeros_like(ends[:1])), total - kept


def _read(x_ND: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x by number; N reads zeros."""
    return jnp.take(x_ND, index, axis=0, mode="fill", fill_value=0)


@partial(jax.custom_vjp)
def spread(x_TD: jax.Array, order_R: jax.Array, place_TK: jax.Array) -> jax.Array:
    """A copy of its token for each row of the buffer: x[T, D] -> [R, D], zeros where a row holds no choice. Its transpose adds up the K
    rows of each token, in float32. `order` and `place` are those of `sort`."""
    # Outside the buffer's rows order is T K, and T K // K is T, which reads zeros.
    return _read(x_TD, order_R // place_TK.shape[1])


def _spread_backward(indices: tuple[jax.Array, jax.Array], dy_RD: jax.Array) -> tuple[jax.Array, None, None]:
    wide = _read(dy_RD, indices[1]).astype(jnp.promote_types(dy_RD.dtype, jnp.float32))
    return wide.sum(1).astype(dy_RD.dtype), None, None


spread.defvjp(lambda x, order, place: (spread(x, order, place), (order, place)), _spread_backward)


@partial(jax.custom_vjp)
def collect(y_RD: jax.Array, order_R: jax.Array, place_TK: jax.Array) -> jax.Array:
    """The row of each choice: y[R, D] -> [T, K, D], zeros where a choice has no row. Its transpose is a gather too."""
    return _read(y_RD, place_TK)


def _collect_backward(indices: tuple[jax.Array, jax.Array], dz_TKD: jax.Array) -> tuple[jax.Array, None, None]:
    return _read(dz_TKD.reshape(-1, dz_TKD.shape[-1]), indices[0]), None, None


collect.defvjp(lambda y, order, place: (collect(y, order, place), (order, place)), _collect_backward)


def combine(y_RD: jax.Array, weights_TK: jax.Array, order_R: jax.Array, place_TK: jax.Array) -> jax.Array:
    """Each token's results times their weights, added up in the weights' dtype: [T, D]."""
    return (collect(y_RD, order_R, place_TK).astype(weights_TK.dtype) * weights_TK[:, :, None]).sum(1)
