"""Activations that one layer works with, and kept values held a second time: what `peak.py` adds to what the forward keeps.

    working_bytes   of a layer that is computed again and differentiated
    last_bytes      of the last layer's backward, which has what its forward kept
    forward_bytes   of a layer's forward
    turned_bytes    kept values in two orders, all layers
    turning_bytes   the largest array among those that are only being put in another order

Dims: B sequences and S tokens of a microbatch on one device, D model width, F MLP width, R rows of experts, t devices along `tensor`.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.plan.experts import choices
from jaxpar.plan.saved import WIDE, expert_rows, expert_tokens
from jaxpar.plan.weights import microbatch, token_shards


def working_bytes(config: Config) -> int:
    """Activations alive while one layer is computed again and differentiated.

    Between blocks two of width D, the input and its gradient. Inside, five: the inputs of attention and of the MLP, the gradient of the
    MLP's output, and what gate and up give of its input's. Queries, keys, values, attention's output and their gradients; and four of the
    MLP's width (gate, up, their product, one gradient), or what experts work with. Of interleaved parts one half is at its MLP, with four
    of the five, while the other is at its attention. A ring has four of the five, for sums
    leave as chunks, and two of queries' width more: zeros, in which chunks of queries, and of gradients of attention's output, are put
    together."""
    model, t, (b, s) = config.model, config.mesh.tensor, microbatch(config)
    heads = (model.heads + max(model.kv_heads, t)) // t * (model.head_width + model.value_head_width)
    parts, moe = config.train.interleave, model.moe
    wide = moe.shared_width if moe.experts and not moe.dense_layers and moe.every == 1 else model.mlp_width
    mlp, whole = 4 * chunk_tokens(config) * wide // t, 5 * model.width
    if config.train.collective_matmul and t > 1:
        whole = 4 * model.width + model.heads // t * (model.head_width + model.value_head_width)
    inside = b * s * whole + mlp if parts == 1 else (b * s * 7 * model.width + mlp) // 2
    return _size(config) * (b * s * (2 * model.width // token_shards(config) + heads) + inside + _rows_at_work(config))


def last_bytes(config: Config) -> int:
    """What the last layer's backward works with beside what it kept: gradients of the MLP's product, of gate and of up, and the product
    where it is computed again; three of width D, the norm's output and its gradient among them. Of one part, where several are
    interleaved; around a ring, of a chunk. Of experts' rows the same of their width, and the zeros that such gradients begin with."""
    model, train, (b, s), t = config.model, config.train, microbatch(config), config.mesh.tensor
    arrays = 3 + (train.remat == "outputs")
    if model.moe.experts:
        width = (model.moe.width or model.mlp_width) // (t if train.experts.columns else 1)
        return _size(config) * ((arrays + 1) * expert_rows(config) * width + _rows_at_work(config))
    numbers = arrays * chunk_tokens(config) * model.mlp_width // t + 3 * b * s * model.width
    return _size(config) * numbers // (t if train.collective_matmul else train.interleave)


def forward_bytes(config: Config) -> int:
    """Of a layer's forward: gate, up and their product (of two layers a turn, both gates and ups), three of width D. Of one part."""
    (b, s), arrays = microbatch(config), 5 if in_pairs(config) else 3
    hidden = 0 if config.model.moe.experts else arrays * chunk_tokens(config) * config.model.mlp_width // config.mesh.tensor
    return _size(config) * (hidden + 3 * b * s * config.model.width) // config.train.interleave


def turned_bytes(config: Config) -> int:
    """Kept values that XLA puts in another order once for all layers before the backward and, as the first layer's backward stands behind
    the loop (ZeRO-3) and reads them as they were, holds in both. With two layers a turn that is so where their number is even: else the
    first is alone. With one sequence a part all orders are the same.

    outputs, matmuls   queries, keys and values: gathering tokens over `tensor` puts them before sequences, cuDNN's backward wants sequences
                       first
    none               what attention's and the MLP's first and last matmuls multiply, of every part (not both norms' chunks that came
                       around a ring); gate, up and the activation's float32 values of the first: those of a second part lie as the
                       layers outside the loop read them
    """
    model, train, t, (b, s) = config.model, config.train, config.mesh.tensor, microbatch(config)
    size, layers = _size(config), model.layers - 1
    if t == 1 or train.zero < 3 or b // train.interleave < 2 or (in_pairs(config) and layers % 2):
        return 0
    if train.remat == "none":
        multiplied = size * (2 * model.width * (not train.collective_matmul) + _kept_width(config))
        return layers * b * s * (multiplied + (2 * size + 4 * WIDE[model.activation]) * _kept_width(config) // train.interleave)
    if train.remat not in ("outputs", "matmuls") or token_shards(config) == 1:
        return 0
    keys = max(model.kv_heads // t, 1)
    widths = (model.heads // t + keys) * model.head_width + keys * model.value_head_width
    return size * b * s * widths * layers


def turning_bytes(config: Config) -> int:
    """One of the float32 arrays of the MLP's width in which "none" keeps the values of all layers of a loop: XLA turns them, one after the
    other, from the order in which the forward wrote them to that in which the backward's matmuls lay theirs."""
    (b, s), train = microbatch(config), config.train
    if b // train.interleave < 2:
        return 0
    layers = _looped(config) // (2 if in_pairs(config) else 1)
    return 4 * layers * b * s * _kept_width(config) // train.interleave


def in_pairs(config: Config) -> bool:
    """Whether the loop over layers takes two a turn; what each of the two keeps is an array of its own."""
    train = config.train
    return train.zero >= 2 and train.remat != "block" and train.interleave == 1 and config.mesh.seq == 1 and _looped(config) >= 6


def chunk_tokens(config: Config) -> int:
    """Tokens that the MLP works on at a time."""
    (b, s), chunk = microbatch(config), config.train.mlp_chunk
    return b * (chunk if 0 < chunk < s else s)


def _looped(config: Config) -> int:
    """Layers in the forward's loop."""
    return config.model.layers - (config.train.zero == 3)


def _kept_width(config: Config) -> int:
    """The MLP's width on one device; 0 where it keeps nothing, being in chunks, or where experts are in its place."""
    whole = chunk_tokens(config) == math.prod(microbatch(config)) and not config.model.moe.experts
    return config.model.mlp_width // config.mesh.tensor if whole else 0


def _size(config: Config) -> int:
    return jnp.dtype(config.train.compute_dtype).itemsize


def _rows_at_work(config: Config) -> int:
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
