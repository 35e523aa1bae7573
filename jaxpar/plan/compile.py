"""Compile a run for a cluster of GPUs on a machine that has none.

    devices      the GPUs of a cluster, as XLA's CUDA plugin describes them
    compile_run  the very step that training runs, lowered and compiled for them -> Compiled
    Compiled     scheduled program, sizes, what is alive when
    report       everything about it as JSON takes it

The plugin (`pip install "jax[cuda13]"`) compiles with no GPU present.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxpar import gpu, rules
from jaxpar.config import Config
from jaxpar.mesh import make_mesh
from jaxpar.plan import formulas, memory, sent, simulate, work
from jaxpar.plan.hardware import Hardware
from jaxpar.train.step import Training, build_training

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


@dataclass(frozen=True, eq=False)
class Compiled:
    """One run compiled for one cluster. `text` is the scheduled program, `alive` what XLA wrote of its buffers."""

    config: Config
    hardware: Hardware
    mesh: Mesh
    training: Training
    text: str
    sizes: Any
    alive: memory.Alive
    lower_seconds: float
    compile_seconds: float


def plugin_present() -> bool:
    try:
        return any(importlib.util.find_spec(name) is not None for name in PLUGINS)
    except ModuleNotFoundError:
        return False


def devices(hardware: Hardware, nodes: int, gpus_per_node: int) -> Sequence[Any]:
    """The GPUs of `nodes` hosts, each a process of its own, with no GPU needed.

    Raises ValueError where the CUDA plugin is missing or of another version than jax.
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
    return found.devices


def cluster(config: Config, hardware: Hardware, nodes: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """(nodes, GPUs a node): as given, else as many as the mesh needs, whole hosts first."""
    total = config.mesh.devices
    if gpus_per_node is None:
        gpus_per_node = total // nodes if nodes and total % nodes == 0 else min(hardware.gpus_per_node, total)
    for name, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} must be at least 1")
    return nodes if nodes is not None else -(-total // gpus_per_node), gpus_per_node


def compile_run(config: Config, hardware: Hardware, nodes: int | None = None, gpus_per_node: int | None = None) -> Compiled:
    """Lower and compile the training step of `config`.

    Raises ValueError: what training would refuse, before anything is compiled; a missing plugin; a compiler option XLA does not know.
    """
    nodes, gpus_per_node = cluster(config, hardware, nodes, gpus_per_node)
    rules.check_run(config, nodes * gpus_per_node)
    mesh = make_mesh(config.mesh, devices(hardware, nodes, gpus_per_node))
    training = build_training(config, mesh)
    start = time.perf_counter()
    lowered = training.step.lower(training.abstract_state, training.abstract_batch)
    lower_seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        options = {**gpu.WITHOUT_GPU, "xla_dump_to": folder, "xla_dump_hlo_module_re": "^jit_step$", "xla_dump_hlo_as_text": True}
        start = time.perf_counter()
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "compile option" in str(error) or "While setting option" in str(error):
                raise ValueError(f"gpu.flags: {str(error).partition(': ')[2] or error}") from None
            raise
        compile_seconds = time.perf_counter() - start
        alive = memory.read_dump(Path(folder))
    return Compiled(config, hardware, mesh, training, compiled.as_text(), compiled.memory_analysis(), alive, lower_seconds, compile_seconds)


def report(compiled: Compiled) -> dict[str, Any]:
    """Memory, traffic, FLOPs and simulated time: nested dicts, lists and numbers."""
    config = compiled.config
    held = memory.measure(config, compiled.training, compiled.text, compiled.sizes, compiled.alive)
    rows, unexpected = sent.compare(compiled.text, compiled.mesh, formulas.step_traffic(config))
    done = work.measure(compiled.text)
    usable = int(compiled.hardware.memory * gpu.MEMORY_FRACTION)
    return {
        "memory": held,
        "collectives": rows,
        "unexpected": unexpected,
        "flops": {"program": done.flops, "model": work.model_flops(config) / config.mesh.devices},
        "time": simulated(compiled),
        "compile_seconds": compiled.compile_seconds,
        "fits": held["peak"] + held["attention_workspace"] <= usable,
        "usable": usable,
        "custom_calls": done.calls,
    }


def simulated(compiled: Compiled) -> dict[str, Any]:
    """Step time by the simulator: `step_seconds`, `tokens_per_second_per_gpu`, `mfu` (causal attention counted half) and `mfu_full` (the
    whole score matrix), `exposed_seconds` by axis."""
    config, peak = compiled.config, compiled.hardware.peak_flops["bfloat16"]
    found = simulate.simulate(compiled.text, compiled.mesh, compiled.hardware)
    gpus, seconds = config.mesh.devices, found.step_seconds
    return {
        "step_seconds": seconds,
        "tokens_per_second_per_gpu": config.train.batch * config.data.sequence / seconds / gpus,
        "mfu": work.model_flops(config) / gpus / seconds / peak,
        "mfu_full": work.model_flops(config, causal=False) / gpus / seconds / peak,
        "exposed_seconds": {"+".join(axes): waited for axes, waited in found.exposed_seconds.items()},
    }


def alternatives(config: Config) -> dict[str, Config]:
    """Configurations that differ in one knob and should need less memory, by what is changed."""
    train, changed = config.train, {}

    def change(label: str, **values: Any) -> None:
        try:
            other = dataclasses.replace(config, train=dataclasses.replace(train, **values))
            rules.check_run(other, config.mesh.devices)
        except ValueError:
            return
        changed[label] = other

    order = ("none", "matmuls", "outputs", "attention", "block")
    lighter = order[order.index(train.remat) + 1 :]
    for remat in lighter[-1:]:
        change(f"train.remat={remat}", remat=remat)
    if train.zero < 3:
        change("train.zero=3", zero=3)
    change(f"train.accumulation={2 * train.accumulation}", accumulation=2 * train.accumulation)
    if train.loss_chunk > 512:
        change(f"train.loss_chunk={train.loss_chunk // 2}", loss_chunk=train.loss_chunk // 2)
    if train.reduce_dtype == "float32" and train.compute_dtype == "bfloat16":
        change("train.reduce_dtype=bfloat16", reduce_dtype="bfloat16")
    if config.mesh.tensor > 1 and not train.sequence_parallel:
        change("train.sequence_parallel=true", sequence_parallel=True)
    return changed


def compare_knobs(config: Config, hardware: Hardware, nodes: int | None, gpus_per_node: int | None) -> list[tuple[str, int]]:
    """(change, peak bytes) of every alternative, compiled, smallest first."""
    peaks = [
        (label, compile_run(other, hardware, nodes, gpus_per_node).sizes.peak_memory_in_bytes)
        for label, other in alternatives(config).items()
    ]
    return sorted(peaks, key=lambda each: each[1])
