"""Mixtures of experts on meshes: loss and every gradient of router × dispatch × folding × mesh equal one device, in float64."""

import dataclasses
import itertools

import pytest

from jaxpar.config import MeshShape
from tests.train import runs
from tests.train.test_experts import MODELS, model

# Every value of every column meets every value of every other column that can stand beside it (test_coverage checks).
COLUMNS = ("data", "expert", "tensor", "zero", "accumulation", "interleave", "fold", "dispatch", "case")
E, ET = "expert", "expert, tensor"
PLAIN, ONE, TOPK, SHARED, MICRO = "softmax", "softmax, not normalised, one", "topk", "sigmoid, shared", "whole microbatch"
FEW = [  # in the default group
    (2, 2, 2, 1, 2, 1, ET, "ragged", SHARED),
    (1, 4, 2, 3, 1, 2, E, "gather", MICRO),
    (2, 4, 1, 0, 1, 1, E, "capacity", PLAIN),
]
MORE = [
    (4, 1, 1, 2, 2, 2, ET, "gather", ONE),
    (8, 1, 1, 1, 1, 1, E, "ragged", TOPK),
    (1, 2, 2, 0, 2, 2, ET, "capacity", TOPK),
    (4, 2, 1, 3, 1, 1, ET, "ragged", MICRO),
    (1, 2, 2, 2, 1, 1, E, "ragged", ONE),
    (4, 1, 2, 3, 2, 2, E, "capacity", SHARED),
    (1, 2, 1, 1, 2, 2, ET, "gather", PLAIN),
    (8, 1, 1, 0, 2, 1, ET, "gather", SHARED),
    (2, 4, 1, 2, 1, 2, ET, "ragged", TOPK),
    (8, 1, 1, 2, 1, 2, E, "capacity", MICRO),
    (2, 4, 1, 1, 2, 1, E, "capacity", ONE),
    (2, 1, 2, 3, 2, 1, E, "ragged", PLAIN),
    (2, 2, 1, 0, 2, 2, ET, "gather", MICRO),
    (1, 1, 1, 0, 1, 2, E, "ragged", SHARED),
    (4, 1, 2, 1, 2, 2, ET, "gather", TOPK),
    (8, 1, 1, 3, 1, 2, ET, "gather", ONE),
    (4, 1, 2, 0, 2, 1, ET, "capacity", ONE),
    (1, 4, 1, 2, 1, 2, E, "gather", SHARED),
    (4, 1, 1, 2, 2, 2, E, "ragged", PLAIN),
    (8, 1, 1, 3, 1, 1, ET, "gather", TOPK),
    (2, 1, 1, 1, 2, 1, ET, "capacity", MICRO),
    (8, 1, 1, 3, 1, 1, ET, "capacity", PLAIN),
]
POSSIBLE = (
    (1, 2, 4, 8),
    (1, 2, 4),
    (1, 2),
    (0, 1, 2, 3),
    (1, 2),
    (1, 2),
    (E, ET),
    ("ragged", "gather", "capacity"),
    (PLAIN, ONE, TOPK, SHARED, MICRO),
)
CASES = {**MODELS, MICRO: model(balance="microbatch", groups=4, kept_groups=2)}


def of(row, **train):
    fields = dict(zip(COLUMNS, row, strict=True))
    axes = tuple(fields["fold"].split(", "))
    run = runs.config(
        model=CASES[fields["case"]],
        zero=fields["zero"],
        accumulation=fields["accumulation"],
        interleave=fields["interleave"],
        expert_axes=axes,
        expert_dispatch=fields["dispatch"],
        **{"expert_buffer": 8.0, "expert_capacity": 12.0, **train},
    )
    return dataclasses.replace(run, mesh=MeshShape(**{name: fields[name] for name in COLUMNS[:3]}))


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
    data, expert, tensor, _, accumulation, interleave, fold, *_ = row
    cut = data * expert * accumulation * interleave
    return data * expert * tensor <= 8 and 16 % cut == 0 and 12 % (expert * (tensor if fold == ET else 1)) == 0


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


def test_a_dense_model_takes_the_axis_as_more_data():
    run = dataclasses.replace(runs.config(zero=1, accumulation=2), mesh=MeshShape(data=2, expert=2, tensor=2))
    (metrics, grads), (want, want_grads) = runs.gradients(run), runs.gradients(runs.config())
    worst = runs.gap({"metrics": metrics, "gradients": grads}, {"metrics": want, "gradients": want_grads})
    assert worst[0] < 1e-11, worst
