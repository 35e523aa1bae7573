"""Where a step's memory goes on one GPU: what the compiled program holds at its peak, beside what formulas say.

    measure      arguments, temporaries, peak, its parts, and the formulas beside them
    parts        the peak by what it holds

Parts: `parameters` (float32 masters), `optimizer`, `weights` (the same in the compute dtype: cast, gathered), `gradients`, `activations`
(saved for the backward, and what one layer or one chunk of the loss is working on), `rest` (batch, counters, gaps between buffers).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.plan import formulas, peak
from jaxpar.plan.buffers import Alive, origin
from jaxpar.plan.hlo import parse
from jaxpar.plan.loops import executions
from jaxpar.train.step import Training

# Buffers below this are `rest`.
SMALL = 2**20


def parts(config: Config, training: Training, text: str, alive: Alive, fullest: int) -> dict[str, int]:
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
        made = origin(program, places, buffer.instruction, buffer.index)
        opcode, source = (made.opcode, made.source) if made else ("", "")
        gathered = "all-gather" in opcode or "all_gather" in source or "convert_element_type" in source or opcode == "parameter"
        found["weights" if gathered and buffer.array.dtype == compute else "gradients"] += buffer.bytes
    found["rest"] = fullest - sum(found.values())
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
    fullest = int(sizes.peak_memory_in_bytes)
    return {
        "arguments": int(sizes.argument_size_in_bytes),
        "outputs": int(sizes.output_size_in_bytes),
        "aliased": int(sizes.alias_size_in_bytes),
        "temporaries": int(sizes.temp_size_in_bytes),
        "peak": fullest,
        "predicted_peak": peak.predicted_peak(config),
        "parts": parts(config, training, text, alive, fullest),
        "attention_workspace": attention_workspace(text),
        "formulas": peak.formula_bytes(config),
    }
