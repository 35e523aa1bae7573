"""Data parallelism and ZeRO: where each parameter is at home, how it becomes whole, how its gradient gets back.

    level   home (masters, optimizer state)   whole weights              gradients
    0       whole on every replica            are at home                one all-reduce a step
    1       split over the replicas           one all-gather a step      one reduce-scatter a step
    2       split                             one all-gather a step      one reduce-scatter a microbatch (layers: a layer)
    3       split                             one all-gather a layer     one reduce-scatter a layer

A `Place` says this for one parameter. Masters are cast to the compute dtype before they are gathered, so a gather sends that dtype;
gradients are summed in the dtype asked for. M bytes of weights cost (n-1)/n M for a gather or a scatter, 2 (n-1)/n M for an all-reduce,
over n replicas.

Source: Rajbhandari et al., "ZeRO" (SC'20), section 5; Zhao et al., "PyTorch FSDP" (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar import rules
from jaxpar.mesh import AXES
from jaxpar.parallel import collectives
from jaxpar.params import Tree, flatten, map_leaves


@dataclass(frozen=True)
class Place:
    """Where one parameter lives.

    whole:   spec of the weights that a device computes with
    home:    spec of the master, the optimizer's state and the finished gradient
    split:   (dim, axes) that home splits beyond whole; None where it does not
    partial: axes over which whole weights are equal but their gradients partial sums
    stacked: dim 0 is the layer
    """

    whole: PartitionSpec
    home: PartitionSpec
    split: rules.Placement | None
    partial: tuple[str, ...]
    stacked: bool

    @property
    def layer_split(self) -> rules.Placement | None:
        """`split` of one layer's slice."""
        return (self.split[0] - self.stacked, self.split[1]) if self.split else None


def places(specs: Tree, table: rules.Rules, level: int, sequence_parallel: bool) -> Tree:
    """The Place of every parameter under ZeRO `level`. ValueError from the rules where one cannot be cut."""

    def place(path: str, parameter: Any) -> Place:
        whole = table.spec(path, parameter)
        split = rules.zero_placement(parameter, whole, table.mesh_sizes) if level else None
        partial = rules.varying_axes(parameter, whole, sequence_parallel)
        return Place(whole, rules.zero_spec(whole, split), split, partial, parameter.stacked)

    return map_leaves(place, specs)


def gather(shards: Tree, places: Tree, dtype: Any) -> Tree:
    """Home -> whole in `dtype`, marked varying wherever the gradient will be a partial sum: W[.., D_replicas] -> W[.., D].

    Sends (n-1)/n of each split weight in `dtype`. Its inverse for gradients is `scatter`.
    """
    return jax.tree.map(lambda w, place: _gather(w, place.split, place, dtype), shards, places)


def gather_layer(shards: Tree, places: Tree, dtype: Any) -> Tree:
    """`gather` of one layer's slices, cast one layer at a time: the other layers take no memory in `dtype`."""
    return jax.tree.map(lambda w, place: _gather(w, place.layer_split, place, dtype), shards, places)


def _gather(w: jax.Array, split: rules.Placement | None, place: Place, dtype: Any) -> jax.Array:
    w = w.astype(dtype)
    if split is not None:
        w = collectives.all_gather(w, split[1], split[0])
    return collectives.vary(w, place.partial)


def scatter(grads: Tree, places: Tree, dtype: Any) -> Tree:
    """Sum over the replicas of each split parameter, keeping this device's part: W[.., D] {U_replicas} -> W[.., D_replicas].
    Others pass."""
    return jax.tree.map(lambda g, place: _scatter(g, place.split, dtype), grads, places)


def scatter_layer(grads: Tree, places: Tree, dtype: Any) -> Tree:
    """`scatter` of one layer's gradients."""
    return jax.tree.map(lambda g, place: _scatter(g, place.layer_split, dtype), grads, places)


def _scatter(g: jax.Array, split: rules.Placement | None, dtype: Any) -> jax.Array:
    return g if split is None else collectives.reduce_scatter(g.astype(dtype), split[1], split[0])


def finish(grads: Tree, places: Tree, dtype: Any) -> Tree:
    """Sum what is still partial: over `partial`, less what `scatter` has done. Norms under sequence parallelism over `tensor`, for one.

    Sends 2 (n-1)/n of each such gradient, once a step.
    """

    def all_reduce(g: jax.Array, place: Place) -> jax.Array:
        left = tuple(axis for axis in place.partial if place.split is None or axis not in place.split[1])
        return collectives.all_reduce(g.astype(dtype), left) if left else g

    return jax.tree.map(all_reduce, grads, places)


def norm(grads: Tree) -> jax.Array:
    """Euclidean norm of finished gradients at home, each parameter counted once; in float32, or float64 if a leaf is.

    Sends one scalar for each set of axes that splits some of them: two sums over three groups of devices at most, where XLA left to itself
    reduces every leaf's.
    """
    sums: dict[tuple[str, ...], jax.Array] = {}
    for g in jax.tree.leaves(grads):
        wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
        total = (wide * wide).sum()
        split = [axis for axis in AXES if axis in collectives.varying(g)]
        alone = tuple(axis for axis in split if collectives.axis_size(axis) == 1)  # costs nothing, and settles the type
        axes = tuple(axis for axis in split if axis not in alone)
        sums[axes] = sums.get(axes, 0) + (collectives.all_reduce(total, alone) if alone else total)
    return jnp.sqrt(sum(collectives.all_reduce(total, axes) if axes else total for axes, total in sums.items()))


def replicated(specs: Tree, places: Tree, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Parameters that ZeRO would split and cannot: vectors that no dim divides. For a run's log."""
    return rules.unsharded(dict(flatten(specs)), {path: place.whole for path, place in flatten(places)}, sizes)
