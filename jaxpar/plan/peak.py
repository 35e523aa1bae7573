"""The fullest moment of a step on one GPU, from the configuration alone, and what papers say of the same.

    predicted_peak  bytes, to compare with the compiled program
    formula_bytes   16 bytes a parameter with its ZeRO share, and Korthikanti's activations

Sources: Rajbhandari et al., "ZeRO" (SC'20), section 3.1; Korthikanti et al., "Reducing Activation Recomputation" (2022), table 2, without
the scores that fused attention does not keep.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.plan import formulas
from jaxpar.plan.experts import choices


def formula_bytes(config: Config) -> dict[str, int]:
    """Of one GPU: `state` by 16 bytes a parameter and its ZeRO shares, `activations` of a microbatch by Korthikanti without attention
    scores, at the remat policy that is nearest; and `kept`, what this program's forward keeps for the backward."""
    split = {0: 0, 1: 12, 2: 14, 3: 16}[config.train.zero]  # bytes of 16 that ZeRO divides
    state = sum(weight.total * (16 - split + split / weight.ways) for weight in formulas.weights(config))
    (b, s), t = formulas.microbatch(config), config.mesh.tensor
    one = b * s * config.model.width
    tokens = t if config.train.sequence_parallel else 1
    full = one * (10 / tokens + 24 / t)
    each = {"block": 2 * one / tokens, "attention": 2 * one / tokens + 2 * one / t}.get(config.train.remat, full)
    return {"state": round(state), "activations": round(config.model.layers * each), "kept": kept_bytes(config)}


def kept_bytes(config: Config) -> int:
    """What the forward of a microbatch keeps for the backward. "none" keeps a layer's every value: what "matmuls" does and at least as much
    again of element-wise results (some are float32, some whole over `tensor`: 2.6 times as much was compiled of 8B on 64)."""
    kept = formulas.saved_bytes(config)
    return 2 * kept_bytes(_with_remat(config, "matmuls")) if kept is None else kept


