"""What one instruction of a compiled GPU program costs: FLOPs, bytes of device memory, seconds.

    work         instruction -> Work (flops, bytes touched, kind)
    seconds      Work -> time of its kernel on a GPU
    transmission a collective's bytes over the links of its group

A kernel takes the longer of its arithmetic and its memory traffic, never less than the gap between two launches. Matmuls reach
`fractions.matmul` of the peak times what their shape allows: the last wave of output tiles that does not fill the GPU, tiles wider than
the matrix, a contraction too short to hide the tiles' start and end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.plan.hardware import Hardware, Link
from jaxpar.plan.hlo import Computation, Instruction, Program, dot_flops
from jaxpar.plan.traffic import Collective

# No kernel runs for these: they name memory that is there already.
FREE = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "domain"))
FREE |= frozenset(("optimization-barrier", "opt-barrier", "partition-id", "replica-id"))
ATTENTION = "__cudnn$fmha"
# NCCL sends small messages by another protocol (LL): little latency, a quarter of the bandwidth. Seconds of a launch and of a step of the
# ring on either link, from baseLatencies and hwLatencies in NCCL's src/graph/tuning.cc; the quarter is an estimate.
SMALL_LAUNCH, SMALL_NODE, SMALL_NETWORK, SMALL_RATE = 6.6e-6, 0.6e-6, 2.7e-6, 0.25
# Output tiles of Hopper's matmul kernels, and the contraction that costs as much as a tile's start and end.
TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64))
CONTRACTION = 128


@dataclass(frozen=True)
class Work:
    """What a kernel does. `kind` is "matmul", "attention" or "memory"; `shapes` are (batch, m, n, k) of each matmul; `bytes` of device
    memory read and written; `dtype` of the operands, tfloat32 where a matmul of float32 is not asked for its highest precision."""

    kind: str
    flops: float
    bytes: float
    dtype: str
    shapes: tuple[tuple[int, int, int, int], ...] = ()
    backward: bool = False


def work(program: Program, instruction: Instruction) -> Work | None:
    """What `instruction` does; None where it starts no kernel. Loops, calls and collectives are not kernels either."""
    if instruction.opcode in FREE or not instruction.results:
        return None
    operands = program.operands(instruction)
    dtype = max(((a.size, a.dtype) for o in operands for a in o.results), default=(0, instruction.results[0].dtype))[1]
    if instruction.opcode == "custom-call" and ATTENTION in instruction.attributes:
        flops, backward = attention_flops_run(instruction)
        return Work("attention", flops, _whole(program, instruction), dtype, backward=backward)
    dots = _dots(program, instruction)
    shapes = tuple(dot_shape(program, dot) for dot in dots)
    moved = touched(program, instruction)
    flops = float(sum(2 * math.prod(shape) for shape in shapes))
    if dots:
        dtype = program.operands(dots[0])[0].results[0].dtype
        if dtype == "float32" and "highest" not in dots[0].attributes.lower():
            dtype = "tfloat32"
    return Work("matmul" if dots else "memory", flops, moved, dtype, shapes)


def _dots(program: Program, instruction: Instruction) -> list[Instruction]:
    """The matrix products inside one kernel."""
    if dot_flops(program, instruction):
        return [instruction]
    inner = program.computations.get(instruction.attribute("calls") or "") if instruction.opcode == "fusion" else None
    return [dot for each in (inner.instructions.values() if inner else ()) for dot in _dots(program, each)]


def dot_shape(program: Program, dot: Instruction) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a matrix product."""
    left, right = (operand.results[0] for operand in program.operands(dot)[:2])
    if dot.opcode == "dot":
        batch = math.prod(left.shape[i] for i in dot.dims("lhs_batch_dims"))
        k = math.prod(left.shape[i] for i in dot.dims("lhs_contracting_dims"))
    else:
        batch = math.prod(dot.results[0].shape[:-2])
        k = math.isqrt(left.size * right.size // (dot.results[0].size * batch))
    return batch, left.size // (batch * k), right.size // (batch * k), k


def attention_flops_run(instruction: Instruction) -> tuple[float, bool]:
    """FLOPs of a cuDNN attention call as it runs, and whether it is the backward. Two products forward, five backward."""
    backward = "Backward" in instruction.attributes
    pairs, width = attention_pairs(instruction)
    return (10.0 if backward else 4.0) * pairs * width, backward


def attention_pairs(instruction: Instruction) -> tuple[float, int]:
    """Scores of a cuDNN attention call that count, over batch and heads, and the head width. Half of the matrix where it is causal, of a
    window (which cuDNN has causal only) what it holds."""
    found = re.search(r"backend_config=(\{.*\})", instruction.attributes)
    config = json.loads(found.group(1))["cudnn_fmha_backend_config"] if found else {}
    *batch, queries, keys = (int(n) for n in config["intermediate_tensor_shape"]["dimensions"])
    width = next(a.shape for a in instruction.results if len(a.shape) == 4)[-1]
    seen = queries * keys * (0.5 if "CAUSAL" in config.get("mask_type", "") else 1.0)
    if (window := int(config.get("sliding_window_length") or 0)) and window < keys:
        seen = queries * window - window * window / 2
    return math.prod(batch) * seen, width


def _whole(program: Program, instruction: Instruction) -> float:
    return float(sum(a.bytes for o in [*program.operands(instruction), instruction] for a in o.results))


def touched(program: Program, instruction: Instruction) -> float:
    """Bytes of device memory that an instruction reads and writes. Of an array that it only slices, the slice; of one that it updates in
    place, the update."""
    operands = program.operands(instruction)
    match instruction.opcode:
        case "dynamic-slice" | "slice" | "gather":
            return 2.0 * sum(a.bytes for a in instruction.results)
        case "dynamic-update-slice":
            return 2.0 * operands[1].results[0].bytes
        case "scatter":
            return 3.0 * sum(a.bytes for a in operands[-1].results)
    inner = program.computations.get(instruction.attribute("calls") or "") if instruction.opcode == "fusion" else None
    return _fused(inner) if inner else _whole(program, instruction)


def _fused(inner: Computation) -> float:
    readers: dict[str, list[tuple[Instruction, int]]] = {}
    for each in inner.instructions.values():
        for place, name in enumerate(each.operands):
            readers.setdefault(name, []).append((each, place))

    def read(name: str, size: int) -> int:
        """Bytes read through `name`: an array of `size`, or the slices that are all anybody takes of it."""
        total = 0
        for reader, place in readers.get(name, []):
            if reader.opcode == "bitcast":
                total += read(reader.name, size)
            elif reader.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
                total += sum(a.bytes for a in reader.results)
            elif not (reader.opcode == "dynamic-update-slice" and place == 0):
                return size
        return min(total, size)

    def written(name: str) -> int:
        made = inner.instructions[name]
        if made.opcode == "tuple":
            return sum(written(part) for part in made.operands)
        while made.opcode == "bitcast":
            made = inner.instructions[made.operands[0]]
        if made.opcode == "dynamic-update-slice":
            return inner.instructions[made.operands[1]].results[0].bytes
        return 0 if made.opcode == "parameter" else sum(a.bytes for a in made.results)

    parameters = (each for each in inner.instructions.values() if each.opcode == "parameter")
    return float(sum(read(p.name, sum(a.bytes for a in p.results)) for p in parameters) + written(inner.root))


def shape_efficiency(shape: tuple[int, int, int, int], cores: int) -> float:
    """What part of its best rate a matmul of (batch, m, n, k) can reach on `cores` multiprocessors, by the best of a few tilings.

    Full waves of full tiles with a long contraction give nearly 1. A contraction is split where tiles are too few to fill the GPU.
    """
    batch, m, n, k = shape

    def waves(tile_m: int, tile_n: int) -> float:
        tiles = batch * math.ceil(m / tile_m) * math.ceil(n / tile_n)
        splits = max(1, min(cores // tiles, k // 512)) if tiles < cores else 1
        full = batch * m * n / (tile_m * tile_n)
        width = min(1.0, (tile_m * tile_n / (128 * 128)) ** 0.5)  # small tiles load more for each FLOP
        long = k / splits / (k / splits + CONTRACTION)
        return full * splits / (math.ceil(tiles * splits / cores) * cores) * width * long

    return max(waves(*tile) for tile in TILES)


def seconds(task: Work, hardware: Hardware) -> float:
    """Time of one kernel on this GPU."""
    peak = hardware.peak_flops.get(task.dtype, hardware.peak_flops["float32"])
    parts, cores = hardware.fractions, int(hardware.target["core_count"])
    if task.kind == "attention":
        arithmetic = task.flops / (peak * (parts.attention_backward if task.backward else parts.attention_forward))
    else:
        arithmetic = sum(2 * math.prod(shape) / (peak * parts.matmul * shape_efficiency(shape, cores)) for shape in task.shapes)
    return max(arithmetic, task.bytes / (hardware.memory_bandwidth * parts.memory)) + hardware.kernel


def transmission(records: Sequence[Collective], members_per_node: int, hardware: Hardware) -> tuple[str, float]:
    """Which link a collective is on, and the seconds it takes there. `records` are of one operation, one a dtype.

    Inside a node every GPU sends its ring bytes over the node's link. A group over several nodes with g members in each has g rings, which
    leave the node over g adapters: its bytes pass at g times a GPU's own network bandwidth, or at the node's link where that is less.
    """
    group, sent = max(r.group for r in records), sum(r.bytes / r.count for r in records)
    inside = members_per_node >= group
    passes = 2 if records[0].kind == "all_reduce" else 1
    steps = 1 if records[0].kind in ("permute", "broadcast") else passes * (group - 1)
    rate = _rate(hardware.node)
    if not inside:
        rate = min(rate, members_per_node * _rate(hardware.network))
    between = 0 if inside else steps // members_per_node
    large = hardware.launch + (steps - between) * hardware.node.latency + between * hardware.network.latency + sent / rate
    small = SMALL_LAUNCH + (steps - between) * SMALL_NODE + between * SMALL_NETWORK + sent / (rate * SMALL_RATE)
    return "node" if inside else "network", min(large, small)


def _rate(link: Link) -> float:
    return link.bandwidth * link.fraction
