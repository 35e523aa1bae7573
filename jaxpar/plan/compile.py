"""Compile a run for a cluster of GPUs on a machine that has none.

    devices      the GPUs of a cluster, as XLA's CUDA plugin describes them
    compile_run  the very step that training runs, lowered and compiled for them -> Compiled
    Compiled     scheduled program, sizes, what is alive when
    report       everything about it as JSON takes it; `knobs.py` compiles what else could be done, `show.py` prints

The plugin (`pip install "jax[cuda13]"`) compiles with no GPU present.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxpar import gpu, run_checks
from jaxpar.compilation import without_cache
from jaxpar.config import Config
from jaxpar.config.checks import divisors
from jaxpar.mesh import make_mesh
from jaxpar.plan import buffers, formulas, kernels, memory, sent, simulate, work
from jaxpar.plan.hardware import Hardware
from jaxpar.train.step import Training, build_training

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


@dataclass(frozen=True, eq=False)
class Compiled:
    """One run compiled for one cluster. `text` is the scheduled program, `sizes` what XLA says of its memory, `alive` of its buffers,
    `kernel_flops` those of one launch of each Pallas kernel."""

    config: Config
    hardware: Hardware
    mesh: Mesh
    training: Training
    text: str
    sizes: Any
    alive: buffers.Alive
    kernel_flops: dict[str, int]
    lower_seconds: float
    compile_seconds: float


def plugin_present() -> bool:
    try:
        return any(importlib.util.find_spec(name) is not None for name in PLUGINS)
    except ModuleNotFoundError:
        return False


def devices(hardware: Hardware, nodes: int, gpus_per_node: int) -> Sequence[Any]:
    """The GPUs of `nodes` hosts, each a process of its own, with no GPU needed.

    Raises ValueError where the CUDA plugin is missing or of another version than jax, and for a `target` that XLA does not understand.
    """
    install = f'pip install "jax[cuda13]=={jax.__version__}"'
    if not plugin_present():
        raise ValueError(f"compiling for GPUs needs JAX's CUDA plugin, though no GPU: {install}")
    try:
        found = topologies.get_topology_desc(
            hardware.name, "cuda", target_config=hardware.target_config(), topology=f"1x{nodes}x{gpus_per_node}"
        )
    except NotImplementedError:
        raise ValueError(f"JAX's CUDA plugin did not load (another version than jax {jax.__version__}?): {install}") from None
    except jax.errors.JaxRuntimeError as error:  # the parser of protos says what it does not know in its first line
        said = str(error).partition(": ")[2] or str(error)
        raise ValueError(f"{hardware.name}: target: XLA does not take it: {' '.join(said.split())}") from None
    return found.devices


def cluster(config: Config, hardware: Hardware, nodes: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """(nodes, GPUs a node): as given, else as many as the mesh needs, hosts as full as their number allows."""
    total, asked = config.mesh.devices, gpus_per_node
    if gpus_per_node is None:
        gpus_per_node = total // nodes if nodes and total % nodes == 0 else math.gcd(hardware.gpus_per_node, total)
    for name, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} must be at least 1")
    if asked is None and gpus_per_node > hardware.gpus_per_node:  # one NVLink domain of 64 must not come about unasked
        least = min(n for n in divisors(total) if total // n <= hardware.gpus_per_node)
        raise ValueError(
            f"--nodes: {nodes} hosts of {hardware.gpus_per_node} GPUs, as {hardware.name} has them, cannot make the {total} of the mesh; "
            f"use {least} or more, or say how many a host has: --gpus-per-node {gpus_per_node}"
        )
    if nodes is None and total % gpus_per_node:
        sizes = ", ".join(str(n) for n in divisors(total) if n <= hardware.gpus_per_node)
        raise ValueError(f"--gpus-per-node: hosts of {gpus_per_node} GPUs cannot make the {total} of the mesh; use one of {sizes}")
    return nodes if nodes is not None else -(-total // gpus_per_node), gpus_per_node


def compile_run(config: Config, hardware: Hardware, nodes: int | None = None, gpus_per_node: int | None = None) -> Compiled:
    """Lower and compile the training step of `config`.

    Raises ValueError: what training would refuse, before anything is compiled; a missing plugin; a compiler option XLA does not know.
    """
    nodes, gpus_per_node = cluster(config, hardware, nodes, gpus_per_node)
    run_checks.check_run(config, nodes * gpus_per_node)
    mesh = make_mesh(config.mesh, devices(hardware, nodes, gpus_per_node))
    training = build_training(config, mesh)
    start = time.perf_counter()
    traced = training.step.trace(training.abstract_state, training.abstract_batch)
    lowered = traced.lower()
    lower_seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder, without_cache():  # what comes from it writes no record of its buffers
        options = {**gpu.WITHOUT_GPU, "xla_dump_to": folder, "xla_dump_hlo_module_re": "^jit_step$", "xla_dump_hlo_as_text": True}
        start = time.perf_counter()
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if refusal := _refusal(str(error)):
                raise ValueError(refusal) from None
            raise
        compile_seconds = time.perf_counter() - start
        alive = buffers.read_dump(Path(folder))
    sizes, flops = compiled.memory_analysis(), kernels.kernel_flops(traced.jaxpr)
    return Compiled(config, hardware, mesh, training, compiled.as_text(), sizes, alive, flops, lower_seconds, compile_seconds)


def _refusal(error: str) -> str:
    """What a user can mend of an error of XLA's compiler, as one line; "" of any other."""
    if "compile option" in error or "While setting option" in error:
        return f"gpu.flags: {error.partition(': ')[2] or error}"
    if "output file" in error or "No space left" in error:  # ptxas and XLA write there
        return f"TMPDIR: XLA cannot write its temporary files; free some space, or name another folder: {' '.join(error.split())}"
    return ""


