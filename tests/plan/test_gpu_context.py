"""Rows split over `seq`, compiled for H100s: bytes, transfers behind attention, memory that grows with the row, MaxText's figures."""

import dataclasses
import math
import re

import pytest

from jaxpar.config import ContextConfig, DataConfig, MeshShape
from jaxpar.plan import compile as compiling
from jaxpar.plan import formulas, hardware, sent, work
from jaxpar.plan.simulate import simulate
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


def test_131k_tokens_hide_the_ring():
    """Every transfer has work behind it: attention, and at the backward's ends the layer's matmuls, but for one that has element-wise work;
    of the simulated step at most 2% waits for `seq`."""
    compiled = gpu.compiled(LONG)
    behind = transfers(compiled.text)
    assert behind.count("attention") >= 5 and behind.count("nothing") == 0 and behind.count("other") <= 1, behind
    found = simulate(compiled.text, compiled.mesh, compiled.hardware)
    assert found.exposed("seq") <= 0.02
    assert compiling.report(compiled)["fits"] and compiled.sizes.peak_memory_in_bytes <= 17 * 2**30


def largest(text):
    """Elements of the largest array of a program."""
    sizes = (shape.split(",") for shape in set(re.findall(r"\w\d+\[([\d,]+)\]", text)))
    return max(math.prod(map(int, shape)) for shape in sizes)


def test_memory_grows_with_the_row():
    """Temporaries at 262k, 524k and 1M tokens on 64 devices: a doubling adds at most twice what the one before did; nothing of S × S/64."""
    temporary = {}
    for tokens in (262144, 524288, 1048576):
        compiled = gpu.compiled(LONGEST, f"data.sequence={tokens}")
        temporary[tokens] = compiled.sizes.temp_size_in_bytes
        assert largest(compiled.text) < tokens * (tokens // 64)
    first, second = temporary[524288] - temporary[262144], temporary[1048576] - temporary[524288]
    assert 0 < first < second <= 2.1 * first


def test_beside_maxtext_with_a_ring():
    """Peak at most 7.33 GiB and 33.3 GB of permutes a GPU."""
    compiled = gpu.compiled(LONGEST, *MAXTEXT)
    rows, _ = sent.compare(compiled.text, compiled.mesh, formulas.step_traffic(compiled.config))
    assert sum(row["bytes"] for row in rows if row["kind"] == "permute") <= 33.3e9
    assert compiled.sizes.peak_memory_in_bytes <= 7.33 * 2**30
