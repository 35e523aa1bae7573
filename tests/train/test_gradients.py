"""Loss and every gradient on meshes of data × tensor × ZeRO × accumulation × sequence parallelism equal one device, in float64."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxpar.config import ModelConfig, RopeConfig
from jaxpar.parallel import zero
from tests.train import runs

TOLERANCE = 1e-11

# Every value of every column meets every value of every other column that can stand beside it (test_coverage checks).
COLUMNS = ("data", "tensor", "zero", "accumulation", "sequence_parallel", "interleave")
MESHES = [
    (1, 1, 0, 2, False, 2),
    (1, 2, 1, 1, True, 2),
    (1, 4, 2, 2, False, 1),
    (1, 2, 3, 2, True, 1),
    (2, 1, 1, 1, True, 1),
    (2, 2, 0, 2, True, 2),
    (2, 4, 3, 1, True, 2),
    (2, 1, 2, 2, False, 2),
    (2, 4, 1, 2, True, 1),
    (2, 2, 3, 1, False, 1),
    (4, 1, 3, 2, False, 2),
    (4, 2, 1, 1, False, 2),
    (4, 2, 2, 2, True, 1),
    (4, 2, 0, 1, True, 1),
    (4, 1, 0, 1, False, 1),
    (8, 1, 2, 1, True, 2),
    (8, 1, 1, 2, False, 1),
    (8, 1, 0, 1, True, 2),
    (8, 1, 3, 1, True, 1),
    (1, 4, 0, 1, True, 2),
    (1, 4, 1, 2, False, 2),
    (1, 1, 1, 1, True, 1),
    (1, 1, 2, 1, True, 1),
    (1, 1, 3, 1, True, 2),
]
POSSIBLE = {0: (1, 2, 4, 8), 1: (1, 2, 4), 2: (0, 1, 2, 3), 3: (1, 2), 4: (True, False), 5: (1, 2)}


def of(row, **changes):
    return runs.config(**dict(zip(COLUMNS, row, strict=True)) | changes)


def name(row):
    return "-".join(f"{column}{int(value)}" for column, value in zip(COLUMNS, row, strict=True))


def test_coverage():
    """The table is pairwise complete over what fits on 8 devices."""
    missing = []
    for a, b in itertools.combinations(range(len(COLUMNS)), 2):
        for pair in itertools.product(POSSIBLE[a], POSSIBLE[b]):
            fits = (a, b) != (0, 1) or pair[0] * pair[1] <= 8
            if fits and not any((row[a], row[b]) == pair for row in MESHES):
                missing.append((COLUMNS[a], COLUMNS[b], pair))
    assert not missing
    assert len({row[:5] for row in MESHES}) >= 14


def compare(run, reference):
    got, want = runs.gradients(run), runs.gradients(reference)
    assert got[0]["tokens"] == want[0]["tokens"]
    worst = runs.gap({"loss": got[0]["loss"], "gradients": got[1]}, {"loss": want[0]["loss"], "gradients": want[1]})
    assert worst[0] < TOLERANCE, worst
    rows = run.model.vocabulary  # padding rows of the vocabulary have no gradient
    tables = [got[1][part]["table"] for part in ("embedding", "head") if part in got[1]]
    assert all(not table[rows:].any() for table in tables)


@pytest.mark.parametrize("row", MESHES, ids=name)
def test_equals_one_device(row):
    compare(of(row), runs.config())


TIED = dataclasses.replace(
    runs.MODEL, kv_heads=1, tied=True, windows=(0,), norm_one_plus=True, score_softcap=3.0, embedding_scale=5.6, dropout=0.0
)
NEIGHBOURS = {
    "one key head, tied, 1+w, score cap": (TIED, {"tensor": 4, "data": 2, "zero": 1}),
    "the same, ZeRO-3, no sequence parallelism": (TIED, {"tensor": 2, "data": 4, "zero": 3, "sequence_parallel": False}),
    "yarn, wide heads": (
        ModelConfig(
            vocabulary=40,
            width=16,
            layers=2,
            heads=4,
            kv_heads=4,
            head_width=12,
            mlp_width=24,
            rope=RopeConfig(type="yarn", factor=4.0, original_length=8),
            init_std=0.3,
        ),
        {"tensor": 4, "data": 2, "zero": 2},
    ),
}


@pytest.mark.parametrize("case", NEIGHBOURS)
def test_neighbours_equal_one_device(case):
    model, mesh = NEIGHBOURS[case]
    compare(runs.config(model=model, **mesh), runs.config(model=model))


@pytest.mark.parametrize("keep", ["none", "outputs", "attention", "block"])
def test_remat_policies(keep):
    compare(runs.config(data=2, tensor=2, zero=1, remat=keep), runs.config())


def test_many_tiles_and_chunks():
    """Attention in tiles of 8 and the loss in chunks that do not divide the tokens."""
    compare(runs.config(data=2, tensor=2, zero=3, attention_block=8, loss_chunk=7), runs.config())


def test_z_loss_is_part_of_the_gradient():
    compare(runs.config(tensor=2, data=2, zero=1, z_loss=0.1), runs.config(z_loss=0.1))
    assert runs.gap(runs.gradients(runs.config(z_loss=0.1))[1], runs.gradients(runs.config())[1])[0] > 1e-3


def test_joined_documents():
    """Rows as one text: without segments the step attends over a whole row, which changes the loss, and still equals one device."""
    joined = {"data_documents": "joined"}
    compare(runs.config(data=2, tensor=2, zero=1, **joined), runs.config(**joined))
    assert runs.gap(runs.gradients(runs.config(**joined))[1], runs.gradients(runs.config())[1])[0] > 1e-3


# What each column would get wrong, as a change of the reference that the comparison must notice.
BROKEN = {
    "data": lambda g: jax.tree.map(lambda a: a / 2, g),
    "tensor": lambda g: {**g, "norm": {"weight": g["norm"]["weight"] / 2}},
    "zero": lambda g: {**g, "embedding": {"table": np.roll(g["embedding"]["table"], 16, 1)}},
    "accumulation": lambda g: jax.tree.map(lambda a: a * (1 + 1e-9), g),
}


@pytest.mark.parametrize("column", BROKEN)
def test_negative_controls(column):
    """A gradient halved, one norm counted once too little, shards exchanged, a mean of means: each fails the comparison."""
    want = runs.gradients(runs.config())[1]
    assert runs.gap(BROKEN[column](want), want)[0] > TOLERANCE


SEVERAL = [row for row in MESHES if row[0] * row[1] > 1]


def trace(row):
    built = runs.training(of(row))
    jax.eval_shape(built.gradients, built.abstract_state["params"], built.abstract_batch, jax.ShapeDtypeStruct((), np.int32))


@pytest.mark.parametrize("row", SEVERAL, ids=name)
def test_a_missing_or_doubled_reduction_is_refused(row, monkeypatch):
    """Negative control of every mesh, inside the engine: the step without its last reductions, or with them twice, does not type-check."""
    finish = zero.finish
    monkeypatch.setattr(zero, "finish", lambda grads, places, dtype: grads)
    with pytest.raises(ValueError, match="out_specs"):
        trace(row)
    monkeypatch.setattr(zero, "finish", lambda grads, places, dtype: finish(finish(grads, places, dtype), places, dtype))
    with pytest.raises(TypeError, match="does not vary over"):
        trace(row)
