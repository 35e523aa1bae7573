"""A program as one flat list of operations, in which a scan is a loop with a body of operations: what can be cut anywhere.

Value, Atom     what an operation reads or writes; a Value's identity is its name, an Atom may also be a literal
Op, Loop        one operation: a JAX equation, or a scan opened up
values_of, made, acts, effectful, matmul_flops, count
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.extend import core as jex

# Operations that only rename or re-type what they read: never worth keeping, free to repeat. A widening cast is among them.
VIEWS = frozenset(
    ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "copy", "pcast", "pvary", "name", "convert_element_type")
)


class Value:
    """The result of an operation, or an input. `aval` holds shape, dtype and the axes it varies over."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


Atom: TypeAlias = Value | jex.Literal


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


def values_of(atoms: Iterable[Atom]) -> set[Value]:
    return {a for a in atoms if isinstance(a, Value)}


def made(ops: Iterable[Op]) -> set[Value]:
    return {v for op in ops for v in op.outputs}


def acts(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation does more than compute, such as a debugging print. The effect of most collectives only names their axis."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def effectful(ops: Iterable[Op]) -> set[Op]:
    """Equations that do more than compute, such as a debugging print, those in loop bodies included."""
    found: set[Op] = set()
    for op in ops:
        if op.loop is not None:
            found |= effectful(op.loop.body)
        elif op.eqn is not None and acts(op.eqn):
            found.add(op)
    return found


def matmul_flops(ops: Iterable[Op]) -> int:
    """Multiply-adds of every matmul times two, loops multiplied by their length, a while by `most_turns`."""
    total = 0
    for op in ops:
        if op.loop is not None:
            total += op.loop.length * matmul_flops(op.loop.body)
        elif op.name == "while" and op.eqn is not None:
            total += most_turns(op.eqn) * _turn_flops(op.eqn.params["body_jaxpr"].jaxpr)
        elif op.name == "dot_general":
            total += _dot_flops(op.eqn)
    return total


def most_turns(eqn: Any) -> int:
    """Of a while: the constant that its counter is compared with, as experts' loops over blocks of rows have beside another condition;
    1 where there is none, for nobody says its length."""
    compared = [inner.invars[1] for inner in eqn.params["cond_jaxpr"].jaxpr.eqns if inner.primitive.name == "lt"]
    return min((int(atom.val) for atom in compared if isinstance(atom, jex.Literal)), default=1)


def _dot_flops(eqn: Any) -> int:
    (contract, _), _ = eqn.params["dimension_numbers"]
    return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contract)


def _turn_flops(jaxpr: Any) -> int:
    """Of the matmuls that stand in a jaxpr, calls included."""
    total = 0
    for eqn in jaxpr.eqns:
        total += _dot_flops(eqn) if eqn.primitive.name == "dot_general" else 0
        total += sum(map(_turn_flops, _inside(eqn)))
    return total


def count(ops: Iterable[Op], name: str) -> int:
    """How many operations called `name` stand in the text of `ops`, loop bodies included once."""
    total = 0
    for op in ops:
        if op.loop is not None:
            total += count(op.loop.body, name)
        elif op.name == "while" and op.eqn is not None:
            total += _named(op.eqn.params["body_jaxpr"].jaxpr, name)
        else:
            total += op.name == name
    return total


def _named(jaxpr: Any, name: str) -> int:
    """Of a jaxpr's equations, those in calls included."""
    return sum((eqn.primitive.name == name) + sum(_named(inner, name) for inner in _inside(eqn)) for eqn in jaxpr.eqns)


def _inside(eqn: Any) -> list[Any]:
    found = [getattr(inner, "jaxpr", inner) for inner in eqn.params.values()]
    return [inner for inner in found if hasattr(inner, "eqns")]
