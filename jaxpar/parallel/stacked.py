"""Trees of arrays stacked over layers [L, ...], and batches cut into parts.

length, pick, add_at    of a stacked tree: its L, one layer's slice, adding to one layer's slice
add                     the sum of trees
cut, join               a batch [B, ...] into equal parts along B, and back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any


def length(layers: Tree) -> int:
    return jax.tree.leaves(layers)[0].shape[0]


def pick(tree: Tree, i: Any) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def add_at(total: Tree, part: Tree, i: Any) -> Tree:
    """total[i] += part, in place inside a loop, in the dtype of `total`."""

    def add(t: Any, p: Any) -> Any:
        old = lax.dynamic_index_in_dim(t, i, keepdims=False)
        return lax.dynamic_update_index_in_dim(t, old + p.astype(t.dtype), i, 0)

    return jax.tree.map(add, total, part)


def add(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *a: sum(a[1:], a[0]), *trees)


def cut(x: Any, parts: int) -> tuple[Any, ...]:
    assert x.shape[0] % parts == 0, f"batch {x.shape[0]} does not divide into {parts} parts"
    return (x,) if parts == 1 else tuple(jnp.split(x, parts))


def join(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
