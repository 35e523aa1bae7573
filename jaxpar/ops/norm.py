"""Root-mean-square normalisation. D model width (or head width, for query and key norms)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x_D: jax.Array, weight_D: jax.Array, eps: float, one_plus: bool) -> jax.Array:
    """x / sqrt(mean(x²) + eps) times the weight, over the last dim of x [..., D]; same shape and dtype as x.

    `one_plus` is Gemma's convention: the factor is 1 + weight, so weights stay near 0. Everything is computed in float32 (float64 if x
    is) and rounded once. Local, no bytes moved. Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    x = x_D.astype(jnp.promote_types(x_D.dtype, jnp.float32))
    weight = weight_D.astype(x.dtype)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * scale * (1 + weight if one_plus else weight)).astype(x_D.dtype)
