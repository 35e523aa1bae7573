"""The ladder: logits, loss, gradients, optimizer steps, each against torch in float64.

run_parity   a Hugging Face folder and a mesh -> Report
Subject      the jaxpar side: a run on its mesh, its weights, and the way back to torch names
subject      a checked folder -> Subject
climb        Subject and torch model -> Report
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.compilation import anew
from jaxpar.config import Config, ContextConfig, MeshShape, OptimizerConfig
from jaxpar.config.checks import one_of, require
from jaxpar.mesh import make_mesh
from jaxpar.params import Tree
from jaxpar.train.step import Training, build_training
from torch_bridge import reference
from torch_bridge.convert import Source, import_params, read_model, torch_arrays
from torch_bridge.parity import backward, forward, training
from torch_bridge.parity.report import Arrays, Report, Rung, compared, gap

TOLERANCES = {"float64": 1e-10, "float32": 1e-4}
SEQUENCE = 48


@dataclass(frozen=True, eq=False)
class Subject:
    """`params` are masters at home on the mesh of `training`. `by_name`: a tree like them on the host, vocabulary padding included ->
    arrays by torch name, in torch's shapes."""

    training: Training
    params: Tree
    by_name: Callable[[Tree], dict[str, np.ndarray]]


def run_parity(
    folder: str | Path,
    mesh: MeshShape,
    dtype: str = "float64",
    steps: int = 3,
    *,
    tolerance: float | None = None,
    sequence: int = SEQUENCE,
    bisect: bool = False,
    optimizer: OptimizerConfig = training.OPTIMIZER,
    reading: Mapping[str, Any] | None = None,
    context: ContextConfig = training.CONTEXT,
) -> Report:
    """Compare jaxpar with torch on the checkpoint in `folder`.

    The very training step of jaxpar runs on `mesh` (sequence parallel, ZeRO-1, two microbatches) in `dtype` with matmuls at highest
    precision; torch runs in float64, whatever `dtype` is. `steps` is of AdamW. `tolerance` defaults to `TOLERANCES`.
    `bisect` compares the output of every module as well. `reading`: what `read_model` takes beside the folder.
    `context` is how `mesh.seq` shares attention.

    Needs 64-bit types for float64 and as many devices as the mesh has. Raises ValueError naming the argument, the file or the axis.
    """
    one_of("dtype", dtype, tuple(TOLERANCES))
    require(steps >= 1, f"steps: {steps} must be at least 1")
    require(sequence >= 2, f"sequence: {sequence} must be at least 2 tokens")
    require(tolerance is None or 0 < tolerance < math.inf, f"tolerance: {tolerance} must be positive and finite")
    require(mesh.devices <= len(jax.devices()), f"mesh: {mesh.devices} devices are asked for and there are {len(jax.devices())}; use fewer")
    limit = TOLERANCES[dtype] if tolerance is None else tolerance
    with precise():
        one = subject(read_model(folder, **(reading or {})), mesh, dtype, steps, sequence, optimizer, context=context)
        with anew(one.training.mesh, one.training.config.train):
            return climb(one, folder, limit, bisect)


@contextlib.contextmanager
def precise() -> Iterator[None]:
    """Matmuls at highest precision: a GPU or TPU would otherwise round float32 operands to fewer bits."""
    with jax.default_matmul_precision("highest"):
        yield


def subject(
    source: Source,
    mesh: MeshShape,
    dtype: str,
    steps: int,
    sequence: int = SEQUENCE,
    optimizer: OptimizerConfig = training.OPTIMIZER,
    zero: int = 1,
    context: ContextConfig = training.CONTEXT,
) -> Subject:
    """A checkpoint as a run of `steps` steps on the first devices that `mesh` asks for."""
    config = training.run_config(source.model, mesh, dtype, steps, sequence, optimizer, zero, context)
    built = build_training(config, make_mesh(mesh, jax.devices()[: mesh.devices]))
    params = import_params(source, built.mesh, built.shardings["params"], dtype)
    return Subject(built, params, lambda tree: torch_arrays(tree, source.model, source.family.name, stacked=True))


def climb(one: Subject, folder: str | Path, tolerance: float, bisect: bool = False) -> Report:
    """All rungs of `one` against the torch model in `folder`."""
    config = one.training.config
    dtype, sizes = config.train.compute_dtype, {axis: getattr(config.mesh, axis) for axis in one.training.mesh.axis_names}
    batches = training.batches(config, config.train.steps)
    found = jaxpar_side(one, batches)
    model = reference.load(folder)
    wanted = torch_side(model, batches, config)
    rungs = against(found, wanted)
    first = None
    if bisect:
        first = forward.first_gap(
            forward.activations(one.training, one.params, training.step_batch(config, batches[0])),
            reference.load(folder).activations(batches[0]["ids"]),
            tolerance,
        )
    narrow = {}
    if dtype != "float64":
        del model
        gc.collect()
        narrow = against(torch_side(reference.load(folder, dtype), batches, config), wanted)
    return Report(dtype, sizes, tolerance, rungs, narrow, first)


@dataclass(frozen=True)
class Side:
    """What one side computed, by torch name."""

    logits: np.ndarray
    loss: float
    gradients: Arrays
    losses: list[float]
    parameters: Arrays
    mean: Arrays
    square: Arrays


def jaxpar_side(one: Subject, batches: list[Arrays]) -> Side:
    """Every rung's numbers, from three programs: the forward, the gradients, the step."""
    stepped = [training.step_batch(one.training.config, batch) for batch in batches]
    logits = forward.logits(one.training, one.params, stepped[0])
    loss, grads = backward.gradients(one.training, one.params, stepped[0])
    trained = training.train(one.training, one.params, stepped)
    return Side(logits, loss, one.by_name(grads), trained.losses, *map(one.by_name, (trained.params, trained.mean, trained.square)))


def torch_side(model: reference.Reference, batches: list[Arrays], config: Config) -> Side:
    """The same of torch, its balancing loss that of `config`'s microbatches. The model is trained by it."""
    parts = config.train.accumulation if config.model.moe.balance_weight else 0
    logits = model.logits(batches[0]["ids"])
    loss, gradients = model.gradients(batches[0], parts)
    trained = model.train(batches, config.optimizer, parts)
    return Side(logits, loss, gradients, trained.losses, trained.parameters, trained.mean, trained.square)


def against(found: Side, wanted: Side) -> dict[str, Rung]:
    """Relative differences of every leaf of every rung."""
    losses = {f"loss of step {step}": gap(a, b) for step, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True), 1)}
    moments = {
        **compared(found.mean, wanted.mean, "exp_avg "),
        **compared(found.square, wanted.square, "exp_avg_sq "),
    }
    return {
        "logits": Rung({"logits": gap(found.logits, wanted.logits)}),
        "loss": Rung({"loss": gap(found.loss, wanted.loss)}),
        "gradients": Rung(compared(found.gradients, wanted.gradients)),
        "steps": Rung({**losses, **compared(found.parameters, wanted.parameters), **moments}),
    }