def report(compiled: Compiled, simulation: simulate.Simulation | None = None) -> dict[str, Any]:
    """Memory, traffic, work and simulated time of one GPU: nested dicts, lists and numbers, in bytes, FLOPs and seconds.

    run          what was compiled: `gpu`, `gpus`, `nodes`, and the settings of `mesh`, `model` and `train`
    memory       see `memory.measure`; `fits` in the `usable` bytes, cuDNN's workspace included
    collectives  {axis, kind, asynchronous, count, bytes, expected_bytes}, `bytes` sent by one GPU over a ring; `unexpected` with sources
    flops        {program, model}
    counted_at_most  loops that end early at run time, as attention's where a layer has its own window and experts' where their buffer is
                 not full: work and time are then upper bounds
    time         see `simulated`
    custom_calls by name; `kernels` of Pallas with their grid; `copies` of large buffers
    """
    config = compiled.config
    held = memory.measure(config, compiled.training, compiled.text, compiled.sizes, compiled.alive)
    rows, unexpected = sent.compare(compiled.text, compiled.mesh, formulas.step_traffic(config, compiled=True))
    done = work.measure(compiled.text, compiled.kernel_flops)
    usable = usable_bytes(compiled.hardware)
    return {
        "run": {
            "gpu": compiled.hardware.name,
            "gpus": config.mesh.devices,
            "nodes": len(set(simulate.hosts(compiled.mesh).tolist())),
            **{name: dataclasses.asdict(getattr(config, name)) for name in ("mesh", "model", "train")},
        },
        "memory": held,
        "collectives": rows,
        "unexpected": unexpected,
        "flops": {"program": done.flops, "model": work.model_flops(config) / config.mesh.devices},
        "counted_at_most": done.at_most,
        "time": simulated(compiled, simulation),
        "compile_seconds": compiled.compile_seconds,
        "fits": held["peak"] + held["attention_workspace"] <= usable,
        "usable": usable,
        "custom_calls": done.calls,
        "kernels": [
            {"name": each.name, "count": each.count, "grid": list(each.grid), "flops": compiled.kernel_flops.get(each.name)}
            for each in done.launches
        ],
        "copies": done.copies,
    }


def usable_bytes(hardware: Hardware) -> int:
    """What JAX may take of a GPU's memory."""
    return int(hardware.memory * gpu.MEMORY_FRACTION)


def simulated(compiled: Compiled, found: simulate.Simulation | None = None) -> dict[str, Any]:
    """Step time by the simulator (`found` where it ran already): `step_seconds`, `tokens_per_second_per_gpu`, `mfu` (causal attention
    counted half) and `mfu_full` (the whole score matrix), both of the GPU's peak in `peak_dtype`, `exposed_seconds` by axis."""
    config, dtype = compiled.config, work.peak_dtype(compiled.config, compiled.hardware)
    peak = compiled.hardware.peak_flops[dtype]
    found = found or simulate.simulate(compiled.text, compiled.mesh, compiled.hardware)
    gpus, seconds = config.mesh.devices, found.step_seconds
    return {
        "step_seconds": seconds,
        "tokens_per_second_per_gpu": config.train.batch * config.data.sequence / seconds / gpus,
        "mfu": work.model_flops(config) / gpus / seconds / peak,
        "mfu_full": work.model_flops(config, causal=False) / gpus / seconds / peak,
        "peak_dtype": dtype,
        "exposed_seconds": {"+".join(axes): waited for axes, waited in found.exposed_seconds.items()},
    }
