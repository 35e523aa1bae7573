"""What depends on what in a flat program, and cutting it there.

needed       the operations that given values depend on, loops narrowed to what is asked of them
upstream     the same, loops whole
reached      the values that depend on given values
narrow_loop  a loop with only what is asked of it
cut_loop     one loop into two: what is asked of it, and the rest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from jaxpar.parallel.operations import Atom, Loop, Op, Value, effectful, made, values_of


def needed(
    ops: Sequence[Op], outputs: Iterable[Atom], given: Set[Value] = frozenset(), pinned: Set[Op] = frozenset()
) -> tuple[list[Op], set[Value]]:
    """The operations that `outputs` depend on, in order, stopping at `given`, `pinned` ones besides; and every value read or asked for."""
    want = values_of(outputs)
    keep: list[Op] = []
    for op in reversed(ops):
        asked = [v for v in op.outputs if v in want and v not in given]
        inside = pinned & effectful(op.loop.body) if pinned and op.loop is not None else frozenset()
        if not asked and op not in pinned and not inside:
            continue
        if op.loop is not None:
            op = narrow_loop(op, set(asked), inside)
        elif op.name == "optimization_barrier":
            op = _narrow_barrier(op, set(asked))
        keep.append(op)
        want |= values_of(op.inputs)
    return keep[::-1], want


def _narrow_barrier(op: Op, asked: set[Value]) -> Op:
    """A barrier of those values alone that somebody reads: an order that the forward wants is no reason to compute the others again."""
    assert op.eqn is not None
    places = [n for n, v in enumerate(op.outputs) if v in asked]
    eqn = op.eqn.replace(invars=[op.eqn.invars[n] for n in places], outvars=[op.eqn.outvars[n] for n in places])
    return replace(op, inputs=tuple(op.inputs[n] for n in places), outputs=tuple(op.outputs[n] for n in places), eqn=eqn)


def upstream(ops: Sequence[Op], values: Iterable[Atom]) -> list[Op]:
    """The operations that `values` depend on, in order and as they are: a loop is not narrowed, so it is the same object however often it
    is asked for."""
    want, found = values_of(values), []
    for op in reversed(ops):
        if want & set(op.outputs):
            found.append(op)
            want |= values_of(op.inputs)
    return found[::-1]


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


def _closure(op: Op, wanted: set[Value], pinned: Set[Op] = frozenset()) -> tuple[list[Op], set[Value], list[int], list[int]]:
    """Body operations, values read, and the carries and stacked outputs that `wanted` outputs of a loop need."""
    loop, _, _, _, carried, stacked = _loop_parts(op)
    carries = {i for i, v in enumerate(carried) if v in wanted}
    ys = [i for i, v in enumerate(stacked) if v in wanted]
    while True:
        body, read = needed(loop.body, [loop.carry_out[i] for i in carries] + [loop.ys[i] for i in ys], pinned=pinned)
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


def narrow_loop(op: Op, wanted: set[Value], pinned: Set[Op] = frozenset()) -> Op:
    """The loop with only what its `wanted` outputs and `pinned` operations need: dead carries and outputs gone."""
    return _rebuild(op, *_closure(op, wanted, pinned))


def cut_loop(op: Op, wanted: set[Value]) -> tuple[Op, Op]:
    """One loop into two: the first makes `wanted`, the second the other outputs from what the first stacks up for it.

    Values that depend on the loop's constants alone are made again in the second: no weight is stacked per iteration.
    """
    first = narrow_loop(op, wanted)
    assert first.loop is not None
    loop, _, _, _, carried, stacked = _loop_parts(op)
    rest = [v for v in op.outputs if v not in set(first.outputs)]
    fixed = made(loop.body) - reached(loop.body, [*loop.carry_in, *loop.xs])
    before = (made(first.loop.body) | set(first.loop.carry_in)) - fixed
    rest_carries = [i for i, v in enumerate(carried) if v in rest]
    rest_ys = [i for i, v in enumerate(stacked) if v in rest]
    body, read = needed(loop.body, [loop.carry_out[i] for i in rest_carries] + [loop.ys[i] for i in rest_ys], given=before)
    body = [o for o in body if not set(o.outputs) <= before]
    unclosed = {v for i, v in enumerate(loop.carry_in) if v in read and i not in rest_carries} - before
    assert not unclosed, "the rest of a loop reads a carry that neither part makes"
    crossing = [
        v for v in dict.fromkeys([*first.loop.carry_in, *(v for o in first.loop.body for v in o.outputs)]) if v in read and v in before
    ]
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
