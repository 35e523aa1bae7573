"""How often each instruction of a compiled program runs.

trip_count    iterations of one loop
bound         the most of a loop that ends early
at_most       loops that may run less often than counted
executions    every instruction that runs, with how often it does (loops, calls, fusions and branches followed)
matmul_flops  2 M N K of every matrix product, so counted
"""

from __future__ import annotations

import re
from collections.abc import Callable

from jaxpar.plan.hlo import NAME, Instruction, Program, dot_flops, parse

_DIRECTIONS = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "NE": lambda a, b: a != b,
}


def _constant(program: Program, instruction: Instruction) -> int | None:
    """Value of an integer scalar that is a constant behind copies and converts."""
    while instruction.opcode in ("copy", "bitcast", "convert", "copy-start", "copy-done"):
        instruction = program.operands(instruction)[0]
    if instruction.opcode == "fusion":
        inner = program.computations[instruction.attribute("calls") or ""]
        return _constant(program, inner.instructions[inner.root])
    if instruction.opcode != "constant":
        return None
    return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None


def _call_operands(program: Program, computation: str, opcodes: tuple[str, ...]) -> tuple[Instruction, list[Instruction]] | None:
    """The root of `computation` if its opcode is one of these, looking through one fusion, with its operands in the caller's scope."""
    scope = program.computations[computation]
    root = scope.instructions[scope.root]
    if root.opcode in opcodes:
        return root, program.operands(root)
    inner = program.computations.get(root.attribute("calls") or "")
    if root.opcode != "fusion" or inner is None or inner.instructions[inner.root].opcode not in opcodes:
        return None
    inner_root = inner.instructions[inner.root]
    outer = program.operands(root)
    return inner_root, [outer[int(o.literal)] if o.opcode == "parameter" else o for o in program.operands(inner_root)]


def trip_count(program: Program, loop: Instruction) -> int:
    """How often the body of a `while` runs: XLA's own count, else from a counter that is compared with a constant, else at most as often
    as `bound` says.

    Raises ValueError when none of them is there.
    """
    try:
        return _exact(program, loop)
    except ValueError:
        if most := bound(program, loop):
            return most
        raise


def bound(program: Program, loop: Instruction) -> int:
    """The most often that a loop can run which ends early at run time, 0 of any other: `tile_pairs`, or the constant that its counter is
    compared with beside another condition (experts' loop over blocks of rows, `ops/grouped_mlp.py`)."""
    if pairs := tile_pairs(program, loop):
        return pairs
    conjunction = _call_operands(program, loop.attribute("condition") or "", ("and",))
    if conjunction is None:
        return 0
    compared = [each for each in program.computations[conjunction[0].computation].instructions.values() if each.opcode == "compare"]
    limits = [_constant(program, program.operands(each)[1]) for each in compared if each.attribute("direction") == "LT"]
    return min((limit for limit in limits if limit is not None), default=0)


def tile_pairs(program: Program, loop: Instruction) -> int:
    """Rows of the table of (query tile, key tile) that a loop of blockwise attention goes through (`ops/tiles.py`), 0 of any other loop.
    Where each layer has its own window, the loop ends as early as the window allows, at run time; it never runs more often than this."""
    body = program.computations[loop.attribute("body") or ""].instructions.values()
    inner = [program.computations[name] for each in body if each.opcode == "fusion" and (name := each.attribute("calls"))]
    constants = [each for each in (*body, *(one for c in inner for one in c.instructions.values())) if each.opcode == "constant"]
    tables = [array.shape for each in constants for array in each.results if array.dtype == "int32"]
    return max((shape[0] for shape in tables if len(shape) == 2 and shape[1] == 2), default=0)


def at_most(program: Program) -> list[Instruction]:
    """Loops whose count is only known to be at most their `bound`."""
    found = []
    for each in (one for c in program.computations.values() for one in c.instructions.values() if one.opcode == "while"):
        try:
            _exact(program, each)
        except ValueError:
            found += [each] if bound(program, each) else []
    return found


