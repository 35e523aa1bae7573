"""Expert parallelism: tokens travel to the devices that hold their experts, and the results travel back.

    Dispatch   how: over which axes, by which method, with how large a buffer
    moe        x[T, D], the chosen experts of each token and their weights -> y[T, D]

E experts lie over `axes` (one or several, folded), E/n consecutive ones on each of n devices, each with T tokens of its own. Inside a
device rows are sorted by expert (stable, so nothing depends on timing), `experts` serves them, and each token adds up its K results in
float32. Values sent by a device in a forward pass; the backward sends the same:

    gather     x[T_axes, D] -> all-gather -> rows of own experts -> sums of each token's results -> reduce-scatter
               (n-1) T D each way: for small n or K > n
    ragged     counts to every device; then exactly the rows that they need, and back
               each way T K (n-1)/n D where the load is balanced; on CPU a padded exchange with the same result takes its place
    capacity   C = capacity_factor T K / E rows for each expert, filled or not, and back
               each way (n-1)/n E C D; choices beyond C of one device's tokens are dropped, and counted

Shapes are static, so with `gather` and `ragged` the rows of a device's own experts go into a buffer of `buffer_factor` times what it would
get if the load were balanced. Rows beyond it are not computed but *counted*: a step whose `overflow` is not 0 must be repeated with factor
n, which nothing overflows. One device needs no factor, and `capacity` no buffer.

Dims: T tokens of a device, D model width, E experts in all, G experts of a device, K experts of a token, P = T K choices, R rows of the
buffer, C rows of an expert.
Source: Lepikhin et al., GShard (2020), section 3.2; Gale et al., MegaBlocks (2022); Liu et al., MoE parallel folding (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.ops.rows import carry, combine, sort, sort_limited, spread
from jaxpar.parallel import collectives

METHODS = ("gather", "ragged", "capacity")
Experts = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Four = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


class Lost(NamedTuple):
    """Choices of this device that were not computed, int32: `overflow` for want of buffer, `dropped` because the method drops them."""

    overflow: jax.Array
    dropped: jax.Array


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """`experts` in all, split over `axes`. `buffer_factor` and `capacity_factor` are in units of the balanced load; `by_weight` drops the
    choices of least weight instead of the latest. `platform` says where it runs ("cpu", "gpu")."""

    experts: int
    axes: tuple[str, ...]
    method: str = "gather"
    buffer_factor: float = 1.5
    capacity_factor: float = 1.25
    by_weight: bool = False
    platform: str = "cpu"

    def __post_init__(self) -> None:
        assert self.method in METHODS and self.buffer_factor >= 1, self

    def rows(self, tokens: int, k: int, ways: int) -> int:
        """Rows of the buffer of a device, each of whose peers has `tokens` tokens of `k` experts. Never more than all there could be: a
        token's experts differ, so at most min(k, G) of them are here."""
        worst = ways * tokens * min(k, self.experts // ways)
        return min(worst, math.ceil(self.buffer_factor * tokens * k)) if ways > 1 else worst

    def capacity(self, tokens: int, k: int) -> int:
        """Rows that an expert has for the tokens of one device; never more than there are tokens."""
        return min(tokens, math.ceil(self.capacity_factor * tokens * k / self.experts))


def moe(x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, experts: Experts, dispatch: Dispatch) -> tuple[jax.Array, Lost]:
    """Each token through its experts, results weighted and added: (y[T, D] in x's dtype, what was not computed).

    `chosen` holds numbers from 0 to E - 1, different ones in each token; anything else goes nowhere and gives zeros. `experts(rows[R, D],
    weights[R], sizes[G]) -> [R, D]` serves this device's experts, rows sorted by expert, and multiplies each result by its weight: best
    before its last matrix, for then the weight's gradient needs no result, and nothing need be kept or computed again for it. Rows behind
    the last expert's are zeros and are not read.

    Runs inside shard_map, all arguments varying over `axes`.
    """
    ways = collectives.axis_size(dispatch.axes)
    assert dispatch.experts % ways == 0, f"{dispatch.experts} experts over {ways} devices"
    method = {"gather": _gather, "ragged": _ragged, "capacity": _capacity}[dispatch.method]
    if ways == 1 and dispatch.method != "capacity":
        method = _local
    y_TD, lost = method(x_TD, weights_TK, chosen_TK, experts, dispatch, ways)
    return y_TD.astype(x_TD.dtype), lost


def _local(
    x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, experts: Experts, dispatch: Dispatch, ways: int
) -> tuple[jax.Array, Lost]:
    """The choices of experts 0 to E/n - 1, of tokens that are here."""
    size = dispatch.rows(chosen_TK.shape[0] // ways, chosen_TK.shape[1], ways)
    rows, sizes_G, overflow = sort(chosen_TK, dispatch.experts // ways, size)
    y_RD = experts(spread(x_TD, rows), carry(weights_TK, rows), sizes_G)
    return combine(y_RD, rows), Lost(overflow, jnp.zeros_like(overflow))


def _gather(
    x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, experts: Experts, dispatch: Dispatch, ways: int
) -> tuple[jax.Array, Lost]:
    all_x, all_weights, all_chosen = (collectives.all_gather(a, dispatch.axes, 0) for a in (x_TD, weights_TK, chosen_TK))
    first = collectives.axis_index(dispatch.axes).astype(jnp.int32) * (dispatch.experts // ways)
    y_TD, lost = _local(all_x, all_weights, all_chosen - first, experts, dispatch, ways)
    return collectives.reduce_scatter(y_TD.astype(x_TD.dtype), dispatch.axes, 0), lost


def _capacity(
    x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, experts: Experts, dispatch: Dispatch, ways: int
) -> tuple[jax.Array, Lost]:
    count, capacity = dispatch.experts, dispatch.capacity(chosen_TK.shape[0], chosen_TK.shape[1])
    held, width = count // ways, x_TD.shape[1]
    rows, dropped = sort_limited(chosen_TK, count, capacity, jax.lax.stop_gradient(weights_TK) if dispatch.by_weight else None)

    def there(a: jax.Array) -> jax.Array:
        """Rows of [E C, ...] to the devices of their experts, by expert: [G n C, ...]."""
        a = collectives.all_to_all(a.reshape(ways, held, capacity, -1), dispatch.axes, 0, 0)
        return a.swapaxes(0, 1).reshape(held * ways * capacity, -1)

    sizes_G = jnp.zeros_like(dropped, shape=(held,)) + ways * capacity
    y = experts(there(spread(x_TD, rows)), there(carry(weights_TK, rows))[:, 0], sizes_G)
    y = y.reshape(held, ways, capacity, width).swapaxes(0, 1)
    back = collectives.all_to_all(y, dispatch.axes, 0, 0).reshape(-1, width)
    return combine(back, rows), Lost(jnp.zeros_like(dropped), dropped)


def _ragged(
    x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, experts: Experts, dispatch: Dispatch, ways: int
) -> tuple[jax.Array, Lost]:
    held, size = dispatch.experts // ways, dispatch.rows(chosen_TK.shape[0], chosen_TK.shape[1], ways)
    rows, sizes_E, _ = sort(chosen_TK, dispatch.experts, chosen_TK.size)
    plan, from_nG, overflow = _plan(sizes_E.reshape(ways, held), size, dispatch.axes)
    arrived, weights = (_exchange(dispatch, size, a, plan) for a in (spread(x_TD, rows), carry(weights_TK, rows)[:, None]))
    # What has arrived lies device by device, each device's rows by expert. Now by expert.
    row_R, ends = jnp.arange(size, dtype=jnp.int32), jnp.cumsum(from_nG.reshape(-1))
    expert_R = jnp.where(row_R < ends[-1], (ends[None, :] <= row_R[:, None]).sum(1, dtype=jnp.int32) % held, held)
    again, sizes_G, _ = sort(expert_R[:, None], held, size)
    y_RD = combine(experts(spread(arrived, again), carry(weights, again), sizes_G), again)
    back = _exchange(dispatch, chosen_TK.size, y_RD, Plan(plan.back, plan.there))
    return combine(back, rows), Lost(overflow, jnp.zeros_like(overflow))


class Plan(NamedTuple):
    """Of a ragged exchange and its reverse: (input offsets, send sizes, output offsets, receive sizes), [n] each."""

    there: Four
    back: Four


def _plan(to_nG: jax.Array, size: int, axes: tuple[str, ...]) -> tuple[Plan, jax.Array, jax.Array]:
    """Rows for each expert of each device -> (plan, the rows of each device for each expert here, overflow). Sends G + 3 counts to each
    device. A buffer of `size` rows keeps what fits, in the order of the devices that send."""
    sent_n = to_nG.sum(1, dtype=jnp.int32)
    begins_n = jnp.cumsum(sent_n) - sent_n
    from_n = collectives.all_to_all(jnp.concatenate([to_nG, begins_n[:, None]], axis=1), axes, 0, 0)
    from_nG, theirs_n = from_n[:, :-1], from_n[:, -1]
    wanted_n = from_nG.sum(1, dtype=jnp.int32)
    lands_n = jnp.minimum(jnp.cumsum(wanted_n) - wanted_n, size)
    kept_n = jnp.minimum(wanted_n, size - lands_n)
    answer = collectives.all_to_all(jnp.stack([kept_n, lands_n], axis=1), axes, 0, 0)
    goes_n, at_n = answer[:, 0], answer[:, 1]
    return Plan((begins_n, goes_n, at_n, kept_n), (lands_n, kept_n, theirs_n, goes_n)), from_nG, (wanted_n - kept_n).sum(dtype=jnp.int32)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(dispatch: Dispatch, size: int, x_PD: jax.Array, plan: Plan) -> jax.Array:
    """Rows x[P, D] to other devices as `plan.there` says -> [size, D], zeros where nothing arrived. The transpose goes `back`."""
    return _send(dispatch, size, x_PD, plan.there)


def _send(dispatch: Dispatch, size: int, x_PD: jax.Array, there: Four) -> jax.Array:
    ragged = collectives.ragged_all_to_all if dispatch.platform == "gpu" else collectives.padded_all_to_all
    return ragged(x_PD, size, *there, dispatch.axes)


def _exchange_forward(dispatch: Dispatch, size: int, x_PD: jax.Array, plan: Plan) -> tuple[jax.Array, tuple[Plan, jax.Array]]:
    # An empty slice says how many rows came in; a number would be no residual.
    return _send(dispatch, size, x_PD, plan.there), (plan, x_PD[:, :0])


def _exchange_backward(dispatch: Dispatch, size: int, residuals: tuple, dy_RD: jax.Array) -> tuple[jax.Array, None]:
    plan, empty = residuals
    return _send(dispatch, empty.shape[0], dy_RD, plan.back), None


_exchange.defvjp(_exchange_forward, _exchange_backward)
