"""`jaxpar compile`: compile a run for a GPU cluster, report, and write what was asked for."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
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

    def files(self) -> dict[str, str]:
        """Names of files to write, by option."""
        given = {option: getattr(self, option) for option in ("json", "hlo", "trace", "png")}
        return {option: name for option, name in given.items() if name is not None and (option, name) != ("json", "-")}


def run(config: Config, request: Request, run_file: str | None = None) -> int:
    """The whole command; 0. A run that does not fit is a verdict, not a failure. `run_file` is what `config` was read from.

    ValueError for what a user got wrong: before anything is compiled where training would say it, the GPU's name and the missing plugin.
    OSError for a file that could not be written after all, when everything else is written and printed.
    """
    gpus = hardware.load(request.gpu)
    _check_targets(request.files(), [name for name in (run_file, request.gpu) if name and name.endswith(".yaml")])
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
    failed = _write(request, compiled, report, simulation)
    print(json.dumps(report, indent=1) if request.json == "-" else show.text(compiled, report, tried))
    if failed:
        raise failed[0]
    return 0


def _check_targets(files: Mapping[str, str], read: Sequence[str]) -> None:
    """ValueError where two options would write one file, or one would write over what was `read`."""
    taken = {Path(name).resolve(): "that is what was read" for name in read}
    for option, name in files.items():
        if name == "-":
            raise ValueError(f"--{option}: - (standard output) is for --json only; give a file's name")
        if not name:
            raise ValueError(f"--{option}: '' is not a file's name")
        _check_target(name)
        path = Path(name).resolve()
        if why := taken.get(path):
            raise ValueError(f"--{option}: {name}: {why}; give another name")
        if path.is_file() or not path.exists():  # a device such as /dev/null takes any number
            taken[path] = f"--{option} is written there"


def _check_target(name: str) -> None:
    """ValueError where no file of that name can be written, before minutes of compiling are lost to it."""
    path = Path(name).resolve()
    if not path.parent.is_dir():
        raise ValueError(f"{name}: there is no folder {Path(name).parent} to write it in")
    if path.is_dir():
        raise ValueError(f"{name}: is a folder, not a file to write")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{name}: cannot be written; choose another place")


def _write(request: Request, compiled: compiling.Compiled, report: dict[str, Any], simulation: simulate.Simulation) -> list[OSError]:
    """Write what was asked for; what went wrong, such as a full disk. One file that cannot be written is no reason to lose the others."""
    contents: dict[str, Callable[[], str | bytes]] = {
        "json": lambda: json.dumps(report, indent=1) + "\n",
        "hlo": lambda: compiled.text,
        "trace": lambda: json.dumps(timeline.chrome_trace(simulation.events)),
        "png": lambda: timeline.picture(timeline.layer(simulation.events)),
    }
    failed = []
    for option, name in request.files().items():
        content = contents[option]()
        try:
            Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        except OSError as error:
            error.filename = error.filename or name  # the system names the file only when it does not open
            failed.append(error)
    return failed
