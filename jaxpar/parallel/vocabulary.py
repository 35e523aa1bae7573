"""The vocabulary split over `tensor`: embedding lookup and cross entropy that never sends a logit.

Dims: B batch, S sequence, T tokens of this device, C tokens of a chunk, D model width, V vocabulary entries of this device, t devices
along `tensor`. Tables are padded so that t divides them: V·t rows, of which the first `vocabulary` are real.

    embed     ids[B, S], table[V_tensor, D]      -> x as it lies between blocks; sends what the boundary's `leave` sends
    embed_columns  the same with the table's columns split too: rows travel instead of the table
    loss      x[T, D], table[V_tensor, D], labels -> sum of token losses; sends three scalars a token
    logits    x[B, S, D], table[V_tensor, D]      -> logits[B, S, V_tensor]; sends nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.mesh import TENSOR
from jaxpar.ops.loss import (
    Statistics,
    accumulation_dtype,
    capped_logits,
    local_sums,
    logit_gradient,
    mask_padding,
    token_losses,
)
from jaxpar.parallel.collectives import all_gather, all_reduce, all_reduce_max, all_to_all, axis_index, vary, varying
from jaxpar.parallel.sequence import Boundary

Pair = tuple[jax.Array, jax.Array]
Triple = tuple[jax.Array, jax.Array, jax.Array]
Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _first_id(rows: int) -> jax.Array:
    """The vocabulary id of this device's first row."""
    return axis_index(TENSOR).astype(jnp.int32) * rows


@jax.custom_vjp
def _lookup(table_VD: jax.Array, row_BS: jax.Array) -> jax.Array:
    """Rows of the table, zeros where `row` is outside it. The gradient adds repeated tokens in float32: a bf16 sum stops growing at 256
    of them."""
    return table_VD.at[row_BS].get(mode="fill", fill_value=0)


def _lookup_forward(table_VD: jax.Array, row_BS: jax.Array) -> tuple[jax.Array, Pair]:
    return _lookup(table_VD, row_BS), (table_VD, row_BS)


