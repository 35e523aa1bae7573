"""One step at a time: what is not finite is skipped, the loss is one mean over all tokens, clipping counts each parameter once."""

import jax
import numpy as np
import pytest

from jaxpar.mesh import make_mesh
from jaxpar.train.schedules import learning_rate
from jaxpar.train.step import build_training
from tests.train import tiny

CLIP = 0.05
CHANGES = {
    "model.dropout": 0.0,
    "mesh.data": 2,
    "train.accumulation": 2,
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip": CLIP,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(training on data 2 × tensor 2 with two microbatches, its first state on the host)."""
    config = tiny.config(tmp_path_factory.mktemp("run"), "unread", CHANGES)
    training = build_training(config, make_mesh(config.mesh, jax.devices()[:4]))
    return training, jax.device_get(training.init())


def batch(labelled=None):
    """Two microbatches of four sequences; `labelled` [microbatch, sequence, token] keeps a label at these places only."""
    random = np.random.default_rng(1)
    shape = (2, tiny.BATCH // 2, tiny.SEQUENCE)
    ids, labels = random.integers(0, tiny.VOCABULARY, (2, *shape)).astype(np.int32)
    if labelled is not None:
        kept = np.zeros(shape, bool)
        kept[tuple(zip(*labelled, strict=True))] = True
        labels = np.where(kept, labels, -1)
    positions = np.broadcast_to(np.arange(tiny.SEQUENCE, dtype=np.int32), shape)
    rows = np.arange(tiny.BATCH, dtype=np.int32).reshape(shape[:2])
    return {"ids": ids, "labels": labels, "positions": positions, "segments": np.ones(shape, np.int32), "rows": rows}


def step(run, state, data):
    """(state, metrics) after one step, on the host."""
    training, _ = run
    state, data = jax.device_put(state, training.shardings), jax.device_put(data, training.batch_shardings)
    return jax.device_get(training.step(state, data))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_is_normal(run):
    training, first = run
    broken = jax.tree.map(np.copy, first["params"])
    broken["layers"]["mlp_norm"]["weight"][1, 3] = np.inf
    after, metrics = step(run, {**first, "params": broken}, batch())
    assert not np.isfinite(metrics["loss"]) or not np.isfinite(metrics["grad_norm"])
    assert bits(after["params"]) == bits(broken) and bits(after["optimizer"]) == bits(first["optimizer"])
    assert (after["step"], after["skipped"], metrics["skipped"]) == (1, 1, 1)

    normal, metrics = step(run, {**after, "params": first["params"]}, batch())
    direct, _ = step(run, first, batch())
    assert (normal["step"], normal["skipped"], metrics["skipped"]) == (2, 1, 1)
    assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])
    assert bits(normal["params"]) == bits(direct["params"]) and bits(normal["params"]) != bits(first["params"])
    assert bits(normal["optimizer"]) == bits(direct["optimizer"]), "the schedule counts steps that were done"
    rate = learning_rate(training.config.optimizer, training.config.train.steps)
    assert metrics["learning_rate"] == np.float32(rate(0)) != np.float32(rate(1))


def test_the_loss_is_one_mean_over_all_tokens(run):
    """One label in one microbatch on one device, three in the other on another: means of means would weigh them alike."""
    _, first = run
    one, three = [(0, 0, 5)], [(1, 2, 0), (1, 3, 7), (1, 3, 8)]
    a, b, both = (step(run, first, batch(labelled))[1] for labelled in (one, three, one + three))
    assert (a["tokens"], b["tokens"], both["tokens"]) == (1, 3, 4)
    a, b, both = (float(metrics["loss"]) for metrics in (a, b, both))
    assert both == pytest.approx((a + 3 * b) / 4, rel=1e-12)
    assert abs(both - (a + b) / 2) > 1e-3, "the control: a mean of means is another number"


def test_clipping_counts_each_parameter_once(run):
    """Without momentum and decay the update is rate × clipped gradient, whose norm is the limit exactly when the norm was counted right."""
    training, first = run
    after, metrics = step(run, first, batch())
    assert metrics["grad_norm"] > 2 * CLIP
    rate = float(learning_rate(training.config.optimizer, training.config.train.steps)(0))
    moved = {
        jax.tree_util.keystr(path): np.asarray(new - old, np.float64) / rate
        for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(after["params"]), jax.tree.leaves(first["params"]), strict=True)
    }
    squares = {name: float((leaf**2).sum()) for name, leaf in moved.items()}
    assert sum(squares.values()) ** 0.5 == pytest.approx(CLIP, rel=1e-6)
    assert all(square > 1e-8 * CLIP**2 for square in squares.values()), squares
    twice = sum(2 * square if "norm" in name else square for name, square in squares.items())
    assert twice**0.5 != pytest.approx(CLIP, rel=1e-6), "the control: counting the norms twice is another number"
