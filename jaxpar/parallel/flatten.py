"""From a traced function to a flat program and back to something that runs.

JAX's own jaxprs nest: `jit`, `remat` and custom derivatives are calls, a scan is one equation. Here every call is opened, and a scan
becomes a loop with a body of its own, so that dependence is visible to the last matmul.

    flatten            jaxpr -> operations
    merge_duplicates   what is computed twice (rematerialisation that the user asked for) is computed once
    run                evaluate operations
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from jaxpar.parallel.operations import Atom, Loop, Op, Value, acts, made

CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_lin")
)


def flatten(closed: jex.ClosedJaxpr, inputs: Sequence[Atom]) -> tuple[list[Op], list[Atom], dict[Value, Any]]:
    """Open every call of `closed` applied to `inputs`. Returns its operations, its outputs and the arrays it captured by value."""
    captured: dict[Value, Any] = {}
    ops, outputs = _flatten(closed.jaxpr, closed.consts, inputs, captured)
    return ops, outputs, captured


def _flatten(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Atom], captured: dict[Value, Any]) -> tuple[list[Op], list[Atom]]:
    env: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = value = Value(var.aval)
        captured[value] = const

    def read(atom: Any) -> Atom:
        return atom if isinstance(atom, jex.Literal) else env[atom]

    ops: list[Op] = []
    for eqn in jaxpr.eqns:
        arguments = tuple(read(atom) for atom in eqn.invars)
        if eqn.primitive.name in CALLS:
            inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            inner_ops, results = _flatten(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), arguments, captured)
            ops += inner_ops
            env.update(zip(eqn.outvars, results, strict=True))
            continue
        outputs = tuple(Value(var.aval) for var in eqn.outvars)
        loop = _open_scan(eqn, captured) if eqn.primitive.name == "scan" else None
        ops.append(Op(eqn.primitive.name, arguments, outputs, None if loop else eqn, loop))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return ops, [read(atom) for atom in jaxpr.outvars]


def _open_scan(eqn: jex.JaxprEqn, captured: dict[Value, Any]) -> Loop:
    params = eqn.params
    if "num_consts" in params:
        n_consts, n_carry = params["num_consts"], params["num_carry"]
    else:  # jax 0.12 groups the inputs instead of counting them
        n_consts, n_carry, _ = (len(part) for part in params["ft_in"].unpack())
    closed = params["jaxpr"]
    values = [Value(var.aval) for var in closed.jaxpr.invars]
    body, outputs = _flatten(closed.jaxpr, closed.consts, values, captured)
    return Loop(
        body=body,
        consts=values[:n_consts],
        carry_in=values[n_consts : n_consts + n_carry],
        xs=values[n_consts + n_carry :],
        carry_out=outputs[:n_carry],
        ys=outputs[n_carry:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )


def merge_duplicates(ops: list[Op], outputs: list[Atom]) -> tuple[list[Op], list[Atom]]:
    """Compute once what is written twice, so that the remat policy alone decides what is computed again."""
    same: dict[Value, Value] = {}
    seen: dict[Any, Op] = {}
    kept: list[Op] = []

    def resolve(atom: Atom) -> Atom:
        return same.get(atom, atom) if isinstance(atom, Value) else atom

    for op in ops:
        op = replace(op, inputs=tuple(map(resolve, op.inputs)))
        key = _fingerprint(op)
        if key in seen:
            same.update(zip(op.outputs, seen[key].outputs, strict=True))
        else:
            seen[key] = op
            kept.append(op)
    return kept, [resolve(atom) for atom in outputs]


def _fingerprint(op: Op) -> Any:
    """Equal for two operations only if they compute the same; values from outside are told apart by identity."""
    return _key(op, {})


def _key(op: Op, bound: dict[Value, int]) -> Any:
    def name(atom: Atom) -> Any:
        if isinstance(atom, Value):
            return bound.get(atom, ("outside", id(atom)))
        return "literal", str(atom.aval), str(atom.val)

    inputs = tuple(map(name, op.inputs))
    if op.loop is None:
        params = op.eqn.params  # type: ignore[union-attr]
        if acts(op.eqn):  # type: ignore[arg-type]
            return id(op)
        return op.name, inputs, str(sorted(params.items(), key=lambda item: item[0])), tuple(_constants(params.values()))
    loop = op.loop
    inside = dict(bound)
    for value in [*loop.consts, *loop.carry_in, *loop.xs, *(v for inner in loop.body for v in inner.outputs)]:
        inside[value] = len(inside)
    ends = tuple(inside.get(a, id(a)) if isinstance(a, Value) else str(a) for a in [*loop.carry_out, *loop.ys])
    body = tuple(_key(inner, inside) for inner in loop.body)
    return "scan", inputs, body, ends, len(loop.consts), len(loop.carry_in), loop.length, loop.reverse


def _constants(params: Iterable[Any]) -> Iterator[int]:
    """Arrays that jaxprs among an equation's parameters carry: they do not show in the text of the jaxpr."""
    for value in params:
        if isinstance(value, tuple | list):
            yield from _constants(value)
        yield from map(id, getattr(value, "consts", ()))


