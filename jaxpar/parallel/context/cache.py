"""A key/value cache that an axis splits: each device keeps the keys of its part of the prompt, and new tokens in turn.

    slot_positions   the position of the token in each slot of a device's cache
    attend_cached    attention of one new token over every device's slots

B batch, M slots of a device, N query heads, K key/value heads, H head width, W value width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import ContextConfig
from jaxpar.mesh import SEQ
from jaxpar.ops.attention import attention_with_lse
from jaxpar.parallel.collectives import all_reduce, all_reduce_max, axis_index, axis_size
from jaxpar.parallel.context.layout import layout


def slot_positions(context: ContextConfig, prompt: int, slots: int, axis: str = SEQ) -> jax.Array:
    """[M] int32: the first `prompt` slots hold this device's tokens of a laid-out prompt, the others every n-th token after it."""
    devices, place = axis_size(axis), axis_index(axis).astype(jnp.int32)
    slot_M = jnp.arange(slots, dtype=jnp.int32)
    laid_M = layout(context, devices, devices * prompt).tokens(place, jnp.minimum(slot_M, prompt - 1), prompt)
    return jnp.where(slot_M < prompt, laid_M, devices * prompt + (slot_M - prompt) * devices + place)


def attend_cached(
    q_BSNH: jax.Array,
    k_BMKH: jax.Array,
    v_BMKW: jax.Array,
    marks: dict[str, jax.Array],
    scores: dict[str, Any],
    sinks_N: jax.Array | None = None,
    axis: str = SEQ,
) -> jax.Array:
    """o_BSNW of queries that every device has over the keys that each has a part of. `marks`: positions and segments of queries and keys as
    `jaxpar.ops.attention` takes them, `scores` its options; `sinks`, equal over the axis, as in `jaxpar.parallel.context.attention`.

    Sends two all-reduces of B S N values (the largest log-sum-exp, then the shares) and one of B S N W. Equal over the axis.
    """
    o_BSNW, lse_BNS = attention_with_lse(q_BSNH, k_BMKH, v_BMKW, **marks, **scores, ordered=False)
    top_BNS = all_reduce_max(lse_BNS, axis)
    top_BNS = jnp.where(top_BNS == -jnp.inf, 0, top_BNS)
    share_BNS = jnp.exp(lse_BNS - top_BNS)
    total_BNS = all_reduce(share_BNS, axis)
    if sinks_N is not None:
        total_BNS += jnp.exp(sinks_N.astype(lse_BNS.dtype)[:, None] - top_BNS)
    mixed_BSNW = all_reduce(o_BSNW.astype(lse_BNS.dtype) * jnp.moveaxis(share_BNS, 1, 2)[..., None], axis)
    return (mixed_BSNW / jnp.moveaxis(jnp.where(total_BNS > 0, total_BNS, 1), 1, 2)[..., None]).astype(q_BSNH.dtype)
