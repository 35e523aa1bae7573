"""How long a compiled GPU program takes, and which communication nothing hides, by walking its schedule.

    simulate     compiled text, mesh, hardware -> Simulation
    Simulation   seconds of a step, exposed by axes, by kind; events to draw

XLA's instructions are in the order in which they are launched. Kernels run one after another on one compute stream, collectives on one
stream for each link (inside a node, between nodes). A start enqueues its collective when the stream of kernels gets there, a done makes
kernels wait for it, and a synchronous collective is both at once. What kernels wait is *exposed*, and is charged to the axes of what the
link carries meanwhile. A loop's body is walked until two iterations take equally long; the rest are counted, not walked.

Left out: kernels that slow down because NCCL takes some of their multiprocessors and of their memory bandwidth, stragglers, contention
between jobs, and the host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jaxpar.mesh import host_of
from jaxpar.plan.hardware import Hardware
from jaxpar.plan.hlo import parse
from jaxpar.plan.walk import Axes, Event, Walk


@dataclass(frozen=True)
class Simulation:
    """One execution of a program on one GPU.

    step_seconds     from the first kernel to the last
    compute_seconds  kernels run; step_seconds is this plus what is exposed (and a moment at each loop's turn)
    kinds            compute_seconds by kind: "matmul", "attention", "memory"
    exposed_seconds  kernels wait, by the axes of what they wait for; ("copy",) for transfers to and from host memory
    busy_seconds     collectives run, hidden or not, by axes
    flops            of matmuls and attention
    unhidden         exposed seconds by (axes, kind of collective, JAX's name of it), longest first
    events           the timeline, repeated iterations left out
    """

    step_seconds: float
    compute_seconds: float
    kinds: Mapping[str, float]
    exposed_seconds: Mapping[Axes, float]
    busy_seconds: Mapping[Axes, float]
    flops: float
    unhidden: Mapping[tuple[Axes, str, str], float]
    events: tuple[Event, ...]

    def exposed(self, axis: str) -> float:
        """Part of the step that waits for collectives over `axis`, alone or with others."""
        return sum(seconds for axes, seconds in self.exposed_seconds.items() if axis in axes) / self.step_seconds


def simulate(text: str, mesh: Mesh, hardware: Hardware) -> Simulation:
    """Walk `compiled.as_text()` of a program that was compiled for `mesh` on `hardware`.

    ValueError for a program that is not scheduled, and for a loop of unknown length.
    """
    if not re.search(r"^HloModule [^\n]*is_scheduled=true", text):
        raise ValueError("the program is not scheduled: pass the text of a compiled GPU program")
    program = parse(text)
    walk = Walk(program, dict(mesh.shape), hosts(mesh), hardware)
    walk.computation(program.entry)
    walk.finish()
    kinds = walk.part("kind")
    return Simulation(
        step_seconds=walk.now,
        compute_seconds=sum(kinds.values()),
        kinds=kinds,
        exposed_seconds=walk.part("exposed"),
        busy_seconds=walk.part("busy"),
        flops=walk.totals["flops", ""],
        unhidden=walk.part("unhidden"),
        events=tuple(walk.events),
    )


def hosts(mesh: Mesh) -> np.ndarray:
    """For each position of the mesh, the number of the host that its device is in."""
    found: dict[tuple[int, int], int] = {}
    return np.array([found.setdefault(host_of(device), len(found)) for device in mesh.devices.flat])
