"""Mixtures of experts compiled for H100s: bytes on every axis are the formulas', and Mixtral-8x7B on 64 of them within its bounds."""

import dataclasses
import math

import pytest

from jaxpar.config import Config, DataConfig, MeshShape, MoeConfig, TrainConfig
from jaxpar.plan import compile as compiling
from jaxpar.plan import formulas, hardware, loops, sent, simulate, work
from jaxpar.plan.hlo import parse
from tests.plan import gpu
from tests.plan.gpu_runs import MODEL

pytestmark = gpu.MARKS


def small():
    """A shared expert, two chunks, recomputation, on 8 GPUs."""
    moe = MoeConfig(experts=16, per_token=2, width=256, balance="microbatch", balance_weight=0.01, shared_width=256)
    return Config(
        model=dataclasses.replace(MODEL, moe=moe),
        mesh=MeshShape(data=2, expert=4),
        data=DataConfig(sequence=512, documents="joined"),
        train=TrainConfig(batch=16, zero=3, loss_chunk=256, remat="block", expert_chunks=2),
    )


@pytest.fixture(scope="module")
def chunked():
    return compiling.compile_run(small(), hardware.load("h100"))


def test_bytes_by_axis_and_kind_are_those_of_the_formulas(chunked):
    """Other methods, foldings and policies as traced: `test_expert_traffic.py`."""
    rows, unexpected = sent.compare(chunked.text, chunked.mesh, formulas.step_traffic(chunked.config))
    assert unexpected == []
    assert {(row["axis"], row["kind"]): row["bytes"] for row in rows} == {(row["axis"], row["kind"]): row["expected_bytes"] for row in rows}


def behind_loops(text):
    """Ragged exchanges that start before a loop with matmuls and are done after it."""
    found = 0
    for computation in parse(text).computations.values():
        begun: dict[str, bool] = {}
        for each in computation.instructions.values():
            if each.opcode == "ragged-all-to-all-start":
                begun[each.name] = False
            elif each.opcode == "while":
                begun = dict.fromkeys(begun, True)
            elif each.opcode == "ragged-all-to-all-done":
                found += begun.pop(each.operands[0], False)
    return found


@pytest.fixture(scope="module")
def mixtral():
    return gpu.compiled("mixtral_8x7b_h100x64")


T, D, F, K, LAYERS, WAYS = 8192, 4096, 14336, 2, 32, 8


def test_mixtral_fits_in_17_gib_as_predicted(mixtral):
    """MaxText: 21.6."""
    report = compiling.report(mixtral)
    assert report["memory"]["peak"] <= 17 * 2**30 and report["fits"]
    assert report["memory"]["predicted_peak"] == pytest.approx(report["memory"]["peak"], rel=0.10)


@pytest.mark.parametrize("run", gpu.MIXTURES)
def test_runs_with_experts_fit_and_are_predicted(run, monkeypatch):
    """Dense ones: `test_gpu_report.py`. Control: without the rows of experts the formula is a quarter off where a token has 8 of them."""
    compiled = gpu.compiled(run)
    gpu.check_predicted(compiling.report(compiled))
    monkeypatch.setattr(compiling.memory.peak, "_expert_rows", lambda config: 0)
    held = compiling.report(compiled)["memory"]
    assert compiled.config.model.moe.per_token < 8 or held["predicted_peak"] < 0.8 * held["peak"]


def test_mixtral_sends_each_choice_once_a_direction_and_nothing_else(mixtral):
    """Tokens out, results back; in the backward tokens out again, and both gradients: 5 times K T D (n-1)/n, in two bytes each."""
    rows, unexpected = sent.compare(mixtral.text, mixtral.mesh, formulas.step_traffic(mixtral.config))
    assert unexpected == [] and all(row["bytes"] == row["expected_bytes"] for row in rows)
    (experts,) = (row for row in rows if row["kind"] == "ragged_all_to_all")
    choices = 5 * 2 * D + 3 * 4  # and the weight of each, three times, in float32
    assert experts["axis"] == "expert" and experts["asynchronous"]
    assert experts["bytes"] == LAYERS * K * T * choices * (WAYS - 1) // WAYS
    counts = next(row["bytes"] for row in rows if row["axis"] == "expert" and row["kind"] == "all_to_all")
    assert counts <= 1e-5 * experts["bytes"]


def test_mixtral_computes_the_rows_of_its_buffer_at_most(mixtral):
    """11 matmuls of an expert's three for each row: 3, two again, 6 of gradients. Loops end with the rows that came; read from the program
    is the buffer, 1.5 times the balanced load."""
    model, done = mixtral.config.model, work.measure(mixtral.text)
    heads = 2 * (model.heads + model.kv_heads) * model.head_width
    others = 4 * LAYERS * 2 * T * D * heads + 3 * 2 * T * D * model.vocabulary
    buffer = 11 * 2 * math.ceil(1.5 * K * T) * D * F * LAYERS
    assert buffer <= done.matmul - others <= 1.01 * buffer
    assert done.at_most == len([each for each in loops.at_most(parse(mixtral.text)) if not loops.tile_pairs(parse(mixtral.text), each)]) > 0


def test_mixtral_hides_its_exchanges(mixtral):
    """At most 5% of the step waits for `expert`."""
    assert simulate.simulate(mixtral.text, mixtral.mesh, mixtral.hardware).exposed("expert") <= 0.05


def test_a_chunk_travels_while_another_is_served(chunked, mixtral):
    """Control: all at once, no exchange has such a loop to travel behind."""
    assert behind_loops(chunked.text) > 0 == behind_loops(mixtral.text)
