"""A traced function as one flat list of operations that can be cut anywhere: the material `split.py` works on.

JAX's own jaxprs nest: `jit`, `remat` and custom derivatives are calls, a scan is one equation. Here every call is opened and a scan becomes a
`Loop` whose body is again a flat list, so that dependence is visible to the last matmul and a loop can be cut in two like anything else.

    Value        what an operation reads or writes; identity is its name
    Op           one operation: inputs, outputs and either a JAX equation or a Loop
    Loop         a scan: its body and how values enter, are carried and leave
    flatten      jaxpr -> [Op]
    merge_duplicates   what is computed twice (rematerialisation that the user asked for) is computed once
    needed       the operations that given values depend on, loops narrowed to what is asked of them
    reached      the values that depend on given values
    cut_loop     one loop into two: what is asked of it, and the rest
    run          evaluate
    matmul_flops, count
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex

CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_lin")
)
# Operations that only rename or re-type what they read: never worth keeping, free to repeat. A widening cast is among them.
VIEWS = frozenset(("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "copy", "pcast", "pvary", "name", "convert_element_type"))


class Value:
    """The result of an operation, or an input. `aval` holds shape, dtype and the axes it varies over."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


Atom = Value | jex.Literal


@dataclass(frozen=True, eq=False)
class Loop:
    """`lax.scan`: `consts` enter every iteration whole, `carry_in` becomes `carry_out`, `xs` are sliced and `ys` stacked along dim 0."""

    body: list[Op]
    consts: list[Value]
    carry_in: list[Value]
    xs: list[Value]
    carry_out: list[Atom]
    ys: list[Atom]
    length: int
    reverse: bool
    unroll: int


@dataclass(frozen=True, eq=False)
class Op:
    name: str
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    eqn: jex.JaxprEqn | None = None
    loop: Loop | None = None


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
    inputs = tuple(id(a) if isinstance(a, Value) else ("literal", str(a.aval), str(a.val)) for a in op.inputs)
    if op.eqn is not None:
        return op.name, inputs, str(sorted(op.eqn.params.items(), key=lambda item: item[0]))
    loop = op.loop
    assert loop is not None
    names = {v: n for n, v in enumerate([*loop.consts, *loop.carry_in, *loop.xs])}

    def name(atom: Atom) -> Any:
        return names.setdefault(atom, len(names)) if isinstance(atom, Value) else ("literal", str(atom.aval), str(atom.val))

    body = tuple(
        (inner.name, tuple(map(name, inner.inputs)), tuple(map(name, inner.outputs)), str(inner.eqn and inner.eqn.params))
        if inner.loop is None
        else id(inner)  # a loop within a loop is compared by identity only
        for inner in loop.body
    )
    ends = tuple(map(name, [*loop.carry_out, *loop.ys]))
    return "scan", inputs, body, ends, len(loop.consts), len(loop.carry_in), loop.length, loop.reverse


def values_of(atoms: Iterable[Atom]) -> set[Value]:
    return {a for a in atoms if isinstance(a, Value)}


def made(ops: Iterable[Op]) -> set[Value]:
    return {v for op in ops for v in op.outputs}


def needed(ops: Sequence[Op], outputs: Iterable[Atom], given: set[Value] = frozenset()) -> tuple[list[Op], set[Value]]:  # type: ignore[assignment]
    """The operations that `outputs` depend on, in order, stopping at `given`; and every value read or asked for."""
    want, keep = values_of(outputs), []
    for op in reversed(ops):
        asked = [v for v in op.outputs if v in want and v not in given]
        if not asked:
            continue
        if op.loop is not None:
            op = narrow_loop(op, set(asked))
        keep.append(op)
        want |= values_of(op.inputs)
    return keep[::-1], want


def reached(ops: Sequence[Op], sources: Iterable[Value]) -> set[Value]:
    """Everything that depends on `sources`, themselves included."""
    seen = set(sources)
    for op in ops:
        if values_of(op.inputs) & seen:
            seen |= set(op.outputs)
    return seen


def _loop_parts(op: Op) -> tuple[Loop, Sequence[Atom], Sequence[Atom], Sequence[Atom], Sequence[Value], Sequence[Value]]:
    loop = op.loop
    assert loop is not None
    first, second = len(loop.consts), len(loop.consts) + len(loop.carry_in)
    carries = len(loop.carry_in)
    return loop, op.inputs[:first], op.inputs[first:second], op.inputs[second:], op.outputs[:carries], op.outputs[carries:]


def _closure(op: Op, wanted: set[Value]) -> tuple[list[Op], set[Value], list[int], list[int]]:
    """Body operations, values read, and the carries and stacked outputs that `wanted` outputs of a loop need."""
    loop, _, _, _, carried, stacked = _loop_parts(op)
    carries = {i for i, v in enumerate(carried) if v in wanted}
    ys = [i for i, v in enumerate(stacked) if v in wanted]
    while True:
        body, read = needed(loop.body, [loop.carry_out[i] for i in carries] + [loop.ys[i] for i in ys])
        more = {i for i, v in enumerate(loop.carry_in) if v in read} - carries
        if not more:
            return body, read, sorted(carries), ys
        carries |= more


