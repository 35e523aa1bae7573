"""Initial values from a seed, bitwise the same on every mesh.

init_params        a tree of arrays, made where they live
standard_normal    integers that are normal, by integer arithmetic
"""

from __future__ import annotations

import functools
import zlib
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.params import Parameter, Tree, map_leaves

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
