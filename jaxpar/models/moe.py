"""The mixture of experts in a block's place of the MLP: a router, routed gated experts, and a shared expert that every token passes.

Dims: B batch, S sequence, D model width, F width of an expert, E experts, T tokens, K experts of a token, R rows.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar.config import ModelConfig, MoeConfig
from jaxpar.mesh import SEQ, TENSOR
from jaxpar.models.mlp import MLP
from jaxpar.models.options import Options
from jaxpar.models.parameter import bias, matrix, state, value
from jaxpar.ops import router
from jaxpar.ops.grouped_matmul import default_block, grouped_matmul
from jaxpar.ops.grouped_mlp import Three, in_sequence
from jaxpar.ops.mlp import gated, weighted
from jaxpar.ops.router import Router
from jaxpar.parallel import collectives, expert
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.expert import Dispatch
from jaxpar.parallel.sequence import Boundary

ROUTER = 2  # where a layer draws noise, after dropout's two places
Aux = dict[str, jax.Array]
BLOCK = {"cpu": 128, "gpu": 512}  # rows that a block of experts' matmuls should have, where that wastes little


def by_row(factor_R1: jax.Array, bias_GO: nnx.Param | None, sizes_G: jax.Array) -> jax.Array:
    """Each row's factor times its group's bias, [R, O]: a product with one input, so that gradients need no scatter."""
    assert bias_GO is not None
    return grouped_matmul(factor_R1, bias_GO[...][..., None], sizes_G)


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


def splitting(valid_BS: jax.Array) -> tuple[str, ...]:
    """The axes that split the tokens of a sequence."""
    return tuple(axis for axis in (SEQ, TENSOR) if axis in collectives.varying(valid_BS))


def row_tokens(boundary: Boundary, length: int, context: Context) -> jax.Array:
    """Index within the row of each of the `length` tokens of this device, [S]; where `seq` splits rows, `tokens` says which it holds."""
    tokens_S = boundary.tokens(length)
    return context.shared["tokens"][tokens_S] if "tokens" in context.shared else tokens_S


class MoE(nnx.Module):
    """gate, up [E, F, D] and down [E, D, F] with their experts over `expert`; the router [E, D] whole. Shazeer et al. (2017)."""

    def __init__(self, config: ModelConfig, boundary: Boundary, options: Options):
        moe, width = config.moe, config.width
        self.moe, self.boundary, self.activation = moe, boundary, moe.activation or config.activation
        self.fused = options.expert_fused and not moe.biases
        self.dispatch = Dispatch(
            experts=moe.experts,
            axes=options.experts.axes,
            method=options.experts.dispatch,
            buffer_factor=options.experts.buffer_factor,
            capacity_factor=options.experts.capacity_factor,
            by_weight=options.experts.priority == "weight",
            platform=options.platform,
            chunks=options.experts.chunks,
        )
        self.columns = options.experts.columns
        shape, axes = (moe.experts, moe.width, width), ("experts", "expert_mlp", "embed")
        self.router = matrix((moe.experts, width), ("router", "embed"), 1, config.init_std)
        self.correction = state((moe.experts,), ("router",)) if moe.correction else None
        self.gate = matrix(shape, axes, 2, config.init_std)
        self.up = matrix(shape, axes, 2, config.init_std)
        self.down = matrix((shape[0], width, moe.width), ("experts", "embed", "expert_mlp"), 2, config.init_std)
        self.router_bias = bias((moe.experts,), ("router",)) if moe.biases else None
        self.gate_bias = bias(shape[:2], axes[:2]) if moe.biases else None
        self.up_bias = bias(shape[:2], axes[:2]) if moe.biases else None
        self.down_bias = bias((moe.experts, width), ("experts", "embed")) if moe.biases else None
        self.shared = MLP(config, boundary, options, moe.shared_width) if moe.shared_width else None

    def __call__(self, x_BSD: jax.Array, context: Context) -> tuple[jax.Array, Aux]:
        """x as it lies between blocks -> (y likewise, aux). Sends what the dispatch sends, the shared expert's `enter` and `leave`, and
        E counts a sequence over the axes that split its tokens."""
        batch, length, _ = x_BSD.shape
        valid_BS = self.valid(x_BSD, context)
        real_BS = self.row_valid(valid_BS, context)
        logits_BSE = self.logits(self.jittered(x_BSD, context))
        weights_TK, chosen_TK = self.routed(logits_BSE, valid_BS, real_BS)
        weights_BSK, chosen_BSK = (each.reshape(batch, length, -1) for each in (weights_TK, chosen_TK))
        if self.columns:
            y_BSD, lost = self.by_columns(x_BSD, weights_BSK, chosen_BSK)
            shared_BSD = None if self.shared is None else self.shared(x_BSD)
        else:
            beside = None if self.shared is None else (self.shared, x_BSD)
            y_BSD, lost, shared_BSD = self.dispatched(x_BSD, weights_BSK, chosen_BSK, beside)
        if shared_BSD is not None:
            y_BSD = y_BSD + shared_BSD
        aux = self.aux(logits_BSE, chosen_TK.reshape(batch, length, -1), valid_BS, real_BS.sum(1, dtype=jnp.int32))
        return y_BSD, {**aux, "overflow": lost.overflow, "dropped": lost.dropped}

    def routed(self, logits_BSE: jax.Array, valid_BS: jax.Array, real_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights and experts of each token, ([T, K], [T, K]). Experts that choose need whole sequences: B S E numbers are gathered over
        the axes that split them, and K is E. `real_BS` are those sequences' `row_valid`."""
        experts = logits_BSE.shape[-1]
        if self.moe.router != "expert_choice":
            return router.select(router_of(self.moe), logits_BSE.reshape(-1, experts), value(self.correction), valid_BS.reshape(-1))
        length, axes = logits_BSE.shape[1], splitting(valid_BS)
        seen_BSE = jax.lax.stop_gradient(logits_BSE)
        seen_BSE = collectives.all_gather(seen_BSE, axes, 1) if axes else seen_BSE
        taken_BSE = router.taken(seen_BSE, max(1, seen_BSE.shape[1] * self.moe.per_token // experts), real_BS)
        if axes:
            taken_BSE = jax.lax.dynamic_slice_in_dim(taken_BSE, collectives.axis_index(axes) * length, length, axis=1)
        weights_BSE, chosen_BSE = router.expert_choice(logits_BSE, taken_BSE)
        return (weights_BSE * self.moe.scale).reshape(-1, experts), chosen_BSE.reshape(-1, experts)

    def jittered(self, x_BSD: jax.Array, context: Context) -> jax.Array:
        """What the router reads: in training, which brings a key, with noise."""
        if not self.moe.jitter or "dropout" not in context.shared:
            return x_BSD
        key = jax.random.fold_in(jax.random.fold_in(context.shared["dropout"], context.layer["index"]), ROUTER)
        return router.jitter(x_BSD, self.moe.jitter, key, context.batch["rows"], row_tokens(self.boundary, x_BSD.shape[1], context))

    def dispatched(
        self, x_BSD: jax.Array, weights_BSK: jax.Array, chosen_BSK: jax.Array, beside: expert.Beside | None = None
    ) -> tuple[jax.Array, expert.Lost, jax.Array | None]:
        """Routed tokens through this device's part of the experts, what was not computed, and what `beside` made meanwhile."""
        x_TD, weights_TK, chosen_TK = (each.reshape(-1, each.shape[-1]) for each in (x_BSD, weights_BSK, chosen_BSK))
        y_TD, lost, result = expert.through(x_TD, weights_TK, chosen_TK, self.experts(), self.dispatch, beside)
        return y_TD.reshape(x_BSD.shape), lost, result

    def by_columns(self, x_BSD: jax.Array, weights_BSK: jax.Array, chosen_BSK: jax.Array) -> tuple[jax.Array, expert.Lost]:
        """The same where each expert's columns are split over `tensor`: all tokens enter, with their weights and choices, results are
        partial sums and leave. Every device of a tensor group dispatches all of their tokens; one of them counts what was lost. A shared
        expert's tokens enter once with them, so it is not tied to the dispatch."""
        enter = self.boundary.enter
        y_BSD, lost, _ = self.dispatched(enter(x_BSD), enter(weights_BSK), enter(chosen_BSK))
        first = collectives.axis_index(TENSOR) == 0
        return self.boundary.leave(y_BSD), jax.tree.map(lambda count: jnp.where(first, count, 0), lost)

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """[B, S, E] in float32, float64 where x is; the router's weights were rounded to the compute dtype like all others."""
        dtype = jnp.promote_types(x_BSD.dtype, jnp.float32)
        logits_BSE = jnp.einsum("bsd,ed->bse", x_BSD.astype(dtype), self.router[...].astype(dtype))
        return logits_BSE if self.router_bias is None else logits_BSE + self.router_bias[...].astype(dtype)

    def experts(self) -> expert.Experts:
        """This device's experts on rows sorted by expert, results times the rows' weights, chunk after chunk."""
        held: Three = self.gate[...], self.up[...], self.down[...]

        def fused(rows_RD: jax.Array, weights_R: jax.Array, sizes_G: jax.Array) -> jax.Array:
            nonlocal held
            y_RD, held = in_sequence(rows_RD, weights_R, held, sizes_G, self.activation, self.block(rows_RD, sizes_G))
            return y_RD

        return fused if self.fused else partial(self.apart, held)

    def block(self, rows_RD: jax.Array, sizes_G: jax.Array) -> int:
        return default_block(rows_RD.shape[0], sizes_G.size, BLOCK[self.dispatch.platform])

    def apart(self, held: Three, rows_RD: jax.Array, weights_R: jax.Array, sizes_G: jax.Array) -> jax.Array:
        """The three matmuls one after another, for policies that keep what lies between, and with biases."""
        (gate_GFD, up_GFD, down_GDF), block = held, self.block(rows_RD, sizes_G)
        gate_RF = checkpoint_name(grouped_matmul(rows_RD, gate_GFD, sizes_G, block), "mlp_gate")
        up_RF = checkpoint_name(grouped_matmul(rows_RD, up_GFD, sizes_G, block), "mlp_up")
        if self.moe.biases:
            ones_R1 = jnp.ones_like(rows_RD[:, :1])
            gate_RF, up_RF = (a + by_row(ones_R1, b, sizes_G) for a, b in ((gate_RF, self.gate_bias), (up_RF, self.up_bias)))
        hidden_RF = weighted(gated(gate_RF, up_RF, self.activation), weights_R)
        y_RD = grouped_matmul(hidden_RF, down_GDF, sizes_G, block)
        if not self.moe.biases:
            return y_RD
        once_R = weights_R * (collectives.axis_index(TENSOR) == 0) if self.columns else weights_R  # of the sum over `tensor`
        return y_RD + by_row(once_R[:, None].astype(y_RD.dtype), self.down_bias, sizes_G)

    def valid(self, x_BSD: jax.Array, context: Context) -> jax.Array:
        """Which of this device's tokens are no padding: bool [B, S]. A batch without segments has none."""
        length = x_BSD.shape[1]
        if "segments" not in context.batch:
            return jnp.zeros_like(x_BSD[..., 0], dtype=bool) | True
        return (context.batch["segments"][:, self.boundary.tokens(length)] != 0) | jnp.zeros_like(x_BSD[..., 0], dtype=bool)

    def row_valid(self, valid_BS: jax.Array, context: Context) -> jax.Array:
        """The same of all tokens of the rows, of which this device may have some: bool [B, S]. Read from segments, which every device of
        `tensor` has of all of its tokens, and where `seq` splits rows from `segments_row`: each layer would else send what all know."""
        (batch, length), axes = valid_BS.shape, splitting(valid_BS)
        if "segments" not in context.batch:
            return collectives.vary_like(jnp.ones((batch, length * collectives.axis_size(axes)), bool), valid_BS)
        segments_BS = context.batch.get("segments_row", context.batch["segments"])
        if SEQ in axes and "segments_row" not in context.batch:
            segments_BS = collectives.all_gather(segments_BS, SEQ, 1)
        return collectives.vary_like(segments_BS != 0, valid_BS)

    def aux(self, logits_BSE: jax.Array, chosen_BSK: jax.Array, valid_BS: jax.Array, tokens_B: jax.Array) -> Aux:
        """What the router's losses and metrics need, additive over sequences and devices: `load` [E] int32, `share` [E], and the sums
        over sequences of `balance` and of the means over a sequence's tokens of `z` and `entropy`. `tokens` [B] are those of each whole row
        that are no padding."""
        experts, axes = self.moe.experts, splitting(valid_BS)
        score_BSE = router.scores(logits_BSE, self.moe.router)
        load_BE, share_BE = router.count(chosen_BSK, experts), router.shares(score_BSE, valid_BS)
        whole_BE = collectives.all_reduce(load_BE, axes) if axes else load_BE
        whole_BE, whole_B = (collectives.vary_like(a, share_BE) for a in (whole_BE, tokens_B))
        mean_B = 1 / jnp.maximum(whole_B, 1).astype(share_BE.dtype)
        return {
            "load": load_BE.sum(0, dtype=jnp.int32),
            "share": share_BE.sum(0),
            "balance": router.sequence_balance(whole_BE, share_BE, whole_B, self.moe.per_token).sum(),
            "z": (router.z_loss(logits_BSE, valid_BS) * mean_B).sum(),
            "entropy": (router.entropy(score_BSE, valid_BS) * mean_B).sum(),
        }
