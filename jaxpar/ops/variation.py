"""Arrays as loops and kernels inside a `shard_map` want them: all typed as varying over the same mesh axes."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp


def same_variation(*arrays: jax.Array, beside: Iterable[jax.Array] = ()) -> list[jax.Array]:
    """`arrays` typed as varying over every mesh axis that any of them or of those `beside` them varies over; the gradients of those widened
    are summed over the rest."""
    zero = sum(jnp.zeros_like(a, shape=(), dtype=arrays[0].dtype) for a in (*arrays, *beside))
    return [a if jax.typeof(a) == jax.typeof(a + zero.astype(a.dtype)) else a + zero.astype(a.dtype) for a in arrays]
