"""Declaring the parameters of nnx modules: abstract arrays that carry their record (`jaxpar.params.Parameter`), so a module needs no mesh
and no memory.

matrix, bias, logits, table, norm, state   one parameter each
value                       the array of a parameter, None where a module has none
stacked                     a module whose every parameter gets a leading dim of L layers
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.params import Parameter, stack

Module = TypeVar("Module", bound=nnx.Module)


def declare(spec: Parameter) -> nnx.Param:
    """An nnx parameter of abstract value; float32, as masters are unless a run says otherwise."""
    return nnx.Param(jax.ShapeDtypeStruct(spec.shape, jnp.float32), spec=spec)


def matrix(shape: tuple[int, ...], axes: tuple[str, ...], out_dims: int, std: float) -> nnx.Param:
    return declare(Parameter(shape=shape, axes=axes, std=std, matrix=out_dims))


def bias(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    return declare(Parameter(shape=shape, axes=axes, init="zeros", role="bias"))


def logits(shape: tuple[int, ...], axes: tuple[str, ...], std: float) -> nnx.Param:
    """A bias that is drawn."""
    return declare(Parameter(shape=shape, axes=axes, std=std, role="bias"))


def state(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """Zeros at first; updated by the step, not by the optimizer."""
    return declare(Parameter(shape=shape, axes=axes, init="zeros", role="state"))


def norm(width: int, axis: str, one_plus: bool) -> nnx.Param:
    return declare(Parameter(shape=(width,), axes=(axis,), init="zeros" if one_plus else "ones", role="norm"))


def table(padded: int, vocabulary: int, width: int, role: str, std: float) -> nnx.Param:
    """[V, D] with zeros below row `vocabulary`. `role` is embedding or head."""
    return declare(Parameter(shape=(padded, width), axes=("vocabulary", "embed"), std=std, matrix=1, role=role, rows=vocabulary))


def value(parameter: nnx.Param | None) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def stacked(module: Module, layers: int) -> Module:
    """The same module, every parameter declared for `layers` layers: [L, ...], logical axis "layers"."""
    graph, state = nnx.split(module)
    flat = [(path, declare(stack({"": variable.get_metadata()["spec"]}, layers)[""])) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))
