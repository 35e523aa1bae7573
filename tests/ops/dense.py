"""Dense attention for the tests: one S x S matrix, visibility from plain loops, derivatives by autodiff. Shares no code with ours."""

import jax
import jax.numpy as jnp
import numpy as np


def visibility(q_positions, k_positions, q_segments, k_segments, causal: bool, window: int) -> np.ndarray:
    """[B, Q, T] bool."""
    batch, queries, keys = len(q_positions), len(q_positions[0]), len(k_positions[0])
    visible = np.zeros((batch, queries, keys), bool)
    for b, i, j in np.ndindex(visible.shape):
        apart = int(q_positions[b][i]) - int(k_positions[b][j])
        same = q_segments is None or (q_segments[b][i] == k_segments[b][j] != 0)
        visible[b, i, j] = same and (not causal or apart >= 0) and (window == 0 or apart < window)
    return visible


def attention(q, k, v, visible, scale: float, softcap: float | None = None) -> tuple[jax.Array, jax.Array]:
    """o [B, S, N, W] and log-sum-exp [B, N, S] of float64 arrays."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bqnh,btnh->bnqt", q, k) * scale
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    visible = jnp.asarray(visible)[:, None]
    top = jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True, where=visible, initial=-1e4))
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, s - top, 0)), 0)
    total = weights.sum(-1)
    seen = total > 0
    o = jnp.einsum("bnqt,btnw->bqnw", weights / jnp.where(seen, total, 1)[..., None], v)
    return o, jnp.where(seen, jnp.log(jnp.where(seen, total, 1)) + top[..., 0], -jnp.inf)
