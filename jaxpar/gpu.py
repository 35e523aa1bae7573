"""How programs are compiled for GPUs: every compiler flag and its reason, in one place. Training and `jaxpar compile` use the same.

    FLAGS              what is set
    compiler_options   FLAGS with the run's own on top, for `jax.jit(..., compiler_options=...)`: they go with the step, not the process
    WITHOUT_GPU        what compiling with no GPU present needs besides
    MEMORY_FRACTION    part of a GPU's memory that JAX may take, set by `reserve` before it looks for devices

A run file overrides or adds: `gpu: {flags: [xla_gpu_all_gather_combine_threshold_bytes=67108864]}`.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from jaxpar.config import GpuConfig

Value = bool | int | str

# JAX takes 3/4 by default. CUDA's context, cuDNN and NCCL's buffers need 2 to 3 GiB of the rest.
MEMORY_FRACTION = 0.95


@dataclass(frozen=True)
class Flag:
    """One option of XLA: `name` as in XLA_FLAGS without dashes."""

    name: str
    value: Value
    reason: str


MIB = 2**20

FLAGS = (
    Flag(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "orders the program by estimated times, so that a collective starts early and is waited for late; without it instructions run "
        "in the order that saves memory and only neighbours overlap",
    ),
    Flag(
        "xla_gpu_all_gather_combine_threshold_bytes",
        32 * MIB,
        "gathers of norm weights and key/value projections travel with others; larger ones stay apart, for each may start as soon as its "
        "own operand is there, and the gathers of two interleaved half batches must not wait for each other",
    ),
    Flag(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        32 * MIB,
        "as for gathers: the gradient of a large weight leaves while the next is computed",
    ),
    Flag(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        32 * MIB,
        "norm weights' gradients and the sums of squares of a clip become one all-reduce; a layer's matrices (ZeRO-0) stay apart",
    ),
    Flag(
        "xla_gpu_enable_pipelined_all_gather",
        False,
        "the layer stack gathers one layer ahead itself; XLA's pipeliner would peel its loops a second time",
    ),
    Flag("xla_gpu_enable_pipelined_reduce_scatter", False, "the layer stack reduces one layer late itself"),
    Flag("xla_gpu_enable_pipelined_all_reduce", False, "gradients are all-reduced once, after the loop over microbatches"),
    Flag(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        4,
        "by default the scheduler starts no collective before the one under way is done, though those over `tensor` use NVLink and those "
        "over `data` the network; with room for both, and for one more in line on each, 6% of a simulated step is won (docs/compile.md)",
    ),
    Flag(
        "xla_gpu_memory_limit_slop_factor",
        118,
        "percent of four fifths of the device's memory up to which the scheduler may overlap; beyond that it computes again and waits; "
        "the default, 95, stops at 76%, and the 70B run, which fills 88% of an 80 GB GPU, would take nearly twice its time "
        "(docs/compile.md)",
    ),
    Flag(
        "xla_gpu_enable_highest_priority_async_stream",
        True,
        "a collective's few blocks get onto the GPU while a matmul fills it; at equal priority it would wait for the matmul's tail",
    ),
)

# Without a GPU no candidates for a kernel can be timed; and nobody runs the kernels, so that LLVM need not optimize them, which takes a
# fifth of the time. The program of kernels, its memory and its schedule are the same.
WITHOUT_GPU: dict[str, Value] = {"xla_gpu_autotune_level": 0, "xla_backend_optimization_level": 0}


def _parse(text: str) -> tuple[str, Value]:
    name, _, value = text.partition("=")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    return name, int(value) if value.lstrip("-").isdigit() else value


def compiler_options(gpu: GpuConfig) -> dict[str, Value]:
    """FLAGS by name, with `gpu.flags` on top."""
    return {**{flag.name: flag.value for flag in FLAGS}, **dict(_parse(text) for text in gpu.flags)}


def reserve(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let JAX take MEMORY_FRACTION of each GPU, unless the user says how much. Nothing where there is no GPU; call it before JAX starts."""
    environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_FRACTION))
