"""What `attention` refuses of its arguments, before anything is computed: one ValueError naming the argument.

B batch, S tokens of this device, N query heads, K key/value heads, H head width, W value width, n devices along the axis.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config.checks import require

IMPLEMENTATIONS = ("auto", "blockwise", "cudnn")


def known_window(window: int | jax.Array) -> bool:
    """Whether a window is a number while tracing."""
    return isinstance(window, (int, np.integer))


def check_heads_and_tokens(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKW: jax.Array) -> None:
    """Queries, keys and values of the same tokens, with heads in whole groups."""
    for name, x in (("q_BSNH", q_BSNH), ("k_BSKH", k_BSKH), ("v_BSKW", v_BSKW)):
        require(x.ndim == 4, f"{name}: shape {x.shape} is not [batch, tokens, heads, width]")
        require(0 not in x.shape, f"{name}: shape {x.shape} has no elements")
        require(jnp.issubdtype(x.dtype, jnp.floating), f"{name}: {x.dtype} are not floating-point numbers")
    q, k, v = q_BSNH.shape, k_BSKH.shape, v_BSKW.shape
    require(k[:2] == q[:2], f"k_BSKH: {k[0]} rows of {k[1]} tokens beside {q[0]} of {q[1]} in q_BSNH; a row attends to its own tokens")
    require(k[3] == q[3], f"k_BSKH: width {k[3]} is not q_BSNH's {q[3]}")
    require(v[:3] == k[:3], f"v_BSKW: shape {v} does not have k_BSKH's rows, tokens and heads {k[:3]}")
    require(k[2] > 0 and q[2] % k[2] == 0, f"k_BSKH: {k[2]} key/value heads do not divide q_BSNH's {q[2]} heads")


def check_marks(
    shape: tuple[int, int], devices: int, heads: int, segments_BS: jax.Array | None, prefix_BS: jax.Array | None, sinks_N: jax.Array | None
) -> None:
    """Segments, prefix and sinks of the shapes and dtypes that `attention` names. `shape` is that of this device's tokens."""
    batch, length = shape
    for name, x_BS, kind, wanted in (
        ("segments_BS", segments_BS, jnp.integer, "whole numbers"),
        ("prefix_BS", prefix_BS, jnp.bool_, "booleans"),
    ):
        if x_BS is not None:
            whole = (batch, length * devices)
            others = f"neither this device's {shape} nor the whole row's {whole}" if devices > 1 else f"not {shape}"
            require(x_BS.shape in (shape, whole), f"{name}: shape {x_BS.shape} is {others}")
            require(jnp.issubdtype(x_BS.dtype, kind), f"{name}: {x_BS.dtype} are not {wanted}")
    if sinks_N is not None:
        require(sinks_N.shape == (heads,), f"sinks_N: shape {sinks_N.shape} is not ({heads},), a logit for each query head of a device")
        require(jnp.issubdtype(sinks_N.dtype, jnp.floating), f"sinks_N: {sinks_N.dtype} are not floating-point numbers")


def check_options(causal: bool, prefix: bool, window: int | jax.Array, softcap: float | None, block: int, implementation: str) -> None:
    """Options that mean something, together too."""
    if known_window(window):
        require(window >= 0, f"window: {window} must not be negative; 0 sees every key")
    else:
        integer = jnp.issubdtype(jnp.result_type(window), jnp.integer) and jnp.shape(window) == ()
        require(integer, f"window: {jnp.result_type(window)}{list(jnp.shape(window))} is not one whole number")
    clash = not causal and not (known_window(window) and window == 0)
    require(not clash, f"window: {window} is given with causal=False; a window needs causal order")
    require(causal or not prefix, "prefix: every key is seen with causal=False; leave one of them out")
    require(softcap is None or softcap > 0, f"softcap: {softcap} must be positive, or None for scores as they are")
    require(block >= 1, f"block: {block} must be at least 1 token")
    require(implementation in IMPLEMENTATIONS, f"train.attention: {implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
