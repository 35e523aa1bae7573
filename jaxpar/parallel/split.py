"""One block cut into the programs that training is made of: F (forward), B (input gradient), W (weight gradients) and BW (both at once).

The block's forward and backward are traced *together* into one flat list of operations (`flatten.py`) and cut by dependence:

    F    what the output and the values kept for later need
    B    what the input gradient needs
    W    the rest of the backward: one matmul for each weight matmul of the forward, and no weight is read

What is kept from F is the remat policy, a set of values; whatever else the backward reads, it computes again from those. Nothing that depends
on parameters alone is ever kept, casts included, nor anything that depends on context alone: both are computed again where they are read.
Operations that only re-type (a reshape, a widening cast) and all-gathers are looked through: their operand is kept in their place.

A scan inside the block (a chunked MLP) is cut like everything else; `fused_loops=True` leaves the backward of such loops whole, in B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel import flatten as flat
from jaxpar.parallel.flatten import Atom, Op, Value, values_of

Tree = Any


@dataclass(frozen=True)
class Policy:
    """Which values F keeps for the backward, besides the block's input."""

    everything: bool = False
    matmuls: bool = False  # outputs of matmuls with a weight
    weight_inputs: bool = False  # what W multiplies
    names: frozenset[str] = frozenset()  # values marked with jax.ad_checkpoint.checkpoint_name


_ATTENTION = frozenset(("attention_out", "attention_lse"))
POLICIES = {
    "none": Policy(everything=True),
    "matmuls": Policy(matmuls=True, weight_inputs=True, names=_ATTENTION),
    "outputs": Policy(matmuls=True, names=_ATTENTION),
    "attention": Policy(names=_ATTENTION),
    "block": Policy(),
}


