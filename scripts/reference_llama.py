"""A Llama training step with nothing but JAX and optax, on one device: what jaxpar's step is measured against (`make bench`).

The same mathematics, written the short way: dense scores under a mask, logits of all tokens at once, `jax.value_and_grad`, a scan over
layers, no recomputation. It knows nothing of meshes, ZeRO or accumulation, and imports nothing of jaxpar. Parameters are jaxpar's nested
dict, so that gradients can be compared leaf by leaf; a batch holds ids, labels, positions and segments, int32 [B, S].

Dims: B batch, S sequence, D model width, N query heads, K key/value heads, G = N/K, H head width, F MLP width, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

Tree = Any


def rms_norm(x: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight_D


def rope(x_BSNH: jax.Array, positions_BS: jax.Array, theta: float) -> jax.Array:
    half = x_BSNH.shape[-1] // 2
    angle_BSP = positions_BS[..., None].astype(jnp.float32) * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angle_BSP)[:, :, None], jnp.sin(angle_BSP)[:, :, None]
    first, second = x_BSNH[..., :half], x_BSNH[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(layer: Tree, x_BSD: jax.Array, batch: Tree, theta: float) -> jax.Array:
    q_BSNH = rope(jnp.einsum("bsd,nhd->bsnh", x_BSD, layer["query"]), batch["positions"], theta)
    k_BSKH = rope(jnp.einsum("bsd,khd->bskh", x_BSD, layer["key"]), batch["positions"], theta)
    v_BSKH = jnp.einsum("bsd,khd->bskh", x_BSD, layer["value"])
    b, s, n, h = q_BSNH.shape
    q_BSKGH = q_BSNH.reshape(b, s, k_BSKH.shape[2], -1, h)
    scores_BKGST = jnp.einsum("bskgh,btkh->bkgst", q_BSKGH, k_BSKH) * h**-0.5
    segments_BS = batch["segments"]
    same_BST = (segments_BS[:, :, None] == segments_BS[:, None, :]) & (segments_BS[:, :, None] != 0)
    mask_BST = same_BST & jnp.tril(jnp.ones((s, s), bool))
    weights = jax.nn.softmax(jnp.where(mask_BST[:, None, None], scores_BKGST, -1e30), axis=-1)
    o_BSNH = jnp.einsum("bkgst,btkh->bskgh", weights, v_BSKH).reshape(b, s, n, h)
    return jnp.einsum("bsnh,dnh->bsd", o_BSNH, layer["output"])


def mlp(layer: Tree, x_BSD: jax.Array) -> jax.Array:
    gate_BSF = jnp.einsum("bsd,fd->bsf", x_BSD, layer["gate"])
    up_BSF = jnp.einsum("bsd,fd->bsf", x_BSD, layer["up"])
    return jnp.einsum("bsf,df->bsd", jax.nn.silu(gate_BSF) * up_BSF, layer["down"])


def loss(params: Tree, batch: Tree, theta: float, eps: float) -> jax.Array:
    """Mean cross entropy over the tokens whose label is not -1."""

    def block(x_BSD: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
        x_BSD += attention(layer["attention"], rms_norm(x_BSD, layer["attention_norm"]["weight"], eps), batch, theta)
        return x_BSD + mlp(layer["mlp"], rms_norm(x_BSD, layer["mlp_norm"]["weight"], eps)), None

    x_BSD, _ = lax.scan(block, params["embedding"]["table"][batch["ids"]], params["layers"])
    logits_BSV = jnp.einsum("bsd,vd->bsv", rms_norm(x_BSD, params["norm"]["weight"], eps), params["head"]["table"])
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, jnp.maximum(batch["labels"], 0))
    valid_BS = batch["labels"] >= 0
    return jnp.where(valid_BS, losses_BS, 0).sum() / valid_BS.sum()


def build(optimizer: optax.GradientTransformation, theta: float, eps: float) -> Callable[[tuple[Tree, Tree], Tree], Any]:
    """The jitted step: ((params, optimizer state), batch) -> ((params, optimizer state), loss). The state is donated."""

    def step(state: tuple[Tree, Tree], batch: Tree) -> tuple[tuple[Tree, Tree], jax.Array]:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, batch, theta, eps)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return jax.jit(step, donate_argnums=0)
