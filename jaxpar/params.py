"""What a parameter is: one record drives its values, its place on the mesh, its optimizer rule and its conversion.

    Parameter            the record: shape, logical axes, initial values, matrix view, role
    stack                records of one layer -> records of L stacked layers
    collect, bind        nnx module -> nested dict of records; nested dict of arrays -> module
    flatten, map_leaves  nested dicts by path, such as "layers/attention/query"
    separate, merge      what is trained and what is state, apart and together again
    partition_specs, zero_placements, zero_specs, shardings    trees of places, by `rules`
    count, padded_vocabulary

A tree is a plain nested dict with string keys; JAX and nnx both order its keys alphabetically. Initial values are `initial.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import rules

Tree = dict[str, Any]

INITS = ("normal", "zeros", "ones")
ROLES = ("matrix", "embedding", "head", "norm", "bias", "state")


@dataclass(frozen=True)
class Parameter:
    """One parameter, global sizes, torch orientation ([out..., in...]).

    `axes` names each dim logically (`jaxpar/rules.py` says which mesh axis that is). `matrix` is how many leading dims are "out" when
    it is seen as a matrix [out, in]; 0 is no matrix. `rows` is how many of the first dim are real, 0 for all: a padded vocabulary has
    zeros below. `stacked` means that dim 0 is the layer; `rows` and `matrix` then speak of one layer. Role `state` is of what a model
    holds and no gradient moves: whole on every device, in the master dtype, updated by the step.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str = "normal"
    std: float = 0.0
    matrix: int = 0
    role: str = "matrix"
    rows: int = 0
    stacked: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"{self.shape} has other dims than {self.axes}"
        assert self.init in INITS and self.role in ROLES, (self.init, self.role)
        assert 0 <= self.matrix < max(len(self.layer_shape), 1), f"{self.layer_shape} has no {self.matrix} out dims"
        assert not self.rows or self.rows <= self.layer_shape[0], f"{self.rows} real rows of {self.layer_shape}"

    @property
    def layer_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.stacked else self.shape

    @property
    def layer_axes(self) -> tuple[str, ...]:
        return self.axes[1:] if self.stacked else self.axes

    @property
    def real_size(self) -> int:
        """Elements, padding rows left out."""
        padding = self.layer_shape[0] - self.rows if self.rows else 0
        return math.prod(self.shape) - padding * math.prod(self.layer_shape[1:]) * (self.shape[0] if self.stacked else 1)

    def one_layer(self) -> Parameter:
        """The record of a single layer of a stacked parameter."""
        return replace(self, shape=self.layer_shape, axes=self.layer_axes, stacked=False)


def padded_vocabulary(vocabulary: int, tensor: int) -> int:
    """The smallest multiple of the tensor axis that holds the vocabulary: every device gets the same number of rows."""
    return -(-vocabulary // max(tensor, 1)) * max(tensor, 1)


def flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) in JAX's leaf order; anything that is no dict is a leaf, None and PartitionSpec included."""
    for key in sorted(tree):
        value, path = tree[key], f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{path}/")
        else:
            yield path, value


def paths(tree: Tree) -> tuple[str, ...]:
    """Paths of the leaves, such as "layers/attention/query"."""
    return tuple(path for path, _ in flatten(tree))


def map_leaves(function: Callable[..., Any], tree: Tree, *others: Tree, prefix: str = "") -> Tree:
    """function(path, leaf, *leaves of the others) at every leaf. Unlike `jax.tree.map` it takes None for a leaf and demands equal keys."""
    for other in others:
        assert set(other) == set(tree), f"{prefix or 'tree'}: keys {sorted(other)} are not {sorted(tree)}"
    return {
        key: map_leaves(function, value, *(other[key] for other in others), prefix=f"{prefix}{key}/")
        if isinstance(value, dict)
        else function(f"{prefix}{key}", value, *(other[key] for other in others))
        for key, value in sorted(tree.items())
    }