def working_bytes(config: Config) -> int:
    """Activations alive while one layer is computed again and differentiated.

    Between blocks two of width D, the input and its gradient. Inside, five: the inputs of attention and of the MLP, the gradient of the
    MLP's output, and what gate and up give of its input's. Queries, keys, values, attention's output and their gradients; and four of the
    MLP's width (gate, up, their product, one gradient), or what experts work with. Of interleaved parts one half is at its MLP, with four
    of the five, while the other is at its attention."""
    model, t, (b, s) = config.model, config.mesh.tensor, formulas.microbatch(config)
    heads = (model.heads + max(model.kv_heads, t)) // t * (model.head_width + model.value_head_width)
    parts, moe = config.train.interleave, model.moe
    wide = moe.shared_width if moe.experts and not moe.dense_layers and moe.every == 1 else model.mlp_width
    mlp = 4 * _chunk(config) * wide // t
    inside = b * s * 5 * model.width + mlp if parts == 1 else (b * s * 7 * model.width + mlp) // 2
    size = jnp.dtype(config.train.compute_dtype).itemsize
    return size * (b * s * (2 * model.width // formulas.token_shards(config) + heads) + inside + _expert_rows(config))


def predicted_peak(config: Config) -> int:
    """The larger of two moments: the loss (whole table of the head, its float32 gradient, one chunk of logits and their gradient) and
    the backward of the last layer (gathered weights, gradients on their way, the head's whole one among them, the layer's working set).
    Both hold state, batch, gradient buffers and what the forward saved; the backward holds some of that twice (`_transposed`)."""
    model, train = config.model, config.train
    held = formulas.state_bytes(config) + formulas.batch_bytes(config) + kept_bytes(config)
    size = jnp.dtype(train.compute_dtype).itemsize
    b, s = formulas.microbatch(config)
    head = next(
        weight.elements
        for weight in formulas.weights(config)
        if weight.name.endswith("head/table" if not model.tied else "embedding/table")
    )
    chunk = min(train.loss_chunk, b * s) * head // model.width
    loss = head * (size + 4) + chunk * (4 + 2 * size) + 3 * size * b * s * model.width
    layer = working_bytes(config) + head * _sent_itemsize(config) + _transposed(config)
    return round(held + _buffers(config) + max(loss + _kept_weights(config), layer + _moving(config)))


def _chunk(config: Config) -> int:
    """Tokens that the MLP works on at a time."""
    (b, s), chunk = formulas.microbatch(config), config.train.mlp_chunk
    return b * (chunk if 0 < chunk < s else s)


def _expert_rows(config: Config) -> int:
    """Numbers in the rows of experts at the backward of a layer: sorted by expert, the gradients of their results likewise, and the
    gradient of the rows, which begins as zeros: XLA makes the zeros that every layer begins with once, before the loop over layers.

    Where other devices have experts, beside them: `ragged`, rows and gradients as they came, into zeros each, and of a token's choices
    what goes back, into zeros; `capacity`, as they came; `gather`, all tokens and all gradients of results."""
    moe, experts, (b, s), width = config.model.moe, config.train.experts, formulas.microbatch(config), config.model.width
    if not moe.experts:
        return 0
    ways = math.prod(getattr(config.mesh, axis) for axis in experts.axes)
    tokens, k = b * s // (1 if experts.columns else formulas.token_shards(config)), choices(config)
    capacity = experts.dispatch == "capacity"
    rows = math.ceil((experts.capacity_factor if capacity else experts.buffer_factor if ways > 1 else 1) * tokens * k)
    if ways == 1:
        return 4 * rows * width
    beside = {"ragged": 4 * rows + 2 * tokens * k, "capacity": 2 * rows, "gather": 2 * ways * tokens}
    return (4 * rows + beside[experts.dispatch]) * width


def _transposed(config: Config) -> int:
    """Queries, keys and values that policies keep, transposed once for all layers before the backward: gathering tokens over `tensor` puts
    them before sequences, cuDNN's backward wants sequences first. With one sequence a part both are the same order."""
    model, train, t, (b, s) = config.model, config.train, config.mesh.tensor, formulas.microbatch(config)
    if train.remat not in ("outputs", "matmuls") or formulas.token_shards(config) == 1 or b // train.interleave < 2:
        return 0
    keys = max(model.kv_heads // t, 1)
    widths = (model.heads // t + keys) * model.head_width + keys * model.value_head_width
    return jnp.dtype(train.compute_dtype).itemsize * b * s * widths * (model.layers - 1)


def _with_remat(config: Config, remat: str) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, remat=remat))


def _buffers(config: Config) -> int:
    """Gradients of all layers: a buffer in the masters' dtype where microbatches add to it, else as they came or were reduced."""
    late = config.train.zero >= 2
    elements = sum(weight.total // (weight.ways if weight.split and late else 1) for weight in formulas.weights(config))
    added = config.train.accumulation > 1
    return (jnp.dtype(config.train.master_dtype).itemsize if added else _sent_itemsize(config)) * elements


def _kept_weights(config: Config) -> int:
    """Weights in the compute dtype that live through the loss: all of the layers below ZeRO-3; a shard is cast as it is gathered."""
    size = jnp.dtype(config.train.compute_dtype).itemsize
    return size * sum(weight.total for weight in formulas.weights(config) if weight.layers) if config.train.zero < 3 else 0


def _sent_itemsize(config: Config) -> int:
    """Of a gradient that waits to be sent: microbatch by microbatch in the dtype of the reduction, else as it came."""
    return jnp.dtype(config.train.reduce_dtype if config.train.zero >= 2 else config.train.compute_dtype).itemsize


def _moving(config: Config) -> int:
    """Weights of the layer in use and the next, and the gradient of the last on its way; this layer's takes the place of what it is made
    of. But gradients that a loop over tokens adds up, of experts or of a chunked MLP, are sums in float32 beside the zeros that every
    layer's begin with."""
    train, size = config.train, jnp.dtype(config.train.compute_dtype).itemsize
    each = [weight for weight in formulas.weights(config) if weight.layers]
    layer = sum(weight.elements for weight in each)
    dims = 3 if config.model.moe.experts else 2 if _chunk(config) < math.prod(formulas.microbatch(config)) else 0
    added = sum(weight.elements for weight in each if "/mlp/" in weight.name and len(weight.shape) == dims)
    moving = layer * (2 * size * (train.zero == 3) + _sent_itemsize(config) * (train.zero >= 2))
    return _kept_weights(config) + moving + 2 * 4 * added
