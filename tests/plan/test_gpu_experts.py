"""Mixtures of experts compiled for H100s: bytes on every axis are the formulas', and Mixtral-8x7B on 64 of them within its bounds."""

import dataclasses
import math

import jax
import pytest

from jaxpar.config import Config, DataConfig, ExpertsConfig, MeshShape, MoeConfig, TrainConfig
from jaxpar.plan import compile as compiling
from jaxpar.plan import formulas, hardware, loops, sent, simulate, work, working
from jaxpar.plan.hlo import dot_flops, parse
from tests.plan import gpu
from tests.plan.gpu_runs import MODEL

pytestmark = gpu.MARKS


SHARED = 384  # width of the shared expert: no other array has such a dim


def small(chunks):
    """DeepSeek's kind of layer, a shared expert beside the routed ones, with recomputation, on 8 GPUs."""
    moe = MoeConfig(experts=16, per_token=2, width=256, balance="microbatch", balance_weight=0.01, shared_width=SHARED, router="sigmoid")
    return Config(
        model=dataclasses.replace(MODEL, moe=moe),
        mesh=MeshShape(data=2, expert=4),
        data=DataConfig(sequence=512, documents="joined"),
        train=TrainConfig(batch=16, zero=3, loss_chunk=256, remat="block", experts=ExpertsConfig(chunks=chunks)),
    )


def compiled(config):
    """Without 64-bit types, as users run it: they are on when a fixture of the module is made."""
    with jax.enable_x64(False):
        return compiling.compile_run(config, hardware.load("h100"))


@pytest.fixture(scope="module")
def chunked():
    return compiled(small(2))


@pytest.fixture(scope="module")
def at_once():
    return compiled(small(1))


def test_bytes_by_axis_and_kind_are_those_of_the_formulas(chunked):
    """Other methods, foldings and policies as traced: `test_expert_traffic.py`."""
    rows, unexpected = sent.compare(chunked.text, chunked.mesh, formulas.step_traffic(chunked.config))
    assert unexpected == []
    assert {(row["axis"], row["kind"]): row["bytes"] for row in rows} == {(row["axis"], row["kind"]): row["expected_bytes"] for row in rows}


def matmuls(program, instruction):
    """Shapes of what the matrix products inside an instruction read, fusions and loops opened."""
    inside = instruction.attribute("calls") or instruction.attribute("body") if instruction.opcode in ("fusion", "while") else None
    if inside in program.computations:
        return [shape for one in program.computations[inside].instructions.values() for shape in matmuls(program, one)]
    return [array.shape for one in program.operands(instruction) for array in one.results] if dot_flops(program, instruction) else []


def behind(text):
    """Of the loops over layers, the forward's and then the backward's: for each exchange of rows, in the order in which they arrive, what
    stands between its start and its done: (loops over an expert's matmuls, matmuls of the shared expert)."""
    program, found = parse(text), []
    for computation in program.computations.values():
        begun: dict[str, list] = {}
        done = []
        for each in computation.instructions.values():
            if each.opcode == "ragged-all-to-all-start" and each.results[0].shape[1] > 1:
                begun[each.name] = []
            elif each.opcode == "ragged-all-to-all-done" and each.operands[0] in begun:
                done.append(begun.pop(each.operands[0]))
            elif shapes := matmuls(program, each):
                for passed in begun.values():
                    passed.append((each.opcode == "while", any(SHARED in shape for shape in shapes)))
        if done and computation.name != program.entry:
            found.append([(sum(loop for loop, _ in passed), sum(shared for _, shared in passed)) for passed in done])
    return sorted(found, key=len)


@pytest.fixture(scope="module")
def mixtral():
    return gpu.compiled("mixtral_8x7b_h100x64")


@pytest.fixture(scope="module")
def mixtral_chunked():
    """Two more transfers at a time than usual, for a layer's weights are four that are on their way already."""
    return gpu.compiled(
        "mixtral_8x7b_h100x64", "train.experts.chunks=2", "gpu.flags=[xla_gpu_experimental_parallel_collective_overlap_limit=6]"
    )


T, D, F, K, LAYERS, WAYS = 8192, 4096, 14336, 2, 32, 8


