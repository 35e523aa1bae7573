"""The forward half of parity: logits, and the output of every module, computed by a run's own per-device functions on its mesh.

    logits        ids -> logits of the layer stack that training runs
    activations   the same layers one after another, with what each part of them puts out
    first_gap     the first module, in the order of computation, whose output differs: a bisect of a failed rung

Dims: B rows of all microbatches, S sequence, D model width, V vocabulary, L layers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.mesh import BATCH, SEQ, TENSOR
from jaxpar.models import pattern
from jaxpar.parallel import remat, zero
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.chain import linked
from jaxpar.parallel.stack import LayerStack
from jaxpar.params import Tree
from jaxpar.train.gradients import BATCH_SPECS
from jaxpar.train.step import Training
from torch_bridge.parity.report import Arrays, gap

PARTS = ("attention_norm", "attention", "mlp_norm", "mlp", "layer")  # of a layer, as they are computed
BETWEEN = PartitionSpec(BATCH, (SEQ, TENSOR))  # activations between blocks, under sequence parallelism


def logits(training: Training, params: Tree, batch: Arrays) -> np.ndarray:
    """A step's batch [microbatches, rows, S] -> logits [B, S, V], microbatches one after another, without vocabulary padding."""
    functions, policy = training.gradients.functions, remat.policy(training.config.train.remat)
    stack = linked({each.name: LayerStack(functions.blocks(each), policy) for each in pattern.segments(training.config.model)})

    def local(weights: Tree, batch: Arrays, context: Context) -> jax.Array:
        y_BSD, _, _ = stack.forward(weights["layers"], functions.embed(weights, batch["ids"], context), context)
        return functions.logits(weights, y_BSD)

    found = _run(training, local, PartitionSpec(BATCH, SEQ, TENSOR), params, batch)
    return in_order(training, np.asarray(found), 1)[..., : training.config.model.vocabulary]


def in_order(training: Training, array: np.ndarray, dim: int) -> np.ndarray:
    """Tokens along `dim` from the order in which the devices of `seq` hold them to that of the row."""
    return array if training.order is None else np.take(array, np.argsort(training.order), dim)


def activations(training: Training, params: Tree, batch: Arrays) -> list[np.ndarray]:
    """Outputs [B, S, D] of the embedding, of `PARTS` of layer after layer and of the last norm."""
    functions, segments = training.gradients.functions, pattern.segments(training.config.model)

    def unit(x_BSD: jax.Array, part: Any, context: Context, name: str) -> tuple[jax.Array, list[dict[str, jax.Array]]]:
        found = []
        for block, own in functions.bound(name, *part):
            here = context._replace(layer=own)
            out = {"attention_norm": block.attention_norm(x_BSD)}
            out["attention"] = block.attention(out["attention_norm"], here)
            out["mlp_norm"] = block.mlp_norm(x_BSD + out["attention"])
            out["mlp"], _ = block.feed_forward(out["mlp_norm"], here)
            x_BSD, _ = block(x_BSD, here)
            found.append({**out, "layer": x_BSD})
        return x_BSD, found

    def local(weights: Tree, batch: Arrays, context: Context) -> Any:
        first_BSD = y_BSD = functions.embed(weights, batch["ids"], context)
        inner = []
        for name in (segment.name for segment in segments):
            parts = (weights["layers"], context.layer) if len(segments) == 1 else (weights["layers"][name], context.layer[name])
            y_BSD, found = lax.scan(functools.partial(unit, context=context, name=name), y_BSD, parts)
            inner.append(found)
        return first_BSD, inner, functions.bind_norm(weights["norm"])(y_BSD)

    places = (BETWEEN, PartitionSpec(None, *BETWEEN), BETWEEN)
    first, inner, last = jax.device_get(_run(training, local, places, params, batch))
    layers = [
        layer[part][place]
        for segment, found in zip(segments, inner, strict=True)
        for place in range(segment.units)
        for layer in found
        for part in PARTS
    ]
    return [in_order(training, array, 1) for array in (first, *layers, last)]


def _run(training: Training, local: Any, places: Any, params: Tree, batch: Arrays) -> Any:
    """local(whole weights in the compute dtype, batch [B, S], context) under shard_map on the mesh of `training`."""
    gradients = training.gradients

    def program(params: Tree, batch: Arrays) -> Any:
        weights = zero.gather(params, gradients.places, training.config.train.compute_dtype)
        batch = jax.tree.map(lambda a: a[0], batch)
        return local(weights, batch, gradients.context(jax.random.key(0), batch))

    homes = jax.tree.map(lambda place: place.home, gradients.places)
    one = {name: value.reshape(1, -1, *value.shape[2:]) for name, value in batch.items()}
    mapped = jax.shard_map(program, mesh=training.mesh, in_specs=(homes, BATCH_SPECS), out_specs=places)
    return jax.jit(mapped)(params, {name: jax.device_put(value, training.batch_shardings[name]) for name, value in one.items()})


def first_gap(found: list[np.ndarray], wanted: Arrays, tolerance: float) -> tuple[str, float] | None:
    """(module, relative difference) of the first output past `tolerance`, None where all agree. `wanted` in the order of `activations`."""
    for array, (name, want) in zip(found, wanted.items(), strict=True):
        difference = gap(array, want)
        if not difference <= tolerance:
            return name, difference
    return None
