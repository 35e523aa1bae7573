"""Mixtures of experts on meshes: loss and every gradient of router × dispatch × folding × mesh equal one device, in float64."""

import dataclasses
import itertools

import pytest

from jaxpar.config import MeshShape
from tests.train import runs
from tests.train.test_experts import MODELS, model

# Every value of every column meets every value of every other column that can stand beside it (test_coverage checks).
COLUMNS = ("data", "expert", "seq", "tensor", "zero", "accumulation", "interleave", "fold", "dispatch", "case")
E, ET, EST = "expert", "expert, tensor", "expert, seq, tensor"
PLAIN, ONE, TOPK, SHARED, MICRO = "softmax", "softmax, not normalised, one", "topk", "sigmoid, shared", "whole microbatch"
CHOICE, DEEPSEEK = "experts choose", "sigmoid, groups, correction, shared"
FEW = [  # in the default group
    (2, 2, 1, 2, 1, 2, 1, ET, "ragged", SHARED),
    (2, 1, 2, 2, 3, 1, 2, EST, "gather", MICRO),
    (2, 4, 1, 1, 0, 1, 1, E, "capacity", PLAIN),
]
MORE = [
    (1, 1, 4, 1, 2, 2, 2, ET, "ragged", TOPK),
    (4, 1, 2, 1, 1, 2, 2, E, "capacity", ONE),
    (1, 2, 4, 1, 3, 1, 1, E, "gather", SHARED),
    (8, 1, 1, 1, 2, 2, 1, EST, "gather", MICRO),
    (1, 2, 2, 2, 0, 1, 1, ET, "ragged", ONE),
    (1, 4, 1, 1, 3, 2, 2, EST, "ragged", PLAIN),
    (4, 2, 1, 1, 1, 1, 1, EST, "capacity", TOPK),
    (1, 2, 2, 2, 2, 1, 2, E, "capacity", PLAIN),
    (4, 1, 2, 1, 0, 2, 2, EST, "gather", SHARED),
    (1, 4, 2, 1, 1, 2, 2, ET, "gather", TOPK),
    (8, 1, 1, 1, 3, 1, 2, ET, "capacity", TOPK),
    (1, 2, 4, 1, 0, 2, 2, E, "ragged", MICRO),
    (2, 1, 4, 1, 2, 2, 2, EST, "gather", ONE),
    (1, 1, 4, 2, 1, 2, 2, ET, "capacity", PLAIN),
    (4, 1, 1, 2, 3, 1, 1, ET, "ragged", MICRO),
    (8, 1, 1, 1, 1, 1, 1, E, "ragged", ONE),
    (1, 4, 1, 2, 2, 1, 2, E, "ragged", SHARED),
    (2, 1, 1, 2, 0, 1, 1, E, "capacity", TOPK),
    (4, 2, 1, 1, 2, 1, 2, EST, "gather", PLAIN),
    (8, 1, 1, 1, 0, 1, 2, EST, "capacity", SHARED),
    (2, 4, 1, 1, 1, 1, 2, ET, "capacity", MICRO),
    (1, 4, 2, 1, 3, 2, 2, ET, "gather", ONE),
    (8, 1, 1, 1, 1, 2, 1, ET, "gather", PLAIN),
    (4, 1, 2, 1, 0, 2, 1, ET, "ragged", CHOICE),
    (1, 1, 2, 2, 0, 2, 1, ET, "gather", DEEPSEEK),
    (1, 2, 1, 2, 3, 1, 2, E, "capacity", CHOICE),
    (4, 2, 1, 1, 1, 1, 2, EST, "capacity", DEEPSEEK),
    (2, 4, 1, 1, 1, 1, 2, EST, "gather", CHOICE),
    (2, 4, 1, 1, 2, 1, 1, E, "ragged", DEEPSEEK),
    (1, 1, 4, 1, 3, 1, 1, EST, "gather", DEEPSEEK),
    (1, 2, 4, 1, 2, 1, 1, ET, "gather", CHOICE),
    (8, 1, 1, 1, 0, 1, 1, ET, "capacity", CHOICE),
    (8, 1, 1, 1, 3, 1, 1, ET, "capacity", DEEPSEEK),
]
POSSIBLE = (
    (1, 2, 4, 8),
    (1, 2, 4),
    (1, 2, 4),
    (1, 2),
    (0, 1, 2, 3),
    (1, 2),
    (1, 2),
    (E, ET, EST),
    ("ragged", "gather", "capacity"),
    (PLAIN, ONE, TOPK, SHARED, MICRO, CHOICE, DEEPSEEK),
)
CASES = {
    **MODELS,
    MICRO: model(balance="microbatch", groups=4, kept_groups=2),
    CHOICE: model(router="expert_choice", scale=1.5),
    DEEPSEEK: model(router="sigmoid", scale=2.5, shared_width=14, groups=4, kept_groups=2, group_best=2, correction=True),
}


