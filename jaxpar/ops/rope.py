"""Rotary position embedding, half-split layout: feature i turns with feature i + R/2, R the rotated part of a head.

    frequencies     radians a token of each pair, float64 on the host, and the factor that cosine and sine carry
    phases          cosine and sine of every token: once for queries and keys, once for all layers if the caller keeps them
    apply_phases    turn queries or keys by them
    rotate          phases and apply_phases in one call

Su et al., RoFormer (2021); Peng et al., YaRN (2023); the llama3 scaling is the one of Meta's Llama 3.1 model card.
B batch, S sequence, N heads, H head width, R rotated width, P = R/2 pairs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import RopeConfig


def frequencies(rope: RopeConfig, head_width: int) -> tuple[np.ndarray, float]:
    """(radians a token of each pair [P] float64, attention factor). ValueError where `fraction` leaves an odd or empty rotated width.

    The attention factor multiplies cosine and sine, hence scores by its square: 1 except for yarn.
    """
    width = int(head_width * rope.fraction)
    if width < 2 or width % 2:
        raise ValueError(
            f"model.rope.fraction: {rope.fraction} of head width {head_width} rotates {width} features; give an even number of them"
        )
    if rope.type == "linear":
        return _powers(rope.theta, width) / rope.factor, 1.0
    if rope.type == "dynamic":
        return _powers(_dynamic_theta(rope, width), width), 1.0
    if rope.type == "llama3":
        return _llama3(rope, _powers(rope.theta, width)), 1.0
    if rope.type == "yarn":
        return _yarn(rope, width), _yarn_attention_factor(rope)
    return _powers(rope.theta, width), 1.0


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature, 0.1 mscale ln(factor) + 1 (section 3.4). DeepSeek's softmax scale is multiplied by its square."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def phases(
    positions_BS: jax.Array, inverse_frequencies: np.ndarray, attention_factor: float, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) [B, S, P] times the attention factor, in `dtype`, float32 or float64: bfloat16 is radians off at token 4095."""
    assert jnp.dtype(dtype) in (jnp.float32, jnp.float64), dtype
    angle_BSP = positions_BS[..., None].astype(dtype) * jnp.asarray(inverse_frequencies, dtype)
    return jnp.cos(angle_BSP) * attention_factor, jnp.sin(angle_BSP) * attention_factor


def apply_phases(x_BSNH: jax.Array, cos_BSP: jax.Array, sin_BSP: jax.Array) -> jax.Array:
    """Turn the first 2 P features of every head, pass the rest through; same shape and dtype as x, rounded once. Local, no bytes moved."""
    pairs = cos_BSP.shape[-1]
    cos, sin = cos_BSP[:, :, None], sin_BSP[:, :, None]
    first, second, rest = x_BSNH[..., :pairs], x_BSNH[..., pairs : 2 * pairs], x_BSNH[..., 2 * pairs :]
    turned = [(first * cos - second * sin).astype(x_BSNH.dtype), (second * cos + first * sin).astype(x_BSNH.dtype)]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)


def rotate(x_BSNH: jax.Array, positions_BS: jax.Array, inverse_frequencies: np.ndarray, attention_factor: float = 1.0) -> jax.Array:
    """x turned by its tokens' positions (int32), phases in float32, or float64 when x is; same shape and dtype as x."""
    dtype = jnp.promote_types(x_BSNH.dtype, jnp.float32)
    return apply_phases(x_BSNH, *phases(positions_BS, inverse_frequencies, attention_factor, dtype))


def _powers(theta: float, width: int) -> np.ndarray:
    return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def _dynamic_theta(rope: RopeConfig, width: int) -> float:
    """The base grows once the declared length passes the trained one; up to it nothing changes."""
    assert rope.original_length is not None and rope.static_length is not None
    if rope.static_length <= rope.original_length:
        return rope.theta
    if width <= 2:
        raise ValueError(f"model.rope.fraction: dynamic rope needs more than {width} rotated features")
    growth = rope.factor * rope.static_length / rope.original_length - (rope.factor - 1)
    return rope.theta * growth ** (width / (width - 2))


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Slow pairs (few turns in the trained length) are divided by the factor, fast ones kept, those between blended."""
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    if high <= low:
        raise ValueError(f"model.rope.high_frequency_factor: {high} must exceed low_frequency_factor {low}")
    assert rope.original_length is not None
    turns = rope.original_length * plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (keep + (1 - keep) / rope.factor)


def _yarn(rope: RopeConfig, width: int) -> np.ndarray:
    """Pairs that turn more than `beta_fast` times in the trained length are kept, fewer than `beta_slow` divided, a ramp between."""
    assert rope.original_length is not None
    first, last = (_pair_turning(rope, turns, width) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = np.clip((np.arange(width // 2) - first) / (last - first or 0.001), 0, 1)
    return _powers(rope.theta, width) * (1 - ramp + ramp / rope.factor)


def _pair_turning(rope: RopeConfig, turns: float, width: int) -> float:
    """Index, not rounded, of the pair that turns that often within the trained length."""
    assert rope.original_length is not None
    return width * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)
