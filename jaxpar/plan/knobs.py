"""What else a run could do: settings changed one at a time, each compiled, so that the report says which helps and not which should.

lighter   configurations that should need less memory
faster    configurations that may take less time
compare   compile them -> peak, whether it fits, step time
best      the fastest that fits, or where nothing fits the smallest
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax

from jaxpar import run_checks
from jaxpar.config import REMAT, Config
from jaxpar.plan import compile as compiling
from jaxpar.plan import formulas, memory, peak
from jaxpar.plan.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One change, such as `train.remat=block`, and what it leads to. `need` is the peak and cuDNN's workspace, bytes."""

    change: str
    peak: int
    need: int
    fits: bool
    step_seconds: float


Change = dict[str, Any]  # such as {"train.remat": "block"}


def _changed(config: Config, changes: list[Change]) -> dict[str, Config]:
    """Those of the changes that make a run, by their label. What must be off before something else may be on comes off first."""
    found = {}
    for change in filter(None, changes):
        other = config
        try:
            for name, value in change.items():
                section, field = name.split(".")
                other = dataclasses.replace(other, **{section: dataclasses.replace(getattr(other, section), **{field: value})})
            run_checks.check_run(other, config.mesh.devices)
        except ValueError:
            continue
        found[" ".join(f"{name}={str(value).lower()}" for name, value in change.items())] = other
    return found


def _finer(config: Config) -> list[int]:
    """Larger numbers of microbatches that the batch allows."""
    train, mesh = config.train, config.mesh
    local = train.batch // (mesh.data * mesh.expert * train.interleave)
    return [n for n in range(train.accumulation + 1, local + 1) if local % n == 0]


def _predicted(config: Config, **train: Any) -> int:
    return peak.predicted_peak(dataclasses.replace(config, train=dataclasses.replace(config.train, **train)))


def lighter(config: Config, usable: int = 0) -> dict[str, Config]:
    """One knob each: less kept for the backward, more sharded, smaller microbatches (the next number, and the first whose predicted peak is
    within `usable` bytes), a smaller chunk of the loss, narrower gradients, twice as many devices in a tensor group where microbatches
    cannot be smaller; and last all that ZeRO, accumulation and recomputation can do together."""
    train, mesh = config.train, config.mesh
    policies = REMAT[REMAT.index(train.remat) + 1 :]
    changes: list[Change] = [{"train.remat": policy} for policy in dict.fromkeys((*policies[:1], *policies[-1:]))]
    shared = formulas.replicas(config) > 1
    if train.zero < 3 and shared:
        changes.append({"train.zero": 3})
    finer = _finer(config)
    enough = [n for n in finer if _predicted(config, accumulation=n) <= usable]
    changes += [{"train.accumulation": n} for n in dict.fromkeys((*finer[:1], *enough[:1]))]
    if finer and train.interleave > 1:
        changes.append({"train.interleave": 1, "train.accumulation": train.accumulation * train.interleave})
    if train.loss_chunk > 512:
        changes.append({"train.loss_chunk": train.loss_chunk // 2})
    if train.reduce_dtype == "float32" and train.compute_dtype == "bfloat16" and shared:
        changes.append({"train.reduce_dtype": "bfloat16"})
    if mesh.tensor > 1 and not train.sequence_parallel:
        changes.append({"train.sequence_parallel": True})
    if not finer and mesh.data % 2 == 0:  # a sequence a device is the least: then more devices must share one
        changes.append({"mesh.data": mesh.data // 2, "mesh.tensor": 2 * mesh.tensor, "train.accumulation": 2 * train.accumulation})
    most: Change = {
        "zero": 3 if shared else train.zero,
        "accumulation": finer[-1] if finer else train.accumulation,
        "remat": REMAT[-1],
    }
    most = {f"train.{name}": value for name, value in most.items() if value != getattr(train, name)}
    return _changed(config, [*changes, most] if len(most) > 1 else changes)


def faster(config: Config) -> dict[str, Config]:
    """One knob each: parts that hide each other's collectives, or a ring of products that hides its own, or neither; less computed again,
    fewer and larger microbatches, half as many devices in a tensor group."""
    train, mesh = config.train, config.mesh
    changes: list[Change] = []
    now = {"train.interleave": train.interleave, "train.collective_matmul": train.collective_matmul}
    ways: list[Change] = [
        {"train.collective_matmul": False, "train.interleave": 2},
        {"train.interleave": 1, "train.collective_matmul": True},
        {"train.interleave": 1, "train.collective_matmul": False},
    ]
    for way in ways if mesh.tensor > 1 else ways[2:]:
        changes.append({name: value for name, value in way.items() if value != now[name]})
    if (place := REMAT.index(train.remat)) > 0:
        changes.append({"train.remat": REMAT[place - 1]})
    if train.accumulation > 1 and train.zero > 1:
        changes.append({"train.accumulation": max(n for n in range(1, train.accumulation) if train.accumulation % n == 0)})
    if mesh.tensor % 2 == 0:
        halved: Change = {"mesh.data": 2 * mesh.data, "mesh.tensor": mesh.tensor // 2}
        changes.append(halved)
        if train.accumulation % 2 == 0:  # as many tokens a microbatch and device
            changes.append({**halved, "train.accumulation": train.accumulation // 2})
    return _changed(config, changes)


def compare(changes: Mapping[str, Config], hardware: Hardware, nodes: int | None, gpus_per_node: int | None) -> list[Alternative]:
    """Each of the changed configurations compiled for the same cluster, the smallest peak first. One that does not compile is said on
    stderr and left out: the report of the run itself, minutes old by then, is worth more."""
    found = []
    for change, config in changes.items():
        try:
            compiled = compiling.compile_run(config, hardware, nodes, gpus_per_node)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            print(f"jaxpar: {change} was not tried: {' '.join(str(error).split())[:200]}", file=sys.stderr)
            continue
        peak = int(compiled.sizes.peak_memory_in_bytes)
        need = peak + memory.attention_workspace(compiled.text)
        seconds = compiling.simulated(compiled)["step_seconds"]
        found.append(Alternative(change, peak, need, need <= compiling.usable_bytes(hardware), seconds))
    return sorted(found, key=lambda each: each.need)


def best(found: list[Alternative], report: Mapping[str, Any]) -> Alternative | None:
    """Of a run that does not fit, the fastest change that does, else the smallest. Of one that fits, the fastest that fits too and takes
    less time than now; None where there is none."""
    fitting = sorted((each for each in found if each.fits), key=lambda each: each.step_seconds)
    if not report["fits"]:
        return fitting[0] if fitting else min(found, key=lambda each: each.need, default=None)
    return next((each for each in fitting if each.step_seconds < report["time"]["step_seconds"]), None)