def _exact(program: Program, loop: Instruction) -> int:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known.group(1))
    unknown = ValueError(f"while loop {loop.name} ({loop.source}): trip count unknown, so what its body does cannot be counted")
    compared = _call_operands(program, loop.attribute("condition") or "", ("compare",))
    if compared is None or len(compared[1]) != 2 or compared[1][0].opcode != "get-tuple-element":
        raise unknown
    compare, (counter, limit) = compared
    index = int(counter.attribute("index") or 0)
    body = program.computations[loop.attribute("body") or ""]
    start = program.operands(program.operands(loop)[0])
    end = program.operands(body.instructions[body.root])
    if len(start) <= index or len(end) <= index:
        raise unknown
    first, last = _constant(program, start[index]), _constant(program, limit)
    step = _increment(program, end[index])
    holds = _DIRECTIONS.get(compare.attribute("direction") or "")
    if first is None or last is None or not step or holds is None:
        raise unknown
    trips = max(0, -(-(last - first) // step))
    return trips + 1 if holds(first + trips * step, last) else trips


def _increment(program: Program, update: Instruction) -> int | None:
    """The constant of `counter + constant`, as an instruction or as a fusion of one."""
    operands = program.operands(update)
    if update.opcode == "fusion":
        inner = program.computations[update.attribute("calls") or ""]
        root = inner.instructions[inner.root]
        if root.opcode != "add":
            return None
        operands = [operands[int(o.literal)] if o.opcode == "parameter" else o for o in program.operands(root)]
    elif update.opcode != "add":
        return None
    constants = [value for value in (_constant(program, operand) for operand in operands) if value is not None]
    return constants[0] if len(constants) == 1 else None


def executions(program: Program, measure: Callable[[Instruction], float]) -> list[tuple[Instruction, int]]:
    """Instructions with a nonzero `measure`, in program order, with how often each runs in one execution of the program.

    Of a conditional's branches the one with the largest total counts.
    Raises ValueError for a loop whose trip count is unknown, if it holds something measured.
    """
    memory: dict[str, list[tuple[Instruction, int]]] = {}

    def total(found: list[tuple[Instruction, int]]) -> float:
        return sum(measure(instruction) * count for instruction, count in found)

    def inside(name: str) -> list[tuple[Instruction, int]]:
        if name not in memory:
            memory[name] = [each for instruction in program.computations[name].instructions.values() for each in follow(instruction)]
        return memory[name]

    def follow(instruction: Instruction) -> list[tuple[Instruction, int]]:
        found = [(instruction, 1)] if measure(instruction) else []
        if instruction.opcode == "while":
            body = inside(instruction.attribute("body") or "")
            trips = trip_count(program, instruction) if body else 0
            return found + [(each, count * trips) for each, count in body]
        if instruction.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
            names = (
                NAME.findall(branches.group(1)) if branches else [instruction.attribute(f"{way}_computation") for way in ("true", "false")]
            )
            return found + max((inside(name) for name in names if name), key=total)
        callee = instruction.attribute("calls") or (instruction.attribute("to_apply") if instruction.opcode == "call" else None)
        # A start that prints its own collective has no computation of its own here.
        return found + (inside(callee) if callee in program.computations and not instruction.opcode.endswith("-done") else [])

    return inside(program.entry)


def matmul_flops(text: str) -> int:
    """2 M N K summed over every matrix product that one device runs, loops included.

    Counts `dot` wherever it stands (GPU and YNN fusions too) and calls to oneDNN and cuBLAS. Does not see inside attention calls of cuDNN
    or Pallas kernels, nor products of vectors that XLA rewrote as multiply and reduce.
    """
    program = parse(text)
    return sum(dot_flops(program, each) * count for each, count in executions(program, lambda each: dot_flops(program, each)))
