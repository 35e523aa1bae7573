"""What a compiled program holds at its fullest moment, from XLA's own record of its buffers.

read_dump   the files that `xla_dump_to` makes XLA write -> Alive
Alive       buffers that are held then
origin      the instruction that really made a buffer
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from jaxpar.plan.hlo import Array, Instruction, Program, arrays

# What holds the values of its operand, or some of them.
SAME = ("copy", "bitcast", "transpose", "convert", "copy-start", "reshape", "slice", "dynamic-slice")


@dataclass(frozen=True)
class Buffer:
    """One array in memory: the instruction that wrote it and which of its results, and whether it is an argument's memory."""

    instruction: str
    index: tuple[int, ...]
    array: Array
    bytes: int
    argument: bool


@dataclass(frozen=True)
class Alive:
    """What is held at the fullest moment, `at` the instruction that runs then."""

    at: str
    buffers: tuple[Buffer, ...]


def read_dump(folder: Path) -> Alive:
    """From the buffer assignment and the live ranges that `xla_dump_to` makes XLA write. Nothing alive where a file is missing."""
    try:
        assigned = next(folder.glob("*buffer-assignment.txt")).read_text()
        ranges = next(folder.glob("*live-range.txt")).read_text()
    except StopIteration:
        return Alive("", ())
    places: dict[str, tuple[int, int, Buffer]] = {}
    allocation, argument = 0, False
    for line in assigned.splitlines():
        if header := re.match(r"allocation (\d+): size \d+(.*)", line):
            allocation, argument = int(header.group(1)), ", parameter " in header.group(2)
            argument |= "maybe-live-out" in header.group(2) and ", preallocated-temp" not in header.group(2)
        elif value := re.match(r"\s+value: <\d+ (\S+?)(\{[\d,]*\})? (?:\(phi\) )?@\d+> \(size=(\d+),offset=(\d+)\): (\S+)", line):
            name, index, size, offset, kind = value.groups()
            found = arrays(kind)
            if found:
                buffer = Buffer(name, _index(index), found[0], int(size), argument)
                places[f"{name}{{{','.join(map(str, buffer.index))}}}"] = (allocation, int(offset), buffer)
    order = dict(re.findall(r"^    (\d+):(\S+)$", ranges, re.M))
    starts: dict[int, list[str]] = defaultdict(list)
    ends: dict[int, list[str]] = defaultdict(list)
    for name, index, first, last in re.findall(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", ranges, re.M):
        if f"{name}{index}" in places:
            starts[int(first)].append(f"{name}{index}")
            ends[int(last) + 1].append(f"{name}{index}")
    held: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    total, most, best, moment = 0, -1, [], 0
    for time in sorted({*starts, *ends}):
        for key in ends[time]:
            slot = (*places[key][:2], places[key][2].bytes)
            held[slot].remove(key)
            if not held[slot]:
                del held[slot]
                total -= slot[2]
        for key in starts[time]:
            slot = (*places[key][:2], places[key][2].bytes)
            total += 0 if slot in held else slot[2]
            held[slot].append(key)
        if total > most:
            most, moment, best = total, time, [places[keys[0]][2] for keys in held.values()]
    return Alive(order.get(str(moment), ""), tuple(sorted(best, key=lambda buffer: -buffer.bytes)))


def _index(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))


def origin(program: Program, places: dict[str, Instruction], name: str, index: tuple[int, ...]) -> Instruction | None:
    """The instruction that really made a buffer: behind copies, slices, tuples, and the elements that loops carry. Of one that a loop does
    not change, what it starts with; else what its body puts there."""
    loops = {each.attribute("body"): each for each in places.values() if each.opcode == "while"}
    instruction = places.get(name)
    for _ in range(50):
        if instruction is None:
            return None
        operands = program.operands(instruction)
        loop = instruction if instruction.opcode == "while" else loops.get(instruction.computation)
        if loop is not None and index and instruction.opcode in ("while", "parameter"):
            instruction = _carried(program, loop, index[0]) or program.operands(loop)[0]
        elif instruction.opcode in ("while", "optimization-barrier") and operands:
            instruction = operands[0]
        elif instruction.opcode == "tuple" and index and index[0] < len(operands):
            instruction, index = operands[index[0]], index[1:]
        elif instruction.opcode == "get-tuple-element" and operands:
            instruction, index = operands[0], (int(instruction.attribute("index") or 0), *index)
        elif operands and (instruction.opcode in SAME or instruction.opcode.endswith("-done")):
            instruction = operands[0]
        elif (behind := _behind(program, instruction, index)) is not None:
            instruction, index = behind, ()
        else:
            return instruction
    return instruction


def _carried(program: Program, loop: Instruction, place: int) -> Instruction | None:
    """The tuple at the end of the loop's body, if it changes what is carried at `place`."""
    body = program.computations.get(loop.attribute("body") or "")
    if body is None or (end := body.instructions[body.root]).opcode != "tuple":
        return None
    value = program.operands(end)[place]
    while value.opcode in SAME:
        value = program.operands(value)[0]
    same = value.opcode == "get-tuple-element" and int(value.attribute("index") or 0) == place
    return None if same and program.operands(value)[0].opcode == "parameter" else end


def _behind(program: Program, fusion: Instruction, index: tuple[int, ...]) -> Instruction | None:
    """The operand that a fusion only copies or slices."""
    inner = program.computations.get(fusion.attribute("calls") or "") if fusion.opcode == "fusion" else None
    if inner is None:
        return None
    value = inner.instructions[inner.root]
    if value.opcode == "tuple" and index:
        value = program.operands(value)[index[0]]
    while value.opcode in SAME:
        value = program.operands(value)[0]
    return program.operands(fusion)[int(value.literal)] if value.opcode == "parameter" else None
