"""Several parts of a batch through one flat program, in an order that lets one part's collectives run behind another's matmuls.

    run_together   evaluate operations for every part, stage by stage
    stages         which stage each heavy operation belongs to

A stage is the matmuls between two exchanges over the mesh: attention's, or the MLP's. Left alone, XLA's scheduler works backwards and
greedily, knows nothing of how long fused attention takes, and leaves half of the exchanges with nothing behind them. So the order of the
stages is written into the program: part 0, part 1, then part 0 again, with an optimization barrier between neighbours. What a stage
sends leaves when the other part's stage starts, and has arrived when that one ends:

    part 0   stage 1 | leave, enter | stage 2      | leave, enter
    part 1           | stage 1      | leave, enter | stage 2

Where a part leaves one block and enters the next, two collectives follow each other; a second barrier halfway through the other part's
stage gives each its half. Operations that the output does not need (gradients of weights) are in no stage: they fill what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpar.parallel.collectives import barrier
from jaxpar.parallel.dependence import reached, upstream
from jaxpar.parallel.flatten import run
from jaxpar.parallel.operations import Atom, Op, Value, made, matmul_flops, values_of

EXCHANGES = frozenset(("all_gather", "reduce_scatter", "psum", "psum_invariant", "ppermute", "all_to_all", "ragged_all_to_all"))
Env = dict[Value, Any]


def flops(op: Op) -> float:
    """Of matmuls and of fused attention: what an exchange can hide behind."""
    if op.name.startswith("dot_product_attention"):
        query, key = (atom.aval.shape for atom in op.inputs[:2])
        return (2 if op.name.endswith("fwd") else 5) * math.prod(query) * key[1]
    return matmul_flops([op])


def stages(chain: Sequence[Op]) -> dict[Op, int]:
    """The stage of each heavy operation of `chain`, as late as its readers allow; the first is 0.

    Late, because what comes in from the layer above has to be sent before it can be used, and meanwhile the forward is computed again.
    """
    late: dict[Value, tuple[int, bool]] = {}  # (stage, whether an exchange of the stage's results has begun) that may read the value
    found: dict[Op, int] = {}
    for op in reversed(chain):
        stage, sent = min((late[v] for v in op.outputs if v in late), default=(0, True))
        if flops(op):
            found[op], sent = stage, False
        elif op.name in EXCHANGES and not sent:
            stage, sent = stage - 1, True
        for v in values_of(op.inputs):
            late[v] = min(late.get(v, (stage, sent)), (stage, sent))
    first = min(found.values(), default=0)
    return {op: stage - first for op, stage in found.items()}


def run_together(ops: Sequence[Op], envs: Sequence[Env], results: Iterable[Atom], entering: set[Value], due: Any = None) -> Any:
    """Evaluate `ops` in every environment, those that `results` need in the order of their stages. `entering`: the activations and
    gradients that come in. All inputs of `ops` are in the environments; so are all outputs afterwards.

    `due`, a tree of values from outside such as the next layer's weights, comes back as it was, tied to a single part (`_run_alone`).
    """
    if len(envs) == 1:
        return _run_alone(ops, envs[0], results, entering, due)
    together = _Together(upstream(ops, results), entering)
    before: _Part | None = None
    parts = [_Part(env, place == 0) for place, env in enumerate(envs)]
    for number in range(together.length):
        for part in parts:
            together.run_stage(part, number, before)
            before = part
    together.finish(parts)
    for part in parts:
        run([op for op in ops if op not in part.done], part.env)
    return due


def _run_alone(ops: Sequence[Op], env: Env, results: Iterable[Atom], entering: set[Value], due: Any) -> Any:
    """Evaluate `ops` for a batch in one part. `due` has arrived when the last matmul that `results` need begins, or where that is a loop of
    them (experts'), when it ends: a loop takes most of the layer's time, and nothing can arrive in the middle of it.

    Where a layer sends activations of its own, XLA would put both transfers beside each other at the layer's end, with no matmul behind
    either. Where it sends none, nothing is tied: weights may take as long as the layer.
    """
    chain = upstream(ops, results)
    last = next((op for op in reversed(chain) if flops(op)), None)
    if due is None or last is None or not any(op.name in EXCHANGES for op in chain):
        run(ops, env)
        return due
    first, tied = upstream(ops, last.inputs), values_of(last.inputs)
    if last.name == "while":
        first, tied = upstream(ops, last.outputs), set(last.outputs)
    run(first, env)
    inputs = [v for v in env if v in tied & reached(first, entering)]
    due, values = barrier((due, [env[v] for v in inputs]))
    env.update(zip(inputs, values, strict=True))
    done = set(first)
    run([op for op in ops if op not in done], env)
    return due


class _Part:
    """One part's values, what of the program it has done, and what its last stage made that goes out."""

    def __init__(self, env: Env, first: bool) -> None:
        self.env, self.first, self.done = env, first, set[Op]()
        self.sending: set[Op] = set()
        self.leaving: set[Value] = set()


class _Together:
    """The operations of `chain`, all of which lie between the activations that enter and a result, by stage and exchange.

    stage    of each heavy operation
    after    of everything else that `entering` reaches: (the last stage it depends on, how many exchanges lie between)
    arrived  values with such an exchange behind them
    moving   values that `entering` reaches: what a barrier may hold back
    """

    def __init__(self, chain: Sequence[Op], entering: set[Value]) -> None:
        self.chain, self.stage = chain, stages(chain)
        self.length = max(self.stage.values(), default=-1) + 1
        self.arrived: set[Value] = set()
        depth = dict.fromkeys(entering, (-1, 0))
        self.after: dict[Op, tuple[int, int]] = {}
        for op in chain:
            known = [depth[v] for v in values_of(op.inputs) if v in depth]
            if not known:
                continue
            stage, sent = max(known)
            stage, sent = (self.stage[op], 0) if op in self.stage else (stage, sent + (op.name in EXCHANGES))
            depth.update(dict.fromkeys(op.outputs, (stage, sent)))
            self.after[op] = stage, sent
            if sent:
                self.arrived |= set(op.outputs)
        self.moving = set(depth)

    def exchanges(self, stage: int, number: int) -> set[Op]:
        """The first, second, ... exchanges after a stage; -1 for those that need no matmul of this layer."""
        return {op for op, place in self.after.items() if place == (stage, number) and op.name in EXCHANGES}

    def run(self, ops: Sequence[Op], part: _Part) -> None:
        run(ops, part.env)
        part.done |= set(ops)

    def make(self, values: Iterable[Atom], part: _Part) -> None:
        self.run([op for op in upstream(self.chain, values) if op not in part.done], part)

    def run_stage(self, part: _Part, number: int, before: _Part | None) -> None:
        """One stage of one part, once the stage before has ended and what it sends is on its way."""
        heavy = [op for op in self.chain if self.stage.get(op) == number]
        ops = [op for op in upstream(self.chain, made(heavy)) if op not in part.done]
        own = set[Value]()
        for op in ops:
            own |= set(op.outputs) if op in heavy or values_of(op.inputs) & own else set()
        self.run([op for op in ops if not set(op.outputs) & own], part)
        if before is not None:
            self.tie(before, values_of(a for op in heavy for a in op.inputs) & self.arrived - own, part)
        first, second = _halves([op for op in ops if set(op.outputs) & own])
        self.run(first, part)
        middle = values_of(second[0].inputs) & self.moving if second else set()
        if before is not None:
            self.halfway(before, middle, part)
        self.run(second, part)
        part.sending = self.exchanges(number, 1) - part.done
        if number == 0 and not part.first:
            part.sending |= self.exchanges(-1, 1) - part.done
        part.leaving = values_of(a for op in part.sending for a in op.inputs)
        self.make(part.leaving, part)

    def tie(self, before: _Part, inputs: set[Value], part: _Part) -> None:
        """A stage begins when the one before has ended, and what that one sends leaves no earlier than this one begins."""
        prompt = set[Value]()
        if before.first:
            prompt = made(self.exchanges(-1, 1) - before.done)
            self.make(prompt, before)
        _barrier(before.env, before.leaving | prompt, part.env, inputs)

    def halfway(self, before: _Part, inputs: set[Value], part: _Part) -> None:
        """Of two exchanges in a row the first has arrived, and the second leaves, at half of this stage."""
        arriving = made(before.sending)
        self.make(arriving, before)
        _barrier(before.env, arriving, part.env, inputs)

    def finish(self, parts: Sequence[_Part]) -> None:
        """What a part sends at the end has arrived when the next one's last stage ends."""
        for before, part in zip(parts, parts[1:], strict=False):
            arriving = made(before.sending)
            self.make(arriving, before)
            _barrier(before.env, arriving, part.env, part.leaving)


def _halves(ops: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """Cut where half of the FLOPs are done, before a heavy operation."""
    total, done = sum(map(flops, ops)), 0.0
    for place, op in enumerate(ops):
        if flops(op) and done >= total / 2:
            return list(ops[:place]), list(ops[place:])
        done += flops(op)
    return list(ops), []


def _barrier(one: Env, ones: set[Value], other: Env, others: set[Value]) -> None:
    """Each of these values of two parts exists only when all do. (An all-reduce's result varies over fewer axes and stays out.)"""
    places = [(env, v) for env, values in ((one, ones), (other, others)) for v in env if v in values]
    if ones and others:
        for (env, v), value in zip(places, barrier([env[v] for env, v in places]), strict=True):
            env[v] = value
