"""Compiled training steps that several tests look at, compiled once a process."""

import functools
import itertools
from collections import Counter

import jax

from jaxpar.config import Config, DataConfig, MeshShape, ModelConfig, OptimizerConfig, TrainConfig
from jaxpar.mesh import make_mesh
from jaxpar.plan.report import measure
from jaxpar.train.step import build_training
from tests.traced import traced_collectives

# No two weights of a layer have one shape, but for key and value, gate and up, and the norms; weights outweigh activations.
MODEL = ModelConfig(vocabulary=250, width=64, layers=5, heads=4, kv_heads=2, mlp_width=192)
LEVELS = {0: 4, 1: 2, 2: 2, 3: 1}  # ZeRO level: microbatches


def config(data=1, tensor=1, *, model=MODEL, sequence=16, **train):
    settings = {"batch": 16, "compute_dtype": "float32", "loss_chunk": 24, **train}
    return Config(
        model=model,
        mesh=MeshShape(data=data, tensor=tensor),
        data=DataConfig(sequence=sequence, vocabulary=model.vocabulary),
        optimizer=OptimizerConfig(clip=1.0),
        train=TrainConfig(**settings),
    )


def level(zero):
    return config(4, 2, zero=zero, accumulation=LEVELS[zero], remat="block")


def training(run):
    return build_training(run, make_mesh(run.mesh, jax.devices()[: run.mesh.devices]))


@functools.cache
def measured(run):
    return measure(training(run))


@functools.cache
def traced(run):
    built = training(run)
    return traced_collectives(built.step.trace(built.abstract_state, built.abstract_batch).jaxpr, built.mesh.shape)


def each(collectives):
    """Executions as a multiset: what they are for and where they stand does not matter, all else does."""
    found: Counter[tuple] = Counter()
    for one in collectives:
        found[one.kind, one.axes, one.dtype, one.payload // max(one.count, 1)] += one.count
    return +found


def pairwise(**choices):
    """Rows of one value for each name, such that any two values of two names meet in some row."""
    names = list(choices)
    wanted = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in choices[a] for y in choices[b]}
    rows = []
    while wanted:
        row = max(
            (dict(zip(names, values, strict=True)) for values in itertools.product(*choices.values())),
            key=lambda row: sum((a, row[a], b, row[b]) in wanted for a, b in itertools.combinations(names, 2)),
        )
        wanted -= {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
        rows.append(row)
    return rows
