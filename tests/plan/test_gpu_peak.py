"""The predicted peak against programs compiled for H100s, over policies, rings, interleaving, ZeRO levels, one GPU and several, experts.

Small runs in which activations of a few layers outweigh all else; `-s` prints both peaks of each. Of real size are those of
`test_gpu_report.py` and `test_gpu_experts.py`, and the 8B of `test_overlap.py` with full recomputation and with none.
"""

import dataclasses

import jax
import pytest

from jaxpar.config import REMAT, Config, DataConfig, ExpertsConfig, MeshShape, ModelConfig, MoeConfig, TrainConfig
from jaxpar.plan import compile as compiling
from jaxpar.plan import hardware, peak, report, saved
from tests.plan import gpu

pytestmark = gpu.MARKS

MODEL = ModelConfig(vocabulary=16384, width=2048, layers=9, heads=16, kv_heads=4, head_width=128, mlp_width=7168)
MIXTURE = dataclasses.replace(MODEL, layers=6, moe=MoeConfig(experts=8, per_token=2, balance="microbatch", balance_weight=0.01))


def run(data=1, tensor=1, expert=1, model=MODEL, **train):
    """Four sequences of 4096 tokens a device and microbatch, but for `tensor` devices together."""
    sequences = 4 * data * expert * tensor * train.get("accumulation", 1)
    return Config(
        model=model,
        mesh=MeshShape(data=data, tensor=tensor, expert=expert),
        data=DataConfig(sequence=4096, documents="joined"),
        train=TrainConfig(**{"batch": sequences, **train}),
    )


RUNS = {
    "one GPU, none, ZeRO-0": run(remat="none", zero=0),
    "one GPU, outputs, ZeRO-3, 2 microbatches": run(remat="outputs", zero=3, accumulation=2),
    "8 GPUs, outputs, ZeRO-2": run(data=8, remat="outputs", zero=2),
    "8 GPUs, none, 2 parts, ZeRO-3": run(data=4, tensor=2, remat="none", zero=3, interleave=2),
    "8 GPUs, matmuls, ZeRO-1": run(data=4, tensor=2, remat="matmuls", zero=1),
    "8 GPUs, none, ring, ZeRO-3": run(data=4, tensor=2, remat="none", zero=3, collective_matmul=True),
    "8 GPUs, experts, none, ZeRO-3": run(
        expert=8, model=MIXTURE, remat="none", zero=3, reduce_dtype="bfloat16", loss_chunk=256, experts=ExpertsConfig(buffer_factor=1.5)
    ),
}


def others(config):
    """The run under the policies before and after its own."""
    place = REMAT.index(config.train.remat)
    near = [*REMAT[max(place - 1, 0) : place], *REMAT[place + 1 : place + 2]]
    return [dataclasses.replace(config, train=dataclasses.replace(config.train, remat=remat)) for remat in near]


@pytest.mark.parametrize("label", RUNS)
def test_the_peak_is_predicted(label):
    config = RUNS[label]
    with jax.enable_x64(False):
        compiled = compiling.compile_run(config, hardware.load("h100"))
    held, said = compiled.sizes.peak_memory_in_bytes, peak.predicted_peak(config)
    print(f"{label}: {held / 2**30:.2f} GiB, predicted {said / 2**30:.2f} ({said / held - 1:+.1%})")
    assert said == pytest.approx(held, rel=gpu.ELSEWHERE)
    for other in others(config):
        assert peak.predicted_peak(other) != pytest.approx(held, rel=gpu.ELSEWHERE), f"negative control: {other.train.remat}"
    if config.train.remat == "none" and not config.model.moe.experts:  # with cuDNN, which no test on CPUs has: to the byte
        with jax.enable_x64(False):
            kept = report.kept_bytes(report.block_facts(compiled.training))
        assert config.model.layers * config.train.interleave * kept == saved.saved_bytes(config)
