"""What the simulator says of whole steps compiled for H100s: calibrated on one published point, predicting another, and the overlap that
the layer stack and the compiler's options reach. Needs JAX's CUDA plugin, no GPU."""

import os
import re
from pathlib import Path

import jax
import pytest

from jaxpar import configfile
from jaxpar.plan import compile as compiling
from jaxpar.plan import hardware
from jaxpar.plan.simulate import simulate

PRESENT = compiling.plugin_present()
if not PRESENT and os.environ.get("GPU_COMPILE_REQUIRED"):
    raise RuntimeError("JAX's CUDA plugin is not installed")
pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(not PRESENT, reason="JAX's CUDA plugin is not installed: make test-gpu-compile"),
]
FOLDER = Path(__file__).parent.parent.parent / "configs" / "runs"


@pytest.fixture(scope="module", autouse=True)
def as_users_run_it():
    """Without the 64-bit types of the other tests."""
    with jax.enable_x64(False):
        yield


def compiled(name, gpu, *settings):
    return compiling.compile_run(configfile.load(FOLDER / f"{name}.yaml", list(settings)), hardware.load(gpu))


# Published by torchtitan (benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3), tokens/s/GPU: FSDP and torch.compile.
@pytest.mark.parametrize(("gpus", "published", "within"), [(8, 6667, 0.01), (128, 6514, 0.05)], ids=["calibration", "prediction"])
def test_torchtitan_llama3_8b_on_500_watt_h100s(gpus, published, within):
    settings = [f"mesh.data={gpus}", "mesh.tensor=1", f"train.batch={2 * gpus}", "train.accumulation=1", "train.remat=outputs"]
    found = compiling.simulated(compiled("llama3_8b_h100x8", "h100_500w", *settings))
    assert found["tokens_per_second_per_gpu"] == pytest.approx(published, rel=within)


GOAL = ("data.documents=joined", "train.accumulation=1", "train.batch=64", "train.remat=block")


@pytest.fixture(scope="module")
def interleaved():
    return compiled("llama3_8b_h100x64", "h100", *GOAL)


def test_data_8_tensor_8_hides_its_communication(interleaved):
    """64 sequences of 8192 tokens, full recomputation: at most 2% of the step waits for `data`, at most 10% for `tensor`."""
    found = simulate(interleaved.text, interleaved.mesh, interleaved.hardware)
    assert found.exposed("data") <= 0.02
    assert found.exposed("tensor") <= 0.10


def test_made_synchronous_the_same_program_waits(interleaved):
    """Control: were every collective synchronous, all of it would be exposed."""
    found = simulate(interleaved.text, interleaved.mesh, interleaved.hardware)
    text = re.sub(r'"is_sync": ?false', '"is_sync":true', interleaved.text)
    blocked = simulate(text, interleaved.mesh, interleaved.hardware)
    assert blocked.exposed_seconds[("tensor",)] > 4 * found.exposed_seconds[("tensor",)]
    assert blocked.exposed_seconds[("tensor",)] == pytest.approx(blocked.busy_seconds[("tensor",)])
    assert blocked.step_seconds > 1.3 * found.step_seconds and blocked.compute_seconds == pytest.approx(found.compute_seconds)


def test_without_interleaving_it_waits_for_a_fifth_of_the_step():
    """Control: one part, nothing to hide behind."""
    plain = compiled("llama3_8b_h100x64", "h100", *GOAL, "train.interleave=1")
    assert simulate(plain.text, plain.mesh, plain.hardware).exposed("tensor") > 0.18


def test_matmuls_and_collectives_of_a_real_step_by_hand(interleaved):
    """32 layers: forward, full recomputation and backward of weights and inputs are 4 times the forward's matmuls, the head's are 3."""
    config, found = interleaved.config, simulate(interleaved.text, interleaved.mesh, interleaved.hardware)
    model, tokens = config.model, 64 * 8192 / 8
    heads = (model.heads + 2 * model.kv_heads) * model.head_width + model.heads * model.head_width
    layer = 2 * tokens * model.width * (heads + 3 * model.mlp_width) / 8
    attention = 4 * 8 * (model.heads / 8) * 8192 * 8192 / 2 * model.head_width
    head = 2 * tokens * model.width * model.vocabulary / 8
    down = 2 * tokens * model.width * model.mlp_width / 8  # the MLP's output is not computed again
    expected = model.layers * (4 * layer - down + (2 + 2.5) * attention) + 3 * head
    assert found.flops == pytest.approx(expected, rel=1e-3)
    assert ("tensor",) in found.busy_seconds and ("data",) in found.busy_seconds
