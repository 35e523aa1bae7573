"""A walk over the schedule of a compiled program: what each stream does when. `simulate.py` says what it assumes and what comes out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.plan import costs
from jaxpar.plan.hardware import Hardware
from jaxpar.plan.hlo import Instruction, Program
from jaxpar.plan.loops import trip_count
from jaxpar.plan.traffic import axes_of, groups_of, kind_of, recorded

Axes = tuple[str, ...]
COMPUTE = "compute"
HOST_BANDWIDTH = 50e9  # PCIe 5 x16, one direction, what copies reach; an estimate
LOOP = 2e-6  # seconds between two iterations; an estimate


@dataclass(frozen=True)
class Event:
    """What one stream does from `start` to `end` (seconds). `kind` is a `costs.Work.kind`, a collective's, "copy", "wait" or "repeat"."""

    stream: str
    kind: str
    name: str
    source: str
    start: float
    end: float
    axes: Axes = ()


@dataclass(frozen=True)
class _Transfer:
    """A collective or copy on its link."""

    stream: str
    kind: str
    axes: Axes
    name: str
    source: str
    start: float
    end: float


class Walk:
    """The state of the walk: the time on the compute stream, what each link still has to do, and totals."""

    def __init__(self, program: Program, sizes: Mapping[str, int], hosts: np.ndarray, hardware: Hardware) -> None:
        """`sizes` of the mesh, `hosts` the host of each of its positions."""
        self.program, self.sizes, self.hosts, self.hardware = program, sizes, hosts, hardware
        self.now = 0.0
        self.free: dict[str, float] = defaultdict(float)
        self.recent: dict[str, list[_Transfer]] = defaultdict(list)
        self.pending: dict[str, _Transfer] = {}
        self.totals: dict[tuple[str, object], float] = defaultdict(float)
        self.events: list[Event] = []
        self.works: dict[tuple[str, str], tuple[costs.Work, float] | None] = {}
        self.sends: dict[tuple[str, str], tuple[str, str, Axes, float] | None] = {}

    def computation(self, name: str) -> None:
        for instruction in self.program.computations[name].instructions.values():
            self.instruction(instruction)

    def instruction(self, each: Instruction) -> None:
        if each.opcode == "while":
            self.loop(each)
        elif each.opcode == "conditional":
            self.branches(each)
        elif each.opcode == "call":
            self.computation(each.attribute("to_apply") or "")
        elif each.opcode.endswith(("-done", "-update")):
            self.done(each)
        elif (sending := self.send(each)) is not None:
            self.start(each, *sending)
        elif not each.opcode.endswith("-start") and kind_of(each) is None:
            self.kernel(each)

    def kernel(self, each: Instruction) -> None:
        key = (each.computation, each.name)
        if key not in self.works:
            work = costs.work(self.program, each)
            self.works[key] = None if work is None else (work, costs.seconds(work, self.hardware))
        if (found := self.works[key]) is None:
            return
        work, seconds = found
        self.totals["kind", work.kind] += seconds
        self.totals["flops", ""] += work.flops
        self.events.append(Event(COMPUTE, work.kind, each.name, each.source, self.now, self.now + seconds))
        self.now += seconds

    def send(self, each: Instruction) -> tuple[str, str, Axes, float] | None:
        """(stream, kind, axes, seconds) of a collective or a transfer to or from host memory; None for anything else."""
        key = (each.computation, each.name)
        if key not in self.sends:
            self.sends[key] = self._send(each)
        return self.sends[key]

    def _send(self, each: Instruction) -> tuple[str, str, Axes, float] | None:
        if each.opcode == "copy-start":
            size = sum(a.bytes for o in self.program.operands(each) for a in o.results)
            away = "S(5)" in each.result + self.program.operands(each)[0].result
            rate = HOST_BANDWIDTH if away else self.hardware.memory_bandwidth * self.hardware.fractions.memory / 2
            return "copy", "copy", ("copy",), size / rate + self.hardware.kernel
        if each.opcode == "async-start":
            inner = self.program.computations[each.attribute("calls") or ""]
            return next((found for i in inner.instructions.values() if (found := self.send(i)) is not None), None)
        if kind_of(each) is None:
            return None
        records = recorded(self.program, each, 1, True, self.sizes)
        if not records:
            return None
        groups = groups_of(each, self.sizes)
        placed = [self.hosts[np.array(group)] for group in groups]
        members = max(int(np.unique(there, return_counts=True)[1].max()) for there in placed)
        crosses = any(np.unique(there).size > 1 for there in placed)
        stream, seconds = costs.transmission(records, members if crosses else records[0].group, self.hardware)
        return stream, records[0].kind, axes_of(groups, self.sizes), seconds

    def start(self, each: Instruction, stream: str, kind: str, axes: Axes, seconds: float) -> None:
        begin = max(self.now, self.free[stream])
        transfer = _Transfer(stream, kind, axes, each.name, each.source, begin, begin + seconds)
        self.free[stream] = transfer.end
        self.totals["busy", axes] += seconds
        self.recent[stream] = [t for t in self.recent[stream] if t.end > self.now] + [transfer]
        self.events.append(Event(stream, kind, each.name, each.source, transfer.start, transfer.end, axes))
        apart = each.opcode.endswith("-start") and not re.search(r'"is_sync": ?true', each.attributes)
        if apart:
            self.pending[each.name] = transfer
        else:
            self.wait(transfer)

    def done(self, each: Instruction) -> None:
        while each.opcode.endswith("-update") or (each.opcode.endswith("-done") and each.operands):
            if each.operands[0] in self.pending:
                if each.opcode.endswith("-done"):
                    self.wait(self.pending.pop(each.operands[0]))
                return
            before = self.program.operands(each)
            if not before:
                return
            each = before[0]

    def wait(self, transfer: _Transfer) -> None:
        """Move on to the transfer's end; charge what its link carries until then, each to its own axes."""
        if transfer.end <= self.now:
            return
        for each in self.recent[transfer.stream]:
            overlap = min(each.end, transfer.end) - max(each.start, self.now)
            if overlap > 0:
                self.totals["exposed", each.axes] += overlap
                self.totals["unhidden", (each.axes, each.kind, each.source)] += overlap
        self.events.append(Event(COMPUTE, "wait", transfer.name, transfer.source, self.now, transfer.end, transfer.axes))
        self.now = transfer.end

    def loop(self, each: Instruction) -> None:
        """Walk the body until two iterations are alike, and count the others."""
        trips, last = trip_count(self.program, each), None
        for done in range(1, trips + 1):
            begun, before = self.now, dict(self.totals)
            self.computation(each.attribute("body") or "")
            self.now += LOOP
            ahead = {stream: max(0.0, end - self.now) for stream, end in self.free.items()}
            shape = (round(self.now - begun, 9), tuple(sorted((s, round(a, 9)) for s, a in ahead.items() if a)))
            if shape == last and done < trips:
                self.skip(each, trips - done, self.now - begun, before, ahead)
                return
            last = shape

    def skip(
        self, each: Instruction, times: int, seconds: float, before: Mapping[tuple[str, object], float], ahead: Mapping[str, float]
    ) -> None:
        for key, value in list(self.totals.items()):
            self.totals[key] = value + times * (value - before.get(key, 0.0))
        end = self.now + times * seconds
        self.events.append(Event(COMPUTE, "repeat", f"{times} more iterations", each.source, self.now, end))
        self.now = end
        for stream, rest in ahead.items():
            self.free[stream] = max(self.free[stream], self.now + rest) if rest else self.free[stream]

    def branches(self, each: Instruction) -> None:
        """The branch with the longest total of kernels and transfers, walked."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", each.attributes)
        names = (
            re.findall(r"%?([\w.\-]+)", listed.group(1)) if listed else [each.attribute(f"{way}_computation") for way in ("true", "false")]
        )
        self.computation(max((name for name in names if name), key=self.length))

    def length(self, name: str) -> float:
        trial = Walk(self.program, self.sizes, self.hosts, self.hardware)
        trial.computation(name)
        return trial.now

    def finish(self) -> None:
        for transfer in list(self.pending.values()):
            self.wait(transfer)

    def part(self, name: str) -> dict[Any, float]:
        """The totals of one name, largest first."""
        found = {key: value for (kind, key), value in self.totals.items() if kind == name}
        return dict(sorted(found.items(), key=lambda item: -item[1]))