def _rebuild(op: Op, body: list[Op], read: set[Value], carries: list[int], ys: list[int]) -> Op:
    loop, consts, init, xs, carried, stacked = _loop_parts(op)
    use_consts = [i for i, v in enumerate(loop.consts) if v in read]
    use_xs = [i for i, v in enumerate(loop.xs) if v in read]
    inner = replace(
        loop,
        body=body,
        consts=[loop.consts[i] for i in use_consts],
        carry_in=[loop.carry_in[i] for i in carries],
        xs=[loop.xs[i] for i in use_xs],
        carry_out=[loop.carry_out[i] for i in carries],
        ys=[loop.ys[i] for i in ys],
    )
    inputs = (*(consts[i] for i in use_consts), *(init[i] for i in carries), *(xs[i] for i in use_xs))
    return Op("scan", inputs, (*(carried[i] for i in carries), *(stacked[i] for i in ys)), None, inner)


def narrow_loop(op: Op, wanted: set[Value]) -> Op:
    """The loop with only what its `wanted` outputs need: dead carries and outputs gone."""
    return _rebuild(op, *_closure(op, wanted))


def cut_loop(op: Op, wanted: set[Value]) -> tuple[Op, Op]:
    """One loop into two: the first makes `wanted`, the second the other outputs from what the first stacks up for it.

    Values that depend on the loop's constants alone are made again in the second: no weight is stacked per iteration.
    """
    first = narrow_loop(op, wanted)
    assert first.loop is not None
    loop, consts, init, xs, carried, stacked = _loop_parts(op)
    rest = [v for v in op.outputs if v not in set(first.outputs)]
    fixed = made(loop.body) - reached(loop.body, [*loop.carry_in, *loop.xs])
    before = (made(first.loop.body) | set(first.loop.carry_in)) - fixed
    rest_carries = [i for i, v in enumerate(carried) if v in rest]
    rest_ys = [i for i, v in enumerate(stacked) if v in rest]
    body, read = needed(loop.body, [loop.carry_out[i] for i in rest_carries] + [loop.ys[i] for i in rest_ys], given=before)
    body = [o for o in body if not set(o.outputs) <= before]
    unclosed = {v for i, v in enumerate(loop.carry_in) if v in read and i not in rest_carries} - before
    assert not unclosed, "the rest of a loop reads a carry that neither part makes"
    crossing = [v for v in dict.fromkeys([*first.loop.carry_in, *(v for o in first.loop.body for v in o.outputs)]) if v in read and v in before]
    outer = [Value(_StackedAval((loop.length, *v.aval.shape), v.aval.dtype)) for v in crossing]
    first = replace(first, outputs=(*first.outputs, *outer), loop=replace(first.loop, ys=[*first.loop.ys, *crossing]))
    second = _rebuild(op, body, read, rest_carries, rest_ys)
    assert second.loop is not None
    second = replace(second, inputs=(*second.inputs, *outer), loop=replace(second.loop, xs=[*second.loop.xs, *crossing]))
    return first, second


@dataclass(frozen=True)
class _StackedAval:
    """Shape and dtype of a value that a cut loop stacks; no trace has seen it yet."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def run(ops: Sequence[Op], env: dict[Value, Any]) -> None:
    """Evaluate `ops` in order, reading and writing `env`. Equations keep the source lines they were written on."""
    for is_loop, group in itertools.groupby(ops, key=lambda op: op.loop is not None):
        if not is_loop:
            _run_straight(list(group), env)
            continue
        for op in group:
            arguments = [a.val if isinstance(a, jex.Literal) else env[a] for a in op.inputs]
            env.update(zip(op.outputs, _run_loop(op.loop, arguments, env), strict=True))


_DEBUG_INFO = jex.DebugInfo("jaxpar.parallel.flatten", "run", None, None)


def _run_straight(ops: list[Op], env: dict[Value, Any]) -> None:
    """Operations without loops, as one jaxpr again: JAX's own evaluation keeps their source lines and contexts."""
    variables: dict[Value, jex.Var] = {}

    def name(atom: Atom, var: Any) -> Any:
        return atom if isinstance(atom, jex.Literal) else variables.setdefault(atom, jex.Var(var.aval))

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
        read: Callable[[Atom], Any] = lambda atom: atom.val if isinstance(atom, jex.Literal) else env[atom]
        return [_as(read(a), c) for a, c in zip(loop.carry_out, carry, strict=True)], [jax.numpy.asarray(read(a)) for a in loop.ys]

    carry, ys = lax.scan(body, arguments[first:second], arguments[second:], loop.length, loop.reverse, loop.unroll)
    return [*carry, *ys]


def _as(value: Any, like: Any) -> Any:
    return jax.numpy.asarray(value, like.dtype)


def matmul_flops(ops: Iterable[Op]) -> int:
    """Multiply-adds of every matmul times two, loops multiplied by their length."""
    total = 0
    for op in ops:
        if op.loop is not None:
            total += op.loop.length * matmul_flops(op.loop.body)
        elif op.name == "dot_general":
            (contract, _), _ = op.eqn.params["dimension_numbers"]  # type: ignore[union-attr]
            shape = op.inputs[0].aval.shape
            total += 2 * op.outputs[0].aval.size * math.prod(shape[d] for d in contract)
    return total


def count(ops: Iterable[Op], name: str) -> int:
    """How many operations called `name` stand in the text of `ops`, loop bodies included once."""
    return sum(count(op.loop.body, name) if op.loop is not None else op.name == name for op in ops)
