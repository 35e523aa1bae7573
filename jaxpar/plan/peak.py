"""The fullest moment of a step on one GPU, from the configuration alone, and what papers say of the same.

    predicted_peak  bytes, to compare with the compiled program
    formula_bytes   16 bytes a parameter with its ZeRO share, and Korthikanti's activations

Sources: Rajbhandari et al., "ZeRO" (SC'20), section 3.1; Korthikanti et al., "Reducing Activation Recomputation" (2022), table 2, without
the scores that fused attention does not keep.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.plan import formulas
from jaxpar.plan.experts import choices
from jaxpar.plan.saved import WIDE, expert_rows, expert_tokens, saved_bytes


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
    inside = b * s * (4 if config.train.collective_matmul else 5) * model.width + mlp if parts == 1 else (b * s * 7 * model.width + mlp) // 2
    size = jnp.dtype(config.train.compute_dtype).itemsize
    return size * (b * s * (2 * model.width // formulas.token_shards(config) + heads) + inside + _expert_rows(config))


def predicted_peak(config: Config) -> int:
    """The largest of three moments. All hold state, batch and the gradients' buffers.

    loss    what the forward kept; the head's whole table, its float32 gradient, one chunk of logits and their gradient
    last    of the last layer's backward, where layers are gathered or reduced one by one: it stands before the loop over the others, which
            finds its kept values in arrays of their own
    loop    the backward inside that loop: of every layer but the last what was kept, some of it twice (`_transposed`)
    """
    return round(max(moments(config).values()))


def moments(config: Config) -> dict[str, float]:
    """Bytes at the moments of `predicted_peak`."""
    model, train = config.model, config.train
    held = formulas.state_bytes(config) + formulas.batch_bytes(config)
    added = _buffers(config) if train.accumulation > 1 else 0  # from the first microbatch on, else from the backward on
    size = jnp.dtype(train.compute_dtype).itemsize
    b, s = formulas.microbatch(config)
    table = next(weight for weight in formulas.weights(config) if weight.name.endswith("embedding/table" if model.tied else "head/table"))
    head, chunk = table.elements, min(train.loss_chunk, b * s) * table.elements // model.width
    loss = head * (size + 4) + chunk * (4 + 2 * size) + 3 * size * b * s * model.width
    kept, waiting, alone = saved_bytes(config), head * (jnp.dtype(train.reduce_dtype).itemsize if train.zero >= 2 else 4), train.zero == 3
    one = kept / model.layers
    found = {"loss": held + added + kept + loss + _kept_weights(config)}
    held += _buffers(config)
    found["loop"] = held + kept - alone * one + waiting + working_bytes(config) + _moving(config) + _transposed(config)
    before = held + kept + (train.zero == 2) * one + waiting  # ZeRO-2's last layer is in the arrays of all layers: sliced, it is there twice
    if train.zero >= 2 and train.remat in ("none", "matmuls", "outputs"):
        found["last"] = before + _moving(config, sent=False) + size * _last(config) + (_transposed(config) if train.remat == "none" else 0)
    if train.remat == "none" and config.mesh.tensor > 1 and not train.collective_matmul and not model.moe.experts:
        found["turned"] = before + _kept_weights(config) + _largest(config)
    if train.zero == 2 and config.model.moe.experts == 0:
        hidden = (5 if _in_pairs(config) else 3) * _chunk(config) * model.mlp_width // config.mesh.tensor
        working = size * (hidden + 3 * b * s * model.width) // train.interleave
        found["forward"] = held - _buffers(config) + added + kept + 2 * _kept_weights(config) + 2 * size * head + working
    return found


def _last(config: Config) -> int:
    """Numbers that the last layer's backward works with beside what it kept: gradients of the MLP's product, of gate and of up, and the
    product where it is computed again; three of width D, the norm's output and its gradient among them. Around a ring, a chunk of each.
    Of experts' rows gradients begin as zeros, which are held beside them."""
    model, train, (b, s), t = config.model, config.train, formulas.microbatch(config), config.mesh.tensor
    again = train.remat == "outputs"
    if model.moe.experts:
        width = (model.moe.width or model.mlp_width) // (t if train.experts.columns else 1)
        return (4 + again) * expert_rows(config) * width + _expert_rows(config)
    dense = ((3 + again) * _chunk(config) * model.mlp_width // t + 3 * b * s * model.width) // train.interleave
    return dense // t if train.collective_matmul else dense


def _largest(config: Config) -> int:
    """One of the float32 arrays of the MLP's width in which "none" keeps the values of all layers of a loop: XLA turns them, one after the
    other, from the order in which the forward wrote them to that in which the backward's matmuls lay theirs."""
    model, train, t, (b, s) = config.model, config.train, config.mesh.tensor, formulas.microbatch(config)
    layers = model.layers - (train.zero == 3)
    layers = layers // 2 if _in_pairs(config) else layers
    return 4 * layers * b * s * model.mlp_width // t // train.interleave


def _in_pairs(config: Config) -> bool:
    """Whether the loop over layers takes two a turn; what each of the two keeps is an array of its own."""
    train, layers = config.train, config.model.layers - (config.train.zero == 3)
    return train.zero >= 2 and train.remat != "block" and train.interleave == 1 and config.mesh.seq == 1 and layers >= 6


def _chunk(config: Config) -> int:
    """Tokens that the MLP works on at a time."""
    (b, s), chunk = formulas.microbatch(config), config.train.mlp_chunk
    return b * (chunk if 0 < chunk < s else s)


def _expert_rows(config: Config) -> int:
    """Numbers in the rows of experts at the backward of a layer: sorted by expert, the gradients of their results likewise, and the
    gradient of the rows, which begins as zeros: XLA makes the zeros that every layer begins with once, before the loop over layers.

    Where other devices have experts, beside them: `ragged`, rows and gradients as they came, into zeros each, and of a token's choices
    what goes back, into zeros; `capacity`, as they came; `gather`, all tokens and all gradients of results."""
    experts, width = config.train.experts, config.model.width
    if not config.model.moe.experts:
        return 0
    ways = math.prod(getattr(config.mesh, axis) for axis in experts.axes)
    tokens, k, rows = expert_tokens(config), choices(config), expert_rows(config)
    if ways == 1:
        return 4 * rows * width
    beside = {"ragged": 4 * rows + 2 * tokens * k, "capacity": 2 * rows, "gather": 2 * ways * tokens}
    return (4 * rows + beside[experts.dispatch]) * width


def _transposed(config: Config) -> int:
    """Kept values that XLA puts in another order once for all layers before the backward and, as the first layer's backward stands behind
    the loop (ZeRO-3) and reads them as they were, holds in both. With two layers a turn that is so where their number is even: the first
    is alone otherwise. A ring's chunks lie as its products read them.

    outputs, matmuls   queries, keys and values: gathering tokens over `tensor` puts them before sequences, cuDNN's backward wants sequences
                       first. With one sequence a part both are the same order
    none               what the MLP's and attention's matmuls multiply, of every part; gate, up and the activation's float32 values of the
                       first: those of a second part lie as the layers outside the loop read them
    """
    model, train, t, (b, s) = config.model, config.train, config.mesh.tensor, formulas.microbatch(config)
    size, layers = jnp.dtype(train.compute_dtype).itemsize, model.layers - 1
    alone = _in_pairs(config) and layers % 2
    if train.remat not in ("none", "outputs", "matmuls") or t == 1 or train.collective_matmul or train.zero < 3 or alone:
        return 0
    if train.remat == "none":
        wide = model.mlp_width // t
        made = (2 * size + 4 * WIDE[model.activation]) * wide // train.interleave
        return layers * b * s * (size * (2 * model.width + wide) + made)
    if formulas.token_shards(config) == 1 or b // train.interleave < 2:
        return 0
    keys = max(model.kv_heads // t, 1)
    widths = (model.heads // t + keys) * model.head_width + keys * model.value_head_width
    return size * b * s * widths * layers


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
    """Weights of the layer in use and the next, and the gradient of the last on its way; this layer's takes the place of what it is made
    of. But gradients that a loop over tokens adds up, of experts or of a chunked MLP, are sums in float32 beside the zeros that every
    layer's begin with."""
    train, size = config.train, jnp.dtype(config.train.compute_dtype).itemsize
    each = [weight for weight in formulas.weights(config) if weight.layers]
    layer = sum(weight.elements for weight in each)
    late = sum(weight.elements * _sent_itemsize(config, weight) for weight in each) * (train.zero >= 2) * sent
    dims = 3 if config.model.moe.experts else 2 if _chunk(config) < math.prod(formulas.microbatch(config)) else 0
    added = sum(weight.elements for weight in each if "/mlp/" in weight.name and len(weight.shape) == dims)
    moving = layer * 2 * size * (train.zero == 3) + late
    return _kept_weights(config) + moving + 2 * 4 * added
