"""Expert parallelism: tokens travel to the devices that hold their experts, and the results travel back.

    Dispatch   how: over which axes, by which method, with how large a buffer, in how many chunks
    moe        x[T, D], a router and this device's experts -> y[T, D]: usable inside any shard_map
    through    the same for tokens that are routed already

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.config.checks import require
from jaxpar.ops.rows import carry, combine, sort, sort_limited, spread
from jaxpar.parallel import collectives
from jaxpar.parallel.expert_inputs import check_dispatch, check_routed, check_tokens

METHODS = ("gather", "ragged", "capacity")
Experts = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Router = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
Two = tuple[jax.Array, jax.Array]
Four = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Beside = tuple[Callable[[jax.Array], jax.Array], jax.Array]


class Lost(NamedTuple):
    """Choices of this device that were not computed, int32: `overflow` for want of buffer, `dropped` because the method drops them."""

    overflow: jax.Array
    dropped: jax.Array


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """`experts` in all, split over `axes`. `buffer_factor` and `capacity_factor` are in units of the balanced load; `by_weight` drops the
    choices of least weight instead of the latest. `platform` says where it runs ("cpu", "gpu"); a device's tokens go in `chunks`, each with
    a buffer, a capacity and an overflow of its own."""

    experts: int
    axes: tuple[str, ...]
    method: str = "gather"
    buffer_factor: float = 1.5
    capacity_factor: float = 1.25
    by_weight: bool = False
    platform: str = "cpu"
    chunks: int = 1

    def __post_init__(self) -> None:
        check_dispatch(self.method, METHODS, self.buffer_factor, self.capacity_factor, self.chunks)

    def rows(self, tokens: int, k: int, ways: int) -> int:
        """Rows of the buffer of a device, each of whose peers has `tokens` tokens of `k` experts. Never more than all there could be: a
        token's experts differ, so at most min(k, G) of them are here."""
        worst = ways * tokens * min(k, self.experts // ways)
        return min(worst, math.ceil(self.buffer_factor * tokens * k)) if ways > 1 else worst

    def capacity(self, tokens: int, k: int) -> int:
        """Rows that an expert has for the tokens of one device; never more than there are tokens."""
        return min(tokens, math.ceil(self.capacity_factor * tokens * k / self.experts))


def moe(x_TD: jax.Array, router: Router, experts: Experts, dispatch: Dispatch) -> tuple[jax.Array, Lost]:
    """A mixture of experts for anyone's `shard_map`: each token to the experts that `router` chooses, their results weighted and added.

    x[T, D]: this device's tokens, others on each device along `dispatch.axes`, over which x must vary. `router(x) -> (weights[T, K],
    chosen[T, K])`: local, such as `ops.router.select` of logits; chosen are numbers from 0 to E - 1, different ones in each token, and
    anything else goes nowhere and gives zeros. `experts(rows[R, D], weights[R], sizes[G]) -> [R, D]` serves this device's E/n experts,
    numbers i E/n to (i+1) E/n - 1 on the i-th device along the axes: rows sorted by expert, `sizes` rows of each, every result multiplied
    by its weight, best before the last matrix: then the weight's gradient needs no result. Rows behind the last expert's are zeros and are
    not read; `ops.grouped_matmul` and `ops.grouped_mlp` are made for it. Called once for each chunk.

    Returns (y[T, D] in x's dtype, `Lost`). Sharding of y is x's. Differentiable in x and in what router and experts close over; the
    gradients of an expert's weights are those of all tokens along the axes, and partial sums over other axes that split tokens.
    Sends what the head of this file says, forward and backward alike; nothing where T is 0. ValueError, before compilation, where n does
    not divide E, or chunks T, and for results of `router` or `experts` of other shapes; TypeError where x does not vary over an axis.
    Source: Shazeer et al. (2017); Lepikhin et al., GShard (2020), section 3.2.
    """
    check_tokens(x_TD, dispatch.experts, dispatch.axes, dispatch.chunks)
    weights_TK, chosen_TK = router(x_TD)
    check_routed(x_TD, weights_TK, chosen_TK)
    weights_TK, chosen_TK = (collectives.vary_like(a, x_TD) for a in (weights_TK, chosen_TK))  # a router may choose alike everywhere
    if x_TD.shape[0] == 0:
        none = collectives.vary_like(jnp.int32(0), x_TD)
        return x_TD, Lost(none, none)

    def checked(rows_RD: jax.Array, weights_R: jax.Array, sizes_G: jax.Array) -> jax.Array:
        y_RD = experts(rows_RD, weights_R, sizes_G)
        require(y_RD.shape == rows_RD.shape, f"experts: a result of shape {y_RD.shape} for rows {rows_RD.shape}; they must be alike")
        return y_RD

    y_TD, lost, _ = through(x_TD, weights_TK, chosen_TK, checked, dispatch)
    return y_TD, lost


def through(
    x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, experts: Experts, dispatch: Dispatch, beside: Beside | None = None
) -> tuple[jax.Array, Lost, jax.Array | None]:
    """`moe` of tokens that are routed already; `beside` is another function (a shared expert) and its input, whose result is returned too.

    What travels behind what, of chunks a and b, in the order of the program:

        forward    a's rows | beside      b's rows | a's experts      a's results | b's experts      b's results |
        backward   b's gradients |      a's gradients | b's experts      b's rows' gradients | a's experts      a's rows' gradients | beside

    It is written as barriers: what travels has arrived when the matmuls are done, and nothing else waits for them. They stand right at the
    matmuls and at the exchanges, before `arrange` and after `pack`, for XLA would fuse the sorting of several chunks' rows into one kernel,
    which then waits for all of them.
    """
    ways, chunks = collectives.axis_size(dispatch.axes), dispatch.chunks
    assert dispatch.experts % ways == 0, f"{dispatch.experts} experts over {ways} devices"
    assert x_TD.shape[0] % chunks == 0, f"{x_TD.shape[0]} tokens in {chunks} chunks"
    method = {"gather": _gather, "ragged": _ragged, "capacity": _capacity}[dispatch.method]
    if ways == 1 and dispatch.method != "capacity":
        method = _local
    cut = [jnp.split(a, chunks) if chunks > 1 else [a] for a in (x_TD, weights_TK, chosen_TK)]
    trips = [method(x, weights, chosen, dispatch, ways) for x, weights, chosen in zip(*cut, strict=True)]
    leaving, result, packed = [trip.leaving for trip in trips], None, None
    homes: list[jax.Array] = []
    if beside is not None:
        leaving[0], argument = collectives.gradient_barrier((leaving[0], beside[1]))
        arrived, result = collectives.value_barrier((trips[0].there(leaving[0]), beside[0](argument)))
    else:
        arrived = trips[0].there(leaving[0])
    for number, trip in enumerate(trips):
        *served, sizes_G = trip.arrange(arrived)
        if number == 0 and beside is not None:
            served, result = collectives.gradient_barrier((served, result))
        if chunks > 1:
            following = slice(number + 1, number + 2)
            served, packed, leaving[following] = collectives.gradient_barrier((served, packed, leaving[following]))
            home = [trips[number - 1].home(packed)] if packed is not None else []
            coming = [trips[number + 1].there(each) for each in leaving[following]]
            y_RD, coming, home = collectives.value_barrier((experts(served[0], served[1], sizes_G), coming, home))
            homes, arrived = homes + home, coming[0] if coming else None
        else:
            y_RD = experts(served[0], served[1], sizes_G)
        packed = trip.pack(y_RD)
    homes.append(trips[-1].home(packed))
    results = [trip.unpack(home_ND).astype(x_TD.dtype) for trip, home_ND in zip(trips, homes, strict=True)]
    lost = jax.tree.map(lambda *each: sum(each[1:], each[0]), *(trip.lost for trip in trips))
    return jnp.concatenate(results) if chunks > 1 else results[0], lost, result


class Trip(NamedTuple):
    """Of a chunk of tokens: rows and weights that are `leaving`, which `there` brings to their experts; `arrange` sorts what has arrived,
    (rows[R, D], weights[R], sizes[G]); `pack` makes results ready to travel, `home` brings them back, `unpack` adds up each token's."""

    leaving: Two
    there: Callable[[Two], Two]
    arrange: Callable[[Two], tuple[jax.Array, jax.Array, jax.Array]]
    pack: Callable[[jax.Array], jax.Array]
    home: Callable[[jax.Array], jax.Array]
    unpack: Callable[[jax.Array], jax.Array]
    lost: Lost


def _as_is(x: Any) -> Any:
    return x


def _local(x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, dispatch: Dispatch, ways: int) -> Trip:
    """The choices of experts 0 to E/n - 1, of tokens that are here."""
    size = dispatch.rows(chosen_TK.shape[0] // ways, chosen_TK.shape[1], ways)
    rows, sizes_G, overflow = sort(chosen_TK, dispatch.experts // ways, size)
    arrange = lambda here: (spread(here[0], rows), carry(here[1], rows), sizes_G)  # noqa: E731
    lost = Lost(overflow, jnp.zeros_like(overflow))
    return Trip((x_TD, weights_TK), _as_is, arrange, lambda y_RD: combine(y_RD, rows), _as_is, _as_is, lost)


def _gather(x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, dispatch: Dispatch, ways: int) -> Trip:
    gather = lambda here: jax.tree.map(lambda a: collectives.all_gather(a, dispatch.axes, 0), here)  # noqa: E731
    first = collectives.axis_index(dispatch.axes).astype(jnp.int32) * (dispatch.experts // ways)
    here = _local(x_TD, weights_TK, gather(chosen_TK) - first, dispatch, ways)
    pack = lambda y_RD: here.pack(y_RD).astype(x_TD.dtype)  # noqa: E731
    return here._replace(there=gather, pack=pack, home=lambda y_ND: collectives.reduce_scatter(y_ND, dispatch.axes, 0))


def _capacity(x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, dispatch: Dispatch, ways: int) -> Trip:
    count, capacity = dispatch.experts, dispatch.capacity(chosen_TK.shape[0], chosen_TK.shape[1])
    held, width = count // ways, x_TD.shape[1]
    rows, dropped = sort_limited(chosen_TK, count, capacity, jax.lax.stop_gradient(weights_TK) if dispatch.by_weight else None)

    def trade(a: jax.Array) -> jax.Array:
        """[n, G, C, ...], to each device the rows of its experts."""
        return collectives.all_to_all(a, dispatch.axes, 0, 0)

    def arrange(arrived: Two) -> tuple[jax.Array, jax.Array, jax.Array]:
        rows_RD, weights_R1 = (a.swapaxes(0, 1).reshape(held * ways * capacity, -1) for a in arrived)
        return rows_RD, weights_R1[:, 0], sizes_G

    sizes_G = jnp.zeros_like(dropped, shape=(held,)) + ways * capacity
    out, number = (a.reshape(ways, held, capacity, -1) for a in (spread(x_TD, rows), carry(weights_TK, rows)))
    return Trip(
        leaving=(out, number),
        there=lambda here: (trade(here[0]), trade(here[1])),
        arrange=arrange,
        pack=lambda y_RD: y_RD.reshape(held, ways, capacity, width).swapaxes(0, 1),
        home=trade,
        unpack=lambda home: combine(home.reshape(-1, width), rows),
        lost=Lost(jnp.zeros_like(dropped), dropped),
    )


def _ragged(x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array, dispatch: Dispatch, ways: int) -> Trip:
    held, size = dispatch.experts // ways, dispatch.rows(chosen_TK.shape[0], chosen_TK.shape[1], ways)
    rows, sizes_E, _ = sort(chosen_TK, dispatch.experts, chosen_TK.size)
    plan, from_nG, overflow = _plan(sizes_E.reshape(ways, held), size, dispatch.axes)
    # Arrived rows lie device by device, by expert only within each; `experts` wants all rows of an expert together.
    row_R, ends = jnp.arange(size, dtype=jnp.int32), jnp.cumsum(from_nG.reshape(-1))
    expert_R = jnp.where(row_R < ends[-1], (ends[None, :] <= row_R[:, None]).sum(1, dtype=jnp.int32) % held, held)
    again, sizes_G, _ = sort(expert_R[:, None], held, size)
    return Trip(
        leaving=(spread(x_TD, rows), carry(weights_TK, rows)[:, None]),
        there=lambda here: (_exchange(dispatch, size, here[0], plan), _exchange(dispatch, size, here[1], plan)),
        arrange=lambda arrived: (spread(arrived[0], again), carry(arrived[1], again), sizes_G),
        pack=lambda y_RD: combine(y_RD, again),
        home=lambda y_RD: _exchange(dispatch, chosen_TK.size, y_RD, Plan(plan.back, plan.there)),
        unpack=lambda home_PD: combine(home_PD, rows),
        lost=Lost(overflow, jnp.zeros_like(overflow)),
    )


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