def test_mixtral_takes_17_gib(mixtral):
    """MaxText: 21.6."""
    assert mixtral.sizes.peak_memory_in_bytes <= 17 * 2**30


@pytest.mark.parametrize("run", gpu.MIXTURES)
def test_runs_with_experts_fit_and_are_predicted(run, monkeypatch):
    """Dense ones: `test_gpu_report.py`. Control: without the rows of experts the formula is a quarter off where a token has 8 of them."""
    compiled = gpu.compiled(run)
    report = compiling.report(compiled)
    gpu.check_predicted(report)
    gpu.check_copied(run, report)
    if compiled.config.model.moe.per_token == 8:
        monkeypatch.setattr(working, "_rows_at_work", lambda config: 0)
        assert compiling.memory.peak.predicted_peak(compiled.config) < 0.8 * report["memory"]["peak"]


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


def test_a_shared_expert_is_computed_while_tokens_travel(at_once):
    """Forward: tokens go out behind its matmuls, results come back behind nothing. Backward: tokens again and the results' gradients with
    nothing behind them, the gradients of tokens behind its matmuls."""
    forward, backward = behind(at_once.text)
    assert [loops for loops, _ in forward + backward] == [0] * 5
    assert forward[0][1] >= 1 == len(forward[1:]) and backward[-1][1] >= 1 and len(backward) == 3


def test_a_chunk_travels_while_another_is_served(chunked, at_once, mixtral, mixtral_chunked):
    """In two chunks a layer has 4 exchanges forward and 6 backward. Behind a loop over an expert's matmuls stand forward the second
    chunk's tokens and the first one's results, backward one chunk's tokens or gradients out and its gradients home.

    Control: all at once, no exchange has such a loop to travel behind."""
    for text, shared in ((chunked.text, True), (mixtral_chunked.text, False)):
        forward, backward = behind(text)
        assert len(forward) == 4 and sum(loops > 0 for loops, _ in forward) == 2
        assert len(backward) == 6 and sum(loops > 0 for loops, _ in backward) >= 2
        assert (sum(shared for _, shared in forward) > 0) is shared
    assert not any(loops for each in (at_once, mixtral) for one in behind(each.text) for loops, _ in one)


def test_mixtral_in_chunks_takes_no_more_memory_and_less_time(mixtral_chunked, mixtral):
    """Less than 17 GiB, one buffer of experts' gradients for both chunks; at most 5% waits for `expert`."""
    report, at_once = compiling.report(mixtral_chunked), compiling.report(mixtral)
    assert report["memory"]["peak"] <= 16.5 * 2**30 and report["memory"]["peak"] <= 1.01 * at_once["memory"]["peak"]
    assert report["memory"]["predicted_peak"] == pytest.approx(report["memory"]["peak"], rel=0.05)
    found, before = (simulate.simulate(each.text, each.mesh, each.hardware) for each in (mixtral_chunked, mixtral))
    assert found.exposed("expert") <= 0.02 and found.step_seconds <= 0.96 * before.step_seconds


def test_qwen3_30b_a3b():
    """The row of docs/experts.md: peak, traffic, work and simulated time; all of a token's 8 choices travel, 128 experts over 8 GPUs."""
    qwen = gpu.compiled("qwen3_30b_a3b_h100x64")
    report, found = compiling.report(qwen), simulate.simulate(qwen.text, qwen.mesh, qwen.hardware)
    rows, unexpected = sent.compare(qwen.text, qwen.mesh, formulas.step_traffic(qwen.config))
    assert unexpected == [] and all(row["bytes"] == row["expected_bytes"] for row in rows)
    experts = sum(row["bytes"] for row in rows if row["kind"] == "ragged_all_to_all")
    assert experts == pytest.approx(56.4e9, rel=0.002) and sum(row["bytes"] for row in rows) == pytest.approx(82.1e9, rel=0.002)
    assert report["memory"]["peak"] <= 13.3 * 2**30 and report["flops"]["program"] <= 358e12
    waits = [found.exposed_seconds[(axis,)] / found.step_seconds for axis in ("expert", "data")]
    assert (found.step_seconds, *waits) == pytest.approx((2.27, 0.054, 0.011), rel=0.03)
    assert found.exposed("expert") <= 0.07, "with what travels over `data` and `expert` together"
