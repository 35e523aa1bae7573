"""Strict collectives: the only file that calls `lax.psum` and its kin (a lint test bans them elsewhere).

Every function runs inside a `shard_map` with `check_vma=True`. Each one that reads over an axis refuses a value that does not *vary*
over it: the sum of a value that is already equal everywhere would come out n times too large, and no type error would say so.
What moves data between one device and itself is left out: an axis of size 1 costs nothing.

`A[I_X]` is an array whose dim I is split over axis X, `{U_X}` one that holds a partial sum on each device of X.

    varying        the axes over which a value may differ from device to device
    vary           mark a value as varying; moves nothing, its transpose is an all-reduce
    vary_like, zeros, varying_of
    all_reduce     A {U_X} -> A                 2 (n-1)/n bytes(A) a device
    all_reduce_max A {U_X} -> A                 2 (n-1)/n bytes(A) a device, no gradient
    all_gather     A[I_X] -> A[I]               (n-1)/n bytes(A) a device
    reduce_scatter A[I] {U_X} -> A[I_X]         (n-1)/n bytes(A) a device
    all_to_all     A[I_X, J] -> A[I, J_X]       (n-1)/n bytes(local A) a device
    ragged_all_to_all, padded_all_to_all    each device sends some rows to each other
    permute        each device sends its A to one other
    axis_index, axis_size
    barrier        values that exist only together; moves nothing
    distinct, anew values that XLA takes for others; move nothing
    value_barrier, gradient_barrier    `barrier` of the forward alone, of the backward alone
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Axes = str | tuple[str, ...]


def as_tuple(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def varying(x: jax.Array) -> frozenset[str]:
    """Axes over which `x` may differ between devices. The only place that reads JAX's own name for it."""
    return frozenset(jax.typeof(x).mat.varying)


def _check(x: jax.Array, axes: Axes, verb: str) -> tuple[str, ...]:
    names = as_tuple(axes)
    missing = [name for name in names if name not in varying(x)]
    if missing:
        raise TypeError(
            f"{verb} over {names}: the value {jax.typeof(x)} does not vary over {missing}, so it is already equal there "
            f"and would be counted {axis_size(tuple(missing))} times"
        )
    return names


def vary(x: jax.Array, axes: Axes) -> jax.Array:
    """Mark `x` as varying over `axes` where it is not yet. Sends nothing; the transpose all-reduces the gradient over the axes added."""
    missing = tuple(name for name in as_tuple(axes) if name not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_of(type_: jax.ShapeDtypeStruct) -> frozenset[str]:
    """Axes over which a value of this type (from `jax.eval_shape` inside a shard_map) may differ between devices."""
    manual = type_.manual_axis_type  # None outside a shard_map
    return frozenset(manual.varying) if manual is not None else frozenset()


def barrier(tree: Any) -> Any:
    """The same values, of which none exists before all do. `lax.optimization_barrier` makes all of its results vary over the same axes;
    here each keeps its type, so only those that vary over the same axes wait for each other."""
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[frozenset[str], list[int]] = {}
    for place, leaf in enumerate(leaves):
        groups.setdefault(varying(leaf), []).append(place)
    for places in groups.values():
        for place, value in zip(places, lax.optimization_barrier([leaves[place] for place in places]), strict=True):
            leaves[place] = value
    return jax.tree.unflatten(structure, leaves)


def distinct(tree: Any) -> Any:
    """The same values, which XLA takes for others: what is computed from them is not merged with the same of the originals, as a second
    gather would be with the first. A barrier each; on CPUs, where XLA drops barriers before it last merges equal operations, a choice that
    only run time makes."""

    def chosen(x: jax.Array) -> jax.Array:
        return _chosen(x, x.reshape(-1)[0])

    return jax.tree.map(lambda x: lax.platform_dependent(x, cpu=chosen, default=lax.optimization_barrier) if x.size else x, tree)


def anew(x: jax.Array, turn: jax.Array) -> jax.Array:
    """The same values, which XLA takes for others in each `turn` of a loop: what is sent of them is sent in each. On CPUs alone, where it
    may cost a copy: their compiler would send it once before the loop; that for GPUs does not."""
    return lax.platform_dependent(x, turn, cpu=_chosen, default=lambda x, _: x)


def _chosen(x: jax.Array, number: jax.Array) -> jax.Array:
    """x, by a condition that always holds, which XLA does not see."""
    return jnp.where((number.astype(jnp.int32) | 1) != 0, x, jnp.zeros_like(x))


@jax.custom_vjp
def value_barrier(tree: Any) -> Any:
    """`barrier` of the values alone: their gradients stay free of each other."""
    return barrier(tree)


value_barrier.defvjp(lambda tree: (barrier(tree), None), lambda _, grads: (grads,))


@jax.custom_vjp
def gradient_barrier(tree: Any) -> Any:
    """The same values, free of each other, whose gradients exist only together: an order of the backward that the forward does not have."""
    return tree


gradient_barrier.defvjp(lambda tree: (tree, None), lambda _, grads: (barrier(grads),))


def vary_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Mark `x` as varying wherever `like` does."""
    return vary(x, tuple(varying(like)))


def zeros(type_: jax.ShapeDtypeStruct, axes: frozenset[str]) -> jax.Array:
    """Zeros of a shape and dtype that vary over `axes`: the start of a loop's carry."""
    return vary(jnp.zeros(type_.shape, type_.dtype), tuple(sorted(axes)))


def all_reduce(x: jax.Array, axes: Axes) -> jax.Array:
    """Sum over `axes`: A {U_X} -> A, equal on every device. Transpose: marks the gradient as varying, sends nothing."""
    return lax.psum(x, _check(x, axes, "all_reduce"))


def all_reduce_max(x: jax.Array, axes: Axes) -> jax.Array:
    """Maximum over `axes`, equal on every device. Not differentiable: pass a stopped value."""
    return lax.pmax(lax.stop_gradient(x), _check(x, axes, "all_reduce_max"))


def all_gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Join the shards of `dim`: A[I_X] -> A[I], still typed as varying over X. Transpose: `reduce_scatter`."""
    names = _check(x, axes, "all_gather")
    return lax.all_gather(x, names, axis=dim, tiled=True) if axis_size(names) > 1 else x


def reduce_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sum over `axes` and keep this device's part of `dim`: A[I] {U_X} -> A[I_X]. Transpose: `all_gather`."""
    names = _check(x, axes, "reduce_scatter")
    size = axis_size(names)
    if x.shape[dim] % size:
        raise ValueError(f"reduce_scatter: dim {dim} of shape {x.shape} does not divide over {names} of size {size}")
    return lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True) if size > 1 else x