def _lookup_backward(saved: Pair, dx_BSD: jax.Array) -> tuple[jax.Array, None]:
    table_VD, row_BS = saved
    wide = accumulation_dtype(table_VD.dtype)
    zeros_VD = vary(jnp.zeros(table_VD.shape, wide), tuple(varying(table_VD)))
    return zeros_VD.at[row_BS].add(dx_BSD.astype(wide), mode="drop").astype(table_VD.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def embed(table_VD: jax.Array, ids_BS: jax.Array, boundary: Boundary, scale: float | None = None) -> jax.Array:
    """Vocabulary-parallel embedding.

    ids[B, S] int32 equal over `tensor`, table[V_tensor, D] -> x[B, S_tensor, D] or [B, S, D] as the boundary says, in the table's dtype.
    Each device contributes the rows it holds and zeros elsewhere; `boundary.leave` adds them up. `scale` multiplies the result and is
    first rounded to its dtype, as Gemma does (sqrt(1152) is 34.0 in bf16). Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
    """
    rows = table_VD.shape[0]
    row_BS = ids_BS - _first_id(rows)
    row_BS = jnp.where(row_BS < 0, rows, row_BS)  # a negative index would wrap around
    x_BSD = boundary.leave(_lookup(vary(table_VD, tuple(varying(row_BS))), row_BS))
    return x_BSD if scale is None else x_BSD * jnp.asarray(scale, x_BSD.dtype)


def embed_columns(
    table_VD: jax.Array, ids_BS: jax.Array, boundary: Boundary, axes: tuple[str, ...], scale: float | None = None
) -> jax.Array:
    """`embed` with a table whose columns are split over `axes` as well, the axes that split the batch (ZeRO-3).

    ids[B, S], table[V_tensor, D_axes] -> x[B, S_tensor, D]. Every device looks up its columns for the tokens of all n devices along
    `axes`, then an all-to-all gives each its tokens with all columns. Sends (n-1)/n of all ids and (n-1)/n of the local x, and again in
    the backward, where gathering the table and reducing its gradient would send (n-1)/n of the table twice: less where a device has fewer
    tokens than the vocabulary has entries. The gradient of the local columns is complete.
    """
    return all_to_all(embed(table_VD, all_gather(ids_BS, axes, dim=0), boundary, scale), axes, split_dim=0, join_dim=2)


def logits(x_BSD: jax.Array, table_VD: jax.Array, vocabulary: int, softcap: float | None = None) -> jax.Array:
    """This device's shard of the logits: x[B, S, D] -> [B, S, V_tensor], float32 or wider, soft cap applied, padding entries -inf. Sends
    nothing."""
    return mask_padding(capped_logits(x_BSD, table_VD, softcap), _first_id(table_VD.shape[0]), vocabulary)


@dataclass(frozen=True)
class LossSettings:
    """`vocabulary` real entries, `chunk` tokens whose logits exist at once, z-loss coefficient, soft cap of the logits."""

    vocabulary: int
    chunk: int
    z_loss: float = 0.0
    softcap: float | None = None


def loss(
    x_TD: jax.Array, table_VD: jax.Array, labels_T: jax.Array, settings: LossSettings, scale: jax.Array | float = 1.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Output projection and cross entropy in one, over a vocabulary split over `tensor`.

    x[..., D], labels[...] int32 (-1: ignored), table[V_tensor, D], scale[] -> (scale times the sum over this device's valid tokens of
    cross entropy + z-loss, aux); aux holds `cross_entropy` and `z_loss`, the two sums without the scale, not differentiated, and `tokens`,
    the int32 count of valid ones. All are equal over `tensor` and vary over whatever axes the batch does. `x` comes from `Boundary.enter`.

    Sends, for each token: the maximum (one all-reduce), the sum of exponentials and the label's logit (one all-reduce), 4 bytes each (8 in
    float64), 2 (t-1)/t times that a device, in ceil(T / chunk) pairs of collectives; in the backward nothing.

    Memory: `chunk` x V logits at once. When differentiated, each chunk yields its dx and its share of dtable while its logits exist, so
    they are neither kept nor computed again: three matmuls in all, dx [T, D] in x's dtype and dtable [V, D] in float32 are kept, and the
    backward only multiplies them by the incoming scalar. It is right because the sum is linear in each token's loss. `scale` is already in
    them: where what comes in is a constant one, nothing is left to multiply, and no second dtable exists beside the first.

    Source: three scalars, Shoeybi et al., "Megatron-LM" (2019), section 3; gradients in the forward, Hsu et al., "Liger Kernel" (2024),
    fused linear cross entropy; z-loss, Chowdhery et al., "PaLM" (2022), section 5.
    """
    labels_T = labels_T.reshape(-1)
    axes = tuple(varying(x_TD) | varying(table_VD) | varying(labels_T) | {TENSOR})
    scale = vary(jnp.asarray(scale, accumulation_dtype(x_TD.dtype)), tuple({*axes} - {TENSOR}))
    total, cross_entropy, z = _loss(vary(x_TD.reshape(-1, x_TD.shape[-1]), axes), vary(table_VD, axes), labels_T, scale, settings)
    aux = {"cross_entropy": cross_entropy, "z_loss": z, "tokens": (labels_T >= 0).sum(dtype=jnp.int32)}
    return total, jax.tree.map(lax.stop_gradient, aux)


def _chunks(x_TD: jax.Array, labels_T: jax.Array, chunk: int) -> Pair:
    """[n, C, D] and [n, C]; the last chunk is filled up with ignored tokens."""
    tokens = labels_T.shape[0]
    chunk = min(chunk, tokens)
    missing = -tokens % chunk
    if missing:
        x_TD = jnp.pad(x_TD, ((0, missing), (0, 0)))
        labels_T = jnp.pad(labels_T, (0, missing), constant_values=-1)
    return x_TD.reshape(-1, chunk, x_TD.shape[-1]), labels_T.reshape(-1, chunk)


def _chunk_statistics(
    x_CD: jax.Array, table_VD: jax.Array, labels_C: jax.Array, settings: LossSettings
) -> tuple[jax.Array, jax.Array, Statistics]:
    """(logits of this shard [C, V], each label's column in it [C], statistics over the whole vocabulary). The only place that sends."""
    first = _first_id(table_VD.shape[0])
    logits_CV = mask_padding(capped_logits(x_CD, table_VD, settings.softcap), first, settings.vocabulary)
    columns_C = labels_C - first
    top_C = all_reduce_max(logits_CV.max(-1), TENSOR)
    total_C, label_C = all_reduce(jnp.stack(local_sums(logits_CV, top_C, columns_C)), TENSOR)
    return logits_CV, columns_C, Statistics(top_C, total_C, label_C)


def _zero_sums(x_TD: jax.Array) -> Pair:
    zero = jnp.zeros((), accumulation_dtype(x_TD.dtype))
    return (vary(zero, tuple(varying(x_TD) - {TENSOR})),) * 2


def _add(sums: Pair, losses: Pair) -> Pair:
    return sums[0] + losses[0].sum(), sums[1] + losses[1].sum()


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(x_TD: jax.Array, table_VD: jax.Array, labels_T: jax.Array, scale: jax.Array, settings: LossSettings) -> Triple:
    """(scale times cross entropy + z-loss, cross entropy, z-loss), summed over tokens. x and table vary over the same axes, `tensor` among
    them, scale over the others."""

    def step(sums: Pair, chunk: Pair) -> tuple[Pair, None]:
        x_CD, labels_C = chunk
        _, _, statistics = _chunk_statistics(x_CD, table_VD, labels_C, settings)
        return _add(sums, token_losses(statistics, labels_C >= 0, settings.z_loss)), None

    (cross_entropy, z), _ = lax.scan(step, _zero_sums(x_TD), _chunks(x_TD, labels_T, settings.chunk))
    return scale * (cross_entropy + z), cross_entropy, z


def _loss_forward(
    x_TD: jax.Array, table_VD: jax.Array, labels_T: jax.Array, scale: jax.Array, settings: LossSettings
) -> tuple[Triple, Saved]:
    """The same sums, and (dx[T, D], dtable[V, D], dscale) for an incoming gradient of one, plus a scalar of the table's dtype to cast back
    to."""
    wide = accumulation_dtype(x_TD.dtype)
    scale_of_logits = vary(scale, (TENSOR,))

    def step(carry: tuple[Pair, jax.Array], chunk: Pair) -> tuple[tuple[Pair, jax.Array], jax.Array]:
        sums, dtable_VD = carry
        x_CD, labels_C = chunk
        valid_C = labels_C >= 0
        logits_CV, columns_C, statistics = _chunk_statistics(x_CD, table_VD, labels_C, settings)
        d_CV = logit_gradient(logits_CV, statistics, columns_C, valid_C, settings.z_loss, settings.softcap)
        d_CV = (d_CV * scale_of_logits).astype(x_CD.dtype)
        dx_CD = lax.dot_general(d_CV, table_VD, (((1,), (0,)), ((), ())))
        dtable_VD += lax.dot_general(d_CV, x_CD, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        return (_add(sums, token_losses(statistics, valid_C, settings.z_loss)), dtable_VD), dx_CD

    # The zeros wait for x: XLA would fill the largest array of the step while the last layer still needs the memory.
    x_TD, zero = lax.optimization_barrier((x_TD, jnp.zeros((), wide)))
    start = (_zero_sums(x_TD), vary(jnp.full(table_VD.shape, zero), tuple(varying(table_VD))))
    ((cross_entropy, z), dtable_VD), dx_nCD = lax.scan(step, start, _chunks(x_TD, labels_T, settings.chunk))
    dx_TD = dx_nCD.reshape(-1, x_TD.shape[1])[: x_TD.shape[0]]
    total = cross_entropy + z
    return (scale * total, cross_entropy, z), (dx_TD, dtable_VD, total, jnp.zeros((), table_VD.dtype))


def _loss_backward(settings: LossSettings, saved: Saved, incoming: Triple) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    """Only the first output is differentiated; the others are reports."""
    dx_TD, dtable_VD, dscale, like = saved
    d = incoming[0]
    return (dx_TD * d).astype(dx_TD.dtype), (dtable_VD * d).astype(like.dtype), None, dscale * d


_loss.defvjp(_loss_forward, _loss_backward)
