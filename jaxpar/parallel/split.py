"""One block cut into the programs that training is made of: F (forward), B (input gradient), W (weight gradients) and BW (both at once).

The block's forward and backward are traced *together* into one flat list of operations (`flatten.py`) and cut by dependence:

    F    what the output and the values kept for later need
    B    what the input gradient needs
    W    the rest of the backward: one matmul for each weight matmul of the forward, and no weight is read

What is kept from F is the remat policy, a set of values; whatever else the backward reads, it computes again from those. Nothing that
depends on parameters alone is ever kept, casts included, nor anything that depends on context alone: both are computed again where they
are read. Operations that only re-type (a reshape, a widening cast) and all-gathers are looked through: their operand is kept in their
place.

A scan inside the block (a chunked MLP) is cut like everything else; `fused_loops=True` leaves the backward of such loops whole, in B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel.dependence import cut_loop, needed, reached
from jaxpar.parallel.flatten import run
from jaxpar.parallel.interleave import run_together
from jaxpar.parallel.joint import Block, Joint, Tree, trace, weight_matmuls
from jaxpar.parallel.operations import Atom, Op, Value, count, effectful, made, matmul_flops, values_of
from jaxpar.parallel.remat import Policy, kept, root

READS_A_WEIGHT = (
    "W reads a weight: a parameter enters the block other than linearly (a product of parameters, the tanh or exp of one, a loss of "
    "parameters alone), or a loop that carries a state stands inside another"
)


@dataclass(frozen=True)
class Facts:
    """What was found while cutting. FLOPs are of matmuls; sizes in elements of one device."""

    flops_forward: int
    flops_backward_input: int
    flops_backward_weight: int
    flops_backward: int
    weight_matmuls_forward: int
    matmuls_backward_weight: int
    weight_reads_backward_weight: int
    saved: tuple[tuple[tuple[int, ...], str], ...]
    deferred: tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True, eq=False)
class Cut:
    """The programs of one block. `params` and `context` are the block's own; `saved` and `deferred` are tuples of arrays.

    forward(params, x, context) -> y, aux, saved
    backward_input(params, saved, context, dy, daux) -> dx, deferred
    backward_weight(saved, deferred, context) -> dparams
    backward(params, saved, context, dy, daux) -> dx, dparams
    forward_parts, backward_parts    `forward` and `backward` of several parts of a batch, in an order that lets one part's collectives run
                                     behind another's matmuls (`interleave.py`): sequences for x, saved, context, dy; a list of results,
                                     and `due`, values from outside that shall arrive meanwhile

    `daux` covers the floating-point leaves of `aux` in order; counts have no gradient.
    """

    forward: Callable[..., tuple[Any, Tree, tuple[Any, ...]]]
    backward_input: Callable[..., tuple[Any, tuple[Any, ...]]]
    backward_weight: Callable[..., Tree]
    backward: Callable[..., tuple[Any, Tree]]
    forward_parts: Callable[..., tuple[list[tuple[Any, Tree, tuple[Any, ...]]], Tree]]
    backward_parts: Callable[..., tuple[list[tuple[Any, Tree]], Tree]]
    saved_for_weight: tuple[int, ...]
    facts: Facts

    def check_split(self) -> None:
        """Assert what a pipeline relies on. AssertionError says which block property failed."""
        facts = self.facts
        assert facts.weight_reads_backward_weight == 0, READS_A_WEIGHT
        assert facts.matmuls_backward_weight == facts.weight_matmuls_forward, (
            f"W has {facts.matmuls_backward_weight} matmuls for {facts.weight_matmuls_forward} weights: "
            "a call in the block could not be opened"
        )
        assert facts.flops_backward_input + facts.flops_backward_weight == facts.flops_backward, "B + W is not BW"


def cut(block: Block, params: Tree, x: Any, context: Tree, keep: Policy, *, fused_loops: bool = False) -> Cut:
    """Trace `block(params, x, context) -> (y, aux)` once and cut it. Arguments may be arrays, tracers or ShapeDtypeStructs.

    Runs anywhere, also inside `shard_map`: collectives are operations like any other and the types say over which axes values vary.
    """
    joint = trace(block, params, x, context)
    ops, cotangents = joint.ops, [joint.dy, *joint.daux]
    if not fused_loops:
        ops = _separate_loops(ops, reached(ops, cotangents), joint.dx)
    late = reached(ops, cotangents)
    early = reached(ops, [joint.x]) - late
    weights = reached(ops, joint.params) - early - late

    in_b = made(needed(ops, [joint.dx])[0]) & late
    only_w, _ = needed([op for op in ops if set(op.outputs) & late and not set(op.outputs) <= in_b], joint.dparams)
    weight_inputs = {v for op in only_w for v in values_of(op.inputs)} & early
    multiplied = {v for op in only_w if count([op], "dot_general") for v in values_of(op.inputs)}
    chosen = kept(keep, ops, early, late, weights, multiplied) | {joint.x}
    remaining = [op for op in ops if not set(op.outputs) <= chosen]

    # Made wherever they are read: what depends on parameters or context alone, and re-typings of kept values.
    maker = {v: op for op in ops for v in op.outputs}
    views = {v for v in made(remaining) & early if root(v, maker, early, through_gathers=True) in chosen}
    anywhere = made(remaining) - early - late | views
    again = weight_inputs - chosen - anywhere  # what W reads and nobody kept: B computes it again, or W would read weights
    started = made(needed(remaining, [joint.dx, *again], chosen)[0])
    by_b = {v for op in remaining if set(op.outputs) & started for v in op.outputs}  # a loop that B runs can stack up more for W
    handed = ({*cotangents} | by_b) - anywhere

    w_ops, w_reads = needed([op for op in remaining if not set(op.outputs) <= handed], joint.dparams, chosen | handed)
    bw_ops, bw_reads = needed(remaining, [joint.dx, *joint.dparams], chosen)
    order = [joint.x, *cotangents, *(v for op in ops for v in op.outputs)]
    saved = [v for v in order if v in chosen & bw_reads]
    deferred = [v for v in order if v in handed & (w_reads | values_of(joint.dparams))]
    b_ops, _ = needed(remaining, [joint.dx, *deferred], chosen)
    effects = effectful(op for op in ops if not values_of(op.inputs) & late)  # such as a debugging print
    f_ops, _ = needed([op for op in ops if not set(op.outputs) & late], [joint.y, *joint.aux, *saved], pinned=effects)

    facts = Facts(
        flops_forward=matmul_flops(f_ops),
        flops_backward_input=matmul_flops(b_ops),
        flops_backward_weight=matmul_flops(w_ops),
        flops_backward=matmul_flops(bw_ops),
        weight_matmuls_forward=sum(weight_matmuls(op, weights) for op in f_ops),
        matmuls_backward_weight=count(w_ops, "dot_general"),
        weight_reads_backward_weight=len((weights | set(joint.params)) & (w_reads | made(w_ops))),
        saved=_describe(saved),
        deferred=_describe(deferred),
    )
    return _programs(joint, f_ops, b_ops, w_ops, bw_ops, saved, deferred, w_reads, facts)


def _describe(values: list[Value]) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((tuple(v.aval.shape), str(v.aval.dtype)) for v in values)


def _separate_loops(ops: list[Op], late: set[Value], dx: Atom) -> list[Op]:
    """Cut every backward loop that makes both what the input gradient needs and what only weight gradients need."""
    done: list[Op] = []
    for place, op in enumerate(ops):
        if op.loop is None:
            done.append(op)
            continue
        _, wanted = needed(ops[place + 1 :], [dx])
        asked = {v for v in op.outputs if v in wanted or v is dx}
        if set(op.outputs) & late and asked and asked != set(op.outputs):
            first, second = cut_loop(op, asked)
            done += [first, second] if set(second.outputs) else [first]
        else:
            done.append(op)
    return done


def _programs(
    joint: Joint,
    f_ops: list[Op],
    b_ops: list[Op],
    w_ops: list[Op],
    bw_ops: list[Op],
    saved: list[Value],
    deferred: list[Value],
    w_reads: set[Value],
    facts: Facts,
) -> Cut:
    leaves, dparams = jax.tree.leaves, joint.params_tree.unflatten

    def environment(inputs: list[Value], arguments: list[Any]) -> dict[Value, Any]:
        return dict(joint.captured) | dict(zip(inputs, arguments, strict=True))

    def read(env: dict[Value, Any], outputs: list[Any]) -> list[Any]:
        return [env[a] if isinstance(a, Value) else jnp.asarray(a.val, a.aval.dtype) for a in outputs]

    def forward_parts(
        params: Tree, xs: Sequence[Any], contexts: Sequence[Tree], due: Tree = None
    ) -> tuple[list[tuple[Any, Tree, tuple[Any, ...]]], Tree]:
        inputs = [*joint.params, joint.x, *joint.context]
        envs = [environment(inputs, [*leaves(params), x, *leaves(c)]) for x, c in zip(xs, contexts, strict=True)]
        due = run_together(f_ops, envs, [joint.y], {joint.x}, due)
        results = [read(env, [joint.y, *joint.aux, *saved]) for env in envs]
        count = len(joint.aux)
        return [(y, joint.aux_tree.unflatten(rest[:count]), tuple(rest[count:])) for y, *rest in results], due

    def forward(params: Tree, x: Any, context: Tree) -> tuple[Any, Tree, tuple[Any, ...]]:
        return forward_parts(params, [x], [context])[0][0]

    backward_inputs = [*joint.params, *saved, *joint.context, joint.dy, *joint.daux]

    def backward_input(params: Tree, saved_values: tuple[Any, ...], context: Tree, dy: Any, daux: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        env = environment(backward_inputs, [*leaves(params), *saved_values, *leaves(context), dy, *daux])
        run(b_ops, env)
        dx, *rest = read(env, [joint.dx, *deferred])
        return dx, tuple(rest)

    for_weight = tuple(n for n, v in enumerate(saved) if v in w_reads)

    def backward_weight(saved_values: tuple[Any, ...], deferred_values: tuple[Any, ...], context: Tree) -> Tree:
        assert facts.weight_reads_backward_weight == 0, READS_A_WEIGHT
        inputs = [*(saved[n] for n in for_weight), *deferred, *joint.context]
        env = environment(inputs, [*(saved_values[n] for n in for_weight), *deferred_values, *leaves(context)])
        run(w_ops, env)
        return dparams(read(env, joint.dparams))

    def backward_parts(
        params: Tree,
        saved_values: Sequence[tuple[Any, ...]],
        contexts: Sequence[Tree],
        dys: Sequence[Any],
        daux: list[Any],
        due: Tree = None,
    ) -> tuple[list[tuple[Any, Tree]], Tree]:
        parts = zip(saved_values, contexts, dys, strict=True)
        envs = [environment(backward_inputs, [*leaves(params), *kept, *leaves(c), dy, *daux]) for kept, c, dy in parts]
        due = run_together(bw_ops, envs, [joint.dx], {*saved, joint.dy}, due)
        results = [read(env, [joint.dx, *joint.dparams]) for env in envs]
        return [(dx, dparams(rest)) for dx, *rest in results], due

    def backward(params: Tree, saved_values: tuple[Any, ...], context: Tree, dy: Any, daux: list[Any]) -> tuple[Any, Tree]:
        return backward_parts(params, [saved_values], [context], [dy], daux)[0][0]

    return Cut(forward, backward_input, backward_weight, backward, forward_parts, backward_parts, for_weight, facts)
