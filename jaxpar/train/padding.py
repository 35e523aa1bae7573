"""States without vocabulary padding: what checkpoints hold, so that they fit any tensor axis.

A vocabulary is padded until the tensor axis divides it (`params.padded_vocabulary`); its padding rows are zeros, and stay zeros, in the
parameters and in every optimizer statistic shaped like one.

    trim            state -> the same with real rows only
    pad             the inverse
    trimmed_types   abstract state -> shapes and shardings of the trimmed one
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.params import Parameter, Tree, flatten
from jaxpar.rules import as_axes

State = dict[str, Any]


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _padded(specs: Tree) -> list[tuple[tuple[str, ...], Parameter]]:
    return [(tuple(path.split("/")), spec) for path, spec in flatten(specs) if spec.rows and spec.rows < spec.layer_shape[0]]


def _rows(path: tuple[Any, ...], shape: tuple[int, ...], padded: list[tuple[tuple[str, ...], Parameter]]) -> int | None:
    """Real rows of a state leaf that is, or mirrors, a padded parameter; None for every other leaf."""
    names = _names(path)
    for suffix, spec in padded:
        if names[-len(suffix) :] == suffix and shape == spec.shape:
            assert not spec.stacked, f"{'/'.join(suffix)}: a stacked parameter has no vocabulary"
            return spec.rows
    return None


def trimmed_types(abstract: State, specs: Tree) -> State:
    """Types of the trimmed state. A leaf whose real rows its axes do not divide is whole in that dim, for the moment of saving only."""
    padded = _padded(specs)

    def trimmed(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rows = _rows(path, leaf.shape, padded)
        if rows is None:
            return leaf
        mesh, (first, *rest) = leaf.sharding.mesh, leaf.sharding.spec
        ways = math.prod(mesh.shape[axis] for axis in as_axes(first))
        sharding = NamedSharding(mesh, PartitionSpec(first if rows % ways == 0 else None, *rest))
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(trimmed, abstract) if padded else abstract


def trim(state: State, abstract: State, specs: Tree) -> State:
    """Real rows only; a leaf that has no others is passed through, not copied."""
    return jax.tree.map(_with_rows, state, trimmed_types(abstract, specs))


def pad(state: State, abstract: State) -> State:
    """`state` with the rows of zeros that `abstract` has more, on its shardings."""
    return jax.tree.map(_with_rows, state, abstract)


def _with_rows(leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    return leaf if leaf.shape == wanted.shape else _resize(wanted.shape[0], wanted.sharding)(leaf)


@functools.lru_cache(maxsize=64)
def _resize(rows: int, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """The program that cuts a leaf to its first `rows` rows, or fills it up to as many with zeros; one for all saves of a run."""

    def resize(leaf: jax.Array) -> jax.Array:
        missing = max(rows - leaf.shape[0], 0)
        return jnp.pad(leaf[:rows], ((0, missing), *((0, 0),) * (leaf.ndim - 1)))

    return jax.jit(resize, out_shardings=sharding)
