"""What a training step sends and holds, from its configuration alone: to plan a run, and to hold against the program.

    weights           the parameters as one device computes with them
    step_traffic      every collective of a step, to compare with what `jaxpar.plan.traffic` reads from a program
    state_bytes, batch_bytes, weight_bytes, gradient_bytes     memory of one device; what its forward keeps is in `saved.py`

Each collective is a `traffic.Collective` whose `source` says what it is for, so that `traffic.summary` adds up formulas and programs alike.
Nothing here reads `rules.py`, `zero.py` or `stack.py`: sizes and counts are written down once more, or agreement would prove nothing.

Dims: B sequences and S tokens of a microbatch on one device, D model width, N query heads, K key/value heads, H head width, F MLP width,
V vocabulary, L layers, t devices along `tensor`, n replicas (devices along `data`, `expert` and `seq` together;
of experts, those along the axes that experts are not split over).

A step of M parameters a device (before ZeRO), a accumulated microbatches:

    ZeRO 0    all-reduce M
    ZeRO 1    all-gather M in the compute dtype, reduce-scatter M
    ZeRO 2    all-gather M, reduce-scatter a · M
    ZeRO 3    all-gather (2 - 1/L) a · M for layers, a · M for norm and head, reduce-scatter as ZeRO 2; the embedding either likewise, or
              an all-to-all of the rows looked up and one of their gradients

The last layer's weights, gathered in the forward, serve the backward too: hence - 1/L. (With remat "block" the MLP's do not.)
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.mesh import AXES, REPLICA, TENSOR
from jaxpar.plan.context import context_traffic
from jaxpar.plan.experts import expert_traffic, sparse_layers
from jaxpar.plan.traffic import Collective
from jaxpar.plan.weights import Weight, microbatch, replicas, state_elements, token_shards, weights
from jaxpar.plan.weights import send as _send

# How often the backward of a layer sends again what its forward sent, to compute values that the policy did not keep: (enter, leave).
SENT_AGAIN = {"none": (0, 0), "matmuls": (2, 0), "outputs": (2, 0), "attention": (2, 1), "block": (2, 1)}


def _itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def _scalar_dtype(config: Config) -> str:
    return "float64" if config.train.compute_dtype == "float64" else "float32"


def step_traffic(config: Config, compiled: bool = False) -> list[Collective]:
    """Every collective of one training step, in no particular order: as it is written, or as it is `compiled`, where XLA drops the gathers
    of biases that nobody reads, and experts' counts likewise.

    `element-wise` optimizers (adamw, lion, sgd) send nothing.
    """
    found = [each for weight in weights(config) for each in [*_gathers(config, weight, compiled), *_reductions(config, weight)]]
    return [
        *found,
        *_activations(config),
        *context_traffic(config),
        *expert_traffic(config, compiled),
        *_loss(config),
        *_scalars(config),
        *_norm(config),
    ]


def _gathers(config: Config, weight: Weight, compiled: bool) -> list[Collective]:
    """Weights made whole."""
    train, a, layers = config.train, config.train.accumulation, weight.layers
    if not weight.split:
        return []

    def gather(what: str, count: int, elements: int) -> list[Collective]:
        return _send(config, f"weights, {what}", "all_gather", weight.copies, count, elements, train.compute_dtype)

    if train.zero < 3:
        return gather("once a step", 1, weight.total)
    if weight.columns:
        b, s = microbatch(config)
        rows = _send(
            config, "embedding, rows", "all_to_all", REPLICA, 2 * a, b * s // token_shards(config) * config.model.width, train.compute_dtype
        )
        return [*_send(config, "embedding, ids", "all_gather", REPLICA, a, replicas(config) * b * s, "int32"), *rows]
    if not layers:
        return gather("once a microbatch", a, weight.elements)
    forward = [*gather("first layer", a, weight.elements), *gather("one layer ahead", a * (layers - 1), weight.elements)]
    if compiled and not _read_backward(config, weight):
        return forward
    again = a if train.remat == "block" and "/mlp/" in weight.name else 0
    return [*forward, *gather("one layer ahead", a * (layers - 1), weight.elements), *gather("last layer again", again, weight.elements)]


def _read_backward(config: Config, weight: Weight) -> bool:
    """Whether a layer's backward reads a weight: all but biases whose sums it does not compute again, as what one layer gives
    to the next."""
    if weight.role != "bias":
        return True
    if config.model.moe.experts and "/mlp/" in weight.name:
        return _expert_bias_read(config, weight.name.rsplit("/", 1)[1])
    chunked = 0 < config.train.mlp_chunk < config.data.sequence // config.mesh.seq and "/mlp/" in weight.name
    return not weight.name.endswith("/down_bias") and (config.train.remat != "none" or chunked)


def _expert_bias_read(config: Config, name: str) -> bool:
    """The same of biases beside experts. That of `down` is a factor of the router's gradient. Of gate and up each row's is the output of a
    matmul, kept as others are: but with capacity, where rows are at fixed places and it depends on the bias alone."""
    remat, kept = config.train.remat, config.train.experts.dispatch != "capacity" and name in ("gate_bias", "up_bias")
    return name == "down_bias" or (remat != "none" and not (kept and remat in ("matmuls", "outputs")))


def _reductions(config: Config, weight: Weight) -> list[Collective]:
    """Gradients made finished."""
    train, a, layers = config.train, config.train.accumulation, weight.layers
    tensor = (TENSOR,) if weight.partial else ()

    def reduce(what: str, kind: str, axes: tuple[str, ...], count: int, elements: int) -> list[Collective]:
        return _send(config, f"gradients, {what}", kind, axes, count, elements, train.reduce_dtype)

    if not weight.split:
        return reduce("once a step", "all_reduce", (*weight.copies, *tensor), 1, weight.total)
    if weight.columns:
        return []  # each device has its columns' whole gradient
    rest = reduce("rest over tensor", "all_reduce", tensor, 1, weight.total // weight.ways)
    if train.zero == 1:
        return [*reduce("once a step", "reduce_scatter", weight.copies, 1, weight.total), *rest]
    if not layers:
        return [*reduce("once a microbatch", "reduce_scatter", weight.copies, a, weight.elements), *rest]
    late = reduce("one layer late", "reduce_scatter", weight.copies, a * (layers - 1), weight.elements)
    return [*late, *reduce("last layer of a pass", "reduce_scatter", weight.copies, a, weight.elements), *rest]


def _activations(config: Config) -> list[Collective]:
    """Over `tensor`: a block enters and leaves twice (once where routed experts alone are in the MLP's place), the embedding leaves, the
    loss enters. The transpose of each is the other."""
    train, (b, s) = config.train, microbatch(config)
    elements, again, blocks = b * s * config.model.width, SENT_AGAIN[train.remat], crossings(config)
    parts, each = train.interleave, train.accumulation
    # Of a group of layers that is computed again, all but the last one's MLP leave again.
    inside = sparse_layers(config) * (config.model.moe.every - 1) if config.model.moe.experts else 0
    enters, leaves = ("all_gather", "reduce_scatter") if train.sequence_parallel else ("", "all_reduce")

    def send(what: str, kind: str, count: int, parts: int = 1) -> list[Collective]:
        sent = _send(config, f"activations, {what}", kind, (TENSOR,), count, elements // parts, train.compute_dtype)
        return sent if kind else []  # without sequence parallelism every device has all tokens already

    passes = [("forward", enters, blocks), ("forward", leaves, blocks), ("backward", leaves, blocks), ("backward", enters, blocks)]
    passes += [("again", enters, again[0] // 2 * blocks), ("again", leaves, again[1] * (config.model.layers + inside))]
    if train.collective_matmul and config.mesh.tensor > 1:  # each all-gather and reduce-scatter is t - 1 permutes of a chunk
        parts = config.mesh.tensor
        passes = [(what, "permute", times * (parts - 1)) for what, _, times in passes]
    else:
        passes = [(what, kind, times * parts) for what, kind, times in passes]
    layers = [one for what, kind, times in passes for _ in range(times) for one in send(f"layers, {what}", kind, each, parts)]
    a = train.accumulation
    embedding = [*send("embedding, forward", leaves, a), *send("embedding, backward", enters, a)]
    return [*layers, *embedding, *send("head, forward", enters, a), *send("head, backward", leaves, a)]


def crossings(config: Config) -> int:
    """How often activations enter and leave what `tensor` splits, all layers: attention, and the MLP or the shared expert. What experts
    whose columns it splits add is in `experts.py`."""
    routed_alone = sparse_layers(config) if not config.model.moe.shared_width else 0
    return 2 * config.model.layers - routed_alone


def _loss(config: Config) -> list[Collective]:
    """Three scalars a token: the maximum, then the sum of exponentials and the label's logit together."""
    train, (b, s) = config.train, microbatch(config)
    chunk = min(train.loss_chunk, b * s)
    count = train.accumulation * -(-b * s // chunk)
    dtype = _scalar_dtype(config)
    return [
        *_send(config, "loss, maximum", "all_reduce", (TENSOR,), count, chunk, dtype),
        *_send(config, "loss, sum and label", "all_reduce", (TENSOR,), count, 2 * chunk, dtype),
    ]


def _scalars(config: Config) -> list[Collective]:
    """The number of labels, the cross entropy and the z-loss."""
    dtype = _scalar_dtype(config)
    labels = _send(config, "labels", "all_reduce", REPLICA, 1, 1, "int32")
    return [*labels, *2 * _send(config, "sums of losses", "all_reduce", REPLICA, 1, 1, dtype)]


def _norm(config: Config) -> list[Collective]:
    """The gradients' sum of squares: one scalar for each set of axes that splits some of them."""
    several = [axis for axis in AXES if getattr(config.mesh, axis) > 1]
    splits = [{*weight.axes, *(weight.copies if weight.split else ())} for weight in weights(config)]
    kinds = {tuple(axis for axis in several if axis in axes) for axes in splits}
    dtype = _scalar_dtype(config)
    return [one for axes in sorted(kinds) for one in _send(config, "norm of the gradients", "all_reduce", axes, 1, 1, dtype)]


def state_bytes(config: Config) -> int:
    """Masters and the optimizer's state on one device, exact for adamw (two moments), lion and sgd (one), and four counters. muon has one
    moment for matrices and adamw's two for the rest; adafactor keeps sums of rows and columns, which are left out."""
    moments = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 2, "adafactor": 0}[config.optimizer.name]
    matrices = 1 if config.optimizer.name == "muon" else moments
    counters = {"lion": 4, "adamw": 4, "sgd": 3}.get(config.optimizer.name, 0)  # step, skipped, the rule's if it counts, the schedule's
    elements = state_elements(config)
    for weight in weights(config):
        copies = 1 + (matrices if weight.role == "matrix" else moments)
        elements += copies * (weight.total // (weight.ways if weight.split else 1))
    return elements * _itemsize(config.train.master_dtype) + 4 * counters


def batch_bytes(config: Config) -> int:
    """Tokens, labels, positions and segments of a step on one device; row numbers only where dropout reads them."""
    (b, s), a = microbatch(config), config.train.accumulation
    return 4 * a * b * (4 * s + (1 if config.model.dropout else 0))


def weight_bytes(config: Config) -> int:
    """Weights in the compute dtype that exist at once beside the masters: all of them, or under ZeRO-3 those outside the layers and two
    layers (the one in use and the next). Nothing where masters are computed with as they are."""
    train, each = config.train, weights(config)
    if train.zero == 3:
        each = [weight for weight in each if weight.split and not weight.columns]
        return _itemsize(train.compute_dtype) * sum(weight.elements * (min(weight.layers, 2) or 1) for weight in each)
    made = [weight for weight in each if weight.split or train.compute_dtype != train.master_dtype]
    return _itemsize(train.compute_dtype) * sum(weight.total for weight in made)


def gradient_bytes(config: Config) -> int:
    """Gradients in the master dtype at their peak: the buffer that microbatches add to, and beside it

    ZeRO 0, 1   (buffer whole) what its reduction gives: whole, or this device's part
    ZeRO 2, 3   (buffer split) what waits for its reduction: whole gradients of two layers and of what is outside the layers
    """
    buffer, beside = 0, 0
    for weight in weights(config):
        n = weight.ways
        late = weight.split and config.train.zero >= 2 and not weight.columns
        buffer += weight.total // n if weight.split and config.train.zero >= 2 else weight.total
        if n > 1:
            beside += weight.elements * (min(weight.layers, 2) or 1) if late else weight.total // (n if weight.split else 1)
    return _itemsize(config.train.master_dtype) * (buffer + beside)