def separate(specs: Tree, tree: Tree) -> tuple[Tree, Tree]:
    """(what is trained, what is state) of a tree with a leaf for each record; without branches that hold nothing."""
    trained: Tree = {}
    held: Tree = {}
    for key, spec in specs.items():
        if isinstance(spec, dict):
            parts = separate(spec, tree[key])
            for part, whole in zip(parts, (trained, held), strict=True):
                if part:
                    whole[key] = part
        else:
            (held if spec.role == "state" else trained)[key] = tree[key]
    return trained, held


def merge(trained: Tree, held: Tree) -> Tree:
    """The inverse of `separate`."""
    joined = dict(trained)
    for key, value in held.items():
        assert isinstance(value, dict) or key not in joined, f"{key} is there twice"
        joined[key] = merge(joined.get(key, {}), value) if isinstance(value, dict) else value
    return joined


def stack(tree: Tree, layers: int) -> Tree:
    """Records of one layer -> records of `layers` of them, stacked along a new dim 0 named "layers"."""

    def stacked(path: str, parameter: Parameter) -> Parameter:
        assert not parameter.stacked, f"{path} is stacked already"
        return replace(parameter, shape=(layers, *parameter.shape), axes=("layers", *parameter.axes), stacked=True)

    return map_leaves(stacked, tree)


def _variables(module: nnx.Module) -> tuple[Any, Any, Tree]:
    """(graph, state, nested dict of its variables). The only variables of a module are parameters that carry their record."""
    graph, state = nnx.split(module)
    tree: Tree = {}
    for path, variable in nnx.to_flat_state(state):
        assert all(isinstance(key, str) for key in path), f"{path}: modules are attributes, not lists"
        assert isinstance(variable, nnx.Param) and "spec" in variable.get_metadata(), f"{path}: not an nnx.Param with spec=Parameter(...)"
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = variable
    return graph, state, tree


def collect(module: nnx.Module) -> Tree:
    """The records of a module's parameters, nested by attribute. Every variable is `nnx.Param(..., spec=Parameter(...))`."""
    return map_leaves(lambda path, variable: variable.get_metadata()["spec"], _variables(module)[2])


def bind(module: nnx.Module) -> Callable[[Tree], Any]:
    """A function that puts a plain nested dict of arrays in the place of a module's parameters.

    The module is taken apart here, once; the function returned only unflattens, and may be called inside jit and shard_map. The
    arrays may be local shards. It refuses a dict with other paths than the module's.
    """
    graph, state, tree = _variables(module)
    structure = jax.tree.structure(state)
    expected = paths(tree)
    assert structure.num_leaves == len(expected)

    def merge(params: Tree) -> Any:
        found = list(flatten(params))
        assert tuple(path for path, _ in found) == expected, f"paths {[path for path, _ in found]} are not the module's {list(expected)}"
        return nnx.merge(graph, jax.tree.unflatten(structure, [leaf for _, leaf in found]))

    return merge


def count(specs: Tree) -> int:
    """Parameters of a model, without padding rows."""
    return sum(parameter.real_size for _, parameter in flatten(specs))


def partition_specs(specs: Tree, on: rules.Rules) -> Tree:
    """The PartitionSpec of every parameter."""
    return map_leaves(on.spec, specs)


def zero_placements(specs: Tree, partitions: Tree, sizes: Any) -> Tree:
    """(dim, axes) or None of every parameter, as `rules.zero_placement`; an error names the parameter."""

    def place(path: str, parameter: Parameter, spec: PartitionSpec) -> rules.Placement | None:
        try:
            return rules.zero_placement(parameter, spec, sizes)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    return map_leaves(place, specs, partitions)


def zero_specs(partitions: Tree, placements: Tree) -> Tree:
    """The PartitionSpecs with ZeRO's split applied."""
    return map_leaves(lambda path, spec, placement: rules.zero_spec(spec, placement), partitions, placements)


def shardings(partitions: Tree, mesh: Mesh) -> Tree:
    """PartitionSpecs -> NamedShardings."""
    return map_leaves(lambda path, spec: NamedSharding(mesh, spec), partitions)
