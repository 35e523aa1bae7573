"""Context parallelism: attention over a sequence that an axis splits. `attention` works inside anyone's `shard_map`.

    layout.py    which tokens a device holds: contiguous, zigzag, striped
    schedule.py  which blocks of queries and keys meet at which step, and how they see each other
    sources.py   how keys come and their gradients go: round a ring, or by one gather
    blocks.py    the walk over the steps, forward and backward
    kernels.py   what a step computes: blockwise XLA, or cuDNN where it covers a block
    inputs.py    what is refused
    exchange.py  Ulysses: tokens against heads

B batch, S tokens of this device, N query heads, K key/value heads, H head width, W value width, n devices along the axis.

    method    sends forward, a device                    backward                           largest temporary
    gather    (n-1) (K H + W K) B S values               dk and dv, and keys again where     keys of the whole row
                                                         what the forward got is not kept
    ring      the same, a block at a time while it       twice that (keys again, dk and dv)  two blocks of keys
              computes; with a window fewer
    ulysses   (n-1)/n (N + max(K, n)) (H + W) B S        the same, and q, k, v again          all tokens of N/n heads
    usp       ulysses over `ulysses` neighbours, and the ring over the rest with N/ulysses heads
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.config import ContextConfig
from jaxpar.config.checks import require
from jaxpar.mesh import SEQ
from jaxpar.ops.attention import attention as local_attention
from jaxpar.ops.attention import row_masking
from jaxpar.ops.cudnn import cudnn_covers
from jaxpar.ops.tiles import Marks
from jaxpar.ops.variation import same_variation
from jaxpar.parallel.collectives import all_gather, axis_index, axis_size, vary_like, varying
from jaxpar.parallel.context import exchange
from jaxpar.parallel.context.blocks import attend
from jaxpar.parallel.context.inputs import check_heads_and_tokens, check_marks, check_options, known_window
from jaxpar.parallel.context.kernels import Row, Settings
from jaxpar.parallel.context.layout import STRIPED, layout
from jaxpar.parallel.context.schedule import Schedule

DEFAULT = ContextConfig()


def attention(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    *,
    context: ContextConfig = DEFAULT,
    axis: str = SEQ,
    segments_BS: jax.Array | None = None,
    prefix_BS: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    causal: bool = True,
    window: int | jax.Array = 0,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 512,
    implementation: str = "auto",
    platform: str = "cpu",
) -> jax.Array:
    """Softmax attention over a row that `axis` splits: q[B, S_axis, N, H], k[B, S_axis, K, H], v[B, S_axis, K, W] -> o[B, S_axis, N, W].

    Rows lie as `layout(context, axis size, S).order(S)` says. Query i sees key j when j <= i in the row or key j is marked by `prefix`,
    both have the same segment, not 0, and with a window w != 0 i - j < w. A query that sees nothing gives zeros and zero gradients.

    segments   int32 [B, S_axis], or the whole laid-out row [B, S], gathered once for many layers; None: one document and no padding.
               Documents are runs of neighbouring tokens
    prefix     bool, likewise: keys that earlier queries of their document see too
    sinks      a logit for each head that every softmax counts and that has no value
    window     keys seen, its own included; 0 for all. A Python integer shortens the walk, an int32 scalar only masks
    scale      of the scores, None for 1/sqrt(H); softcap: scores become softcap * tanh(scores / softcap)
    block, implementation, platform   as `jaxpar.ops.attention`; "auto" on "gpu" takes cuDNN for blocks that it covers, and so
               does "cudnn", which refuses cases without any: blocks at the edge of a window are blockwise under both

    Bytes: the table above; segments and prefix, where given as shards, are gathered. Gradients of q, k, v lie as they do; that of `sinks`
    is their sum over the axis where sinks are equal on it, else this device's share. Raises ValueError, before compilation, for shapes,
    dtypes, options and masks that contradict each other, heads that Ulysses cannot deal, and lengths that do not divide; TypeError where
    q, k or v does not vary over the axis.
    Source: ring, Liu et al. (2023); ulysses, Jacobs et al. (2023); usp, Fang and Zhao (2024); gather, The Llama 3 Herd of Models (2024),
    section 3.3.2.
    """
    require(isinstance(axis, str), f"axis: {axis!r} is not the name of one mesh axis")
    check_options(causal, prefix_BS is not None, window, softcap, block, implementation)
    check_heads_and_tokens(q_BSNH, k_BSKH, v_BSKW)
    devices, shape = axis_size(axis), q_BSNH.shape[:2]
    for name, x in (("q_BSNH", q_BSNH), ("k_BSKH", k_BSKH), ("v_BSKW", v_BSKW)):
        if devices > 1 and axis not in varying(x):
            raise TypeError(
                f"{name}: it does not vary over {axis!r}, so every device has the same tokens; split them over {axis!r}, "
                "by a shard_map with check_vma=True"
            )
    known = known_window(window)
    window = 0 if known and window >= shape[1] * devices else window  # it hides nothing; without one there is more that cuDNN covers
    check_marks(shape, devices, q_BSNH.shape[2], segments_BS, prefix_BS, sinks_N)
    if devices == 1 and prefix_BS is None and sinks_N is None:
        index_BS = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        return local_attention(
            q_BSNH,
            k_BSKH,
            v_BSKW,
            q_positions_BS=index_BS,
            k_positions_BS=index_BS,
            q_segments_BS=segments_BS,
            k_segments_BS=segments_BS,
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            block=block,
            ordered=True,
            implementation=implementation,
            platform=platform,
        )
    row = shape[1] * devices
    over = layout(context, devices, row)
    context.check_heads(q_BSNH.shape[2], k_BSKH.shape[2], devices)
    segments, prefix = (_whole_row(x_BS, shape, axis) for x_BS in (segments_BS, prefix_BS))
    place = axis_index(axis).astype(jnp.int32)
    marks = Marks(place, place, segments, prefix, None if known else window)
    q, k, v = same_variation(q_BSNH, k_BSKH, v_BSKW, beside=jax.tree.leaves(marks))
    sinks = None if sinks_N is None else vary_like(sinks_N, q)
    if over.inner > 1:
        q, k, v = (exchange.to_heads(x, axis, over.inner) for x in (q, k, v))
        sinks = None if sinks is None else exchange.own_heads(sinks, axis, over.inner)
    masking = row_masking(q, causal, int(window) if known else 0, scale, softcap, block, platform)
    ordered = causal and prefix is None
    schedule = Schedule(layout=over, masking=masking, shard=row // over.ring, ordered=ordered, traced=not known)
    gap = cudnn_covers(q, k, v, causal=causal, ordered=ordered, packed=segments is not None, window=window, softcap=softcap)
    if gap is None and over.name == STRIPED and window:
        gap = "a window under the striped layout"
    if implementation == "cudnn" and (gap or platform != "gpu"):
        raise ValueError(f"train.attention: cudnn does not cover {gap or f'platform {platform}'}; use auto or blockwise")
    cudnn = gap is None and platform == "gpu" and implementation != "blockwise"
    settings = Settings(schedule=schedule, method="gather" if context.method == "gather" else "ring", axis=axis, cudnn=cudnn)
    o = attend(settings, q, k, v, sinks, Row(segments, prefix, None if known else window))
    return exchange.to_tokens(o, axis, over.inner) if over.inner > 1 else o


def _whole_row(x_BS: jax.Array | None, shape: tuple[int, int], axis: str) -> jax.Array | None:
    """Marks of the whole laid-out row from this device's, or as they are given."""
    return x_BS if x_BS is None or x_BS.shape != shape or axis_size(axis) == 1 else all_gather(x_BS, axis, dim=1)


def row_tokens(context: ContextConfig, local_S: jax.Array, length: int, axis: str = SEQ) -> jax.Array:
    """The index in the row of tokens of this device, given their places among the `length` that it holds. int32."""
    devices = axis_size(axis)
    if devices == 1:
        return local_S
    place = axis_index(axis).astype(jnp.int32)
    return layout(context, devices, devices * length).tokens(place, local_S, length)
