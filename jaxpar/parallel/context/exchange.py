"""Ulysses: tokens against heads. Inside a group of neighbours each device gives up heads and gets the tokens of the others.

    q[B, S_seq, N, H]  ->  q[B, S, N_seq, H]     before attention, and the reverse after it
    k[B, S_seq, K, H]  ->  k[B, S, K_seq, H]     K heads are repeated only as often as the group exceeds their number

Each sends (n-1)/n of its local array. Source: Jacobs et al., "DeepSpeed Ulysses" (2023); inside a ring, Fang and Zhao, "USP" (2024).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.collectives import all_to_all, axis_index, axis_size


def groups(axis: str, inner: int) -> list[list[int]] | None:
    """Runs of `inner` neighbours along the axis; None when that is the whole axis."""
    size = axis_size(axis)
    return None if inner == size else [list(range(first, first + inner)) for first in range(0, size, inner)]


def to_heads(x_BSNH: jax.Array, axis: str, inner: int) -> jax.Array:
    """All tokens of the group, this device's heads. Heads fewer than the group are repeated first, neighbours sharing one."""
    if x_BSNH.shape[2] < inner:
        x_BSNH = jnp.repeat(x_BSNH, inner // x_BSNH.shape[2], axis=2)
    return all_to_all(x_BSNH, axis, split_dim=2, join_dim=1, groups=groups(axis, inner))


def to_tokens(x_BSNH: jax.Array, axis: str, inner: int) -> jax.Array:
    """All heads of the group, this device's tokens: the inverse for as many heads as devices or more."""
    return all_to_all(x_BSNH, axis, split_dim=1, join_dim=2, groups=groups(axis, inner))


def own_heads(x_N: jax.Array, axis: str, inner: int) -> jax.Array:
    """This device's part of a value for each head."""
    size = x_N.shape[0] // inner
    return lax.dynamic_slice_in_dim(x_N, axis_index(axis) % inner * size, size)
