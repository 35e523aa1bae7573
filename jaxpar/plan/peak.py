"""The fullest moment of a step on one GPU, from the configuration alone, and what papers say of the same.

    predicted_peak  bytes, to compare with the compiled program; the largest of several `moments`
    formula_bytes   16 bytes a parameter with its ZeRO share, and Korthikanti's activations

Sources: Rajbhandari et al., "ZeRO" (SC'20), section 3.1; Korthikanti et al., "Reducing Activation Recomputation" (2022), table 2, without
the scores that fused attention does not keep.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.plan import formulas
from jaxpar.plan.saved import saved_bytes
from jaxpar.plan.working import chunk_tokens, forward_bytes, last_bytes, turned_bytes, turning_bytes, working_bytes


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
    return {"state": round(state), "activations": round(config.model.layers * each), "kept": saved_bytes(config)}


def predicted_peak(config: Config) -> int:
    """The largest of `moments`."""
    return round(max(moments(config).values()))


def moments(config: Config) -> dict[str, float]:
    """Bytes at the moments of a step that may be its fullest. All hold state, batch and what the forward kept; where microbatches add up,
    the gradients' buffers, which else begin with the backward.

    loss      the head's whole table, its float32 gradient, one chunk of logits and their gradient
    loop      the backward inside the loop over layers, without what ZeRO-3's last layer kept, which is done by then; some of the rest is
              held twice. The head's gradient waits, here and below, until the layers are done
    last      ZeRO-2 and -3: the backward of the last layer, before the loop. ZeRO-2 slices what it kept from the arrays of all layers
    turning   "none" over `tensor`: before the loop, while kept values are put in another order
    forward   ZeRO-2: weights as the gathers left them, which the last layer's backward reads, and as the loop over layers reads them
    """
    model, train, (b, s) = config.model, config.train, formulas.microbatch(config)
    size, reduced = jnp.dtype(train.compute_dtype).itemsize, jnp.dtype(train.reduce_dtype).itemsize
    table = next(weight for weight in formulas.weights(config) if weight.name.endswith("embedding/table" if model.tied else "head/table"))
    head, chunk = table.elements, min(train.loss_chunk, b * s) * table.elements // model.width
    kept, weights, buffers = saved_bytes(config), _kept_weights(config), _buffers(config)
    of_last = kept / model.layers
    before = formulas.state_bytes(config) + formulas.batch_bytes(config) + (buffers if train.accumulation > 1 else 0)
    backward = formulas.state_bytes(config) + formulas.batch_bytes(config) + buffers + head * (reduced if train.zero >= 2 else 4)
    twice = turned_bytes(config)

    found: dict[str, float] = {
        "loss": before + kept + weights + head * (size + 4) + chunk * (4 + 2 * size) + 3 * size * b * s * model.width
    }
    found["loop"] = backward + kept - of_last * (train.zero == 3) + twice + working_bytes(config) + _moving(config)
    sliced = kept + of_last * (train.zero == 2)
    if train.zero >= 2 and train.remat in ("none", "matmuls", "outputs"):
        found["last"] = backward + sliced + twice * (train.remat == "none") + last_bytes(config) + _moving(config, sent=False)
    if train.remat == "none" and config.mesh.tensor > 1 and not train.collective_matmul:
        found["turning"] = backward + sliced + weights + turning_bytes(config)
    if train.zero == 2:
        found["forward"] = before + kept + 2 * (weights + size * head) + forward_bytes(config)
    return found


def _buffers(config: Config) -> int:
    """Finished gradients during the backward: where microbatches add to them all, in the masters' dtype; else those of the layers, as they
    came or were reduced. The embedding's comes last, when the layers' values are gone."""
    late, added = config.train.zero >= 2, config.train.accumulation > 1
    master = jnp.dtype(config.train.master_dtype).itemsize
    return sum(
        (master if added else _sent_itemsize(config, weight)) * weight.total // (weight.ways if weight.split and late else 1)
        for weight in formulas.weights(config)
        if added or weight.layers
    )


def _kept_weights(config: Config) -> int:
    """Weights in the compute dtype that live through the loss: all of the layers below ZeRO-3; a shard is cast as it is gathered."""
    size = jnp.dtype(config.train.compute_dtype).itemsize
    return size * sum(weight.total for weight in formulas.weights(config) if weight.layers) if config.train.zero < 3 else 0


def _sent_itemsize(config: Config, weight: formulas.Weight) -> int:
    """Of a gradient that waits to be sent: microbatch by microbatch in the dtype of the reduction, else as it came."""
    late = config.train.zero >= 2 and weight.split
    return jnp.dtype(config.train.reduce_dtype if late else config.train.compute_dtype).itemsize


def _moving(config: Config, sent: bool = True) -> int:
    """Weights of the layer in use and the next, and, where `sent`, the gradient of the last on its way; this layer's takes the place of
    what it is made of. But gradients that a loop over tokens adds up, of experts or of a chunked MLP, are sums in float32 beside the zeros
    that every layer's begin with."""
    train, size = config.train, jnp.dtype(config.train.compute_dtype).itemsize
    each = [weight for weight in formulas.weights(config) if weight.layers]
    layer = sum(weight.elements for weight in each)
    late = sum(weight.elements * _sent_itemsize(config, weight) for weight in each) * (train.zero >= 2) * sent
    dims = 3 if config.model.moe.experts else 2 if chunk_tokens(config) < math.prod(formulas.microbatch(config)) else 0
    added = sum(weight.elements for weight in each if "/mlp/" in weight.name and len(weight.shape) == dims)
    moving = layer * 2 * size * (train.zero == 3) + late
    return _kept_weights(config) + moving + 2 * 4 * added
