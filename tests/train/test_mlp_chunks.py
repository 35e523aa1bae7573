"""The MLP some tokens at a time: the same gradients on every mesh, in every policy, with hidden values of a chunk only in memory."""

import dataclasses

import numpy as np
import pytest

from jaxpar.config import ContextConfig, ModelConfig
from jaxpar.plan.traffic import summary
from tests.parallel.context_cases import OPTIONS
from tests.train import runs
from tests.train.programs import config, traced, training
from tests.train.test_gradients import check
from tests.train.test_gradients_context import gradients


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"seq": 2, "data": 2, "tensor": 2, "zero": 3, "remat": "matmuls", "context": ContextConfig()}, marks=pytest.mark.slow),
        {"zero": 0, "remat": "matmuls"},
        pytest.param({"zero": 0, "remat": "none"}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2, "zero": 1, "remat": "block", "interleave": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "zero": 2, "remat": "outputs", "accumulation": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_the_whole(mesh):
    """Chunks of 3 tokens, of 16 or 8: shortened until they divide."""
    check(gradients(runs.config(mlp_chunk=3, **mesh)), runs.gradients(runs.config()), runs.MODEL.vocabulary)


WIDE = ModelConfig(vocabulary=64, width=32, layers=2, heads=2, kv_heads=1, mlp_width=2048)


def step(chunk, dtype="float32"):
    return config(model=WIDE, sequence=256, batch=2, remat="block", zero=0, mlp_chunk=chunk, compute_dtype=dtype)


def temporary(run):
    built = training(run)
    program = built.step.lower(built.abstract_state, built.abstract_batch).compile(compiler_options=OPTIONS)
    return program.memory_analysis().temp_size_in_bytes


def test_memory():
    """Without chunks the hidden values of 512 tokens exist, several at once; with chunks of 16 tokens a sixteenth of them."""
    hidden = 2 * 256 * WIDE.mlp_width * 4
    assert temporary(step(0)) - temporary(step(16)) > 2 * hidden


def test_sends_the_same():
    run = config(1, 2, model=WIDE, sequence=32, zero=0, remat="attention")
    chunked = dataclasses.replace(run, train=dataclasses.replace(run.train, mlp_chunk=8))
    assert summary(traced(run)) == summary(traced(chunked))


@pytest.mark.slow
def test_gradients_add_up_in_float32():
    """Many chunks in bfloat16 are as close to float64 as one: their sum is not rounded once for each."""

    def error(chunk):
        model = dataclasses.replace(runs.MODEL, layers=1, dropout=0.0, windows=(0,), mlp_bias=False)
        run = runs.config(model=model, mlp_chunk=chunk, compute_dtype="bfloat16")
        exact = runs.gradients(runs.config(model=model))[1]["layers"]["mlp"]["down"]
        return float(np.abs(gradients(run)[1]["layers"]["mlp"]["down"] - exact).max() / np.abs(exact).max())

    assert error(1) < 1.5 * error(0) + 2**-9


def test_bad_size():
    with pytest.raises(ValueError, match=r"train\.mlp_chunk: -1 must be at least 1 token, or 0"):
        runs.config(mlp_chunk=-1)
