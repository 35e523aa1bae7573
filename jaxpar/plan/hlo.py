"""Read a compiled program: XLA's optimized HLO text, as `compiled.as_text()` prints it, for CPU and GPU, jax 0.10 to 0.12.

    parse             text -> Program of computations and instructions
    executions        every instruction that runs, with how often it does (loops, calls, fusions and branches followed)
    dot_flops         2 M N K of one matrix product
    matmul_flops      the same over all of them
    buffers_at_least  arrays of some size that the program writes

What XLA did is counted, not what was written: fused, combined, peeled or moved operations appear as they run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

# XLA's short names -> (numpy's name, bits).
_DTYPES = {
    "pred": ("bool", 8),
    "bf16": ("bfloat16", 16),
    "f16": ("float16", 16),
    "f32": ("float32", 32),
    "f64": ("float64", 64),
    "c64": ("complex64", 64),
    "c128": ("complex128", 128),
    **{f"s{bits}": (f"int{bits}", bits) for bits in (2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": (f"uint{bits}", bits) for bits in (2, 4, 8, 16, 32, 64)},
}
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+|f8e[a-z0-9]+|f4e[a-z0-9]+)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_DIRECTIONS = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "NE": lambda a, b: a != b,
}


@dataclass(frozen=True)
class Array:
    """Element type by numpy's name, and local shape."""

    dtype: str
    shape: tuple[int, ...]
    bits: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.size * self.bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One line. `results`: arrays of its flattened result; `operands`: names in the same computation; `attributes`: the line's rest;
    `result`: its result type as printed, with layouts and memory spaces."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str
    computation: str
    result: str = ""

    def attribute(self, name: str) -> str | None:
        """The computation or word that follows `name=`."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    def dims(self, name: str) -> tuple[int, ...]:
        """The integers of `name={0,2}`."""
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(i) for i in found.group(1).split(",") if i) if found else ()

    @property
    def source(self) -> str:
        """JAX's name for where it came from, such as jit(step)/while/body/psum."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else self.name


@dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]
    root: str


@dataclass(frozen=True)
class Program:
    computations: dict[str, Computation]
    entry: str

    def operands(self, instruction: Instruction) -> list[Instruction]:
        scope = self.computations[instruction.computation].instructions
        return [scope[name] for name in instruction.operands if name in scope]


def arrays(text: str) -> tuple[Array, ...]:
    """All array types in a piece of HLO: `(f32[8,2]{1,0}, s32[])` -> two arrays."""
    found = []
    for short, dims in _ARRAY.findall(text):
        dtype, bits = _DTYPES.get(short) or (f"float{short[1]}_{short[2:]}", int(short[1]) if short[1].isdigit() else 0)
        found.append(Array(dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d), bits))
    return tuple(found)


def _closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"HLO line with an open bracket: {text[:120]}")


def _instruction(line: str, start: int, name: str, computation: str) -> Instruction:
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", end)
    closing = _closing(line, opening)
    inside = line[opening + 1 : closing - 1]
    return Instruction(
        name=name,
        opcode=line[end:opening].strip(),
        results=arrays(line[start:end]),
        operands=tuple(_NAME.findall(inside)),
        literal=inside,
        attributes=line[closing:],
        computation=computation,
        result=line[start:end],
    )


def parse(text: str) -> Program:
    """Read the text of one compiled module.

    Raises ValueError if there is no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name, instructions, root = header.group(2), {}, ""
            entry = name if header.group(1) else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, instructions, root or next(reversed(instructions)))
            name = ""
        elif name and (found := _INSTRUCTION.match(line)):
            instructions[found.group(2)] = _instruction(line, found.end(), found.group(2), name)
            root = found.group(2) if found.group(1) else root
    if not entry:
        raise ValueError("the text holds no ENTRY computation: pass compiled.as_text()")
    return Program(computations, entry)


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
    """How often the body of a `while` runs: XLA's own count, else from a counter that is compared with a constant.

    Raises ValueError when neither is there.
    """
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
                _NAME.findall(branches.group(1)) if branches else [instruction.attribute(f"{way}_computation") for way in ("true", "false")]
            )
            return found + max((inside(name) for name in names if name), key=total)
        callee = instruction.attribute("calls") or (instruction.attribute("to_apply") if instruction.opcode == "call" else None)
        # A start that prints its own collective has no computation of its own here.
        return found + (inside(callee) if callee in program.computations and not instruction.opcode.endswith("-done") else [])

    return inside(program.entry)


_MATMUL_CALLS = ("__onednn$matmul", "__cublas$gemm", "__cublas$lt$matmul")


def dot_flops(program: Program, instruction: Instruction) -> int:
    """2 M N K of a `dot` or a call to oneDNN or cuBLAS; 0 for anything else."""
    if instruction.opcode == "dot":
        left = program.operands(instruction)[0].results[0]
        return 2 * instruction.results[0].size * math.prod(left.shape[i] for i in instruction.dims("lhs_contracting_dims"))
    target = re.search(r'custom_call_target="([^"]+)"', instruction.attributes) if instruction.opcode == "custom-call" else None
    if target is None or not target.group(1).startswith(_MATMUL_CALLS):
        return 0
    left, right, out = *(operand.results[0] for operand in program.operands(instruction)[:2]), instruction.results[0]
    batch = math.prod(out.shape[:-2])
    # (b M K)(b K N)(b M N) = b (b M N K)^2
    return 2 * math.isqrt(left.size * right.size * out.size // batch)


def matmul_flops(text: str) -> int:
    """2 M N K summed over every matrix product that one device runs, loops included.

    Counts `dot` wherever it stands (GPU and YNN fusions too) and calls to oneDNN and cuBLAS. Does not see inside attention calls of cuDNN
    or Pallas kernels, nor products of vectors that XLA rewrote as multiply and reduce.
    """
    program = parse(text)
    return sum(dot_flops(program, each) * count for each, count in executions(program, lambda each: dot_flops(program, each)))


@dataclass(frozen=True)
class Buffer:
    """An array that the program writes: where, what and how large. `source` is JAX's name of the operation."""

    array: Array
    opcode: str
    name: str
    computation: str
    source: str


def buffers_at_least(text: str, size: int) -> list[Buffer]:
    """Arrays of `size` bytes or more that some instruction writes, largest first: results outside fusions, without arguments and aliases.

    The same memory may appear more than once (an in-place update of a loop's buffer is listed beside the instruction that made it).
    """
    program = parse(text)
    fused = {i.attribute("calls") for c in program.computations.values() for i in c.instructions.values() if i.opcode == "fusion"}
    aliases = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "optimization-barrier")
    found = [
        Buffer(array, each.opcode, each.name, name, each.source)
        for name, computation in program.computations.items()
        if name not in fused
        for each in computation.instructions.values()
        if each.opcode not in aliases and not each.opcode.endswith("-done")
        for array in each.results
        if array.bytes >= size
    ]
    return sorted(found, key=lambda buffer: -buffer.array.bytes)
