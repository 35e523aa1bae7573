"""Where a step's memory goes on one GPU: what the compiled program holds at its peak, beside what formulas say.

    read_dump       XLA's own record of its buffers -> Alive
    Alive           what is held at the fullest moment
    measure         arguments, temporaries, peak, its parts, and the formulas beside them
    predicted_peak  the peak from the configuration alone

Parts: `parameters` (float32 masters), `optimizer`, `weights` (the same in the compute dtype: cast, gathered), `gradients`, `activations`
(saved for the backward, and what one layer or one chunk of the loss is working on), `rest` (batch, counters, gaps between buffers).

Sources: 16 bytes a parameter, Rajbhandari et al., "ZeRO" (SC'20), section 3.1; activations, Korthikanti et al., "Reducing Activation
Recomputation" (2022), table 2, without the scores that fused attention does not keep.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.plan import formulas
from jaxpar.plan.hlo import Array, Instruction, Program, arrays, executions, parse
from jaxpar.train.step import Training

# Buffers below this are `rest`.
SMALL = 2**20


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


def _origin(program: Program, places: dict[str, Instruction], name: str, index: tuple[int, ...]) -> Instruction | None:
    """The instruction that really made a buffer: behind copies, bitcasts, tuples and the start of a loop."""
    instruction = places.get(name)
    for _ in range(50):
        if instruction is None:
            return None
        operands = program.operands(instruction)
        if instruction.opcode in ("while", "optimization-barrier") and operands:
            instruction = operands[0]
        elif instruction.opcode == "tuple" and index and index[0] < len(operands):
            instruction, index = operands[index[0]], index[1:]
        elif instruction.opcode == "get-tuple-element" and operands:
            instruction, index = operands[0], (int(instruction.attribute("index") or 0), *index)
        elif instruction.opcode in ("copy", "bitcast", "transpose", "convert", "copy-start", "copy-done") and operands:
            instruction = operands[0]
        elif instruction.opcode.endswith("-done") and operands:
            instruction = operands[0]
        else:
            return instruction
    return instruction


def parts(config: Config, training: Training, text: str, alive: Alive, peak: int) -> dict[str, int]:
    """The peak by what it holds. Masters and optimizer state are exact; temporaries are told apart by size, dtype and origin."""
    program = parse(text)
    places = {name: each for computation in program.computations.values() for name, each in computation.instructions.items()}
    found = {"parameters": _local_bytes(training.abstract_state["params"]), "optimizer": _local_bytes(training.abstract_state["optimizer"])}
    found |= {"weights": 0, "gradients": 0, "activations": 0}
    sizes = _weight_sizes(config)
    compute = jnp.dtype(config.train.compute_dtype).name
    for buffer in alive.buffers:
        if buffer.argument or buffer.bytes < SMALL:
            continue
        if buffer.array.size not in sizes:
            found["activations"] += buffer.bytes
            continue
        made = _origin(program, places, buffer.instruction, buffer.index)
        opcode, source = (made.opcode, made.source) if made else ("", "")
        gathered = "all-gather" in opcode or "all_gather" in source or "convert_element_type" in source or opcode == "parameter"
        found["weights" if gathered and buffer.array.dtype == compute else "gradients"] += buffer.bytes
    found["rest"] = peak - sum(found.values())
    return found


def _weight_sizes(config: Config) -> set[int]:
    """Elements that an array of one parameter may have: a layer or all, whole or split by ZeRO."""
    n, sizes = formulas.replicas(config), set()
    for weight in formulas.weights(config):
        for size in (weight.elements, weight.total):
            sizes |= {size, size // n} if weight.split else {size}
    return {size for size in sizes if size > 1}


def _local_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def attention_workspace(text: str) -> int:
    """Bytes that cuDNN takes at run time and the compiler does not see: its backward adds dQ up in float32 and keeps a float32 scalar
    for each query and head. The largest call's."""
    program = parse(text)
    backward = executions(program, lambda each: float('custom_call_target="__cudnn$fmhaSoftmaxBackward"' in each.attributes))
    shapes = [program.operands(call)[0].results[0].shape for call, _ in backward]
    return max((4 * math.prod(shape) + 4 * math.prod(shape[:3]) for shape in shapes), default=0)


