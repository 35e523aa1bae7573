"""Routers of a mixture of experts: which experts a token goes to, with which weights, and the losses that keep the load even.

    scores           logits -> a score per expert, in [0, 1]
    select           scores -> the k experts of each token and their weights
    taken, expert_choice   scores -> the tokens that each expert takes of each sequence, and the experts of each token from that
    jitter           noise on the router's input
    count            tokens per expert
    sequence_balance, load_balance, z_loss, entropy

Everything is float32 (float64 where logits are). A token that is padding is given expert E, which nobody owns, and weight 0; no count,
loss or entropy sees it.

Dims: B batch, S sequence, T tokens, D model width, E experts, K chosen experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

KINDS = ("softmax_topk", "topk_softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a token chooses experts.

    kind         softmax_topk: softmax over all, then the k largest (Shazeer et al. 2017 with GShard's order; Mixtral, Qwen3-MoE).
                 topk_softmax: the k largest logits, then softmax over them (Shazeer et al. 2017, eq. 3-5; gpt-oss).
                 sigmoid: each expert on its own (DeepSeek-V3, section 2.1.2).
    k            experts of a token
    normalise    chosen weights are divided by their sum (topk_softmax's always sum to 1)
    scale        factor on the weights, after that (DeepSeek's routed_scaling_factor)
    groups, kept_groups, group_best
                 experts lie in `groups` equal groups; only the `kept_groups` with the largest sum of their `group_best` largest scores
                 may be chosen from (DeepSeek-V2, section 2.1.2, sums 1; DeepSeek-V3 2)
    """

    kind: str = "softmax_topk"
    k: int = 2
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"router {self.kind!r} is not one of {', '.join(KINDS)}"
        assert self.k >= 1 and 1 <= self.kept_groups <= self.groups and self.group_best >= 1, self


def scores(logits_TE: jax.Array, kind: str) -> jax.Array:
    """Scores [..., E] in [0, 1] of logits [..., E]: sigmoid for the router of that name, softmax for the others."""
    logits = logits_TE.astype(jnp.promote_types(logits_TE.dtype, jnp.float32))
    return lax.logistic(logits) if kind == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def select(
    router: Router, logits_TE: jax.Array, bias_E: jax.Array | None = None, valid_T: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, largest first, and their weights: ([T, K], [T, K] int32). The lower expert wins a tie.

    `bias` is added to the scores for the choice only, never to the weights: auxiliary-loss-free balancing (Wang et al. 2024, eq. 3). It has
    no gradient. Tokens that are not `valid` get expert E and weight 0; one of whose logits any is NaN or infinite gets NaN, which the
    step's guard sees in the loss.
    """
    experts = logits_TE.shape[-1]
    assert router.k <= experts and experts % router.groups == 0, f"{router} of {experts} experts"
    logits = logits_TE.astype(jnp.promote_types(logits_TE.dtype, jnp.float32))
    scores_TE = logits if router.kind == "topk_softmax" else scores(logits, router.kind)
    choice_TE = lax.stop_gradient(scores_TE if bias_E is None else scores_TE + bias_E.astype(scores_TE.dtype))
    if router.kept_groups < router.groups:
        choice_TE = jnp.where(_allowed(router, choice_TE), choice_TE, -jnp.inf)
    _, chosen_TK = lax.top_k(choice_TE, router.k)
    weights_TK = jnp.take_along_axis(scores_TE, chosen_TK, axis=-1)
    if router.kind == "topk_softmax":
        weights_TK = jax.nn.softmax(weights_TK, axis=-1)
    elif router.normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdims=True) + 1e-20)
    # A sort may put not-a-number last, and nobody would see it in the loss.
    broken_T1 = ~(logits < jnp.inf).all(-1, keepdims=True)
    weights_TK = jnp.where(broken_T1, jnp.nan, weights_TK * router.scale)
    if valid_T is not None:
        weights_TK = jnp.where(valid_T[:, None], weights_TK, 0)
        chosen_TK = jnp.where(valid_T[:, None], chosen_TK, experts)
    return weights_TK, chosen_TK.astype(jnp.int32)


def _allowed(router: Router, choice_TE: jax.Array) -> jax.Array:
    """Whether each expert lies in a group that its token may choose from: bool [T, E]."""
    tokens, experts = choice_TE.shape
    grouped = choice_TE.reshape(tokens, router.groups, experts // router.groups)
    best, _ = lax.top_k(grouped, min(router.group_best, grouped.shape[-1]))
    _, kept = lax.top_k(best.sum(-1), router.kept_groups)
    allowed = (kept[:, :, None] == jnp.arange(router.groups)).any(1)
    return jnp.repeat(allowed, experts // router.groups, axis=1)


def taken(logits_BSE: jax.Array, count: int, valid_BS: jax.Array) -> jax.Array:
    """Which tokens each expert takes, bool [B, S, E]: of each sequence the `count` valid ones that score highest, the earlier at a tie.

    Scores are a softmax over experts. Needs whole sequences: a token's fate depends on later ones, so such a model cannot generate. Where a
    sequence has fewer valid tokens, its experts take fewer. Zhou et al., "Expert Choice Routing" (2022), section 3.2.
    """
    assert 1 <= count <= logits_BSE.shape[1], f"{count} tokens of {logits_BSE.shape[1]}"
    choice_BSE = jnp.where(valid_BS[..., None], -scores(logits_BSE, "softmax_topk"), jnp.inf)
    rank_BSE = jnp.argsort(jnp.argsort(choice_BSE, axis=1, stable=True), axis=1)
    return (rank_BSE < count) & valid_BS[..., None]


def expert_choice(logits_BSE: jax.Array, taken_BSE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights and experts of tokens of which `taken` says who takes them, E places a token: ([B, S, E], [B, S, E] int32), expert E and
    weight 0 where none does; weights are scores, NaN where a logit is NaN or infinite, as `select`'s."""
    experts = logits_BSE.shape[-1]
    broken_BS1 = ~(logits_BSE < jnp.inf).all(-1, keepdims=True)
    weights_BSE = jnp.where(broken_BS1, jnp.nan, scores(logits_BSE, "softmax_topk"))
    return jnp.where(taken_BSE, weights_BSE, 0), jnp.where(taken_BSE, jnp.arange(experts, dtype=jnp.int32), experts)


def jitter(x_BSD: jax.Array, amount: float, key: jax.Array, rows_B: jax.Array, tokens_S: jax.Array) -> jax.Array:
    """x times noise that is uniform in [1 - amount, 1 + amount], an element each. Fedus et al., Switch Transformer (2021), section 2.2.

    The noise is a function of (key, row, token, feature) alone, as `dropout`'s mask is, so that no sharding changes it. Fold seed, step and
    layer into the key.
    """
    dtype = jnp.promote_types(x_BSD.dtype, jnp.float32)

    def token(row_key: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(row_key, place), x_BSD.shape[-1:], jnp.uint32)

    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)
    bits_BSD = jax.vmap(jax.vmap(token, (None, 0)), (0, None))(row_keys, tokens_S)
    noise_BSD = 1 + amount * (bits_BSD.astype(dtype) * 2.0**-31 - 1)
    return (x_BSD * noise_BSD).astype(x_BSD.dtype)


