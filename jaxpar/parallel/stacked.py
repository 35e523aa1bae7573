"""Trees of arrays stacked over layers [L, ...], and batches cut into parts.

length, pick, pick_after   of a stacked tree: its L, one layer's slice
add_at, put_at          adding to one layer's slice, writing it
unwritten, zeros        arrays for a loop over layers to write, or to add to
add                     the sum of trees
cut, join               a batch [B, ...] into equal parts along B, and back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel import collectives

Tree = Any


def length(layers: Tree) -> int:
    return jax.tree.leaves(layers)[0].shape[0]


def pick(tree: Tree, i: Any) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def pick_after(values: Tree, tree: Tree, i: Any) -> tuple[Tree, Tree]:
    """(values, one layer's slice), which is not read before the values are there; but what varies over fewer axes than they may be."""
    axes = frozenset[str]().union(*map(collectives.varying, jax.tree.leaves(values)))
    values, late = collectives.barrier((values, collectives.vary(jnp.asarray(i, jnp.int32), tuple(sorted(axes)))))

    def read(a: Any) -> Any:
        return lax.dynamic_index_in_dim(a, late if collectives.varying(a) >= axes else i, keepdims=False)

    return values, jax.tree.map(read, tree)


def add_at(total: Tree, part: Tree, i: Any) -> Tree:
    """total[i] += part, in place inside a loop, in the dtype of `total`."""

    def add(t: Any, p: Any) -> Any:
        old = lax.dynamic_index_in_dim(t, i, keepdims=False)
        return lax.dynamic_update_index_in_dim(t, old + p.astype(t.dtype), i, 0)

    return jax.tree.map(add, total, part)


def put_at(total: Tree, part: Tree, i: Any) -> Tree:
    """total[i] = part, in place inside a loop."""
    return jax.tree.map(lambda t, p: lax.dynamic_update_index_in_dim(t, p, i, 0), total, part)


def zeros(types: Tree, layers: int) -> Tree:
    """Zeros [L, ...] for one layer's `types` (from `jax.eval_shape`)."""
    return jax.tree.map(lambda t: collectives.zeros(t.update(shape=(layers, *t.shape)), collectives.varying_of(t)), types)


def unwritten(types: Tree, layers: int) -> Tree:
    """Arrays [L, ...] without values, for one layer's `types`.

    The outputs of `lax.scan` begin as zeros, on a GPU a pass over the largest arrays of a step; and where two have one shape, XLA makes
    the zeros once and copies them.
    """

    def make(t: jax.ShapeDtypeStruct) -> jax.Array:
        return collectives.vary(lax.empty((layers, *t.shape), t.dtype), tuple(sorted(collectives.varying_of(t))))

    return jax.tree.map(make, types)


def add(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *a: sum(a[1:], a[0]), *trees)


def cut(x: Any, parts: int) -> tuple[Any, ...]:
    assert x.shape[0] % parts == 0, f"batch {x.shape[0]} does not divide into {parts} parts"
    return (x,) if parts == 1 else tuple(jnp.split(x, parts))


def join(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
