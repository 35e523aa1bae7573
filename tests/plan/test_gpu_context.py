"""Rows split over `seq`, compiled for H100s: bytes, transfers behind attention, memory that grows with the row, MaxText's figures."""

import dataclasses
import math
import re
from collections import Counter

import pytest

from jaxpar.config import ContextConfig, DataConfig, MeshShape
from jaxpar.parallel.context import blocks, sources
from jaxpar.plan import compile as compiling
from jaxpar.plan import formulas, hardware, sent, work
from jaxpar.plan.simulate import simulate
from scripts import long_rows
from tests.plan import gpu
from tests.plan.gpu_runs import RUNS

pytestmark = gpu.MARKS

LONG, LONGEST = "llama3_8b_131k_h100x64", "llama3_8b_1m_h100x64"
# MaxText with Transformer Engine's ring: fsdp 8 × context 8, Llama-3-8B, 64 sequences of 8192 tokens, full recomputation.
MAXTEXT = (
    *("data.sequence=8192", "mesh.data=8", "mesh.seq=8", "train.batch=64", "train.mlp_chunk=0"),
    *("train.remat=block", "train.reduce_dtype=bfloat16", "train.loss_chunk=256"),
)
WAYS = [("ring", "zigzag"), ("ring", "contiguous"), ("ring", "striped"), ("gather", "zigzag"), ("ulysses", "contiguous"), ("usp", "zigzag")]


def small(method, layout, seq=4, tensor=2, **train):
    base = RUNS["8-8-3-True-1-block-2-float32"]
    return dataclasses.replace(
        base,
        mesh=MeshShape(seq=seq, tensor=tensor),
        data=DataConfig(sequence=1024, documents="joined"),
        train=dataclasses.replace(base.train, batch=2, context=ContextConfig(method=method, layout=layout), **train),
    )


def check_sent(compiled):
    """Every byte is the formulas', on every axis. What the program sends: {(axis, kind): bytes}."""
    rows, unexpected = sent.compare(compiled.text, compiled.mesh, formulas.step_traffic(compiled.config))
    assert unexpected == []
    found = {(row["axis"], row["kind"]): row["bytes"] for row in rows}
    assert found == {(row["axis"], row["kind"]): row["expected_bytes"] for row in rows}
    return found


@pytest.mark.parametrize(("method", "layout"), WAYS)
def test_bytes_over_seq_are_those_of_the_formulas(method, layout):
    config = small(method, layout, interleave=1)
    compiled = compiling.compile_run(config, hardware.load("h100"))
    check_sent(compiled)
    assert re.search(r"fmhaSoftmax\b", compiled.text) and "fmhaSoftmaxBackward" in compiled.text


def test_layers_with_windows_of_their_own():
    """Three layers see 128 tokens, two the row: bytes of the formulas, and of cuDNN's calls one for a device's own tokens in each layer and
    three more where the ring goes on; no loop whose end is only known at run time."""
    config = small("ring", "contiguous", interleave=1, remat="matmuls")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, windows=(128, 0)))
    compiled = compiling.compile_run(config, hardware.load("h100"))
    check_sent(compiled)
    done = work.measure(compiled.text)
    calls = {name.rsplit("$")[-1]: count for name, count in done.calls.items() if "fmha" in name}
    assert calls == {"fmhaSoftmax": 3 * 1 + 2 * 4, "fmhaSoftmaxBackward": 3 * 1 + 2 * 4} and done.at_most == 0


def test_layers_with_windows_that_leave_no_loop():
    """ZeRO-3's gathers of norm weights, which vary over fewer axes than activations, are the backward's own too."""
    config = small("ring", "contiguous", interleave=1, remat="matmuls")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, windows=(128, 0), layers=3))
    check_sent(compiling.compile_run(config, hardware.load("h100")))


def transfers(text):
    """Of every permute of the program, what stands between its start and its done: attention, else matrix products, else other kernels."""
    behind = []
    for computation in re.split(r"\n(?=(?:%|ENTRY))", text):
        open_, done = {}, []
        for line in computation.splitlines():
            if found := re.search(r"%(\S+) = .*\bcollective-permute-start\(", line):
                open_[found[1]] = len(done)
            elif found := re.search(r"collective-permute-done\(.*%(\S+?)\)", line):
                between = done[open_.pop(found[1]) :]
                behind.append(next((kind for kind in ("attention", "products", "other") if kind in between), "nothing"))
            elif "fmhaSoftmax" in line and "custom-call(" in line:
                done.append("attention")
            elif " fusion(" in line or " custom-call(" in line:
                done.append("products" if re.search(r"%gemm_fusion|__cublas", line) else "other")
    return behind