def all_to_all(x: jax.Array, axes: Axes, split_dim: int, join_dim: int, groups: Sequence[Sequence[int]] | None = None) -> jax.Array:
    """Trade which dim is split: A[I_X, J] -> A[I, J_X] with I `join_dim`, J `split_dim`. Transpose: the same with dims swapped. `groups` of
    places along the axes trade among themselves."""
    names = _check(x, axes, "all_to_all")
    if (len(groups[0]) if groups else axis_size(names)) == 1:
        return x
    return lax.all_to_all(x, names, split_axis=split_dim, concat_axis=join_dim, tiled=True, axis_index_groups=groups)


def ragged_all_to_all(
    x_PD: jax.Array,
    rows: int,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    receive_sizes: jax.Array,
    axes: Axes,
) -> jax.Array:
    """Rows of x[P, D] to each of n devices -> [rows, D], zeros where nothing arrives. Offsets and sizes are int32 [n].

    To device j go the `send_sizes[j]` rows that begin at `input_offsets[j]`, and arrive there at `output_offsets[j]`; from device i come
    `receive_sizes[i]`. Sends just those rows. GPUs only (no CPU implementation exists); no gradient of its own.
    """
    names = _check(x_PD, axes, "ragged_all_to_all")
    out = jnp.zeros_like(x_PD, shape=(rows, x_PD.shape[1]))
    return lax.ragged_all_to_all(x_PD, out, input_offsets, send_sizes, output_offsets, receive_sizes, axis_name=names)


def padded_all_to_all(
    x_PD: jax.Array,
    rows: int,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    receive_sizes: jax.Array,
    axes: Axes,
) -> jax.Array:
    """`ragged_all_to_all` anywhere: what it computes, by an all-to-all of P rows to each device. Sends (n-1) P D values."""
    index_nP = input_offsets[:, None] + jnp.arange(x_PD.shape[0], dtype=jnp.int32)
    index_nP = jnp.where(index_nP < (input_offsets + send_sizes)[:, None], index_nP, x_PD.shape[0])
    arrived = all_to_all(jnp.take(x_PD, index_nP, axis=0, mode="fill", fill_value=0), axes, 0, 0)
    begins_n = all_to_all(output_offsets, axes, 0, 0)
    within_nR = jnp.arange(rows, dtype=jnp.int32) - begins_n[:, None]
    mine_nR = (within_nR >= 0) & (within_nR < receive_sizes[:, None])
    place_nR = jnp.arange(begins_n.size, dtype=jnp.int32)[:, None] * x_PD.shape[0] + within_nR
    place_R = jnp.where(mine_nR, place_nR, 0).sum(0, dtype=jnp.int32)
    flat = arrived.reshape(-1, x_PD.shape[1])
    return jnp.take(flat, jnp.where(mine_nR.any(0), place_R, flat.shape[0]), axis=0, mode="fill", fill_value=0)


def permute(x: jax.Array, axis: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Send this device's `x` along `axis` by (source, destination) pairs; who receives nothing gets zeros. Transpose: pairs reversed."""
    (name,) = _check(x, axis, "permute")
    return lax.ppermute(x, name, list(pairs))


def axis_index(axes: Axes) -> jax.Array:
    """This device's place along `axes`, the first axis slowest. Scalar int32, varying over `axes`."""
    return lax.axis_index(as_tuple(axes))


def axis_size(axes: Axes) -> int:
    """Devices along `axes`, a Python integer."""
    return math.prod(lax.axis_size(name) for name in as_tuple(axes))
