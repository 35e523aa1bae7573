"""Optimizer rules that look at a whole matrix, applied to the matrices that a model means.

    per_matrix(transformation, specs)   one layer and one matrix at a time, whatever the parameter's shape

Adafactor factors a matrix into row and column statistics, and muon orthogonalises it. On a stacked [L, N, H, D] leaf they would take L or
a head for a matrix and compute something else. O out, I in: the matrix of one layer, from `Parameter.matrix`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.params import Parameter, Tree, flatten


def per_matrix(transformation: optax.GradientTransformation, specs: Tree) -> optax.GradientTransformation:
    """`transformation` as if every layer's every matrix were a parameter of its own, [O, I] (a parameter that is no matrix: a vector).

    A leaf [L, …] is seen as [L, O, I] and `transformation` is vmapped over L; so query [L, N, H, D] with matrix=2 is L matrices [N·H, D].
    Padding rows of a vocabulary are left out of what it sees and get a zero update, so statistics do not depend on the mesh.

    State: the fields of `transformation`'s state, each a tree like the parameters', so that a leaf's path ends in its parameter's path.
    A leaf of the matrix's shape is kept in the parameter's shape (and can live where the parameter lives); all others (factored statistics
    [L, O] and [L, I], counters [L]) keep their shape, with the leading L.

    Works under `optax.masked` and `optax.partition`: leaves are found by path. Parameters are global arrays of any sharding; where
    a reshape or a contraction crosses it, XLA inserts the communication.
    """
    by_path = dict(flatten(specs))
    structure = jax.tree.structure(jax.eval_shape(transformation.init, jax.ShapeDtypeStruct((2, 2), jnp.float32)))

    def of(path: tuple[Any, ...], leaf: jax.Array) -> Parameter:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = by_path[name]
        assert leaf.shape == spec.shape, f"{name}: {leaf.shape} is not the {spec.shape} of its record"
        return spec

    def by_field(outer: Any, states: list[Any]) -> Any:
        """States of the leaves -> one state whose fields are trees."""
        columns = zip(*(structure.flatten_up_to(state) for state in states), strict=True) if states else [()] * structure.num_leaves
        return structure.unflatten([outer.unflatten(column) for column in columns])

    def by_leaf(outer: Any, state: Any) -> list[Any]:
        columns = [outer.flatten_up_to(column) for column in structure.flatten_up_to(state)]
        return [structure.unflatten(row) for row in zip(*columns, strict=True)]

    def init(params: Any) -> Any:
        leaves, outer = jax.tree_util.tree_flatten_with_path(params)
        return by_field(outer, [init_leaf(of(path, leaf), leaf) for path, leaf in leaves])

    def init_leaf(spec: Parameter, param: jax.Array) -> Any:
        state = _mapped(spec, transformation.init)(_view(spec, param))
        return jax.tree.map(lambda x: _store(spec, x), state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves, outer = jax.tree_util.tree_flatten_with_path(updates)
        params = [None] * len(leaves) if params is None else outer.flatten_up_to(params)
        rows = zip(leaves, by_leaf(outer, state), params, strict=True) if leaves else ()
        done = [update_leaf(of(path, leaf), leaf, leaf_state, param) for (path, leaf), leaf_state, param in rows]
        return outer.unflatten([leaf for leaf, _ in done]), by_field(outer, [leaf_state for _, leaf_state in done])

    def update_leaf(spec: Parameter, grad: jax.Array, state: Any, param: jax.Array | None) -> tuple[jax.Array, Any]:
        state = jax.tree.map(lambda x: _load(spec, x), state)
        param = None if param is None else _view(spec, param)
        grad, state = _mapped(spec, transformation.update)(_view(spec, grad), state, param)
        return _restore(spec, grad), jax.tree.map(lambda x: _store(spec, x), state)

    return optax.GradientTransformation(init, update)


def _mapped(spec: Parameter, function: Any) -> Any:
    return jax.vmap(function) if spec.stacked else function


def _real(spec: Parameter) -> tuple[int, ...]:
    """The shape of one layer, with a leading L when stacked, without padding rows."""
    layer = (spec.rows, *spec.layer_shape[1:]) if spec.rows else spec.layer_shape
    return (*spec.shape[: spec.stacked], *layer)


def _viewed(spec: Parameter) -> tuple[int, ...]:
    """[O, I] of a matrix or [size] of a vector, with a leading L when stacked."""
    real = _real(spec)
    lead, layer = real[: spec.stacked], real[spec.stacked :]
    split = (layer[: spec.matrix], layer[spec.matrix :]) if spec.matrix else (layer,)
    return (*lead, *map(math.prod, split))


def _view(spec: Parameter, x: jax.Array) -> jax.Array:
    """Parameter shape -> [L, O, I], padding dropped."""
    return x[tuple(slice(size) for size in _real(spec))].reshape(_viewed(spec))


def _restore(spec: Parameter, x: jax.Array) -> jax.Array:
    """[L, O, I] -> parameter shape, padding zero."""
    real = _real(spec)
    return jnp.pad(x.reshape(real), [(0, whole - size) for whole, size in zip(spec.shape, real, strict=True)])


def _store(spec: Parameter, x: jax.Array) -> jax.Array:
    return _restore(spec, x) if x.shape == _viewed(spec) else x


def _load(spec: Parameter, x: jax.Array) -> jax.Array:
    return _view(spec, x) if x.shape == spec.shape else x
