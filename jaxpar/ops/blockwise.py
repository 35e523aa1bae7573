"""Attention tile by tile in plain XLA: no buffer of S x S exists, forward or backward.

Dao, FlashAttention-2 (2023), algorithms 1 and 2: a running maximum and sum per row, and a backward that computes the scores again
from the log-sum-exp. One loop over a static list of tiles; those that the order of the tokens or the window hides are not in it.

    attend             o and log-sum-exp, differentiable in q, k, v through both
    block_forward      the same without a derivative rule
    block_backward     dq, dk, dv of one block of keys, given log-sum-exp and output over *all* keys (ring attention sums blocks)

B batch, S sequence (of q or of k), N query heads, K key/value heads, G = N/K heads of a group, H head width, W value width,
Q and T the queries and keys of one tile. `tiles.py` has Masking (static) and Marks (arrays).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.ops.tiles import Marks, Masking, Tiles

Three = tuple[jax.Array, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(masking: Masking, q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKW: jax.Array, marks: Marks) -> tuple[jax.Array, jax.Array]:
    """Softmax attention: o_BSNW in q's dtype and lse_BNS in float32 (float64 for float64 inputs), -inf where a row sees nothing.

    q, k, v vary over the same mesh axes, which include those of the marks (`variation.same_variation` sees to it). Residuals are q, k, v,
    o, lse, the last two named "attention_out" and "attention_lse" for remat policies.
    """
    return block_forward(masking, q_BSNH, k_BSKH, v_BSKW, marks)


def _attend_forward(masking: Masking, q: jax.Array, k: jax.Array, v: jax.Array, marks: Marks) -> tuple:
    o, lse = block_forward(masking, q, k, v, marks)
    # named here, before they become residuals: a policy that keeps these names then recomputes no attention
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (o, lse), (q, k, v, o, lse, marks)


def _attend_backward(masking: Masking, residuals: tuple, cotangents: tuple[jax.Array, jax.Array]) -> tuple:
    q, k, v, o, lse, marks = residuals
    do, dlse = cotangents
    return *block_backward(masking, q, k, v, o, lse, do, marks, dlse), jax.tree.map(lambda _: None, marks)


attend.defvjp(_attend_forward, _attend_backward)


def block_forward(masking: Masking, q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKW: jax.Array, marks: Marks) -> tuple[jax.Array, jax.Array]:
    """As `attend`, without a derivative rule. Temporary memory: B N block² scores and one float32 copy of o."""
    tiles, dtype = Tiles(masking, q_BSNH, k_BSKH, marks), _statistics(q_BSNH)
    q, k, v = tiles.queries(q_BSNH), tiles.keys(k_BSKH), tiles.keys(v_BSKW)
    if tiles.single:
        o, maximum, total = _tile_forward(masking, q, k, v, tiles.mask(0, 0))
    else:
        zero = jnp.zeros_like(q[..., 0], dtype=dtype)
        start = (jnp.broadcast_to(zero[..., None], (*zero.shape, v.shape[-1])), zero - jnp.inf, zero)

        def body(step: jax.Array, carry: Three) -> Three:
            i, j = tiles.pair(step)
            o, maximum, total = (tiles.q_slice(x, i) for x in carry)
            o_new, maximum_new, total_new = _tile_forward(
                masking, tiles.q_slice(q, i), tiles.k_slice(k, j), tiles.k_slice(v, j), tiles.mask(i, j)
            )
            top = jnp.maximum(maximum, maximum_new)
            old, new = jnp.exp(maximum - _finite(top)), jnp.exp(maximum_new - _finite(top))
            merged = (o * old[..., None] + o_new * new[..., None], top, total * old + total_new * new)
            return tuple(tiles.q_update(x, part, i) for x, part in zip(carry, merged, strict=True))

        o, maximum, total = lax.fori_loop(0, tiles.count(), body, start)
    seen = total > 0
    o = o / jnp.where(seen, total, 1)[..., None]
    lse = jnp.where(seen, _finite(maximum) + jnp.log(jnp.where(seen, total, 1)), -jnp.inf)
    return tiles.from_queries(o.astype(q_BSNH.dtype)), tiles.from_rows(lse)


def block_backward(
    masking: Masking,
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKW: jax.Array,
    o_BSNW: jax.Array,
    lse_BNS: jax.Array,
    do_BSNW: jax.Array,
    marks: Marks,
    dlse_BNS: jax.Array | None = None,
) -> Three:
    """dq, dk, dv in the dtypes of q, k, v. With `o` and `lse` over more keys than `k` holds, these are this block's shares: dq of the
    blocks add up. Rows with lse -inf get zeros. Temporary memory: B N block² scores and float32 copies of dq, dk, dv."""
    tiles, dtype = Tiles(masking, q_BSNH, k_BSKH, marks), _statistics(q_BSNH)
    q, k, v, do = tiles.queries(q_BSNH), tiles.keys(k_BSKH), tiles.keys(v_BSKW), tiles.queries(do_BSNW)
    lse = tiles.rows(_finite(lse_BNS))
    slope_BNS = jnp.einsum("bsnw,bsnw->bns", do_BSNW.astype(dtype), o_BSNW.astype(dtype))
    slope = tiles.rows(slope_BNS if dlse_BNS is None else slope_BNS - dlse_BNS)
    if tiles.single:
        dq, dk, dv = _tile_backward(masking, (q, k, v, do, lse, slope), tiles.mask(0, 0))
    else:

        def body(step: jax.Array, carry: Three) -> Three:
            i, j = tiles.pair(step)
            rows = (tiles.q_slice(x, i) for x in (do, lse, slope))
            operands = (tiles.q_slice(q, i), tiles.k_slice(k, j), tiles.k_slice(v, j), *rows)
            shares = _tile_backward(masking, operands, tiles.mask(i, j))
            dq, dk, dv = carry
            return (
                tiles.q_update(dq, tiles.q_slice(dq, i) + shares[0], i),
                tiles.k_update(dk, tiles.k_slice(dk, j) + shares[1], j),
                tiles.k_update(dv, tiles.k_slice(dv, j) + shares[2], j),
            )

        start = tuple(jnp.zeros_like(x, dtype=dtype) for x in (q, k, v))
        dq, dk, dv = lax.fori_loop(0, tiles.count(), body, start)
    return tiles.from_queries(dq.astype(q_BSNH.dtype)), tiles.from_keys(dk.astype(k_BSKH.dtype)), tiles.from_keys(dv.astype(v_BSKW.dtype))


def _finite(x: jax.Array) -> jax.Array:
    """-inf to 0: exp(-inf - 0) is the 0 that a row which sees nothing wants, exp(-inf + inf) is not a number."""
    return jnp.where(x == -jnp.inf, 0, x)


def _capped(masking: Masking, s: jax.Array) -> jax.Array:
    s = s * masking.scale
    return s if masking.softcap is None else masking.softcap * jnp.tanh(s / masking.softcap)


def _statistics(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _tile_forward(masking: Masking, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None) -> Three:
    """(sum of exp(s - max) v, max, sum of exp(s - max)) of one tile, in the statistics' dtype."""
    dtype = _statistics(q)
    s = _capped(masking, jnp.einsum("bkgqh,bkth->bkgqt", q, k, preferred_element_type=dtype))
    s = s if mask is None else jnp.where(mask[:, None, None], s, -jnp.inf)
    maximum = s.max(-1)
    p = jnp.exp(s - _finite(maximum)[..., None])
    return jnp.einsum("bkgqt,bktw->bkgqw", p.astype(v.dtype), v, preferred_element_type=dtype), maximum, p.sum(-1)


