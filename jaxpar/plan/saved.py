"""What the forward of a microbatch keeps for its backward on one device, from the configuration alone.

    saved_bytes    of all layers, by remat policy
    expert_tokens, expert_rows    how many of both experts work on

As in `formulas.py`, nothing here asks `jaxpar/parallel/remat.py`: `tests/train/test_memory_of_step.py` traces blocks and compares.

Dims: B sequences and S tokens of a microbatch on one device, D model width, N query heads, K key/value heads, H head width, W value width,
F MLP width, E experts, R rows of experts (a token's choices, or their buffer), t devices along `tensor`.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.plan.experts import choices, sparse_layers
from jaxpar.plan.weights import microbatch, token_shards

# Arrays of width F that an activation's derivative reads in float32, beside gate and up as their products gave them. silu: the logistic,
# its derivative, and the activation; gelu_tanh: x / 2, 1 + tanh, and what the chain rule makes of x, x² and x³ on the way.
WIDE = {"silu": 3, "gelu_tanh": 7, "clamped_swiglu": 5}


def saved_bytes(config: Config) -> int:
    """What the forward of one microbatch keeps for the backward, all layers.

    block       the block's input
    attention   and attention's output and log-sum-exp
    outputs     and what weight matmuls give: query, key, value, attention's projection, gate and up, a router's logits
    matmuls     and what they multiply: both norms' outputs, the MLP's product, the rows that experts were sent
    none        whatever the backward reads: of both norms the normalised input in float32, and the output as matmuls multiply it, with all
                tokens; query and key behind rope; float32 results inside the activation. Around a ring chunks of attention's output too
    """
    sparse = sparse_layers(config)
    dense = config.model.layers - sparse
    return config.model.layers * _attention(config) + dense * _mlp(config, config.model.mlp_width) + (sparse * _experts(config))


def expert_tokens(config: Config) -> int:
    """Tokens that a device routes."""
    return math.prod(microbatch(config)) // (1 if config.train.experts.columns else token_shards(config))


def expert_rows(config: Config) -> int:
    """R: what the buffers of all chunks of a device's tokens hold, never more than all choices that could come."""
    experts, count, k = config.train.experts, config.model.moe.experts, choices(config)
    ways, tokens = math.prod(getattr(config.mesh, axis) for axis in experts.axes), expert_tokens(config) // experts.chunks
    if experts.dispatch == "capacity":
        return experts.chunks * count * min(tokens, math.ceil(experts.capacity_factor * tokens * k / count))
    worst = ways * tokens * min(k, count // ways)
    return experts.chunks * (min(worst, math.ceil(experts.buffer_factor * tokens * k)) if ways > 1 else worst)


def _sizes(config: Config) -> tuple[int, int]:
    """Bytes of a number in the compute dtype, and in which norms and activations compute."""
    return jnp.dtype(config.train.compute_dtype).itemsize, 8 if config.train.compute_dtype == "float64" else 4


def _attention(config: Config) -> int:
    """Of a layer's first half, and its input: everything but what the MLP or experts keep."""
    model, train, t = config.model, config.train, config.mesh.tensor
    (size, wide), tokens = _sizes(config), math.prod(microbatch(config))
    between, own = tokens // token_shards(config), size * tokens
    heads, kv_heads = model.heads // t, max(model.kv_heads // t, 1)
    attended = own * heads * model.value_head_width
    kept = size * between * model.width  # the block's input
    if train.remat == "block":
        return kept
    kept += attended + wide * tokens * heads
    if train.remat == "attention":
        return kept
    rotated = (heads + kv_heads) * model.head_width
    kept += own * (rotated + kv_heads * model.value_head_width) + size * between * model.width
    traded = train.context.split(config.mesh.seq)[1] > 1  # then attention's output is kept before and after heads are traded back
    if train.remat == "matmuls":
        return kept + size * 2 * between * model.width + attended * traded
    if train.remat == "none":
        sparse = model.moe.experts > 0 and not model.moe.shared_width  # experts' tokens do not enter
        kept += wide * 2 * between * (model.width + 2) + own * model.width + (size * between if sparse else own) * model.width
        kept += attended * (traded or (train.collective_matmul and t > 1))
        # Norms of queries and keys: what they read, the same normalised, two float32 numbers a head.
        kept += model.qk_norm * tokens * ((size + wide) * rotated + 2 * wide * (heads + kv_heads))
    return kept


def _mlp(config: Config, width: int) -> int:
    """Of a dense MLP, or a shared expert, as wide as that. In chunks of tokens it keeps nothing."""
    (b, s), train, (size, wide) = microbatch(config), config.train, _sizes(config)
    hidden = b * s * width // config.mesh.tensor
    if train.remat in ("block", "attention") or 0 < train.mlp_chunk < s:
        return 0
    return hidden * _arrays(train.remat, size, wide, config.model.activation)


def _experts(config: Config) -> int:
    """Of a layer's experts, the shared one among them."""
    model, moe, train, (size, wide) = config.model, config.model.moe, config.train, _sizes(config)
    shared, tokens, rows = _mlp(config, moe.shared_width), expert_tokens(config), expert_rows(config)
    if train.remat in ("block", "attention"):
        return shared
    width = (moe.width or model.mlp_width) // (config.mesh.tensor if train.experts.columns else 1)
    kept = rows * width * _arrays(train.remat, size, wide, moe.activation or model.activation) + wide * tokens * moe.experts + shared
    if train.remat == "none":  # and each result times its choice's weight; softmax and balancing
        kept += size * rows * width + 3 * wide * tokens * moe.experts
    return kept + size * rows * model.width * (train.remat in ("matmuls", "none"))


def _arrays(remat: str, size: int, wide: int, activation: str) -> int:
    """Bytes of a gated MLP's kept values for each hidden one: gate and up; what they make; what the activation's derivative reads."""
    return {"outputs": 2 * size, "matmuls": 3 * size, "none": 3 * size + WIDE[activation] * wide}[remat]
