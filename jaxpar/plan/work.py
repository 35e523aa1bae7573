"""Arithmetic of a step: what the compiled program does beside what the model needs, so that recomputation and waste show as a ratio.

    measure      compiled text -> Work: matmuls, attention, Pallas kernels by their grid, custom calls by name, large copies
    model_flops  the model's own count, all devices together
    peak_dtype   whose peak an MFU divides by

Both count causal attention as half of the score matrix, of a window what it holds, and the backward of attention as two forwards: cuDNN
computes scores again inside its backward kernel, which is the price of not keeping them and not the program's doing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.config import Config
from jaxpar.models.decoder import Decoder
from jaxpar.params import flatten
from jaxpar.plan.costs import ATTENTION, attention_pairs
from jaxpar.plan.hardware import Hardware
from jaxpar.plan.hlo import Instruction, Program, parse
from jaxpar.plan.kernels import Launch, launches, total_flops
from jaxpar.plan.loops import at_most, executions, matmul_flops

MOVES = {"copy", "transpose"}
# A copy of this many bytes is worth a line.
LARGE_COPY = 64 * 2**20


@dataclass(frozen=True)
class Work:
    """FLOPs of one GPU in a step. `calls` says how often each custom call runs, `launches` the grid of Pallas kernels, `copies` the bytes
    of copies of LARGE_COPY or more, by array and JAX's name of it, `at_most` the loops that may run less often than they are counted."""

    matmul: int
    attention: int
    kernels: int
    calls: dict[str, int]
    launches: list[Launch]
    copies: dict[str, int]
    at_most: int

    @property
    def flops(self) -> int:
        return self.matmul + self.attention + self.kernels


def _target(instruction: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]+)"', instruction.attributes)
    return found.group(1) if found else ""


def attention_flops(instruction: Instruction) -> int:
    """Of one call of cuDNN's fused attention, by the scores that `costs.attention_pairs` counts: 4 H for each forward, twice that backward;
    else 0."""
    target = _target(instruction)
    if not target.startswith(ATTENTION):
        return 0
    pairs, width = attention_pairs(instruction)
    return round((8 if "Backward" in target else 4) * pairs * width)


def measure(text: str, kernels: Mapping[str, int] | None = None) -> Work:
    """What one GPU computes. Triton kernels that XLA makes of matmuls are fusions with a `dot` inside and count as such; `kernels` says
    what one launch of each Pallas kernel does (`kernels.kernel_flops`)."""
    program = parse(text)
    calls: Counter[str] = Counter()
    attention = 0
    for each, count in executions(program, lambda each: float(each.opcode == "custom-call")):
        calls[_target(each)] += count
        attention += count * attention_flops(each)
    launched = launches(program)
    kernel = total_flops(launched, kernels or {})
    return Work(matmul_flops(text), attention, kernel, dict(calls), launched, large_copies(program), len(at_most(program)))


def large_copies(program: Program) -> dict[str, int]:
    """Bytes of copies and transposes of LARGE_COPY or more, kernels of their own, by array and JAX's name, the largest first."""
    fused = {each.attribute("calls") for c in program.computations.values() for each in c.instructions.values() if each.opcode == "fusion"}

    def copied(each: Instruction) -> int:
        size = each.results[0].bytes if each.results else 0
        return size if size >= LARGE_COPY and each.computation not in fused and _only_copies(program, each) else 0

    found: Counter[str] = Counter()
    for each, count in executions(program, copied):
        array, made = each.results[0], program.operands(each)[0]
        zeros = "zeros " if "broadcast" in made.name else ""
        named = f" ({each.source})" if "/" in each.source else ""
        found[f"{zeros}{array.dtype}[{','.join(map(str, array.shape))}]{named}"] += count * copied(each)
    return dict(found.most_common())


def _only_copies(program: Program, each: Instruction) -> bool:
    """A copy or transpose, or a fusion of nothing else."""
    if each.opcode != "fusion":
        return each.opcode in MOVES
    inner = program.computations[each.attribute("calls") or ""].instructions.values()
    opcodes = {one.opcode for one in inner} - {"parameter", "bitcast"}
    return bool(opcodes) and opcodes <= MOVES


def peak_dtype(config: Config, hardware: Hardware) -> str:
    """Whose peak an MFU of this run divides by, a key of `Hardware.peak_flops`: the compute dtype's; of float32 the one that GPUs multiply
    in, tfloat32 unless `train.matmul_precision` is "highest" or the GPU has none. A dtype without a peak counts as float32."""
    dtype, peaks = config.train.compute_dtype, hardware.peak_flops
    if dtype == "float32" and config.train.matmul_precision != "highest" and "tfloat32" in peaks:
        return "tfloat32"
    return dtype if dtype in peaks else "float32"


def model_flops(config: Config, causal: bool = True) -> int:
    """6 x matrix elements x tokens, and 6 x layers x heads x (head and value width) x (keys a query sees) x tokens, all devices together.

    Keys: half of the sequence, or of a window what it holds; all of it where `causal` is not counted. The embedding is a lookup and counts
    nothing; the head does; of experts those that a token passes.
    """
    model, tokens = config.model, config.train.batch * config.data.sequence
    specs = flatten(Decoder(model, model.vocabulary).specs)
    used = model.moe.per_token / model.moe.experts if model.moe.experts else 1  # of the experts, those that a token passes
    matrices = sum(
        spec.real_size * (used if "experts" in spec.axes else 1)
        for _, spec in specs
        if spec.role in ("matrix", "head") or (model.tied and spec.role == "embedding")
    )
    length = config.data.sequence
    seen = sum(length / 2 if not window or window >= length else window - window * window / (2 * length) for window in model.layer_windows)
    if not causal:
        seen = length * model.layers
    return round(6 * matrices * tokens + 6 * model.heads * (model.head_width + model.value_head_width) * seen * tokens)
