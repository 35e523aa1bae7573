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
    """The peak by what it holds. Masters and optimizer state are exact; temporaries are told apart by shape and by what made them."""
    found = {"parameters": _local_bytes(training.abstract_state["params"]), "optimizer": _local_bytes(training.abstract_state["optimizer"])}
    found |= temporaries(config, text, alive)
    return {**found, "rest": fullest - sum(found.values())}


def temporaries(config: Config, text: str, alive: Alive) -> dict[str, int]:
    """Bytes of `weights`, `gradients` and `activations` among the buffers of SMALL or more that are alive.

    What is not shaped as a parameter is an activation. Of the rest, weights are what was cast or gathered from the masters, activations
    what the forward computed and may have a dim of tokens (the loss adds up the head's gradient there, in the masters' dtype), and
    gradients all else.
    """
    program = parse(text)
    places = {name: each for computation in program.computations.values() for name, each in computation.instructions.items()}
    shapes, found = weight_shapes(config), {"weights": 0, "gradients": 0, "activations": 0}
    compute, master = (jnp.dtype(name).name for name in (config.train.compute_dtype, config.train.master_dtype))
    (rows, length), least = formulas.microbatch(config), max(1, formulas.microbatch(config)[1] // config.mesh.tensor)
    for buffer in alive.buffers:
        if buffer.argument or buffer.bytes < SMALL:
            continue
        if _dims(buffer.array.shape) not in shapes:
            found["activations"] += buffer.bytes
            continue
        made = origin(program, places, buffer.instruction, buffer.index)
        opcode, source = (made.opcode, made.source) if made else ("", "")
        argument = made is not None and opcode == "parameter" and made.computation == program.entry
        forward = "jvp(" in source and "transpose(" not in source
        of_tokens = any(size % least == 0 and rows * length % size == 0 for size in buffer.array.shape)
        if buffer.array.dtype == compute and (argument or "all-gather" in opcode or "all_gather" in source):
            found["weights"] += buffer.bytes
        elif forward and of_tokens and (buffer.array.dtype == compute or buffer.array.dtype != master):
            found["activations"] += buffer.bytes
        else:
            found["gradients"] += buffer.bytes
    return found


def _dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its order and without ones: the same for a transposed array."""
    return tuple(sorted(size for size in shape if size > 1))


def weight_shapes(config: Config) -> set[tuple[int, ...]]:
    """Dims that an array of one parameter may have: one layer, all, or all but the last; whole, one dim split by ZeRO, or that dim as
    (replicas, share); neighbouring dims merged, as matmuls see heads and their width."""
    found = set()
    for weight in formulas.weights(config):
        shapes, n = [weight.shape], weight.ways
        if weight.split:
            for place, size in enumerate(weight.shape):
                if size % n == 0:
                    before, after = weight.shape[:place], weight.shape[place + 1 :]
                    shapes += [(*before, size // n, *after), (*before, n, size // n, *after)]
        for shape in shapes:
            for stack in {(), (weight.layers,), (weight.layers - 1,)} if weight.layers else {()}:
                found |= {_dims((*stack, *merged)) for merged in _merged(shape)}
    return found - {()}


def _merged(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """`shape`, and with neighbours multiplied together in every way."""
    if len(shape) < 2:
        return [shape]
    rest = _merged(shape[1:])
    return [way for inner in rest for way in ((shape[0], *inner), (shape[0] * inner[0], *inner[1:]))]


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
