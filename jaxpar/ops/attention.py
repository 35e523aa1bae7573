"""Attention's one entry: it picks the kernel. `blockwise.py` does every case anywhere, `cudnn.py` the plain ones on NVIDIA GPUs.

    attention            o
    attention_with_lse   o and the log-sum-exp, for who merges blocks of keys
    with_sinks           o where every softmax counts a logit more
    beside_sinks         its share and log-sum-exp
    row_masking          the static part of a mask

B batch, S sequence (of q or of k), N query heads, K key/value heads (K divides N), H head width, W value width.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.ops.blockwise import attend
from jaxpar.ops.cudnn import cudnn_attention, cudnn_covers
from jaxpar.ops.tiles import Marks, Masking
from jaxpar.ops.variation import same_variation

CPU_BLOCK = 128  # a larger tile of scores falls out of the cache: at S = 512 a step of attention takes 3 to 5 times as long


def attention(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    *,
    q_positions_BS: jax.Array,
    k_positions_BS: jax.Array,
    q_segments_BS: jax.Array | None = None,
    k_segments_BS: jax.Array | None = None,
    causal: bool = True,
    window: int | jax.Array = 0,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
    ordered: bool = False,
    implementation: str = "auto",
    platform: str = "cpu",
) -> jax.Array:
    """Softmax attention over local arrays; returns o_BSNW in q's dtype, softmax in float32 (float64 for float64 inputs).

    Query i sees key j when their segments are equal and not 0, when `causal` position j <= position i, and with a window w != 0
    position i - position j < w. A query that sees nothing gives zeros and zero gradients.

    segments        int32 [B, S]; None promises one document a row and no padding, which is what lets cuDNN run
    window          keys seen, its own included; 0 for all. A Python integer skips tiles while compiling, an int32 scalar at run time
    scale           of the scores, None for 1/sqrt(H)
    softcap         scores become softcap * tanh(scores / softcap)
    block           tokens on a side of a tile of scores (at most `CPU_BLOCK` on CPU): the largest temporary is B N block²
    ordered         q and k are the same contiguous tokens in index order: half the tiles of causal attention need no computing
    implementation  "blockwise", "cudnn", or "auto": cuDNN on platform "gpu" where it covers the case, else blockwise
    platform        that the program is compiled for, "cpu" or "gpu"

    Sharding: local arrays, no bytes moved. Typed as varying over every mesh axis that an input varies over.
    Raises ValueError for implementation "cudnn" where cuDNN does not cover the case. Dao, FlashAttention-2 (2023).
    """
    marks = Marks(q_positions_BS, k_positions_BS, q_segments_BS, k_segments_BS)
    masking, marks = _masking(q_BSNH, marks, causal, window, scale, softcap, block, ordered, platform)
    q, k, v = same_variation(q_BSNH, k_BSKH, v_BSKW, beside=jax.tree.leaves(marks))
    if implementation not in ("auto", "blockwise", "cudnn"):
        raise ValueError(f"train.attention: {implementation!r} is not one of auto, blockwise, cudnn")
    if implementation == "cudnn" or (implementation == "auto" and platform == "gpu"):
        packed = q_segments_BS is not None
        gap = cudnn_covers(q, k, v, causal=causal, ordered=ordered, packed=packed, window=window, softcap=softcap)
        if platform != "gpu":
            gap = f"platform {platform}"
        if gap is None:
            return cudnn_attention(causal, masking.window, masking.scale, q, k, v)
        if implementation == "cudnn":
            raise ValueError(f"train.attention: cudnn does not cover {gap}; use auto or blockwise")
    return attend(masking, q, k, v, marks)[0]


def attention_with_lse(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    *,
    q_positions_BS: jax.Array,
    k_positions_BS: jax.Array,
    q_segments_BS: jax.Array | None = None,
    k_segments_BS: jax.Array | None = None,
    k_prefix_BS: jax.Array | None = None,
    causal: bool = True,
    window: int | jax.Array = 0,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
    ordered: bool = False,
    platform: str = "cpu",
) -> tuple[jax.Array, jax.Array]:
    """As `attention`, always blockwise: (o_BSNW, lse_BNS), the log-sum-exp in float32 or float64, -inf where a row sees nothing.
    Differentiable through both. `k_prefix_BS`, bool: keys that earlier queries of their segment see too."""
    marks = Marks(q_positions_BS, k_positions_BS, q_segments_BS, k_segments_BS, k_prefix_BS=k_prefix_BS)
    masking, marks = _masking(q_BSNH, marks, causal, window, scale, softcap, block, ordered, platform)
    return attend(masking, *same_variation(q_BSNH, k_BSKH, v_BSKW, beside=jax.tree.leaves(marks)), marks)


def with_sinks(o_BSNW: jax.Array, lse_BNS: jax.Array, sinks_N: jax.Array) -> jax.Array:
    """The output of a softmax that also counts a logit of each head, which has no value, from that of one that does not."""
    share_BNS, _ = beside_sinks(lse_BNS, sinks_N)
    return (o_BSNW * jnp.moveaxis(share_BNS, 1, 2)[..., None]).astype(o_BSNW.dtype)


def beside_sinks(lse: jax.Array, sinks_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What share of each softmax the keys keep beside the sinks, and the log-sum-exp of both: as lse [..., N, S]. A sink of -inf is none,
    and where a row sees nothing besides the share is 0."""
    both = jnp.logaddexp(lse, sinks_N.astype(lse.dtype)[:, None])
    return jnp.exp(lse - jnp.where(both > -jnp.inf, both, 0)), both


def _masking(
    q_BSNH: jax.Array,
    marks: Marks,
    causal: bool,
    window: int | jax.Array,
    scale: float | None,
    softcap: float | None,
    block: int,
    ordered: bool,
    platform: str,
) -> tuple[Masking, Marks]:
    known = isinstance(window, (int, np.integer))
    masking = row_masking(q_BSNH, causal, int(window) if known else 0, scale, softcap, block, platform)
    return replace(masking, ordered=ordered), marks if known else marks._replace(window=window)


def row_masking(
    q_BSNH: jax.Array, causal: bool, window: int, scale: float | None, softcap: float | None, block: int, platform: str
) -> Masking:
    """What is static of a row's attention, with `attention`'s defaults filled in. A window of 0 is none, or one known at run time."""
    return Masking(
        scale=float(q_BSNH.shape[-1] ** -0.5 if scale is None else scale),
        softcap=softcap,
        causal=causal,
        window=window,
        block=min(block, CPU_BLOCK) if platform == "cpu" else block,
    )
