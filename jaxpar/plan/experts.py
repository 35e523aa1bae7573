"""What a step sends to and from experts, from its configuration alone; `formulas.py` adds it to the rest of a step.

    expert_traffic   every collective of routing, dispatch and its counts

As in `formulas.py`, sizes and counts are written down once more rather than asked of `jaxpar/parallel/expert.py`.

Dims: T tokens of a microbatch's part on one device, D model width, E experts, K experts of a token, n devices along `train.experts.axes`.
Values of width D that a device sends in a layer's forward (the backward sends as many, and what the policy did not keep again):

    gather     2 (n-1) T D                          each token to every device, and its result back
    ragged     2 (n-1)/n T K D                      each choice to its expert and back, where every device gets as many
    capacity   2 (n-1)/n T K D capacity_factor      filled or not

Beside them travel one number of a choice, its weight (float32), and counts (int32): `gather` each token's choices, `ragged` the rows for
each expert and where they land.
"""

from __future__ import annotations

import math

from jaxpar.config import Config
from jaxpar.mesh import REPLICA, SEQ, TENSOR
from jaxpar.plan import weights
from jaxpar.plan.traffic import Collective

# How often a backward sends again what its forward sent to experts, for values that the policy did not keep: (tokens, weights and counts).
DISPATCHED_AGAIN = {"none": (0, 0), "matmuls": (0, 1), "outputs": (1, 1), "attention": (1, 1), "block": (1, 1)}


def expert_traffic(config: Config, compiled: bool = False) -> list[Collective]:
    """Every collective that a mixture of experts adds to a step, as written or as `compiled` (`_counts`); none for a dense model."""
    if not config.model.moe.experts:
        return []
    return [*_dispatch(config), *_columns(config), *_counts(config, compiled), *_metrics(config)]


def sparse_layers(config: Config) -> int:
    """Layers that have experts."""
    moe = config.model.moe
    return (config.model.layers - moe.dense_layers) // moe.every if moe.experts else 0


def choices(config: Config) -> int:
    """Experts that a token may be sent to: all of them where experts choose."""
    moe = config.model.moe
    return moe.experts if moe.router == "expert_choice" else moe.per_token


def _sent(config: Config, what: str, kind: str, axes: tuple[str, ...], count: int, elements: int, dtype: str) -> list[Collective]:
    return weights.send(config, f"experts, {what}", kind, axes, count, elements, dtype)


def _wide(config: Config) -> str:
    return "float64" if config.train.compute_dtype == "float64" else "float32"


def _token_axes(config: Config) -> tuple[str, ...]:
    """Axes that split the tokens of a row between blocks."""
    return (SEQ, TENSOR) if config.train.sequence_parallel else (SEQ,)


def _rows(config: Config) -> tuple[int, int]:
    """(sequences, tokens of each) of a part of a microbatch on one device, between blocks."""
    mesh, train = config.mesh, config.train
    rows = train.batch // train.accumulation // (mesh.data * mesh.expert) // train.interleave
    return rows, config.data.sequence // math.prod(getattr(mesh, axis) for axis in _token_axes(config))


def _dispatch(config: Config) -> list[Collective]:
    """Tokens to experts and back, forward, again and backward."""
    train, experts, moe, axes = config.train, config.train.experts, config.model.moe, config.train.experts.axes
    n, tokens = math.prod(getattr(config.mesh, axis) for axis in axes), math.prod(_rows(config)) // experts.chunks
    if experts.columns and train.sequence_parallel:
        tokens *= config.mesh.tensor
    times = sparse_layers(config) * train.accumulation * train.interleave * experts.chunks
    again, counted_again = DISPATCHED_AGAIN[train.remat]
    # A bias of `down` is multiplied by them, so that they are kept where all that matmuls multiply is, but in a narrower dtype.
    multiplied = moe.biases and train.remat == "matmuls" and not experts.columns and train.compute_dtype == _wide(config)
    weighed_again = 0 if multiplied else counted_again
    width, k, dtype = config.model.width, choices(config), train.compute_dtype

    def send(what: str, kind: str, count: int, elements: int, dtype: str) -> list[Collective]:
        return _sent(config, what, kind, axes, count * times, elements, dtype)

    if experts.dispatch == "gather":
        whole = n * tokens
        return [
            *send("tokens, and gradients of results", "all_gather", 2 + again, whole * width, dtype),
            *send("weights", "all_gather", 1 + weighed_again, whole * k, _wide(config)),
            *send("choices", "all_gather", 1 + counted_again, whole * k, "int32"),
            *send("results, and gradients of tokens", "reduce_scatter", 2, whole * width, dtype),
            *send("gradients of weights", "reduce_scatter", 1, whole * k, _wide(config)),
        ]
    rows, kind = tokens * k, "ragged_all_to_all"
    if experts.dispatch == "capacity":
        rows, kind = moe.experts * min(tokens, math.ceil(experts.capacity_factor * tokens * k / moe.experts)), "all_to_all"
    found = send("tokens, results and their gradients", kind, 4 + again, rows * width, dtype)
    found += send("weights and their gradients", kind, 2 + weighed_again, rows, _wide(config))
    if experts.dispatch == "ragged":
        for values in (moe.experts + n, 2 * n):
            found += send("counts", "all_to_all", 1 + counted_again, values, "int32")
    return found


