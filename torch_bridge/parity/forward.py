"""The forward half of parity: logits, and the output of every module, computed by a run's own per-device functions on its mesh.

    logits        ids -> logits of the layer stack that training runs
    activations   the same layers one after another, with what each part of them puts out
    first_gap     the first module, in the order of computation, whose output differs: a bisect of a failed rung

Dims: B rows of all microbatches, S sequence, D model width, V vocabulary, L layers.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxpar.mesh import BATCH, SEQ, TENSOR
from jaxpar.models.pattern import segments
from jaxpar.parallel import remat, zero
from jaxpar.parallel.chain import linked
from jaxpar.parallel.stack import Context, LayerStack
from jaxpar.params import Tree
from jaxpar.train.gradients import BATCH_SPECS
from jaxpar.train.step import Training
from torch_bridge.parity.report import Arrays, gap

PARTS = ("attention_norm", "attention", "mlp_norm", "mlp", "layer")  # of a layer, as they are computed
BETWEEN = PartitionSpec(BATCH, (SEQ, TENSOR))  # activations between blocks, under sequence parallelism


def logits(training: Training, params: Tree, batch: Arrays) -> np.ndarray:
    """A step's batch [microbatches, rows, S] -> logits [B, S, V], microbatches one after another, without vocabulary padding."""
    functions, train = training.gradients.functions, training.config.train

    def local(weights: Tree, batch: Arrays, context: Context) -> jax.Array:
        stacks = {each.name: LayerStack(functions.blocks(each), remat.policy(train.remat)) for each in segments(training.config.model)}
        stack = linked(stacks)
        y_BSD, _, _ = stack.forward(weights["layers"], functions.embed(weights, batch["ids"], context), context)
        return functions.logits(weights, y_BSD)

    found = _run(training, local, PartitionSpec(BATCH, SEQ, TENSOR), params, batch)
    return in_order(training, np.asarray(found), 1)[..., : training.config.model.vocabulary]


def in_order(training: Training, array: np.ndarray, dim: int) -> np.ndarray:
    """Tokens along `dim` from the order in which the devices of `seq` hold them to that of the row."""
    return array if training.order is None else np.take(array, np.argsort(training.order), dim)


def activations(training: Training, params: Tree, batch: Arrays) -> list[np.ndarray]:
    """Outputs [B, S, D] of the embedding, of `PARTS` of layer after layer and of the last norm."""
    functions = training.gradients.functions

    def layer(x_BSD: jax.Array, part: Any, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
        weights, own = part
        block, context = functions.bind_block(weights), context._replace(layer=own)
        out = {"attention_norm": block.attention_norm(x_BSD)}
        out["attention"] = block.attention(out["attention_norm"], context)
        out["mlp_norm"] = block.mlp_norm(x_BSD + out["attention"])
        out["mlp"], _ = block.feed_forward(out["mlp_norm"], context)
        out["layer"], _ = functions.block(weights, x_BSD, context)
        return out["layer"], out

    def local(weights: Tree, batch: Arrays, context: Context) -> Any:
        x_BSD = functions.embed(weights, batch["ids"], context)
        y_BSD, inner = lax.scan(lambda x, part: layer(x, part, context), x_BSD, (weights["layers"], context.layer))
        return x_BSD, inner, functions.bind_norm(weights["norm"])(y_BSD)

    places = (BETWEEN, PartitionSpec(None, *BETWEEN), BETWEEN)
    first, inner, last = jax.device_get(_run(training, local, places, params, batch))
    layers = [inner[part][number] for number in range(training.config.model.layers) for part in PARTS]
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
