"""What a step sends over `seq`, as written and as compiled, is what the formulas say: kind, axes, count, bytes, and nothing else."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from jaxpar.config import Config, ContextConfig, DataConfig, MeshShape, ModelConfig, TrainConfig
from jaxpar.models.decoder import DecoderFunctions
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


def step(mesh=(4, 1, 2), method="ring", layout="zigzag", windows=(0,), documents="isolated", layers=MODEL.layers, model=MODEL, **train):
    seq, data, tensor = mesh
    return Config(
        model=dataclasses.replace(model, windows=windows, layers=layers),
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


MORE = dataclasses.replace(MODEL, sinks=True, prefix=9, value_head_width=6)


@pytest.mark.parametrize(("method", "remat"), [("ring", "matmuls"), ("ulysses", "attention"), ("gather", "outputs"), ("usp", "block")])
def test_sinks_a_prefix_and_wide_values(method, remat):
    """Values are sent in their own width, a prefix once as booleans; with a prefix a window ends no walk, and sinks send nothing over `seq`
    but their gradient."""
    run = step(method=method, remat=remat, windows=(9, 0), model=MORE)
    assert executions(traced(run)) == executions(formulas.step_traffic(run))
    other = step(method=method, remat=remat, windows=(9, 0), model=dataclasses.replace(MORE, value_head_width=4))
    assert executions(traced(run)) != executions(formulas.step_traffic(other))


COMPILED = {
    "ring": step(zero=0),
    "window": step(zero=0, windows=(9,), layout="contiguous"),
    "window, zigzag, again": step(zero=0, windows=(9,), remat="block"),
    "usp": step(zero=0, method="usp"),
    "gather": step(zero=0, method="gather", layout="striped"),
    "sinks, a prefix, wide values": step(zero=0, windows=(9,), model=MORE),
    "windows that alternate": step(zero=0, windows=(9, 0), layout="contiguous", layers=4, attention_block=4),
    "windows that alternate, zigzag": step(zero=1, windows=(9, 0), layers=4, attention_block=4),
    "windows that leave no loop": step(zero=3, windows=(9, 0), layout="contiguous", layers=3, attention_block=4),
}
QUICK = ("usp", "windows that alternate")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMPILED])
def test_a_compiled_step_sends_exactly_what_the_formulas_say(name):
    run = COMPILED[name]
    expected, found = summary(formulas.step_traffic(run)), summary(measured(run).sent)
    assert {key: total.payload for key, total in found.items()} == {key: total.payload for key, total in expected.items()}


def tiles(layout, window, devices=4, length=64, tile=4):
    """Tiles of scores that a device of a ring computes for a head of a row: of all blocks that meet at a step on any device, those tiles
    in which some device sees a key. A step is the same program on all of them."""
    chunks = devices * (2 if layout == "zigzag" else 1)
    size, found = length // chunks, 0

    def seen(behind):  # tiles of two chunks that far apart, in tokens
        i, j = np.mgrid[:size, :size]
        visible = (behind + i - j >= 0) & ((behind + i - j < window) | (window == 0))
        return int(visible.reshape(size // tile, tile, size // tile, tile).any((1, 3)).sum())

    for step in range(devices):
        if layout == "contiguous":
            found += seen(step * size)
        elif window:  # chunks meet those `step` before them
            found += 2 * seen(step * size)
        else:  # two of the four pairs of chunks are visible; at step 0 their own, and the early one by the late
            found += 2 * seen(length) if step else 2 * seen(0) + seen(length)
    return found


def flops(run):
    """Matrix products of a step on one device: six a matrix element and token, seven a tile of scores."""
    model, mesh, batch = run.model, run.mesh, run.train.batch // run.mesh.data
    matrices = sum(weight.elements for weight in formulas.weights(run) if weight.layers and len(weight.shape) > 1)
    head = next(weight.elements for weight in formulas.weights(run) if weight.name == "head/table")
    tokens, chunk = batch * run.data.sequence // mesh.seq, run.train.loss_chunk
    scores = sum(tiles(run.train.context.layout, window) for window in model.layer_windows)
    attention = 7 * 2 * 4 * 4 * model.head_width * batch * (model.heads // mesh.tensor) * scores
    return 6 * (matrices * tokens * model.layers + head * -(-tokens // chunk) * chunk) + attention


@pytest.mark.parametrize(
    "name", ["windows that alternate", pytest.param("windows that alternate, zigzag", marks=pytest.mark.slow)], ids=str
)
def test_layers_compute_what_their_windows_reach(name):
    """To the operation; a window of 9 needs 12 tiles, without one a contiguous ring of 4 computes 58 and zigzag 34."""
    assert (tiles("contiguous", 9), tiles("contiguous", 0)) == (12, 58) and (tiles("zigzag", 9), tiles("zigzag", 0)) == (12, 34)
    assert measured(COMPILED[name]).flops == flops(COMPILED[name])


def keys(run, kind="permute"):
    """Bytes that activations send over `seq`."""
    return sum(one.bytes for one in traced(run) if (one.kind, one.axes, one.dtype) == (kind, ("seq",), "float32"))


def test_closed_forms():
    """Forward and backward, of K + V of a device (one head each): ring 3 (n - 1); a window only what it reaches; a gather (n - 1), and as
    much for the sums home. Of a head's block: Ulysses 2 (n - 1)/n (2 N + 2 max(K, n)) with n = 4 and N = 4; usp, with n = 2, this
    and a ring over 2 of blocks twice as long."""
    block = 2 * 8 * (64 // 4) * 1 * 4 * 4  # K and V, 8 rows, 16 tokens, 1 head of 4 float32
    times = MODEL.layers
    assert keys(step(zero=0)) == 3 * 3 * block * times
    assert keys(step(zero=0, layout="contiguous")) == 3 * 3 * block * times
    assert keys(step(zero=0, layout="contiguous", windows=(9,))) == 3 * 1 * block * times
    assert keys(step(zero=0, layout="zigzag", windows=(9,))) == 3 * 1 * block * times
    assert keys(step(zero=0, layout="contiguous", windows=(9, 0), layers=5)) == 3 * (3 * 1 + 2 * 3) * block
    assert keys(step(zero=0, layout="zigzag", windows=(9, 0), layers=5)) == 3 * (3 * 1 + 2 * 3) * block
    once = {"zero": 0, "remat": "none"}  # policies that compute attention's inputs again send them again
    assert keys(step(method="gather", **once), "all_gather") == 3 * block * times
    assert keys(step(method="gather", **once), "reduce_scatter") == 3 * block * times
    head = block // 2
    assert keys(step(method="ulysses", **once), "all_to_all") == 2 * 3 * (2 * 4 + 2 * 4) * head // 4 * times
    assert keys(step(method="usp", **once), "all_to_all") == 2 * 1 * (2 * 4 + 2 * 2) * head // 2 * times
    assert keys(step(method="usp", **once)) == 3 * 1 * (2 * block) * times


@pytest.mark.parametrize(
    "change",
    [{"method": "gather"}, {"method": "usp"}, {"windows": (9,)}, {"documents": "joined"}, {"remat": "block"}, {"mesh": (8, 1, 1)}],
    ids=str,
)
def test_another_step_does_not_match(change):
    """Negative control: the formulas of any other setting disagree with the program."""
    assert executions(traced(step())) != executions(formulas.step_traffic(step(**change)))


def test_a_window_known_at_run_time_sends_every_block(monkeypatch):
    """Negative control: layers whose windows only arrays know."""
    run = step(windows=(9, 0), layers=4, batch=16)
    assert executions(traced(run)) == executions(formulas.step_traffic(run))
    monkeypatch.setattr(DecoderFunctions, "blocks", lambda self, segment: (self.block,) * segment.units)
    assert executions(traced.__wrapped__(run)) != executions(formulas.step_traffic(run))