def measure(config: Config, training: Training, text: str, sizes: Any, alive: Alive) -> dict[str, Any]:
    """Bytes of one GPU: `arguments`, `outputs`, `aliased`, `temporaries`, `peak`, `predicted_peak`, `parts`, `attention_workspace`
    (not in the peak), `formulas`."""
    peak = int(sizes.peak_memory_in_bytes)
    return {
        "arguments": int(sizes.argument_size_in_bytes),
        "outputs": int(sizes.output_size_in_bytes),
        "aliased": int(sizes.alias_size_in_bytes),
        "temporaries": int(sizes.temp_size_in_bytes),
        "peak": peak,
        "predicted_peak": predicted_peak(config),
        "parts": parts(config, training, text, alive, peak),
        "attention_workspace": attention_workspace(text),
        "formulas": formula_bytes(config),
    }


def formula_bytes(config: Config) -> dict[str, int]:
    """What the papers say of one GPU: `state` by 16 bytes a parameter and its ZeRO shares, `activations` of a microbatch by Korthikanti
    without attention scores, at the remat policy that is nearest."""
    n, level, elements = formulas.replicas(config), config.train.zero, sum(weight.total for weight in formulas.weights(config))
    shares = {0: 16, 1: 4 + 12 / n, 2: 2 + 14 / n, 3: 16 / n}[level]
    (b, s), t = formulas.microbatch(config), config.mesh.tensor
    one = b * s * config.model.width
    tokens = t if config.train.sequence_parallel else 1
    full = one * (10 / tokens + 24 / t)
    each = {"block": 2 * one / tokens, "attention": 2 * one / tokens + 2 * one / t}.get(config.train.remat, full)
    return {"state": round(shares * elements), "activations": round(config.model.layers * each)}


def working_bytes(config: Config) -> int:
    """Activations alive while one layer is computed again and differentiated: its inputs and outputs and their gradients, two of width D
    between blocks and four inside, queries, keys, values, attention's output and their gradients, and four of the MLP's width (gate, up,
    their product, one gradient)."""
    model, t, (b, s) = config.model, config.mesh.tensor, formulas.microbatch(config)
    size = jnp.dtype(config.train.compute_dtype).itemsize
    heads = (2 * model.heads + 2 * max(model.kv_heads, t)) // t
    part = b * s // config.train.interleave
    return (
        size
        * part
        * (2 * model.width // formulas.token_shards(config) + 2 * model.width + heads * model.head_width + 4 * model.mlp_width // t)
    )


def predicted_peak(config: Config) -> int:
    """The larger of two moments: the loss (whole table of the head, its float32 gradient, one chunk of logits and their gradient) and
    the backward of a layer (gathered weights, gradients on their way, the layer's working set). Both hold state, batch, gradient buffers
    and what the forward saved."""
    model, train = config.model, config.train
    saved = formulas.saved_bytes(config)
    if saved is None:  # "none" keeps a layer's every value: what "matmuls" does and as much again of element-wise results
        saved = 2 * (formulas.saved_bytes(_with_remat(config, "matmuls")) or 0)
    held = formulas.state_bytes(config) + formulas.batch_bytes(config) + saved
    size = jnp.dtype(train.compute_dtype).itemsize
    b, s = formulas.microbatch(config)
    head = next(
        weight.elements
        for weight in formulas.weights(config)
        if weight.name.endswith("head/table" if not model.tied else "embedding/table")
    )
    chunk = min(train.loss_chunk, b * s) * head // model.width
    loss = head * (size + 4) + chunk * (4 + 2 * size) + 3 * size * b * s * model.width
    layer = working_bytes(config)
    return round(held + _buffers(config) + max(loss + _kept_weights(config), layer + _moving(config)))


def _with_remat(config: Config, remat: str) -> Config:
    import dataclasses

    return dataclasses.replace(config, train=dataclasses.replace(config.train, remat=remat))


def _buffers(config: Config) -> int:
    """The accumulation buffer of the gradients."""
    n, late = formulas.replicas(config), config.train.zero >= 2
    elements = sum(weight.total // (n if weight.split and late else 1) for weight in formulas.weights(config))
    return jnp.dtype(config.train.master_dtype).itemsize * elements


def _kept_weights(config: Config) -> int:
    """Weights in the compute dtype that live through the loss: all of the layers below ZeRO-3, else their own shard."""
    size, n = jnp.dtype(config.train.compute_dtype).itemsize, formulas.replicas(config)
    layers = [weight for weight in formulas.weights(config) if weight.layers]
    return size * sum(weight.total // (n if config.train.zero == 3 and weight.split else 1) for weight in layers)


def _moving(config: Config) -> int:
    """Weights of the layer in use and the next, gradients of this layer and the last on their way."""
    size = jnp.dtype(config.train.compute_dtype).itemsize
    layer = sum(weight.elements for weight in formulas.weights(config) if weight.layers)
    return _kept_weights(config) + size * layer * (2 * (config.train.zero == 3) + 2 * (config.train.zero >= 2))
