"""What else a run could do: settings changed one at a time, each compiled, so that the report says which helps and not which should.

lighter   configurations that should need less memory
faster    configurations that may take less time
compare   compile them -> peak, whether it fits, step time
best      the fastest that fits, or where nothing fits the smallest
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpar import rules
from jaxpar.config import REMAT, Config
from jaxpar.plan import compile as compiling
from jaxpar.plan import memory
from jaxpar.plan.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One change, such as `train.remat=block`, and what it leads to. `need` is the peak and cuDNN's workspace, bytes."""

    change: str
    peak: int
    need: int
    fits: bool
    step_seconds: float


def _changed(config: Config, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Config]:
    """Those of the changes to `train` that make a run."""
    found = {}
    for label, values in changes.items():
        try:
            other = dataclasses.replace(config, train=dataclasses.replace(config.train, **values))
            rules.check_run(other, config.mesh.devices)
        except ValueError:
            continue
        found[label] = other
    return found


def _label(values: Mapping[str, Any]) -> str:
    return " ".join(f"train.{name}={str(value).lower()}" for name, value in values.items())


def lighter(config: Config) -> dict[str, Config]:
    """One knob each: less kept for the backward, more sharded, smaller microbatches, a smaller chunk of the loss, narrower gradients; and
    last all that ZeRO, accumulation and recomputation can do together."""
    train = config.train
    policies = REMAT[REMAT.index(train.remat) + 1 :]
    changes: list[dict[str, Any]] = [{"remat": policy} for policy in dict.fromkeys((*policies[:1], *policies[-1:]))]
    if train.zero < 3 and config.mesh.data > 1:
        changes.append({"zero": 3})
    local = train.batch // (config.mesh.data * config.mesh.expert * train.interleave)
    finer = [n for n in range(train.accumulation + 1, local + 1) if local % n == 0]
    changes += [{"accumulation": n} for n in finer[:1]]
    if finer and train.interleave > 1:
        changes.append({"interleave": 1, "accumulation": train.accumulation * train.interleave})
    if train.loss_chunk > 512:
        changes.append({"loss_chunk": train.loss_chunk // 2})
    if train.reduce_dtype == "float32" and train.compute_dtype == "bfloat16":
        changes.append({"reduce_dtype": "bfloat16"})
    if config.mesh.tensor > 1 and not train.sequence_parallel:
        changes.append({"sequence_parallel": True})
    most: dict[str, Any] = {"zero": 3, "accumulation": finer[-1] if finer else train.accumulation, "remat": REMAT[-1]}
    most = {name: value for name, value in most.items() if value != getattr(train, name)}
    if len(most) > 1:
        changes.append(most)
    return _changed(config, {_label(values): values for values in changes})


def faster(config: Config) -> dict[str, Config]:
    """One knob each: two parts that hide each other's collectives, less computed again, fewer and larger microbatches."""
    train = config.train
    changes: list[dict[str, Any]] = []
    if train.interleave == 1 and config.mesh.tensor > 1:
        changes.append({"interleave": 2})
    elif train.interleave > 1:
        changes.append({"interleave": 1})
    if (place := REMAT.index(train.remat)) > 0:
        changes.append({"remat": REMAT[place - 1]})
    if train.accumulation > 1 and train.zero > 1:
        fewer = max(n for n in range(1, train.accumulation) if train.accumulation % n == 0)
        changes.append({"accumulation": fewer})
    return _changed(config, {_label(values): values for values in changes})


def compare(changes: Mapping[str, Config], hardware: Hardware, nodes: int | None, gpus_per_node: int | None) -> list[Alternative]:
    """Each of the changed configurations compiled for the same cluster, the smallest peak first."""
    found = []
    for change, config in changes.items():
        compiled = compiling.compile_run(config, hardware, nodes, gpus_per_node)
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
