"""`jaxpar compile`: compile a run for a GPU cluster, report, and write what was asked for."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from jaxpar.config import Config
from jaxpar.plan import compile as compiling
from jaxpar.plan import hardware, knobs, show, simulate, timeline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The command's options: the cluster, files to write (`json` may be "-", stdout), and whether to compile alternatives as well."""

    gpu: str = "h100"
    nodes: int | None = None
    gpus_per_node: int | None = None
    json: str | None = None
    hlo: str | None = None
    trace: str | None = None
    png: str | None = None
    knobs: bool = False


def run(config: Config, request: Request) -> int:
    """The whole command; 0. A run that does not fit is a verdict, not a failure.

    ValueError for what a user got wrong: before anything is compiled where training would say it, the GPU's name and the missing plugin.
    """
    gpus = hardware.load(request.gpu)
    files = [name for name in (request.json, request.hlo, request.trace, request.png) if name not in (None, "-")]
    for option in ("hlo", "trace", "png"):
        if getattr(request, option) == "-":
            raise ValueError(f"--{option}: - (standard output) is for --json only; give a file's name")
    for name in files:
        _check_target(name)
    compiled = compiling.compile_run(config, gpus, request.nodes, request.gpus_per_node)
    simulation = simulate.simulate(compiled.text, compiled.mesh, compiled.hardware)
    report = compiling.report(compiled, simulation)
    tried: list[knobs.Alternative] = []
    if request.knobs or not report["fits"]:
        changes = knobs.lighter(config, report["usable"] - report["memory"]["attention_workspace"])
        if report["fits"]:
            changes |= knobs.faster(config)
        tried = knobs.compare(changes, gpus, request.nodes, request.gpus_per_node)
    report["alternatives"] = [dataclasses.asdict(each) for each in tried]
    _write(request, compiled, report, simulation)
    if request.json != "-":
        print(show.text(compiled, report, tried))
    return 0


def _check_target(name: str) -> None:
    """ValueError where no file of that name can be written, before minutes of compiling are lost to it."""
    path = Path(name).resolve()
    if not path.parent.is_dir():
        raise ValueError(f"{name}: there is no folder {Path(name).parent} to write it in")
    if path.is_dir():
        raise ValueError(f"{name}: is a folder, not a file to write")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{name}: cannot be written; choose another place")


def _write(request: Request, compiled: compiling.Compiled, report: dict[str, Any], simulation: simulate.Simulation) -> None:
    if request.hlo:
        Path(request.hlo).write_text(compiled.text)
    if request.trace:
        Path(request.trace).write_text(json.dumps(timeline.chrome_trace(simulation.events)))
    if request.png:
        Path(request.png).write_bytes(timeline.picture(timeline.layer(simulation.events)))
    text = json.dumps(report, indent=1) + "\n"
    if request.json == "-":
        print(text, end="")
    elif request.json:
        Path(request.json).write_text(text)