def of(row, **train):
    fields = dict(zip(COLUMNS, row, strict=True))
    axes = tuple(fields["fold"].split(", "))
    run = runs.config(
        model=CASES[fields["case"]],
        zero=fields["zero"],
        accumulation=fields["accumulation"],
        interleave=fields["interleave"],
        experts=runs.roomy(axes=axes, dispatch=fields["dispatch"]),
        **train,
    )
    return dataclasses.replace(run, mesh=MeshShape(**{name: fields[name] for name in COLUMNS[:4]}))


def alone(run):
    """The same on one device, as far as its value may depend on how a step is cut: a whole microbatch's balancing loss does."""
    accumulation = run.train.accumulation if run.model.moe.balance == "microbatch" else 1
    return runs.config(model=run.model, accumulation=accumulation)


def compare(run):
    (metrics, grads), (want, want_grads) = runs.gradients(run), runs.gradients(alone(run))
    assert metrics["tokens"] == want["tokens"] and metrics["expert_overflow"] == metrics["expert_dropped"] == 0
    assert want["balance_loss"] > 0.9
    worst = runs.gap({"metrics": metrics, "gradients": grads}, {"metrics": want, "gradients": want_grads})
    assert worst[0] < 1e-11, worst


def name(row):
    return "-".join(map(str, row))


def fits(row):
    """Whether a row can run: at most 8 devices, which divide 12 experts, and 16 sequences."""
    data, expert, seq, tensor, _, accumulation, interleave, fold, *_ = row
    cut, ways = data * expert * accumulation * interleave, {E: 1, ET: tensor, EST: seq * tensor}[fold] * expert
    return data * expert * seq * tensor <= 8 and 16 % cut == 0 and 12 % ways == 0


def test_coverage():
    """The two tables are pairwise complete over what can run."""
    rows = [row for row in itertools.product(*POSSIBLE) if fits(row)]
    places = list(itertools.combinations(range(len(COLUMNS)), 2))
    pairs = lambda rows: {(a, b, row[a], row[b]) for row in rows for a, b in places}  # noqa: E731
    assert all(map(fits, FEW + MORE))
    assert not pairs(rows) - pairs(FEW + MORE)
    assert pairs(rows) - pairs(FEW)


@pytest.mark.parametrize("row", FEW, ids=name)
def test_equals_one_device(row):
    compare(of(row))


@pytest.mark.slow
@pytest.mark.parametrize("row", MORE, ids=name)
def test_more_equal_one_device(row):
    compare(of(row))


def on(mesh, case=PLAIN, experts=(), **train):
    """A run on any mesh."""
    run = runs.config(model=CASES[case], experts=runs.roomy(**dict(experts)), **train)
    return dataclasses.replace(run, mesh=MeshShape(**mesh))


OTHERS = on({"expert": 2, "seq": 2, "tensor": 2}, SHARED, {"columns": True, "chunks": 2}, zero=1)
SLOW = {
    "columns, beside tensor": on({"expert": 2, "tensor": 2}, PLAIN, {"columns": True}, zero=1),
    "folded over seq": on({"expert": 2, "seq": 2, "tensor": 1}, MICRO, {"axes": (E, "seq", "tensor")}, zero=3),
    "columns, replicated": on({"data": 2, "tensor": 2}, TOPK, {"columns": True, "dispatch": "gather"}, sequence_parallel=False),
    "columns, ring": on({"expert": 2, "tensor": 2}, SHARED, {"columns": True}, collective_matmul=True, zero=2, accumulation=2),
    "columns, capacity": on({"data": 2, "expert": 2, "tensor": 2}, MICRO, {"columns": True, "dispatch": "capacity"}, zero=3),
    "chunks, capacity": on({"expert": 2, "tensor": 2}, ONE, {"axes": (E, "tensor"), "chunks": 4, "dispatch": "capacity"}),
    "chunks, gather": on({"data": 2, "expert": 2}, PLAIN, {"chunks": 2, "dispatch": "gather"}, remat="block", zero=2),
    "chunks, fused": on({"expert": 4}, SHARED, {"chunks": 2}, remat="block", zero=3, interleave=2),
    "seq beside": on({"expert": 2, "seq": 2, "tensor": 2}, SHARED, zero=1, accumulation=2),
    "folded over seq and tensor": on({"seq": 2, "tensor": 2}, PLAIN, {"axes": (E, "seq", "tensor")}, zero=2, remat="block"),
    "folded over seq, no expert axis": on({"data": 2, "seq": 2, "tensor": 2}, TOPK, {"axes": (E, "seq", "tensor")}, zero=3),
}


def test_columns_in_chunks_beside_seq_equal_one_device():
    compare(OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("run", SLOW.values(), ids=SLOW)
def test_more_columns_chunks_and_seq(run):
    compare(run)


def test_a_dense_model_takes_the_axis_as_more_data():
    run = dataclasses.replace(runs.config(zero=1, accumulation=2), mesh=MeshShape(data=2, expert=2, tensor=2))
    (metrics, grads), (want, want_grads) = runs.gradients(run), runs.gradients(runs.config())
    worst = runs.gap({"metrics": metrics, "gradients": grads}, {"metrics": want, "gradients": want_grads})
    assert worst[0] < 1e-11, worst
