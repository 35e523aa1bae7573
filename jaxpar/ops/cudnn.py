"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`, and the list of what it covers.

    cudnn_covers      why cuDNN cannot do a case, or None
    cudnn_attention   o, with its residuals named for remat policies
    block_forward     o and log-sum-exp of one block of keys
    block_backward    its dq, dk, dv, given log-sum-exp and output over *all* keys

B batch, S sequence, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

LARGEST_HEAD = 128  # wider heads need Hopper or later and have no backward everywhere


def cudnn_covers(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool,
    ordered: bool,
    packed: bool,
    window: int | np.integer | jax.Array,
    softcap: float | None,
) -> str | None:
    """None if cuDNN does this case, else why not, in words that complete "cudnn does not cover ...". Reads shapes and dtypes only."""
    width, value_width = q_BSNH.shape[-1], v_BSKH.shape[-1]
    static = isinstance(window, (int, np.integer))
    reasons = (
        (q_BSNH.dtype not in (jnp.bfloat16, jnp.float16), f"dtype {q_BSNH.dtype}"),
        (not q_BSNH.dtype == k_BSKH.dtype == v_BSKH.dtype, "queries, keys and values of different dtypes"),
        (width > LARGEST_HEAD or width % 8 != 0, f"head width {width} (a multiple of 8 up to {LARGEST_HEAD} is needed)"),
        (value_width != width, f"value width {value_width} beside head width {width}"),
        (softcap is not None, "soft-capped scores"),
        (packed, "packed documents or padding (segments)"),
        (not static, "a window that is only known at run time"),
        (static and window != 0 and not causal, "a window without causal order"),
        (causal and not ordered, "causal order by position rather than by index"),
    )
    return next((reason for applies, reason in reasons if applies), None)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def cudnn_attention(causal: bool, window: int, scale: float, q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """o_BSNH. Causal by index; `window` 0 sees all keys, w the w nearest including its own. Needs the CUDA plugin even to trace.

    Residuals are q, k, v, o named "attention_out" and the log-sum-exp [B, N, S] float32 named "attention_lse".
    """
    return _kernel(causal, window, scale)(q_BSNH, k_BSKH, v_BSKH)


def _kernel(causal: bool, window: int, scale: float) -> partial:
    local = (window - 1, 0) if window else None
    return partial(jax.nn.dot_product_attention, scale=scale, is_causal=causal, local_window_size=local, implementation="cudnn")


def _cudnn_forward(causal: bool, window: int, scale: float, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
    o, pullback = jax.vjp(_kernel(causal, window, scale), q, k, v)
    *inputs, lse, _ = leaves = jax.tree.leaves(pullback)  # the last two are the log-sum-exp and the output
    assert lse.ndim == 3 and leaves[-1].shape == o.shape, [leaf.shape for leaf in leaves]
    o, lse = checkpoint_name(o, "attention_out"), checkpoint_name(lse, "attention_lse")
    return o, jax.tree.unflatten(jax.tree.structure(pullback), [*inputs, lse, o])


def _cudnn_backward(causal: bool, window: int, scale: float, pullback: Callable, do: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return pullback(do)


cudnn_attention.defvjp(_cudnn_forward, _cudnn_backward)


def block_forward(
    causal: bool, window: int, scale: float, q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """o_BSNH in q's dtype and lse_BNS float32 of one block of keys, without a derivative rule."""
    o, pullback = jax.vjp(_kernel(causal, window, scale), q_BSNH, k_BSKH, v_BSKH)
    return o, jax.tree.leaves(pullback)[-2]


def block_backward(
    causal: bool,
    window: int,
    scale: float,
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    o_BSNH: jax.Array,
    lse_BNS: jax.Array,
    do_BSNH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This block's shares of dq, dk, dv. The residuals of the kernel's own derivative get the log-sum-exp and output over all keys in place
    of this block's; XLA drops the forward that made them."""
    _, pullback = jax.vjp(_kernel(causal, window, scale), q_BSNH, k_BSKH, v_BSKH)
    *inputs, lse, o = jax.tree.leaves(pullback)
    assert lse.shape == lse_BNS.shape and o.shape == o_BSNH.shape, (lse.shape, o.shape)
    return jax.tree.unflatten(jax.tree.structure(pullback), [*inputs, lse_BNS, o_BSNH])(do_BSNH)
