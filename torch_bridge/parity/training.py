"""The last rung of parity: steps of the very program that `jaxpar train` runs, and the run that parity trains.

run_config   a model, a mesh, a dtype -> Config
batches      random tokens, uneven labels, the same for torch and jaxpar
train        N steps -> losses, parameters and AdamW's moments
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar import run_checks
from jaxpar.config import Config, ContextConfig, DataConfig, ExpertsConfig, MeshShape, ModelConfig, OptimizerConfig, TrainConfig
from jaxpar.mesh import EXPERT
from jaxpar.params import Tree
from jaxpar.train.data import lay_out
from jaxpar.train.step import Training, row_order
from torch_bridge.parity.backward import total
from torch_bridge.parity.report import Arrays

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, schedule="constant", eps=1e-8, weight_decay=0.1, clip=1.0)
CONTEXT = ContextConfig()
ACCUMULATION = 2
LEAST_ROWS = 4


def run_config(
    model: ModelConfig,
    mesh: MeshShape,
    dtype: str,
    steps: int,
    sequence: int,
    optimizer: OptimizerConfig = OPTIMIZER,
    zero: int = 1,
    context: ContextConfig = CONTEXT,
    experts: tuple[str, ...] = (EXPERT,),
) -> Config:
    """A run as hard as a real one: sequence parallel, ZeRO, two microbatches, several tiles of attention and loss. Experts have room for
    every token, so that no program is repeated.

    `sequence` is raised to what the mesh divides; rows are few, and every device has some of each microbatch. Raises ValueError
    where the model does not fit the mesh.
    """
    unit = mesh.data * mesh.expert * ACCUMULATION
    whole = math.lcm(context.unit(mesh.seq), mesh.seq * mesh.tensor)
    length = -(-sequence // whole) * whole
    config = Config(
        model=model,
        mesh=mesh,
        data=DataConfig(sequence=length, source="tokens", path="random"),
        optimizer=optimizer,
        train=TrainConfig(
            steps=steps,
            batch=-(-LEAST_ROWS // unit) * unit,
            accumulation=ACCUMULATION,
            zero=zero,
            context=context,
            compute_dtype=dtype,
            master_dtype=dtype,
            reduce_dtype=dtype,
            attention="blockwise",
            attention_block=16,
            loss_chunk=64,
            experts=ExpertsConfig(axes=experts, buffer_factor=float(math.prod(getattr(mesh, axis) for axis in experts))),
        ),
    )
    run_checks.check_run(config, mesh.devices)
    return config


def batches(config: Config, count: int, seed: int = 0) -> list[Arrays]:
    """`count` batches of one document a row: `ids` and `labels` [B, S], B rows of all microbatches.

    About a third of the labels are ignored, and ever more of them in later rows, so that a mean of means is not the mean.
    """
    random = np.random.default_rng(seed)
    shape = (config.train.batch, config.data.sequence)
    keep_B1 = np.linspace(0.95, 0.3, shape[0])[:, None]
    made: list[Arrays] = []
    for _ in range(count):
        ids_BS = random.integers(0, config.model.vocabulary, shape, dtype=np.int32)
        labels_BS = np.where(random.random(shape) < keep_B1, np.roll(ids_BS, -1, axis=1), -1).astype(np.int32)
        labels_BS[:, -1] = -1
        labels_BS[0, 0] = ids_BS[0, 1]
        made.append({"ids": ids_BS, "labels": labels_BS})
    return made


def step_batch(config: Config, batch: Arrays) -> dict[str, np.ndarray]:
    """`ids` and `labels` [B, S] -> a step's batch [microbatches, B / microbatches, S], laid out for `seq`; rows lack the last dim."""
    rows, length = batch["ids"].shape
    whole = {
        "ids": batch["ids"],
        "labels": batch["labels"],
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "segments": np.ones((rows, length), np.int32),
        "rows": np.arange(rows, dtype=np.int32),
    }
    laid = lay_out(whole, row_order(config))
    return {name: value.reshape(config.train.accumulation, -1, *value.shape[1:]) for name, value in laid.items()}


@dataclass(frozen=True)
class Trained:
    """After N steps, on the host, vocabulary padding included: the loss of each, parameters, and AdamW's means of gradients and squares."""

    losses: list[float]
    params: Tree
    mean: Tree
    square: Tree


def train(training: Training, params: Tree, batches: Sequence[Arrays]) -> Trained:
    """A step on each batch, from placed masters, which it leaves alone."""
    state: dict[str, Any] = first_state(training, params)
    losses = []
    for batch in batches:
        placed = {name: jax.device_put(value, training.batch_shardings[name]) for name, value in batch.items()}
        state, metrics = training.step(state, placed)
        losses.append(total(training.config, metrics) if not int(metrics["skipped"]) else math.nan)
    adam = state["optimizer"][0]
    return Trained(losses, *jax.device_get((state["params"], adam.mu, adam.nu)))


def first_state(training: Training, params: Tree) -> dict[str, Any]:
    """The state of step 0 with `params`, copied, for a step gives its buffers away."""

    def make(params: Tree) -> dict[str, Any]:
        zero = jnp.zeros((), jnp.int32)
        return {"params": jax.tree.map(jnp.copy, params), "optimizer": training.optimizer.init(params), "step": zero, "skipped": zero}

    return jax.jit(make, out_shardings=training.shardings)(params)