def check_hidden(compiled, behind, exposed, gib):
    """What the program sends is the formulas'; its transfers have `behind` them what is said; at most a share `exposed` of the simulated
    step waits for `seq`, and no time at all for a permute; the peak is at most `gib`; no array has the dims of a block's scores."""
    sent_ = check_sent(compiled)
    assert Counter(transfers(compiled.text)) == behind
    simulated = simulate(compiled.text, compiled.mesh, compiled.hardware)
    assert simulated.exposed("seq") <= exposed and not [kind for _, kind, _ in simulated.unhidden if kind == "permute"]
    row = long_rows.row(compiled.config, compiled.sizes.temp_size_in_bytes, compiled.text)
    chunk = row.tokens // (2 * compiled.config.mesh.seq)
    assert long_rows.squares(row, chunk) == []
    scores = dataclasses.replace(row, shapes=row.shapes | {(4, chunk, chunk)})
    assert long_rows.squares(scores, chunk) == [(4, chunk, chunk)], "control: the scores of two chunks"
    assert compiling.report(compiled)["fits"] and compiled.sizes.peak_memory_in_bytes <= gib * 2**30
    return sent_["seq", "permute"]


def test_131k_tokens_hide_the_ring():
    """seq 8 x tensor 8: every transfer runs behind attention; at most 2% waits, all of it for ZeRO's."""
    assert check_hidden(gpu.compiled(LONG), {"attention": 7}, exposed=0.018, gib=17) < 45.2e9


def test_a_million_tokens_hide_the_ring():
    """seq 64: all but one; that of dk on its way home shares its link with dv's, which has attention."""
    assert check_hidden(gpu.compiled(LONGEST), {"attention": 43, "other": 1}, exposed=0.001, gib=16.5) < 406e9


def test_transfers_without_order_are_noticed(monkeypatch):
    """Negative control: keys, values and sums that do not wait for one another."""
    monkeypatch.setattr(sources, "barrier", lambda parts: parts)
    monkeypatch.setattr(blocks, "barrier", lambda parts: parts)
    behind = Counter(transfers(gpu.compiled.__wrapped__(LONG).text))
    assert behind.total() > 7 and behind["attention"] < behind.total()


def test_memory_grows_with_the_row():
    """32k to 1M tokens on 64 devices: from each length to the next a token adds as often what is kept of it as docs/context.md says, 1.37
    times over the whole range; between 524k and 1M no array grows by more than a factor of two."""
    rows = []
    for tokens in reversed(long_rows.TOKENS):  # the longest was compiled for the test above
        compiled = gpu.compiled(LONGEST, *([f"data.sequence={tokens}"] if tokens < long_rows.TOKENS[-1] else []))
        rows.insert(0, long_rows.row(compiled.config, compiled.sizes.temp_size_in_bytes, compiled.text))
    assert long_rows.growth(rows) == pytest.approx([1.33, 1.33, 1.94, 1.09], abs=0.1)
    assert long_rows.growth([rows[0], rows[-1]]) == pytest.approx([1.37], abs=0.05)
    *_, half, whole = rows
    assert long_rows.more_than_linear(half, whole, 2**18) == []
    model, tokens = compiled.config.model, whole.tokens // 64
    assert math.prod(whole.largest) == (model.layers - 1) * tokens * model.width  # what is kept of all layers but the last
    scores = dataclasses.replace(whole, shapes=whole.shapes | {(32, tokens, tokens)})
    assert long_rows.more_than_linear(half, scores, 2**18) == [(32, tokens, tokens)], "control: a block's scores"


def test_beside_maxtext_with_a_ring():
    """Peak at most 7.33 GiB and 33.3 GB of permutes a GPU."""
    compiled = gpu.compiled(LONGEST, *MAXTEXT)
    assert check_sent(compiled)["seq", "permute"] <= 33.3e9
    assert compiled.sizes.peak_memory_in_bytes <= 7.33 * 2**30
