"""Forward and backward of one block, traced together into one flat program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.dependence import reached
from jaxpar.parallel.flatten import flatten, merge_duplicates
from jaxpar.parallel.operations import Atom, Op, Value, values_of

Tree = Any
Block = Callable[[Tree, Any, Tree], tuple[Any, Tree]]


def is_differentiable(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


@dataclass(frozen=True, eq=False)
class Joint:
    """Every operation of a block's forward and backward, and which values go in and come out. `captured` arrays came by value."""

    ops: list[Op]
    captured: dict[Value, Any]
    params: list[Value]
    x: Value
    context: list[Value]
    dy: Value
    daux: list[Value]
    y: Atom
    aux: list[Atom]
    dx: Atom
    dparams: list[Atom]
    params_tree: Any
    aux_tree: Any


def trace(block: Block, params: Tree, x: Any, context: Tree) -> Joint:
    """Trace `block(params, x, context) -> (y, aux)` and its transpose. Arguments may be arrays, tracers or ShapeDtypeStructs.

    AssertionError when the block closes over a traced array: such a value would belong to no program that is cut from the trace.
    """
    y_type, aux_type = jax.eval_shape(block, params, x, context)
    daux_types = [leaf for leaf in jax.tree.leaves(aux_type) if is_differentiable(leaf)]

    def whole(params: Tree, x: Any, context: Tree, dy: Any, daux: list[Any]) -> Any:
        def differentiable(params: Tree, x: Any) -> Any:
            y, aux = block(params, x, context)
            leaves = jax.tree.leaves(aux)
            return (y, [leaf for leaf in leaves if is_differentiable(leaf)]), leaves

        (y, _), transpose, aux = jax.vjp(differentiable, params, x, has_aux=True)
        dparams, dx = transpose((dy, daux))
        return y, aux, dx, jax.tree.leaves(dparams)

    arguments = (params, x, context, y_type, daux_types)
    closed = jax.make_jaxpr(whole)(*arguments)
    inputs = [Value(aval) for aval in closed.in_avals]
    ops, outputs, captured = flatten(closed, inputs)
    for const in captured.values():
        assert not isinstance(const, jax.core.Tracer), "a block must get arrays through its context, not by closing over them"
    ops, outputs = merge_duplicates(ops, outputs)
    sizes = [len(jax.tree.leaves(part)) for part in arguments]
    params_in, x_in, context_in, dy_in, daux_in = _groups(inputs, sizes)
    n_aux, n_params = len(jax.tree.leaves(aux_type)), sizes[0]
    y_out, aux_out, dx_out, dparams_out = _groups(outputs, [1, n_aux, 1, n_params])
    return Joint(
        ops=ops,
        captured=captured,
        params=params_in,
        x=x_in[0],
        context=context_in,
        dy=dy_in[0],
        daux=daux_in,
        y=y_out[0],
        aux=aux_out,
        dx=dx_out[0],
        dparams=dparams_out,
        params_tree=jax.tree.structure(params),
        aux_tree=jax.tree.structure(aux_type),
    )


def _groups(items: list[Any], sizes: list[int]) -> list[list[Any]]:
    groups, start = [], 0
    for size in sizes:
        groups.append(items[start : start + size])
        start += size
    assert start == len(items)
    return groups


def weight_matmuls(op: Op, weights: set[Value]) -> int:
    """Matmuls of `op` (a loop's body included, once) that read a value of `weights`, a set of values that depend on parameters alone.

    A while's are counted where it has one, as `grouped_matmul`'s. One of several (`grouped_mlp`) stays whole, and makes its gradients in B.
    """
    if op.name == "while" and op.eqn is not None:
        body = op.eqn.params["body_jaxpr"]
        values = [Value(var.aval) for var in body.jaxpr.invars]
        given = zip(values, op.inputs[len(op.inputs) - len(values) :], strict=True)
        read = {inside for inside, outside in given if isinstance(outside, Value) and outside in weights}
        ops, _, _ = flatten(body, values)
        found = sum(weight_matmuls(o, reached(ops, read)) for o in ops)
        return found if found == 1 else 0
    if op.loop is not None:
        entering = [*op.loop.consts, *op.loop.carry_in, *op.loop.xs]
        inner = {inside for inside, outside in zip(entering, op.inputs, strict=True) if isinstance(outside, Value) and outside in weights}
        varying = [v for v in entering if v not in inner]
        only = reached(op.loop.body, inner) - reached(op.loop.body, varying)
        return sum(weight_matmuls(o, only) for o in op.loop.body)
    return int(op.name == "dot_general" and bool(values_of(op.inputs) & weights))