def run(ops: Sequence[Op], env: dict[Value, Any]) -> None:
    """Evaluate `ops` in order, reading and writing `env`. Equations keep the source lines they were written on."""
    for is_loop, group in itertools.groupby(ops, key=lambda op: op.loop is not None):
        if not is_loop:
            _run_straight(list(group), env)
            continue
        for op in group:
            arguments = [_read(atom, env) for atom in op.inputs]
            assert op.loop is not None
            env.update(zip(op.outputs, _run_loop(op.loop, arguments, env), strict=True))


_DEBUG_INFO = jex.DebugInfo("jaxpar.parallel.flatten", "run", None, None)


def _run_straight(ops: list[Op], env: dict[Value, Any]) -> None:
    """Operations without loops, as one jaxpr again: JAX's own evaluation keeps their source lines and contexts."""
    variables: dict[Value, jex.Var] = {}

    def name(atom: Atom, var: Any) -> Any:
        return variables.setdefault(atom, jex.Var(var.aval)) if isinstance(atom, Value) else atom

    eqns = []
    for op in ops:
        eqn: Any = op.eqn
        inputs = [name(atom, var) for atom, var in zip(op.inputs, eqn.invars, strict=True)]
        eqns.append(eqn.replace(invars=inputs, outvars=[name(atom, var) for atom, var in zip(op.outputs, eqn.outvars, strict=True)]))
    inside = made(ops)
    given = [v for v in variables if v not in inside]
    results = [v for v in variables if v in inside]
    outvars = [variables[v] for v in results]
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    jaxpr = jex.Jaxpr((), [variables[v] for v in given], outvars, eqns, effects, debug_info=_DEBUG_INFO)
    env.update(zip(results, jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))(*(env[v] for v in given)), strict=True))


def _run_loop(loop: Loop, arguments: list[Any], outside: dict[Value, Any]) -> list[Any]:
    first, second = len(loop.consts), len(loop.consts) + len(loop.carry_in)
    consts = dict(zip(loop.consts, arguments[:first], strict=True))

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        env = {**outside, **consts, **dict(zip(loop.carry_in, carry, strict=True)), **dict(zip(loop.xs, xs, strict=True))}
        run(loop.body, env)
        return [jnp.asarray(_read(a, env), c.dtype) for a, c in zip(loop.carry_out, carry, strict=True)], [
            jnp.asarray(_read(a, env)) for a in loop.ys
        ]

    carry, ys = lax.scan(body, arguments[first:second], arguments[second:], loop.length, loop.reverse, loop.unroll)
    return [*carry, *ys]


def _read(atom: Atom, env: dict[Value, Any]) -> Any:
    return env[atom] if isinstance(atom, Value) else atom.val
