"""Activations of the gated MLP. R rows, F MLP width."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def silu(x: jax.Array) -> jax.Array:
    """x sigmoid(x), in x's dtype. Elfwing et al. (2017)."""
    return x * lax.logistic(x)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """x times the normal distribution function, in its tanh form, in x's dtype. Hendrycks and Gimpel (2016), section 2."""
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


LIMIT, SLOPE = 7.0, 1.702  # of clamped_swiglu

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The function of that name. ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ValueError(f"model.activation: {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gated(gate_F: jax.Array, up_F: jax.Array, name: str) -> jax.Array:
    """activation(gate) * up over [..., F], in float32 (float64 if gate is), rounded once to gate's dtype. Shazeer, GLU Variants (2020).

    `clamped_swiglu` is another function of the two: gate sigmoid(1.702 gate) (up + 1), gate at most 7, up within ±7 (gpt-oss, 2025).
    """
    dtype = jnp.promote_types(gate_F.dtype, jnp.float32)
    if name == "clamped_swiglu":
        gate, up = jnp.minimum(gate_F.astype(dtype), LIMIT), jnp.clip(up_F.astype(dtype), -LIMIT, LIMIT)
        return (gate * lax.logistic(SLOPE * gate) * (up + 1)).astype(gate_F.dtype)
    return (activation(name)(gate_F.astype(dtype)) * up_F.astype(dtype)).astype(gate_F.dtype)


def weighted(hidden_RF: jax.Array, weight_R: jax.Array) -> jax.Array:
    """hidden times each row's weight, [R, F], rounded once to hidden's dtype."""
    return (hidden_RF.astype(weight_R.dtype) * weight_R[:, None]).astype(hidden_RF.dtype)