def policy(name: str) -> Policy:
    """The remat policy called `name`. ValueError for an unknown one."""
    if name not in POLICIES:
        raise ValueError(f"train.remat: {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]


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

    `daux` covers the floating-point leaves of `aux` in order; counts have no gradient.
    """

    forward: Callable[..., tuple[Any, Tree, tuple[Any, ...]]]
    backward_input: Callable[..., tuple[Any, tuple[Any, ...]]]
    backward_weight: Callable[..., Tree]
    backward: Callable[..., tuple[Any, Tree]]
    saved_for_weight: tuple[int, ...]
    facts: Facts

    def check_split(self) -> None:
        """Assert what a pipeline relies on. AssertionError says which block property failed."""
        facts = self.facts
        assert facts.weight_reads_backward_weight == 0, "W reads a weight: the block multiplies parameters with each other"
        assert facts.matmuls_backward_weight == facts.weight_matmuls_forward, (
            f"W has {facts.matmuls_backward_weight} matmuls for {facts.weight_matmuls_forward} weights: a call in the block could not be opened"
        )
        assert facts.flops_backward_input + facts.flops_backward_weight == facts.flops_backward, "B + W is not BW"


def is_differentiable(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def cut(block: Callable[..., tuple[Any, Tree]], params: Tree, x: Any, context: Tree, keep: Policy, *, fused_loops: bool = False) -> Cut:
    """Trace `block(params, x, context) -> (y, aux)` once and cut it. Arguments may be arrays, tracers or ShapeDtypeStructs.

    Runs anywhere, also inside `shard_map`: collectives are operations like any other and the types say over which axes values vary.
    """
    trace = _trace(block, params, x, context)
    return _cut_trace(trace, keep, fused_loops)


@dataclass(frozen=True, eq=False)
class _Trace:
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


def _trace(block: Callable[..., tuple[Any, Tree]], params: Tree, x: Any, context: Tree) -> _Trace:
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
    ops, outputs, captured = flat.flatten(closed, inputs)
    for const in captured.values():
        assert not isinstance(const, jax.core.Tracer), "a block must get arrays through its context, not by closing over them"
    ops, outputs = flat.merge_duplicates(ops, outputs)
    sizes = [len(jax.tree.leaves(part)) for part in arguments]
    params_in, x_in, context_in, dy_in, daux_in = _groups(inputs, sizes)
    n_aux, n_params = len(jax.tree.leaves(aux_type)), sizes[0]
    y_out, aux_out, dx_out, dparams_out = _groups(outputs, [1, n_aux, 1, n_params])
    return _Trace(
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


def _separate_loops(ops: list[Op], late: set[Value], dx: Atom) -> list[Op]:
    """Cut every backward loop that makes both what the input gradient needs and what only weight gradients need."""
    done: list[Op] = []
    for place, op in enumerate(ops):
        _, wanted = flat.needed(ops[place + 1 :], [dx])
        asked = {v for v in op.outputs if v in wanted or v is dx}
        if op.loop is not None and set(op.outputs) & late and asked and asked != set(op.outputs):
            first, second = flat.cut_loop(op, asked)
            done += [first, second] if set(second.outputs) else [first]
        else:
            done.append(op)
    return done


def _root(value: Value, maker: dict[Value, Op], early: set[Value], regather: bool) -> Value:
    """Look through re-typing and all-gathers to the value worth keeping."""
    while (op := maker.get(value)) is not None and len(op.outputs) == 1:
        views = flat.VIEWS | ({"all_gather"} if regather else set())
        operands = [v for v in values_of(op.inputs) if v in early]
        if op.name not in views or len(operands) != 1 or operands[0].aval.size > value.aval.size:
            break
        if op.name == "convert_element_type" and operands[0].aval.dtype.itemsize > value.aval.dtype.itemsize:
            break
        value = operands[0]
    return value


def _has_matmul_with(op: Op, weights: set[Value]) -> int:
    """Matmuls of `op` (a loop's body included, once) that read a value of `weights`, a set of values that depend on parameters alone."""
    if op.loop is not None:
        entering = [*op.loop.consts, *op.loop.carry_in, *op.loop.xs]
        inner = {inside for inside, outside in zip(entering, op.inputs, strict=True) if isinstance(outside, Value) and outside in weights}
        varying = [v for v in entering if v not in inner]
        only = flat.reached(op.loop.body, inner) - flat.reached(op.loop.body, varying)
        return sum(_has_matmul_with(o, only) for o in op.loop.body)
    return int(op.name == "dot_general" and bool(values_of(op.inputs) & weights))


def _cut_trace(trace: _Trace, keep: Policy, fused_loops: bool) -> Cut:
    ops = trace.ops
    late = flat.reached(ops, [trace.dy, *trace.daux])
    if not fused_loops:
        ops = _separate_loops(ops, late, trace.dx)
        late = flat.reached(ops, [trace.dy, *trace.daux])
    early = flat.reached(ops, [trace.x]) - late
    weights = flat.reached(ops, trace.params) - early - late
    maker = {v: op for op in ops for v in op.outputs}

    in_b = flat.made(flat.needed(ops, [trace.dx])[0]) & late
    w_only = [op for op in ops if set(op.outputs) & late and not set(op.outputs) <= in_b]
    w_reads = {v for op in flat.needed(w_only, trace.dparams)[0] for v in values_of(op.inputs)}
    late_reads = {v for op in ops if set(op.outputs) & late for v in values_of(op.inputs)} & early
    matmul_outputs = {v for op in ops if op.outputs and op.outputs[0] in early and _has_matmul_with(op, weights) for v in op.outputs}

    def named(op: Op) -> bool:
        return op.name == "name" and op.eqn.params["name"] in keep.names  # type: ignore[union-attr]

    chosen: set[Value] = set()
    if keep.everything:
        chosen |= late_reads
    if keep.matmuls:
        chosen |= matmul_outputs
    if keep.weight_inputs:
        chosen |= w_reads & early
    chosen |= {v for op in ops if named(op) for v in op.outputs if v in early}
    chosen = {_root(v, maker, early, regather=not keep.everything) for v in chosen} | {trace.x}

    remaining = [op for op in ops if not set(op.outputs) <= chosen]
    repeated = _free(remaining, early, late) | _views(remaining, maker, early, chosen)
    again = (w_reads & early) - chosen - repeated  # what W multiplies and nobody kept: B computes it again, or W would read weights
    started = flat.made(flat.needed(remaining, [trace.dx, *again], chosen)[0])
    by_b = {v for op in remaining if set(op.outputs) & started for v in op.outputs}  # a loop that B runs can stack up more for W
    deferrable = ({trace.dy, *trace.daux} | by_b) - repeated
    w_ops, w_reads = flat.needed([op for op in remaining if not set(op.outputs) <= deferrable], trace.dparams, chosen | deferrable)
    bw_ops, bw_reads = flat.needed(remaining, [trace.dx, *trace.dparams], chosen)
    order = [trace.x, *(v for op in ops for v in op.outputs)]
    saved = [v for v in order if v in chosen and v in bw_reads]
    deferred = [v for v in [trace.dy, *trace.daux, *order] if v in deferrable and (v in w_reads or v in values_of(trace.dparams))]
    b_ops, _ = flat.needed(remaining, [trace.dx, *deferred], chosen)
    f_ops, _ = flat.needed([op for op in ops if not set(op.outputs) & late], [trace.y, *trace.aux, *saved])

    describe = lambda values: tuple((tuple(v.aval.shape), str(v.aval.dtype)) for v in values)  # noqa: E731
    facts = Facts(
        flops_forward=flat.matmul_flops(f_ops),
        flops_backward_input=flat.matmul_flops(b_ops),
        flops_backward_weight=flat.matmul_flops(w_ops),
        flops_backward=flat.matmul_flops(bw_ops),
        weight_matmuls_forward=sum(_has_matmul_with(op, weights) for op in f_ops),
        matmuls_backward_weight=flat.count(w_ops, "dot_general"),
        weight_reads_backward_weight=len((weights | set(trace.params)) & (w_reads | flat.made(w_ops))),
        saved=describe(saved),
        deferred=describe(deferred),
    )
    return _programs(trace, f_ops, b_ops, w_ops, bw_ops, saved, deferred, w_reads, facts)


def _free(ops: list[Op], early: set[Value], late: set[Value]) -> set[Value]:
    """Values that depend on neither the block's input nor the output gradient: parameters or context alone."""
    return flat.made(ops) - early - late


def _views(ops: list[Op], maker: dict[Value, Op], early: set[Value], chosen: set[Value]) -> set[Value]:
    """Forward values that are a re-typing of a kept one: made again in W rather than handed over."""
    return {v for op in ops for v in op.outputs if v in early and _root(v, maker, early, regather=True) in chosen}


def _programs(
    trace: _Trace,
    f_ops: list[Op],
    b_ops: list[Op],
    w_ops: list[Op],
    bw_ops: list[Op],
    saved: list[Value],
    deferred: list[Value],
    w_reads: set[Value],
    facts: Facts,
) -> Cut:
    def evaluate(ops: list[Op], inputs: list[Value], arguments: list[Any], outputs: list[Any]) -> list[Any]:
        env = dict(trace.captured) | dict(zip(inputs, arguments, strict=True))
        flat.run(ops, env)
        return [env[a] if isinstance(a, Value) else jnp.asarray(a.val, a.aval.dtype) for a in outputs]

    leaves = jax.tree.leaves
    dparams = trace.params_tree.unflatten

    def forward(params: Tree, x: Any, context: Tree) -> tuple[Any, Tree, tuple[Any, ...]]:
        inputs = [*trace.params, trace.x, *trace.context]
        y, *rest = evaluate(f_ops, inputs, [*leaves(params), x, *leaves(context)], [trace.y, *trace.aux, *saved])
        return y, trace.aux_tree.unflatten(rest[: len(trace.aux)]), tuple(rest[len(trace.aux) :])

    backward_inputs = [*trace.params, *saved, *trace.context, trace.dy, *trace.daux]

    def backward_input(params: Tree, saved_values: tuple[Any, ...], context: Tree, dy: Any, daux: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        arguments = [*leaves(params), *saved_values, *leaves(context), dy, *daux]
        dx, *rest = evaluate(b_ops, backward_inputs, arguments, [trace.dx, *deferred])
        return dx, tuple(rest)

    for_weight = tuple(n for n, v in enumerate(saved) if v in w_reads)

    def backward_weight(saved_values: tuple[Any, ...], deferred_values: tuple[Any, ...], context: Tree) -> Tree:
        inputs = [*(saved[n] for n in for_weight), *deferred, *trace.context]
        arguments = [*(saved_values[n] for n in for_weight), *deferred_values, *leaves(context)]
        return dparams(evaluate(w_ops, inputs, arguments, trace.dparams))

    def backward(params: Tree, saved_values: tuple[Any, ...], context: Tree, dy: Any, daux: list[Any]) -> tuple[Any, Tree]:
        arguments = [*leaves(params), *saved_values, *leaves(context), dy, *daux]
        dx, *rest = evaluate(bw_ops, backward_inputs, arguments, [trace.dx, *trace.dparams])
        return dx, dparams(rest)

    return Cut(forward, backward_input, backward_weight, backward, for_weight, facts)