def _columns(config: Config) -> list[Collective]:
    """Over `tensor`, where it splits experts' columns: all tokens of a group enter, with their weights and choices, and results leave. A
    shared expert's tokens have entered already, and so have the gradients of its results, but where they go around a ring."""
    train, moe, tokens = config.train, config.model.moe, math.prod(_rows(config))
    again, counted_again = DISPATCHED_AGAIN[train.remat]
    if not train.experts.columns:
        return []

    def send(what: str, kind: str, count: int, width: int, dtype: str) -> list[Collective]:
        times = sparse_layers(config) * train.accumulation * train.interleave
        shards = config.mesh.tensor if train.sequence_parallel else 1
        return _sent(config, what, kind, (TENSOR,), count * times, shards * tokens * width, dtype)

    width, k = config.model.width, choices(config)
    if not train.sequence_parallel:
        results = send("results, and gradients of tokens", "all_reduce", 2, width, train.compute_dtype)
        return [*results, *send("gradients of weights", "all_reduce", 1, k, _wide(config))]
    there = bool(moe.shared_width) and not train.collective_matmul
    return [
        *send("tokens, and gradients of results", "all_gather", 0 if there else 2 + again, width, train.compute_dtype),
        *send("results, and gradients of tokens", "reduce_scatter", 2, width, train.compute_dtype),
        *send("weights", "all_gather", 1 + counted_again, k, _wide(config)),
        *send("choices", "all_gather", 1 + counted_again, k, "int32"),
        *send("gradients of weights", "reduce_scatter", 1, k, _wide(config)),
    ]


def _counts(config: Config, compiled: bool) -> list[Collective]:
    """Choices of each row, over the axes that split it; of a whole microbatch over all, where the balancing loss wants that.

    Compiled, a backward counts choices again only where the balancing loss reads those of a row."""
    train, moe, (rows, _), split = config.train, config.model.moe, _rows(config), _token_axes(config)
    times, again = sparse_layers(config) * train.accumulation * train.interleave, int(train.remat != "none")
    loads = (1 + (again * (moe.balance == "sequence") if compiled else again)) * times
    found = _sent(config, "load of a row", "all_reduce", split, loads, rows * moe.experts, "int32")
    if moe.router == "expert_choice":
        seen = math.prod(getattr(config.mesh, axis) for axis in split) * math.prod(_rows(config)) * moe.experts
        found += _sent(config, "what experts choose from", "all_gather", split, (1 + again) * times, seen, _wide(config))
    if moe.balance != "sequence":
        found += _sent(
            config,
            "load of a microbatch",
            "all_reduce",
            (*REPLICA, *split),
            train.accumulation,
            sparse_layers(config) * moe.experts,
            "int32",
        )
    return found


def _metrics(config: Config) -> list[Collective]:
    """Balancing loss, z-loss and entropy; choices that overflowed and that were dropped; the load of every expert."""
    axes = (*REPLICA, *_token_axes(config))
    losses = (*axes, TENSOR) if config.train.experts.columns else axes
    names = {"balance": _wide(config), "z": _wide(config), "entropy": _wide(config), "overflow": "int32", "dropped": "int32"}
    counts = sparse_layers(config) * config.model.moe.experts if config.model.moe.balance == "sequence" else 0  # else summed already
    load = _sent(config, "load", "all_reduce", axes, 1, counts, "int32") if counts else []
    return load + [
        one
        for name, dtype in names.items()
        for one in _sent(config, name, "all_reduce", losses if name in ("overflow", "dropped") else axes, 1, 1, dtype)
    ]
