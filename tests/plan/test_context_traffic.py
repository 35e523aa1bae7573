"""What a step sends over `seq`, as written and as compiled, is what the formulas say: kind, axes, count, bytes, and nothing else."""

import dataclasses
from collections import Counter

import pytest

from jaxpar.config import Config, ContextConfig, DataConfig, MeshShape, ModelConfig, TrainConfig
from jaxpar.plan import formulas
from jaxpar.plan.traffic import summary
from tests.train.programs import measured, pairwise, traced

MODEL = ModelConfig(vocabulary=62, width=32, layers=3, heads=8, kv_heads=2, head_width=4, mlp_width=48)
ROWS = pairwise(
    method=["ring", "ulysses", "gather", "usp"],
    layout=["contiguous", "zigzag", "striped"],
    mesh=[(2, 1, 2), (4, 1, 2), (4, 2, 1), (8, 1, 1)],
    windows=[(0,), (9,), (33,), (9, 0)],
    remat=["none", "matmuls", "outputs", "attention", "block"],
    interleave=[1, 2],
    zero=[1, 3],
    accumulation=[1, 1, 2],
    documents=["isolated", "joined"],
)


def step(mesh=(4, 1, 2), method="ring", layout="zigzag", windows=(0,), documents="isolated", **train):
    seq, data, tensor = mesh
    return Config(
        model=dataclasses.replace(MODEL, windows=windows),
        mesh=MeshShape(seq=seq, data=data, tensor=tensor),
        data=DataConfig(sequence=64, vocabulary=62, documents=documents),
        train=TrainConfig(
            **{"batch": 8, "compute_dtype": "float32", "loss_chunk": 24, **train},
            context=ContextConfig(method=method, layout=layout),
        ),
    )


def executions(collectives):
    """Executions as a multiset, wherever they stand in the program and whatever they are for."""
    found = Counter()
    for one in collectives:
        found[one.kind, one.axes, one.dtype, one.payload // one.count] += one.count
    return found


@pytest.mark.parametrize(
    "row",
    [row if n < 5 else pytest.param(row, marks=pytest.mark.slow) for n, row in enumerate(ROWS)],
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_a_step_as_written_sends_exactly_what_the_formulas_say(row):
    run = step(**row)
    assert executions(traced(run)) == executions(formulas.step_traffic(run))


COMPILED = {
    "ring": step(zero=0),
    "window": step(zero=0, windows=(9,), layout="contiguous"),
    "window, zigzag, again": step(zero=0, windows=(9,), remat="block"),
    "usp": step(zero=0, method="usp"),
    "gather": step(zero=0, method="gather", layout="striped"),
}
QUICK = ("usp",)


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMPILED])
def test_a_compiled_step_sends_exactly_what_the_formulas_say(name):
    run = COMPILED[name]
    expected, found = summary(formulas.step_traffic(run)), summary(measured(run).sent)
    assert {key: total.payload for key, total in found.items()} == {key: total.payload for key, total in expected.items()}


def keys(run, kind="permute"):
    return sum(one.payload for one in traced(run) if one.kind == kind and one.axes == ("seq",))


def test_closed_forms():
    """K + V blocks of a device, forward and backward: ring 3 (n - 1); a window only what it reaches."""
    block = 2 * 8 * (64 // 4) * 1 * 4 * 4  # K and V, 8 rows, 16 tokens, 1 head of 4 float32
    times = MODEL.layers
    assert keys(step(zero=0)) == 3 * 3 * block * times
    assert keys(step(zero=0, layout="contiguous")) == 3 * 3 * block * times
    assert keys(step(zero=0, layout="contiguous", windows=(9,))) == 3 * 1 * block * times
    assert keys(step(zero=0, layout="zigzag", windows=(9,))) == 3 * 1 * block * times


@pytest.mark.parametrize(
    "change",
    [{"method": "gather"}, {"method": "usp"}, {"windows": (9,)}, {"documents": "joined"}, {"remat": "block"}, {"mesh": (8, 1, 1)}],
    ids=str,
)
def test_another_step_does_not_match(change):
    """Negative control: the formulas of any other setting disagree with the program."""
    assert executions(traced(step())) != executions(formulas.step_traffic(step(**change)))
