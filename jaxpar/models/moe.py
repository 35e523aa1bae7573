"""The mixture of experts in a block's place of the MLP: a router, routed gated experts, and a shared expert that every token passes.

Dims: B batch, S sequence, D model width, F width of an expert, E experts, T tokens, K experts of a token, R rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar.config import ModelConfig, MoeConfig
from jaxpar.mesh import SEQ, TENSOR
from jaxpar.models.mlp import MLP
from jaxpar.models.options import Options
from jaxpar.models.parameter import matrix
from jaxpar.ops import router
from jaxpar.ops.grouped_matmul import default_block, grouped_matmul
from jaxpar.ops.grouped_mlp import grouped_mlp
from jaxpar.ops.mlp import gated
from jaxpar.ops.router import Router
from jaxpar.parallel import collectives, expert
from jaxpar.parallel.expert import Dispatch
from jaxpar.parallel.sequence import Boundary

if TYPE_CHECKING:
    from jaxpar.parallel.stack import Context

Aux = dict[str, jax.Array]
GPU_BLOCK = 512  # rows that a block of experts' matmuls should have on a GPU


def router_of(moe: MoeConfig) -> Router:
    return Router(
        kind=moe.router,
        k=moe.per_token,
        normalise=moe.normalise,
        scale=moe.scale,
        groups=moe.groups,
        kept_groups=moe.kept_groups,
        group_best=moe.group_best,
    )


class MoE(nnx.Module):
    """gate, up [E, F, D] and down [E, D, F] with their experts over `expert`; the router [E, D] whole. Shazeer et al. (2017)."""

    def __init__(self, config: ModelConfig, boundary: Boundary, options: Options):
        moe, width = config.moe, config.width
        self.moe, self.boundary, self.activation = moe, boundary, config.activation
        self.fused = options.expert_fused
        self.dispatch = Dispatch(
            experts=moe.experts,
            axes=options.expert_axes,
            method=options.expert_dispatch,
            buffer_factor=options.expert_buffer,
            capacity_factor=options.expert_capacity,
            by_weight=options.expert_priority == "weight",
            platform=options.platform,
            chunks=options.expert_chunks,
        )
        self.columns = options.expert_columns
        shape, axes = (moe.experts, moe.width, width), ("experts", "expert_mlp", "embed")
        self.router = matrix((moe.experts, width), ("router", "embed"), 1, config.init_std)
        self.gate = matrix(shape, axes, 2, config.init_std)
        self.up = matrix(shape, axes, 2, config.init_std)
        self.down = matrix((shape[0], width, moe.width), ("experts", "embed", "expert_mlp"), 2, config.init_std)
        self.shared = MLP(config, boundary, options, moe.shared_width) if moe.shared_width else None

    def __call__(self, x_BSD: jax.Array, context: Context) -> tuple[jax.Array, Aux]:
        """x as it lies between blocks -> (y likewise, aux). Sends what the dispatch sends, the shared expert's `enter` and `leave`, and
        E + 1 counts a sequence over the axes that split its tokens."""
        batch, length, _ = x_BSD.shape
        valid_BS = self.valid(x_BSD, context)
        logits_BSE = self.logits(x_BSD)
        weights_TK, chosen_TK = router.select(router_of(self.moe), logits_BSE.reshape(batch * length, -1), valid_T=valid_BS.reshape(-1))
        weights_BSK, chosen_BSK = (each.reshape(batch, length, -1) for each in (weights_TK, chosen_TK))
        y_BSD, lost = (self.by_columns if self.columns else self.dispatched)(x_BSD, weights_BSK, chosen_BSK)
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(x_BSD)
        aux = self.aux(logits_BSE, chosen_TK.reshape(batch, length, -1), valid_BS)
        return y_BSD, {**aux, "overflow": lost.overflow, "dropped": lost.dropped}

    def dispatched(self, x_BSD: jax.Array, weights_BSK: jax.Array, chosen_BSK: jax.Array) -> tuple[jax.Array, expert.Lost]:
        """Routed tokens through this device's part of the experts, and what was not computed."""
        x_TD, weights_TK, chosen_TK = (each.reshape(-1, each.shape[-1]) for each in (x_BSD, weights_BSK, chosen_BSK))
        y_TD, lost = expert.through(x_TD, weights_TK, chosen_TK, self.experts, self.dispatch)
        return y_TD.reshape(x_BSD.shape), lost

    def by_columns(self, x_BSD: jax.Array, weights_BSK: jax.Array, chosen_BSK: jax.Array) -> tuple[jax.Array, expert.Lost]:
        """The same where each expert's columns are split over `tensor`: all tokens enter, with their weights and choices, results are
        partial sums and leave. Every device of a tensor group dispatches all of their tokens; one of them counts what was lost."""
        enter = self.boundary.enter
        y_BSD, lost = self.dispatched(enter(x_BSD), enter(weights_BSK), enter(chosen_BSK))
        first = collectives.axis_index(TENSOR) == 0
        return self.boundary.leave(y_BSD), jax.tree.map(lambda count: jnp.where(first, count, 0), lost)

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """[B, S, E] in float32, float64 where x is; the router's weights were rounded to the compute dtype like all others."""
        dtype = jnp.promote_types(x_BSD.dtype, jnp.float32)
        return jnp.einsum("bsd,ed->bse", x_BSD.astype(dtype), self.router[...].astype(dtype))

    def experts(self, rows_RD: jax.Array, weights_R: jax.Array, sizes_G: jax.Array) -> jax.Array:
        """This device's experts on rows sorted by expert, results times the rows' weights."""
        gate_GFD, up_GFD, down_GDF = (each[...] for each in (self.gate, self.up, self.down))
        block = default_block(rows_RD.shape[0], sizes_G.size, GPU_BLOCK if self.dispatch.platform == "gpu" else 0)
        if self.fused:
            return grouped_mlp(rows_RD, weights_R, gate_GFD, up_GFD, down_GDF, sizes_G, self.activation, block)
        gate_RF = checkpoint_name(grouped_matmul(rows_RD, gate_GFD, sizes_G, block), "mlp_gate")
        up_RF = checkpoint_name(grouped_matmul(rows_RD, up_GFD, sizes_G, block), "mlp_up")
        hidden_RF = gated(gate_RF, up_RF, self.activation)
        return grouped_matmul((hidden_RF.astype(weights_R.dtype) * weights_R[:, None]).astype(hidden_RF.dtype), down_GDF, sizes_G, block)

    def valid(self, x_BSD: jax.Array, context: Context) -> jax.Array:
        """Which of this device's tokens are no padding: bool [B, S]. A batch without segments has none."""
        length = x_BSD.shape[1]
        if "segments" not in context.batch:
            return jnp.zeros_like(x_BSD[..., 0], dtype=bool) | True
        return (context.batch["segments"][:, self.boundary.tokens(length)] > 0) | jnp.zeros_like(x_BSD[..., 0], dtype=bool)

    def aux(self, logits_BSE: jax.Array, chosen_BSK: jax.Array, valid_BS: jax.Array) -> Aux:
        """What the router's losses and metrics need, additive over sequences and devices: `load` [E] int32, `share` [E], and the sums
        over sequences of `balance` and of the means over a sequence's tokens of `z` and `entropy`."""
        experts, axes = self.moe.experts, tuple(axis for axis in (SEQ, TENSOR) if axis in collectives.varying(valid_BS))
        score_BSE = router.scores(logits_BSE, self.moe.router)
        load_BE, tokens_B = router.count(chosen_BSK, experts), valid_BS.sum(1, dtype=jnp.int32)
        share_BE = router.shares(score_BSE, valid_BS)
        whole_BE, whole_B = (collectives.all_reduce(a, axes) if axes else a for a in (load_BE, tokens_B))
        whole_BE, whole_B = (collectives.vary_like(a, tokens_B) for a in (whole_BE, whole_B))
        mean_B = 1 / jnp.maximum(whole_B, 1).astype(share_BE.dtype)
        return {
            "load": load_BE.sum(0, dtype=jnp.int32),
            "share": share_BE.sum(0),
            "balance": router.sequence_balance(whole_BE, share_BE, whole_B, self.moe.per_token).sum(),
            "z": (router.z_loss(logits_BSE, valid_BS) * mean_B).sum(),
            "entropy": (router.entropy(score_BSE, valid_BS) * mean_B).sum(),
        }
