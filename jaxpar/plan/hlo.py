"""Read a compiled program: XLA's optimized HLO text, as `compiled.as_text()` prints it, for CPU and GPU, jax 0.10 to 0.12.

    parse             text -> Program of computations and instructions
    dot_flops         2 M N K of one matrix product
    buffers_at_least  arrays of some size that the program writes

What XLA did is counted, not what was written: fused, combined, peeled or moved operations appear as they run.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

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
NAME = re.compile(r"%([\w.\-]+)")


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

    @property
    def frame(self) -> str:
        """The number of its stack frame in the tables at the head of the text; "" where XLA gives none."""
        found = re.search(r"stack_frame_id=(\d+)", self.attributes)
        return found.group(1) if found else ""


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
        operands=tuple(NAME.findall(inside)),
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
