"""What a parameter is: one record drives its values, its place on the mesh, its optimizer rule and its conversion.

    Parameter            the record: shape, logical axes, initial values, matrix view, role
    stack                records of one layer -> records of L stacked layers
    collect, bind        nnx module -> nested dict of records; nested dict of arrays -> module
    flatten, map_leaves  nested dicts by path, such as "layers/attention/query"
    separate, merge      what is trained and what is state, apart and together again
    init_params          values from a seed, the same on every mesh
    partition_specs, zero_placements, zero_specs, shardings    trees of places, by `rules`
    count, padded_vocabulary

A tree is a plain nested dict with string keys; JAX and nnx both order its keys alphabetically.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


# Fixed point of the normal: a cell is one of 2^6 parts of an octave of the tail probability, cut in 2^13 steps; values in units of 2^-24.
_CELL_BITS, _STEP_BITS, _UNIT = 6, 13, 24


@functools.cache
def _normal_table() -> np.ndarray:
    """Quantiles of the half normal, uint32: entry t is where a tail of (1 + t % 64 / 64) 2^(t // 64 - 32) begins; the last is at 1/2."""
    cells = 1 << _CELL_BITS
    tails = [(1 + cell / cells) * 2.0 ** (octave - 32) for octave in range(31) for cell in range(cells)] + [0.5]
    inverse = NormalDist().inv_cdf
    return np.array([round(-inverse(tail) * 2**_UNIT) for tail in tails], np.uint32)


def standard_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Normal values in units of 2^-24, int32, by integer arithmetic alone: quantiles of random words, linear between table cells.

    `jax.random.normal` evaluates polynomials and logarithms in floating point, whose last bit depends on how a compiler vectorizes
    the local shape: the same seed gave other weights on another mesh (jax 0.12.0). Integers do not.
    """
    return quantiles(jax.random.bits(key, shape, jnp.uint32))


def quantiles(word: jax.Array) -> jax.Array:
    """uint32 words -> quantiles of the normal in units of 2^-24, int32: 31 bits of tail probability and a sign. Error below 2e-5."""
    tail = (word & jnp.uint32(0x7FFFFFFF)) | jnp.uint32(1)
    zeros = jax.lax.clz(tail)
    mantissa = (tail << zeros) & jnp.uint32(0x7FFFFFFF)
    index = ((31 - zeros) << _CELL_BITS) + (mantissa >> (31 - _CELL_BITS))
    step = (mantissa >> (31 - _CELL_BITS - _STEP_BITS)) & jnp.uint32((1 << _STEP_BITS) - 1)
    table = jnp.asarray(_normal_table())
    begin, end = table[index], table[index + 1]
    value = (begin - (((begin - end) * step) >> _STEP_BITS)).astype(jnp.int32)
    return jnp.where(word >> 31 == 1, -value, value)


def _values(parameter: Parameter, key: jax.Array, dtype: Any) -> jax.Array:
    """One layer. One multiplication in float32 (float64 when that is asked), so there is nothing to contract or reorder."""
    if parameter.init != "normal":
        values = jnp.full(parameter.shape, 0 if parameter.init == "zeros" else 1, dtype)
    else:
        draw = jnp.promote_types(dtype, jnp.float32)
        scale = jnp.asarray(parameter.std * 2.0**-_UNIT, draw)
        values = (standard_normal(key, parameter.shape).astype(draw) * scale).astype(dtype)
    if not parameter.rows:
        return values
    row = jax.lax.broadcasted_iota(jnp.int32, parameter.shape, 0)
    return jnp.where(row < parameter.rows, values, jnp.zeros((), dtype))


def init_program(specs: Tree, shardings: Tree, dtype: Any) -> Any:
    """The jitted function of a uint32 seed that `init_params` runs."""

    def make(seed: jax.Array) -> Tree:
        root = jax.random.key(seed, impl="threefry2x32")

        def leaf(path: str, parameter: Parameter) -> jax.Array:
            key = jax.random.fold_in(root, zlib.crc32(path.encode()))
            if not parameter.stacked:
                return _values(parameter, key, dtype)
            keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(parameter.shape[0], dtype=jnp.uint32))
            return jax.vmap(lambda layer_key: _values(parameter.one_layer(), layer_key, dtype))(keys)

        return map_leaves(leaf, specs)

    return jax.jit(make, out_shardings=shardings)


def init_params(specs: Tree, seed: int, mesh: Mesh, shardings: Tree, dtype: Any) -> Tree:
    """Initial values, made where they live: no device ever holds more than its shard.

    Bitwise the same on every mesh, ZeRO placement and vocabulary padding: a leaf's key comes from `seed`, its path and, when stacked,
    the layer, and the counter of an element is its place in the global array, which padding rows below do not move.

    `shardings`: a tree of NamedSharding (or of PartitionSpec, put on `mesh`). Returns global arrays of `dtype`.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float64 and not jax.config.jax_enable_x64:
        raise ValueError("train.master_dtype: float64 needs 64-bit types; set the environment variable JAX_ENABLE_X64=1")
    placed = map_leaves(lambda path, place: NamedSharding(mesh, place) if isinstance(place, PartitionSpec) else place, shardings)
    with jax.threefry_partitionable(True):
        return init_program(specs, placed, dtype)(jnp.uint32(seed))