def _tile_backward(masking: Masking, operands: tuple[jax.Array, ...], mask: jax.Array | None) -> Three:
    """(dq, dk, dv) of one tile, in the statistics' dtype. Scores lie keys first: then no matmul needs a transposed copy of a tile."""
    q, k, v, do, lse, slope = operands
    dtype = _statistics(q)
    einsum = partial(jnp.einsum, preferred_element_type=dtype)
    s = _capped(masking, einsum("bkth,bkgqh->bktgq", k, q))
    visible = s if mask is None else jnp.where(jnp.swapaxes(mask, 1, 2)[:, None, :, None, :], s, -jnp.inf)
    p = jnp.exp(visible - lse[:, :, None])
    ds = p * (einsum("bktw,bkgqw->bktgq", v, do) - slope[:, :, None]) * masking.scale
    if masking.softcap is not None:
        ds = ds * (1 - (s / masking.softcap) ** 2)
    ds, p = ds.astype(q.dtype), p.astype(v.dtype)
    if ds.dtype == dtype:
        dq = jnp.moveaxis(einsum("bkth,bktgq->bkhgq", k, ds), 2, -1)
    else:  # XLA's CPU backend cannot run the form above from bfloat16 to float32
        dq = einsum("bktgq,bkth->bkgqh", ds, k)
    return dq, einsum("bktgq,bkgqh->bkth", ds, q), einsum("bktgq,bkgqw->bktw", p, do)
