"""Rematerialisation policies: which values of a block's forward are kept for its backward. All others are computed again."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.config import REMAT
from jaxpar.parallel.joint import weight_matmuls
from jaxpar.parallel.operations import VIEWS, Op, Value, values_of


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


assert tuple(POLICIES) == REMAT


def policy(name: str) -> Policy:
    """The remat policy called `name`. ValueError for an unknown one."""
    if name not in POLICIES:
        raise ValueError(f"train.remat: {name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]


# Sums over devices of what each holds a part of.
REDUCTIONS = frozenset(("psum", "psum_invariant", "reduce_scatter"))


def kept(keep: Policy, ops: list[Op], early: set[Value], late: set[Value], weights: set[Value], weight_inputs: set[Value]) -> set[Value]:
    """The forward values that `keep` chooses, re-typings and all-gathers looked through.

    `early` values depend on the block's input, `late` ones on the output gradient, `weights` on parameters alone; W's matmuls read
    `weight_inputs`. What the gradient of a norm's weight reads is not among them: float32, and cheap to compute again.
    """
    readers: dict[Value, list[Op]] = {}
    for op in ops:
        for v in values_of(op.inputs):
            readers.setdefault(v, []).append(op)
    maker = {v: op for op in ops for v in op.outputs}
    chosen: set[Value] = set()
    for op in ops:
        if keep.everything and set(op.outputs) & late:
            chosen |= values_of(op.inputs)
        if keep.matmuls and weight_matmuls(op, weights):
            chosen |= {_reduced(v, readers, maker) for v in op.outputs}
        if op.name == "name" and op.eqn is not None and op.eqn.params["name"] in keep.names:
            chosen |= set(op.outputs)
    found = {root(v, maker, early, through_gathers=not keep.everything) for v in chosen & early}
    if keep.weight_inputs:
        inputs = weight_inputs & early
        # Of what was sent, the smaller shard before.
        found |= {
            origin
            for v in inputs
            if (origin := root(v, maker, early, through_gathers=True)) is not root(v, maker, early, through_gathers=False)
        }
        found |= {_as_multiplied(v, found, maker, early) for v in inputs}
    return found


def _as_multiplied(value: Value, kept: set[Value], maker: dict[Value, Op], early: set[Value]) -> Value:
    """What to keep of a matmul's input: what is kept anyway of which it is a view or a slice, or else the input itself, transposed as the
    matmul reads it: XLA would otherwise transpose the values of all layers at once between the two loops."""
    origin = root(value, maker, early, through_gathers=True)
    op = maker.get(origin)
    if op is not None and op.name == "dynamic_slice":
        (cut,) = (root(v, maker, early, through_gathers=True) for v in values_of(op.inputs[:1]))
        origin = cut if cut in kept else origin
    transposed = value in maker and maker[value].name == "transpose"
    return value if transposed and origin not in kept and origin.aval.size == value.aval.size else origin


def _reduced(value: Value, readers: dict[Value, list[Op]], maker: dict[Value, Op]) -> Value:
    """What a reduction makes of `value`, where nothing else reads it, re-typings looked through: no larger, and the backward need not send
    it again. Around a ring (permute, add, permute, ...) it is the last sum."""
    found, reduced = value, value
    while len(read := readers.get(found, [])) == 1 and len(read[0].outputs) == 1:
        found = read[0].outputs[0]
        if read[0].name in REDUCTIONS:
            return found
        if read[0].name == "add" and any(v in maker and maker[v].name == "ppermute" for v in values_of(read[0].inputs)):
            reduced = found
        elif read[0].name not in VIEWS and read[0].name != "ppermute":
            break
    return reduced


def root(value: Value, maker: dict[Value, Op], early: set[Value], through_gathers: bool) -> Value:
    """Look through re-typing, and all-gathers and permutes, to the value worth keeping."""
    while (op := maker.get(value)) is not None and len(op.outputs) == 1:
        views = VIEWS | ({"all_gather", "ppermute"} if through_gathers else set())
        operands = [v for v in values_of(op.inputs) if v in early]
        if op.name not in views or len(operands) != 1 or operands[0].aval.size > value.aval.size:
            break
        if op.name == "convert_element_type" and operands[0].aval.dtype.itemsize > value.aval.dtype.itemsize:
            break
        value = operands[0]
    return value
