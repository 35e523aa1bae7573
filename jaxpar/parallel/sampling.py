"""Choosing the next token from logits that are split over `tensor`; every device of a group comes to the same token.

    likeliest   greedy                                         sends two scalars a row
    sample      from the whole distribution, by Gumbel noise    sends three scalars a row
    sample_cut  the same among the top k, or the top p          sends the logits of a row as well
    check_choice  what a user asked for

Dims: B rows of this device, V vocabulary entries of this device, t devices along `tensor`. Padding entries are -inf.

The noise is a function of (seed, row, position, token) alone, so that a seed gives the same tokens on every mesh, as long as the logits are
equal but for rounding. Source: Gumbel-max, Maddison et al., "A* Sampling" (2014); top p, Holtzman et al., "The Curious Case of Neural Text
Degeneration" (2020).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config.checks import require
from jaxpar.mesh import TENSOR
from jaxpar.parallel.collectives import all_gather, all_reduce_max, axis_index, vary_like

NO_TOKEN = jnp.iinfo(jnp.int32).max  # chosen where logits are not numbers


class Draw(NamedTuple):
    """What sampling depends on beside the logits: the seed and, of each row, its number and the position of the token to choose."""

    seed: jax.Array
    row_B: jax.Array
    position_B: jax.Array


def _ids(logits_BV: jax.Array) -> jax.Array:
    """Vocabulary ids of this device's entries, [V] int32."""
    width = logits_BV.shape[-1]
    return axis_index(TENSOR).astype(jnp.int32) * width + jnp.arange(width, dtype=jnp.int32)


def likeliest(logits_BV: jax.Array) -> jax.Array:
    """The id of the largest logit of each row, the smallest of equals: [B] int32, equal over `tensor`."""
    top_B = all_reduce_max(logits_BV.max(-1), TENSOR)
    found_BV = jnp.where(logits_BV == top_B[:, None], _ids(logits_BV), NO_TOKEN)
    return -all_reduce_max(-found_BV.min(-1), TENSOR)


def sample(logits_BV: jax.Array, temperature: jax.Array, draw: Draw) -> jax.Array:
    """A token of softmax(logits / temperature) for each row: [B] int32, equal over `tensor`."""
    return likeliest(_tempered(logits_BV, temperature) + _noise(_ids(logits_BV), draw).astype(logits_BV.dtype))


def sample_cut(logits_BV: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, draw: Draw) -> jax.Array:
    """`sample` among the `top_k` likeliest tokens (int32 scalar) and, of these, the fewest whose shares reach `top_p` (float32 scalar).

    Among equal logits the smaller id counts as likelier, so that exactly k remain. A `top_p` above 1 cuts nothing.
    """
    scores_BV = _tempered(logits_BV, temperature)
    lowest_B, last_B = _cut(all_gather(scores_BV, TENSOR, dim=1), top_k, top_p)
    lowest_B1, last_B1 = lowest_B[:, None], last_B[:, None]
    ids_V = _ids(logits_BV)
    kept_BV = (scores_BV > lowest_B1) | ((scores_BV == lowest_B1) & (ids_V <= last_B1))
    return likeliest(jnp.where(kept_BV, scores_BV, -jnp.inf) + _noise(ids_V, draw).astype(scores_BV.dtype))


def _tempered(logits_BV: jax.Array, temperature: jax.Array) -> jax.Array:
    """Logits / temperature with the largest at 0, so that no temperature overflows."""
    top_B = all_reduce_max(logits_BV.max(-1), TENSOR)
    return (logits_BV - top_B[:, None]) / temperature.astype(logits_BV.dtype)


def _cut(scores_BV: jax.Array, top_k: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(score, id) of the last token that is kept, each [B], from the scores of the whole vocabulary."""
    ids_BV = jnp.broadcast_to(jnp.arange(scores_BV.shape[-1], dtype=jnp.int32), scores_BV.shape)
    falling_BV, ids_BV = lax.sort((-scores_BV, vary_like(ids_BV, scores_BV)), dimension=1, is_stable=True, num_keys=1)
    rank_V = jnp.arange(scores_BV.shape[-1], dtype=jnp.int32)
    weight_BV = jnp.where(rank_V < top_k, jnp.exp(-falling_BV), 0)
    before_BV = jnp.cumsum(weight_BV, axis=1) - weight_BV
    kept_BV = (rank_V < top_k) & (before_BV < top_p.astype(before_BV.dtype) * weight_BV.sum(1, keepdims=True))
    last_B1 = jnp.maximum(kept_BV.sum(1, dtype=jnp.int32) - 1, 0)[:, None]
    return -jnp.take_along_axis(falling_BV, last_B1, axis=1)[:, 0], jnp.take_along_axis(ids_BV, last_B1, axis=1)[:, 0]


def _noise(ids_V: jax.Array, draw: Draw) -> jax.Array:
    """Gumbel noise of the given tokens, [B, V] float32.

    -log(-log1p(-v)) for v uniform in (0, 1): the large values, which decide, come from small v, where float32 is fine.
    """
    seed = jax.random.key(draw.seed, impl="threefry2x32")

    def word(row: jax.Array, position: jax.Array, token: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(seed, row), position), token)
        return jax.random.bits(key, (), jnp.uint32)

    by_token = jax.vmap(word, in_axes=(None, None, 0))
    words_BV = jax.vmap(by_token, in_axes=(0, 0, None))(draw.row_B, draw.position_B, ids_V)
    v_BV = jnp.minimum((words_BV.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-v_BV))


def check_choice(tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int) -> None:
    """Refuse what no generation can mean; ValueError names the argument."""
    require(1 <= tokens < 2**30, f"tokens: {tokens} must be at least 1 and below 2^30")
    require(0 <= temperature < math.inf, f"temperature: {temperature} must be finite and not negative; 0 takes the likeliest token")
    require(top_k is None or top_k >= 1, f"top_k: {top_k} must be at least 1, or absent")
    require(top_p is None or 0 < top_p <= 1, f"top_p: {top_p} must be in (0, 1], or absent")
    require(0 <= seed < 2**32, f"seed: {seed} must be in 0 to 2^32 - 1")