def count(chosen_BSK: jax.Array, experts: int) -> jax.Array:
    """How many of the choices [B, S, K] of each sequence fall on each expert: [B, E] int32. Choices outside 0 to E - 1 fall on none."""
    rows = chosen_BSK.reshape(chosen_BSK.shape[0], -1)
    return (rows[:, :, None] == jnp.arange(experts, dtype=rows.dtype)).sum(1, dtype=jnp.int32)


def shares(scores_BSE: jax.Array, valid_BS: jax.Array) -> jax.Array:
    """Scores of each sequence's valid tokens, each token's made to sum to 1, added up: [B, E]. (Sigmoid's do not sum to 1.)"""
    share = scores_BSE / (scores_BSE.sum(-1, keepdims=True) + 1e-20)
    return jnp.where(valid_BS[..., None], share, 0).sum(1)


def sequence_balance(count_BE: jax.Array, share_BE: jax.Array, tokens_B: jax.Array, k: int) -> jax.Array:
    """Balancing loss of each sequence, [B]: sum over experts of (E/(k n) count) (1/n share), n its valid tokens; 1 when balanced.

    `count` [B, E] and n [B] are of whole sequences; `share` may be of some of their tokens, and the loss then is those tokens' part. A
    sequence without valid tokens has loss 0. DeepSeek-V3, eq. 17-20: a sequence's loss depends on that sequence alone.
    """
    tokens = jnp.maximum(tokens_B, 1).astype(share_BE.dtype)[:, None]
    load_BE = count_BE.astype(share_BE.dtype) * (count_BE.shape[-1] / k) / tokens
    return (lax.stop_gradient(load_BE) * share_BE / tokens).sum(-1)


def load_balance(count_E: jax.Array, share_E: jax.Array, k: int) -> jax.Array:
    """Balancing loss of a set of sequences, a scalar: the same of all their tokens as if they were one sequence.

    `count` [..., E] is of the whole set, `share` may be of some of its tokens. Fedus et al., Switch Transformer (2021), eq. 4-6.
    """
    tokens = jnp.maximum(count_E.sum(-1, keepdims=True) / k, 1).astype(share_E.dtype)
    load_E = count_E.astype(share_E.dtype) * (count_E.shape[-1] / k) / tokens
    return (lax.stop_gradient(load_E) * share_E / tokens).sum(-1)


def z_loss(logits_BSE: jax.Array, valid_BS: jax.Array) -> jax.Array:
    """Squared log of the partition function, summed over each sequence's valid tokens: [B]. Zoph et al., ST-MoE (2022), eq. 5."""
    logits = logits_BSE.astype(jnp.promote_types(logits_BSE.dtype, jnp.float32))
    lse = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(valid_BS, lse * lse, 0).sum(1)


def entropy(scores_BSE: jax.Array, valid_BS: jax.Array) -> jax.Array:
    """Entropy in nats of each valid token's scores, made to sum to 1, added up over each sequence: [B], without gradient."""
    share = lax.stop_gradient(scores_BSE / (scores_BSE.sum(-1, keepdims=True) + 1e-20))
    bits = jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0)
    return -jnp.where(valid_BS, bits.sum(-1), 0).sum(1)
