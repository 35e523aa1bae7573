"""Dropout whose mask does not know how the program is sharded. B batch, S sequence, D model width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def dropout(x_BSD: jax.Array, rate: float, key: jax.Array, rows_B: jax.Array, positions_S: jax.Array) -> jax.Array:
    """Zero each element with probability `rate` and divide the rest by 1 - rate; same shape and dtype as x. Rate 0 is x itself.

    The mask is a function of (key, row, position, feature) only: `rows_B` int32 are the global numbers of these sequences and
    `positions_S` int32 the places of these tokens in their row, so every sharding of batch and sequence drops the same elements. Fold
    seed, step and layer into the key. D is whole on every device. Local, no bytes moved. ValueError for a rate outside [0, 1).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"model.dropout: {rate} must be in [0, 1)")
    if rate == 0:
        return x_BSD
    features = x_BSD.shape[-1]
    kept = np.uint32(min(round((1 - rate) * 2**32), 2**32 - 1))

    def token(row_key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(row_key, position), (features,), jnp.uint32) < kept

    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)
    keep_BSD = jax.vmap(jax.vmap(token, (None, 0)), (0, None))(row_keys, positions_S)
    return jnp.where(keep_BSD, x_BSD / jnp.asarray(1 - rate, x_BSD.dtype), 0)
