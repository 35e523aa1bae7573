"""The fullest moment of a step on one GPU, from the configuration alone, and what papers say of the same.

    predicted_peak  bytes, to compare with the compiled program
    formula_bytes   16 bytes a parameter with its ZeRO share, and Korthikanti's activations

Sources: Rajbhandari et al., "ZeRO" (SC'20), section 3.1; Korthikanti et al., "Reducing Activation Recomputation" (2022), table 2, without
the scores that fused attention does not keep.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.plan import formulas


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
    """What the forward of a microbatch keeps for the backward. "none" keeps a layer's every value: what "matmuls" does and as much again of
    element-wise results."""
    kept = formulas.saved_bytes(config)
    return 2 * kept_bytes(_with_remat(config, "matmuls")) if kept is None else kept


def working_bytes(config: Config) -> int:
    """Activations alive while one layer is computed again and differentiated: its inputs and outputs and their gradients, two of width D
    between blocks and four inside, queries, keys, values, attention's output and their gradients, and four of the MLP's width (gate, up,
    their product, one gradient). Interleaved parts are in work at the same time, so it is the whole batch whatever their number."""
    model, t, (b, s) = config.model, config.mesh.tensor, formulas.microbatch(config)
    heads = (model.heads + max(model.kv_heads, t)) // t * (model.head_width + model.value_head_width)
    widths = 2 * model.width // formulas.token_shards(config) + 2 * model.width + heads + 4 * model.mlp_width // t
    return jnp.dtype(config.train.compute_dtype).itemsize * b * s * widths


def predicted_peak(config: Config) -> int:
    """The larger of two moments: the loss (whole table of the head, its float32 gradient, one chunk of logits and their gradient) and
    the backward of the last layer (gathered weights, gradients on their way, the head's whole one among them, the layer's working set).
    Both hold state, batch, gradient buffers and what the forward saved."""
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
    layer = working_bytes(config) + head * _sent_itemsize(config)
    return round(held + _buffers(config) + max(loss + _kept_weights(config), layer + _moving(config)))


def _with_remat(config: Config, remat: str) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, remat=remat))


def _buffers(config: Config) -> int:
    """The accumulation buffer of the gradients."""
    late = config.train.zero >= 2
    elements = sum(weight.total // (weight.ways if weight.split and late else 1) for weight in formulas.weights(config))
    return jnp.dtype(config.train.master_dtype).itemsize * elements


def _kept_weights(config: Config) -> int:
    """Weights in the compute dtype that live through the loss: all of the layers below ZeRO-3, else their own shard."""
    size = jnp.dtype(config.train.compute_dtype).itemsize
    layers = [weight for weight in formulas.weights(config) if weight.layers]
    return size * sum(weight.total // (weight.ways if config.train.zero == 3 and weight.split else 1) for weight in layers)


def _sent_itemsize(config: Config) -> int:
    """Of a gradient that waits to be sent: microbatch by microbatch in the dtype of the reduction, else as it came."""
    return jnp.dtype(config.train.reduce_dtype if config.train.zero >= 2 else config.train.compute_dtype).itemsize


def _moving(config: Config) -> int:
    """Weights of the layer in use and the next, the gradient of this layer, and that of the last on its way."""
    size, level = jnp.dtype(config.train.compute_dtype).itemsize, config.train.zero
    layer = sum(weight.elements for weight in formulas.weights(config) if weight.layers)
    return _kept_weights(config) + layer * (2 * size * (level == 3) + (size + _sent_itemsize(config)) * (level >= 2))
