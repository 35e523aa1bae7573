"""The routers' correction bias: moved by a step's counts alone, by the sign rule, the same on every mesh; and metrics of those counts."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpar.config import MeshShape
from jaxpar.train.checkpoint import Checkpoints, SavedCheckpoints, abstract
from tests.train import runs
from tests.train.test_experts import dense, model

RATE = 0.02
CORRECTED = model(router="sigmoid", scale=2.5, shared_width=14, correction=True, correction_rate=RATE)
# Weight decay of all parameters: it must not reach the bias either.
RUN = runs.config(model=CORRECTED, optimizer=dataclasses.replace(runs.config().optimizer, decay="all", weight_decay=0.5))


def bias(state):
    return np.asarray(jax.device_get(state["params"]["layers"]["mlp"]["correction"]))


def step(built, state, number):
    state, metrics = built.advance(state, runs.place(built, runs.batch(built.config, number)))
    return state, jax.device_get(metrics)


def trained(built):
    """(correction after each of two steps, metrics of each, last parameters) of a run from the common parameters."""
    state, seen, metrics = built.first_state(runs.place_params(built)), [], []
    for number in range(2):
        state, found = step(built, state, number)
        seen.append(bias(state))
        metrics.append(found)
    return seen, metrics, jax.device_get(state["params"])


@pytest.fixture(scope="module")
def alone():
    return runs.training(RUN)


@pytest.fixture(scope="module")
def one_device(alone):
    return trained(alone)


def with_leaf(state, name, value):
    mlp = state["params"]["layers"]["mlp"]
    mlp[name] = jax.device_put(value, mlp[name].sharding)
    return state


def sign_rule(bias, load):
    """One expert after another."""
    moved = np.array(bias)
    for layer, counts in enumerate(load.tolist()):
        mean = sum(counts) / len(counts)
        for expert, count in enumerate(counts):
            moved[layer, expert] += RATE * ((count < mean) - (count > mean))
    return moved


def test_the_sign_rule_on_plain_counts(one_device):
    """The first step's load is that of the reference, which counts valid tokens; each step moves every bias by the rate, or not at all."""
    seen, metrics, _ = one_device
    load = dense(CORRECTED)[2]
    np.testing.assert_array_equal(metrics[0]["expert_load"], np.asarray(load).sum(1))
    before = np.zeros_like(seen[0])
    for after, found in zip(seen, metrics, strict=True):
        np.testing.assert_allclose(after, sign_rule(before, found["expert_load"]), rtol=0, atol=1e-15)
        assert (after != before).any()
        before = after


def test_the_bias_selects(alone, one_device):
    """Taken away after the first step, the second routes otherwise."""
    state, _ = step(alone, alone.first_state(runs.place_params(alone)), 0)
    _, metrics = step(alone, with_leaf(state, "correction", np.zeros_like(bias(state))), 1)
    assert (metrics["expert_load"] != one_device[1][1]["expert_load"]).any()


@pytest.mark.parametrize(
    "mesh, train",
    [
        ({"data": 2, "expert": 2}, {"zero": 1, "accumulation": 2, "remat": "block"}),
        pytest.param(
            {"data": 2, "expert": 2, "tensor": 2},
            {"zero": 3, "accumulation": 2, "remat": "block", "experts": runs.roomy(axes=("expert", "tensor"))},
            marks=pytest.mark.slow,
        ),
        pytest.param({"data": 2}, {"zero": 1, "accumulation": 4, "remat": "none"}, marks=pytest.mark.slow),
        pytest.param({"expert": 4}, {"zero": 2, "interleave": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, {"sequence_parallel": False}, marks=pytest.mark.slow),
        pytest.param({"seq": 2, "expert": 2}, {"zero": 1}, marks=pytest.mark.slow),
    ],
)
def test_the_same_on_every_mesh(mesh, train, one_device):
    run = runs.changed(dataclasses.replace(RUN, mesh=MeshShape(**mesh)), **{"experts": runs.roomy(), **train})
    seen, metrics, params = trained(runs.training(run))
    for got, want in zip(seen, one_device[0], strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(metrics, one_device[1], strict=True):
        np.testing.assert_array_equal(got["expert_load"], want["expert_load"])
        assert got["router_entropy"] == pytest.approx(want["router_entropy"], rel=1e-11)
        assert got["expert_load_max"] == pytest.approx(want["expert_load_max"], rel=1e-14)
    assert runs.gap(params, one_device[2])[0] < 1e-9


def test_a_skipped_step_leaves_it(alone, one_device):
    """Not-a-number logits of a router are caught by the guard, which counts the step and changes nothing; the next step goes on."""
    state = alone.first_state(runs.place_params(alone))
    router = np.array(state["params"]["layers"]["mlp"]["router"])
    broken = router.copy()
    broken[1, 3, 0] = np.nan
    state, metrics = step(alone, with_leaf(state, "router", broken), 0)
    assert not np.isfinite(metrics["loss"]) and metrics["skipped"] == 1 and not bias(state).any()
    state, metrics = step(alone, with_leaf(state, "router", router), 0)
    assert metrics["skipped"] == 1 and int(state["step"]) == 2
    np.testing.assert_array_equal(bias(state), one_device[0][0])


def test_checkpoints_hold_it(tmp_path, alone, one_device):
    """And a restored run goes on as if nothing had been."""
    state, _ = step(alone, alone.first_state(runs.place_params(alone)), 0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    with SavedCheckpoints(tmp_path) as checkpoints:
        state = checkpoints.restore(1, abstract(state))
        np.testing.assert_array_equal(checkpoints.restore_params(1, abstract(state["params"]))["layers"]["mlp"]["correction"], bias(state))
    np.testing.assert_array_equal(bias(state), one_device[0][0])
    state, _ = step(alone, state, 1)
    np.testing.assert_array_equal(bias(state), one_device[0][1])


def test_the_optimizer_does_not_know_it(alone):
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(alone.abstract_state)]
    assert [name for name in names if "correction" in name] == ["['params']['layers']['mlp']['correction']"]


def test_metrics_of_load(one_device):
    metrics = one_device[1][0]
    load = metrics["expert_load"]
    assert metrics["expert_load_max"] == pytest.approx(np.mean([max(row) / (sum(row) / len(row)) for row in load]), rel=1e-14)
    tokens = int((runs.batch(RUN)["segments"] > 0).sum())
    assert (load.sum(1) == CORRECTED.moe.per_token * tokens).all()
    assert metrics["expert_dropped"] == metrics["expert_dropped_share"] == 0
