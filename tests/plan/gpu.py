"""What tests that compile for GPUs share: the mark, and runs compiled once for all of them.

They need JAX's CUDA plugin and no GPU: `make test-gpu-compile`. GPU_COMPILE_REQUIRED=1 makes its absence a failure instead of a skip.
"""

import functools
import os
from pathlib import Path

import jax
import pytest

from jaxpar import configfile
from jaxpar.plan import compile as compiling
from jaxpar.plan import hardware

PRESENT = compiling.plugin_present()
if not PRESENT and os.environ.get("GPU_COMPILE_REQUIRED"):
    raise RuntimeError("JAX's CUDA plugin is not installed")
MARKS = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(not PRESENT, reason="JAX's CUDA plugin is not installed: make test-gpu-compile"),
    pytest.mark.usefixtures("as_users_run_it"),
    pytest.mark.filterwarnings(
        "error:Error reading persistent compilation cache"
    ),  # it is off: what comes from it has no record of buffers
]
FOLDER = Path(__file__).parent.parent.parent / "configs" / "runs"

# Llama-3-8B, 64 sequences of 8192 tokens on 64 H100s, full recomputation: what MaxText 0.2.5 was compiled for as well.
COMPARED = ("train.remat=block", "train.batch=64", "train.accumulation=1", "train.reduce_dtype=bfloat16", "train.loss_chunk=256")


def load(name, *settings):
    return configfile.load(FOLDER / f"{name}.yaml", list(settings))


def runs(experts: bool):
    """Every run file for GPUs, dense or of experts."""
    found = {path.stem: load(path.stem) for path in FOLDER.glob("*.yaml")}
    return sorted(name for name, each in found.items() if not each.train.cpu_devices and bool(each.model.moe.experts) is experts)


BIG, MIXTURES = runs(experts=False), runs(experts=True)


# GB that copies and transposes of 64 MiB and more move in a step, and what they are, see docs/compile.md.
COPIED = {
    "llama3_8b_h100x8": 1.2,  # the embedding's rows, rearranged for the all-to-all
    "llama3_8b_h100x64": 9,  # kept queries and keys, transposed for the backward
    "llama3_70b_h100x256": 17,  # the same
    "llama3_405b_h100x1024": 400,  # gathered weights, when the loop turns
    "llama3_8b_131k_h100x64": 6.8,  # gathered weights and summed gradients of all layers, rearranged once a step
    "llama3_8b_1m_h100x64": 19,  # gathered weights of the MLP, and zeros that its gradients begin with
    "mixtral_8x7b_h100x64": 45,  # zeros that rows arrive in and gradients begin with; gathered weights of experts
    "qwen3_30b_a3b_h100x64": 62,  # such zeros
}


def check_copied(run, report):
    assert run in COPIED, f"{run}: how much it copies has no bound yet"
    assert sum(report["copies"].values()) <= 1e9 * COPIED[run]


# Of the compiled peak, how far the closed formula may be from it: for run files, and for other runs.
OF_RUN_FILES, ELSEWHERE = 0.03, 0.08


def check_predicted(report, within=OF_RUN_FILES):
    """What every run file must: fit, and peak `within` a share of the closed formula."""
    held = report["memory"]
    assert report["fits"] and held["predicted_peak"] == pytest.approx(held["peak"], rel=within)


@functools.lru_cache(maxsize=12)
def compiled(name, *settings, gpu="h100"):
    """A run of configs/runs, compiled without 64-bit types; 2 MB each, so that a dozen stays in memory."""
    with jax.enable_x64(False):
        return compiling.compile_run(load(name, *settings), hardware.load(gpu))
