"""Attention of a block: grouped query heads with rope, each device its own heads.

Dims: B batch, S sequence, D model width, N query heads, K key/value heads, H head width, W value width, M tokens that a cache holds.
Order of operations on queries and keys: project, bias, norm per head (`qk_norm`), rope.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar.config import ModelConfig
from jaxpar.models.options import Options
from jaxpar.models.parameter import bias, logits, matrix, norm, value
from jaxpar.ops.attention import attention_with_lse, with_sinks
from jaxpar.ops.norm import rms_norm
from jaxpar.ops.rope import frequencies, rotate
from jaxpar.parallel import context as context_parallel
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.context.cache import attend_cached
from jaxpar.parallel.sequence import Boundary, Replicated
from jaxpar.parallel.tensor import column_linear, own_kv_heads, row_linear

Cache = dict[str, jax.Array]


class Attention(nnx.Module):
    """query [N_tensor, H, D], key [K_tensor, H, D] and value [K_tensor, W, D] are column-parallel, output [D, N_tensor, W] is row-parallel;
    sinks [N_tensor].

    With fewer key/value heads than `tensor` devices key and value are whole on each device and each takes the head of its queries.
    Source: Ainslie et al., "GQA" (2023); Shoeybi et al., "Megatron-LM" (2019), section 3.
    """

    def __init__(self, config: ModelConfig, boundary: Boundary, options: Options):
        width, heads, kv_heads, head, value_head = config.width, config.heads, config.kv_heads, config.head_width, config.value_head_width
        self.config, self.boundary, self.options = config, boundary, options
        self.query = matrix((heads, head, width), ("heads", "head_dim", "embed"), 2, config.init_std)
        self.key = matrix((kv_heads, head, width), ("kv_heads", "head_dim", "embed"), 2, config.init_std)
        self.value = matrix((kv_heads, value_head, width), ("kv_heads", "head_dim", "embed"), 2, config.init_std)
        self.output = matrix((width, heads, value_head), ("embed", "heads", "head_dim"), 1, config.init_std)
        self.query_bias = bias((heads, head), ("heads", "head_dim")) if config.qkv_bias else None
        self.key_bias = bias((kv_heads, head), ("kv_heads", "head_dim")) if config.qkv_bias else None
        self.value_bias = bias((kv_heads, value_head), ("kv_heads", "head_dim")) if config.qkv_bias else None
        self.output_bias = bias((width,), ("embed",)) if config.output_bias else None
        self.sinks = logits((heads,), ("heads",), config.init_std) if config.sinks else None
        self.query_norm = norm(head, "head_dim", config.norm_one_plus) if config.qk_norm else None
        self.key_norm = norm(head, "head_dim", config.norm_one_plus) if config.qk_norm else None

    def __call__(self, x_BSD: jax.Array, context: Context) -> jax.Array:
        """x as it lies between blocks -> y likewise. Sends one `enter` and one `leave`, and over `seq` what its method does.

        A batch without `segments` promises one document a row and no padding. Within a document positions grow by one with the index.
        Where `seq` splits rows, `segments_row` and `prefix_row` may hold marks of the whole row, gathered once for all layers."""
        q_BSNH, k_BSKH, v_BSKW = self.project(x_BSD, context.batch["positions"])
        return self.out(self.over_row(q_BSNH, k_BSKH, v_BSKW, context))

    def cached(self, x_BSD: jax.Array, context: Context, cache: Cache) -> tuple[jax.Array, Cache]:
        """The same for S new tokens of sequences whose earlier ones are in the cache: a whole prompt, or one token.

        cache: `key` [B, M, K_tensor, H] and `value` [B, M, K_tensor, W], equal or varying over `tensor` as the heads are. A new
        token is written at its position; tokens of segment 0 (padding, on either side) are not written. Real tokens have segment 1.
        Only for `Replicated`.

        Where `seq` splits the cache, `context.batch["slots"]` [M] are the positions of this device's slots; a prompt's tokens lie in the
        first of them, and one new token is on every device.
        """
        assert isinstance(self.boundary, Replicated), "a key/value cache needs all tokens on each device"
        positions_BS, segments_BS = context.batch["positions"], context.batch["segments"]
        q_BSNH, k_BSKH, v_BSKW = self.project(x_BSD, positions_BS)
        if "slots" in context.batch:
            return self.cached_in_parts(q_BSNH, k_BSKH, v_BSKW, context, cache)
        rows, length = cache["key"].shape[:2]
        row_B1 = jnp.arange(rows, dtype=jnp.int32)[:, None]
        slot_BS = jnp.where(segments_BS != 0, positions_BS, length)  # out of range, hence dropped
        cache = {
            "key": cache["key"].at[row_B1, slot_BS].set(k_BSKH.astype(cache["key"].dtype), mode="drop"),
            "value": cache["value"].at[row_B1, slot_BS].set(v_BSKW.astype(cache["value"].dtype), mode="drop"),
        }
        k_positions_BM = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))  # later slots are hidden by causality
        seen_BM = jnp.ones_like(k_positions_BM)
        o_BSNW, lse_BNS = attention_with_lse(  # by position, which cuDNN does not do
            q_BSNH,
            cache["key"],
            cache["value"],
            q_positions_BS=positions_BS,
            k_positions_BS=k_positions_BM,
            q_segments_BS=segments_BS,
            k_segments_BS=seen_BM,
            k_prefix_BS=self.prefix(k_positions_BM),
            ordered=False,
            **self.scores(context),
        )
        return self.out(o_BSNW if self.sinks is None else with_sinks(o_BSNW, lse_BNS, value(self.sinks))), cache

    def cached_in_parts(
        self, q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKW: jax.Array, context: Context, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """`cached` with a cache that `seq` splits. A prompt sends what training does, a new token what `attend_cached` does."""
        new, tokens = {"key": k_BSKH, "value": v_BSKW}, q_BSNH.shape[1]
        if tokens > 1:
            cache = {name: old.at[:, :tokens].set(new[name].astype(old.dtype)) for name, old in cache.items()}
            return self.out(self.over_row(q_BSNH, k_BSKH, v_BSKW, context)), cache
        positions_BS, segments_BS, slots_M = (context.batch[name] for name in ("positions", "segments", "slots"))
        mine_BM = (slots_M == positions_BS) & (segments_BS != 0)
        cache = {name: jnp.where(mine_BM[..., None, None], new[name].astype(old.dtype), old) for name, old in cache.items()}
        slots_BM = jnp.broadcast_to(slots_M, mine_BM.shape)
        marks = {
            "q_positions_BS": positions_BS,
            "k_positions_BS": slots_BM,
            "q_segments_BS": segments_BS,
            "k_segments_BS": jnp.ones_like(slots_BM),
        }
        return self.out(attend_cached(q_BSNH, cache["key"], cache["value"], marks, self.scores(context), value(self.sinks))), cache

    def prefix(self, positions_BS: jax.Array) -> jax.Array | None:
        """The keys that earlier queries of their document see too."""
        return positions_BS < self.config.prefix if self.config.prefix else None

    def over_row(self, q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKW: jax.Array, context: Context) -> jax.Array:
        """Attention of the tokens of a row, which `seq` may split, to one another."""
        prefix_BS = context.batch["prefix_row"] if "prefix_row" in context.batch else self.prefix(context.batch["positions"])
        return context_parallel.attention(
            q_BSNH,
            k_BSKH,
            v_BSKW,
            context=self.options.context,
            segments_BS=context.batch.get("segments_row", context.batch.get("segments")),
            prefix_BS=prefix_BS,
            sinks_N=value(self.sinks),
            implementation=self.options.attention,
            **self.scores(context),
        )

    def out(self, o_BSNW: jax.Array) -> jax.Array:
        """The output projection: [B, S, N_tensor, W] -> y as it lies between blocks."""
        return row_linear(o_BSNW, value(self.output), self.boundary, value(self.output_bias))

    def project(self, x_BSD: jax.Array, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x as it lies between blocks -> q[B, S, N_tensor, H], k[B, S, K_tensor, H] and v[B, S, K_tensor, W], norms and rope applied.
        Sends one `enter`.

        The projections are what carries a name for the remat policies: norm and rope are cheap to do again from them."""
        config = self.config

        def kv(x_BSD: jax.Array, weight: nnx.Param, bias: nnx.Param | None) -> jax.Array:
            own = None if bias is None else own_kv_heads(value(bias), config.kv_heads)
            return column_linear(x_BSD, own_kv_heads(value(weight), config.kv_heads), own)

        def products(x_BSD: jax.Array) -> tuple[jax.Array, ...]:
            q_BSNH = checkpoint_name(column_linear(x_BSD, value(self.query), value(self.query_bias)), "query")
            k_BSKH = checkpoint_name(kv(x_BSD, self.key, self.key_bias), "key")
            return q_BSNH, k_BSKH, checkpoint_name(kv(x_BSD, self.value, self.value_bias), "value")

        q_BSNH, k_BSKH, v_BSKW = self.boundary.enter_with(x_BSD, products)
        if config.qk_norm:
            q_BSNH = rms_norm(q_BSNH, value(self.query_norm), config.norm_eps, config.norm_one_plus)
            k_BSKH = rms_norm(k_BSKH, value(self.key_norm), config.norm_eps, config.norm_one_plus)
        rope = frequencies(config.rope, config.head_width)
        return rotate(q_BSNH, positions_BS, *rope), rotate(k_BSKH, positions_BS, *rope), v_BSKW

    def scores(self, context: Context) -> dict[str, Any]:
        """How scores are made and which of them count, and the size of a tile: arguments of any attention."""
        config, options = self.config, self.options
        same = len(set(config.windows)) == 1
        return {
            "causal": True,
            "window": config.windows[0] if same else context.layer["window"],
            "scale": config.head_width**-0.5 if config.score_scale is None else config.score_scale,
            "softcap": config.score_softcap,
            "block": options.attention_block,
            "platform": options.platform,
        }
