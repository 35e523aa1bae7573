"""What a compiled program sends: every collective with its axes, how often it runs and its bytes.

    collectives  compiled text and mesh -> one record per operation
    recorded     the record of one instruction, groups_of its devices
    summary      records added up by kind, axes and dtype

Groups are printed as positions in the program's device list, which is the mesh's own order (not device ids).

XLA on CPU has no bfloat16 collectives: it converts to float32 before and back after, so there a bfloat16 value is recorded as float32 with
twice the bytes. That is what the program sends. What was written is in the jaxpr, see `tests/traced.py`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jaxpar.plan.hlo import Array, Instruction, Program, parse
from jaxpar.plan.loops import executions

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}


@dataclass(frozen=True)
class Collective:
    """One collective operation of the program, all its executions in a step together.

    kind          all_reduce, all_gather, reduce_scatter, all_to_all, ragged_all_to_all, permute (names of `jaxpar/parallel/collectives.py`)
    axes          the mesh axes it runs over, in mesh order
    group         devices that take part together (smaller than the product of the axes when the program divided an axis)
    count         executions
    bytes         sent by one device over a ring, all executions together
    payload       bytes of the whole array, all executions together: the operand of an all_reduce, the result of an all_gather, the operand
                  of a reduce_scatter, the local array of an all_to_all or permute, of a ragged_all_to_all the most that it can send
    dtype         as sent, numpy's name
    asynchronous  started and finished apart, so that other work may run meanwhile
    source        JAX's name of the operation
    frame         number of its stack frame in the program's text, "" where there is none (`sent.sources`)
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    count: int
    bytes: float
    payload: int
    dtype: str
    asynchronous: bool
    source: str
    frame: str = ""


@dataclass(frozen=True)
class Total:
    """Sum of collectives of one kind, axes and dtype: operations executed, bytes sent by a device, bytes of the whole arrays."""

    count: int
    bytes: float
    payload: int


def ring_bytes(kind: str, group: int, payload: float) -> float:
    """Bytes that one device sends over a ring of `group` devices for a `payload` as `Collective` defines it. Of a ragged exchange: where
    as many of its rows go to each device, itself among them."""
    if kind == "all_reduce":
        return 2 * (group - 1) / group * payload
    return payload if kind in ("permute", "broadcast") else (group - 1) / group * payload


def replica_groups(text: str, devices: int) -> list[list[int]]:
    """Device groups from an instruction's attributes, in each form that XLA prints; [] when it has none.

    {{0,1},{2,3}}                         written out; {} is one group of all
    [2,4]<=[4,2]T(1,0)                    arange(8).reshape(4,2).transpose(1,0).reshape(2,4), rows are groups
    mesh['a'=2,'b'=4] {'b'}               the named axes of a mesh; device_ids=([2,2,2]T(0,2,1)) or (0,2,1,3) gives its device order,
                                          'b':(2)2 the part of size 2 that follows a part of size 2 of axis b
    """
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", text):
        return _mesh_groups(*found.groups())
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota(found.group(2), found.group(3)).reshape(_integers(found.group(1))).tolist()
    if found := re.search(r"replica_groups=\{((?:\{[\d,]*\},?\s*)*)\}", text):
        groups = [list(_integers(group)) for group in re.findall(r"\{([\d,]*)\}", found.group(1))]
        return groups or [list(range(devices))]
    if "replica_groups=" in text:
        raise ValueError(f"replica groups in a form that is not known: {text[text.index('replica_groups=') :][:120]}")
    return []


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in re.findall(r"\d+", text))


