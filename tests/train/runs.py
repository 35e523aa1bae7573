"""Small runs that several tests share: one hostile model, batches of packed documents, and its gradients on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.config import Config, DataConfig, ExpertsConfig, MeshShape, ModelConfig, OptimizerConfig, TrainConfig
from jaxpar.mesh import make_mesh
from jaxpar.train.data import lay_out
from jaxpar.train.step import build_training

MODEL = ModelConfig(
    vocabulary=61,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=6,
    mlp_width=48,
    norm_eps=1e-2,
    qk_norm=True,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    windows=(5,),
    logit_softcap=8.0,
    dropout=0.1,
    init_std=0.2,
)
SEQUENCE, BATCH = 16, 16


def config(data=1, tensor=1, seq=1, *, model=MODEL, optimizer=None, steps=20, data_documents="isolated", **train):
    settings = {
        "batch": BATCH,
        "compute_dtype": "float64",
        "master_dtype": "float64",
        "reduce_dtype": "float64",
        "attention_block": 16,
        "loss_chunk": 24,
    }
    return Config(
        model=model,
        mesh=MeshShape(data=data, seq=seq, tensor=tensor),
        data=DataConfig(sequence=SEQUENCE, vocabulary=model.vocabulary, documents=data_documents),
        optimizer=optimizer or OptimizerConfig(learning_rate=1e-2, clip=0.5),
        train=TrainConfig(steps=steps, **{**settings, "zero": 0, **train}),
    )


def training(run):
    return build_training(run, make_mesh(run.mesh, jax.devices()[: run.mesh.devices]))


def batch(run, step=0):
    """Packed documents with padding at some ends, uneven label counts, the same tokens whatever the mesh or accumulation."""
    random = np.random.default_rng(step)
    length = run.data.sequence
    shape = (run.train.batch, length)
    ids = random.integers(0, run.model.vocabulary, shape)
    starts = random.random(shape) < 0.2
    starts[:, 0] = True
    segments = starts.cumsum(1)
    index = np.arange(length)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    labels = np.roll(ids, -1, 1)
    labels[:, -1] = -1
    labels[:, :-1][segments[:, 1:] != segments[:, :-1]] = -1
    ends = random.integers(length // 2, length + 1, run.train.batch)
    padding = index >= ends[:, None]
    segments, labels = np.where(padding, 0, segments), np.where(padding, -1, labels)
    labels[index == (ends - 1)[:, None]] = -1
    cut = lambda a: a.reshape(run.train.accumulation, -1, *a.shape[1:]).astype(np.int32)  # noqa: E731
    rows = np.arange(run.train.batch)
    return {"ids": cut(ids), "labels": cut(labels), "positions": cut(positions), "segments": cut(segments), "rows": cut(rows)}


@functools.cache
def host_params(model):
    """Parameters of a model on the host: norm weights far from 1 and large biases. The same for every mesh; programs that make them are
    tested in tests/test_params.py."""
    params = training(config(model=model)).init()["params"]

    def change(path, leaf):
        name = jax.tree_util.keystr(path)
        if "norm" not in name and "bias" not in name:
            return np.asarray(leaf)
        return np.asarray(leaf) + np.random.default_rng(len(name)).normal(size=leaf.shape)

    return jax.tree_util.tree_map_with_path(change, params)


def place_params(built):
    """The host parameters on a run's mesh, at home, with the padding rows that its vocabulary has there."""

    def put(leaf, type_):
        missing = type_.shape[0] - leaf.shape[0]
        return jax.device_put(np.pad(leaf, ((0, missing), *((0, 0),) * (leaf.ndim - 1))).astype(type_.dtype), type_.sharding)

    return jax.tree.map(put, host_params(built.config.model), built.abstract_state["params"])


def place(built, host_batch):
    laid = lay_out(host_batch, built.order)
    return {name: jax.device_put(value, built.batch_shardings[name]) for name, value in laid.items()}


@functools.cache
def gradients(run):
    """(metrics, gradients) as numpy of a run's first batch at step 3; compiled and run once per configuration."""
    built = training(run)
    program = jax.jit(built.gradients)
    return jax.device_get(program(place_params(built), place(built, batch(run)), jnp.asarray(3, jnp.int32)))


def padded_alike(a, b):
    """Two leaves of possibly different vocabulary padding, cut to the rows that both have."""
    if a.shape == b.shape:
        return a, b
    rows = min(a.shape[0], b.shape[0])
    return a[:rows], b[:rows]


def gap(got, want):
    """The largest max|a−b| / max|b| over the leaves, with its name."""
    worst = (0.0, "")
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = padded_alike(np.asarray(a), np.asarray(b))
        worst = max(worst, (float(np.abs(a - b).max() / (np.abs(b).max() + 1e-300)), jax.tree_util.keystr(path)))
    return worst


def roomy(**fields):
    """Experts with room for any load, so that no step is repeated and nothing dropped."""
    return ExpertsConfig(**{"buffer_factor": 8.0, "capacity_factor": 12.0, **fields})


def changed(run, **train):
    return dataclasses.replace(run, train=dataclasses.replace(run.train, **train))