def _iota(dims: str, order: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
    return ids.transpose(_integers(order)) if order else ids


def _mesh_groups(axes: str, devices: str | None, chosen: str) -> list[list[int]]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    if iota := re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices or ""):
        ids = _iota(iota.group(1), iota.group(2))
    else:
        ids = np.array(_integers(devices)) if devices else np.arange(math.prod(sizes.values()))
    parts: list[tuple[int, bool]] = []
    picks = {name: part for name, *part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", chosen)}
    for name, size in sizes.items():
        before, middle = (int(n) if n else None for n in picks.get(name, ("", "")))
        if before and middle:
            parts += [(before, False), (middle, True), (size // before // middle, False)]
        else:
            parts.append((size, name in picks))
    ids = ids.reshape([size for size, _ in parts])
    inner = [i for i, (_, picked) in enumerate(parts) if picked]
    outer = [i for i, (_, picked) in enumerate(parts) if not picked]
    return ids.transpose(outer + inner).reshape(-1, math.prod(parts[i][0] for i in inner)).tolist()


def axes_of(groups: Iterable[Iterable[int]], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which members of a group differ, in mesh order. Positions count through the mesh, last axis fastest.

    Raises ValueError for a position that the mesh does not have.
    """
    shape, names, found = tuple(sizes.values()), tuple(sizes), set()
    for group in groups:
        members = list(group)
        if max(members) >= math.prod(shape):
            raise ValueError(f"device {max(members)} is not on the mesh {dict(sizes)}: the program was compiled for another one")
        coordinates = np.array(np.unravel_index(members, shape))
        found |= {names[i] for i in np.flatnonzero((coordinates != coordinates[:, :1]).any(axis=1))}
    return tuple(name for name in names if name in found)


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction is or starts."""
    return KINDS.get(instruction.opcode.removesuffix("-start"))


def _sent(program: Program, instruction: Instruction) -> list[Array]:
    """What an instruction sends. Of a ragged exchange's operands only the first travels (the second is where rows land, the others say
    which), and of that no more than the result has room for: the program does not say how many rows there are."""
    operands = program.operands(instruction)
    arrays = [array for operand in operands for array in operand.results]
    return [min(arrays[:2], key=lambda array: array.bytes)] if kind_of(instruction) == "ragged_all_to_all" else arrays


def groups_of(instruction: Instruction, sizes: Mapping[str, int]) -> list[list[int]]:
    """Devices that take part together in a collective, as positions in the mesh: groups, or for a permute pairs."""
    if kind_of(instruction) == "permute":
        found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}", instruction.attributes)
        pairs = [_integers(pair) for pair in re.findall(r"\{(\d+,\d+)\}", found.group(1) if found else "")]
        return [[a, b] for a, b in pairs if a != b]
    devices = math.prod(sizes.values())
    return replica_groups(instruction.attributes, devices) or [list(range(devices))]


def recorded(program: Program, instruction: Instruction, count: int, asynchronous: bool, sizes: Mapping[str, int]) -> list[Collective]:
    """`count` executions of one collective instruction, a record for each dtype; [] where no device sends anything."""
    kind = kind_of(instruction)
    assert kind is not None
    groups = groups_of(instruction, sizes)
    group = 2 if kind == "permute" else max(map(len, groups), default=1)
    axes = axes_of(groups, sizes)
    if group == 1 or not axes:
        return []
    payloads: dict[str, int] = defaultdict(int)
    for array in _sent(program, instruction):
        payloads[array.dtype] += array.bytes * count * (group if kind == "all_gather" else 1)
    apart = asynchronous or instruction.opcode.endswith("-start")
    apart = apart and '"is_sync":true' not in instruction.attributes
    return [
        Collective(kind, axes, group, count, ring_bytes(kind, group, payload), payload, dtype, apart, instruction.source, instruction.frame)
        for dtype, payload in payloads.items()
    ]


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Every collective that a compiled program runs, in program order; those within one device are left out.

    A combined operation (several arrays at once) is one record per dtype with the bytes added. `mesh` is the one it was compiled for.
    Raises ValueError for a loop of unknown length around a collective, and for devices outside the mesh.
    """
    program = parse(text)
    # async-start calls a computation that holds the collective itself.
    wrapped = {
        each.attribute("calls") for c in program.computations.values() for each in c.instructions.values() if each.opcode == "async-start"
    }
    found = executions(program, lambda each: sum(a.bytes for a in _sent(program, each)) if kind_of(each) else 0)
    sizes = dict(mesh.shape)
    return [record for each, count in found for record in recorded(program, each, count, each.computation in wrapped, sizes)]


def summary(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...], str], Total]:
    """Collectives added up by (kind, axes, dtype), in order of first appearance."""
    totals: dict[tuple[str, tuple[str, ...], str], Total] = {}
    for each in found:
        key = (each.kind, each.axes, each.dtype)
        old = totals.get(key, Total(0, 0, 0))
        totals[key] = Total(old.count + each.count, old.bytes + each.bytes, old.payload + each.payload)
    return totals
