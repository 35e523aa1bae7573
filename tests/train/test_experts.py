"""Mixtures of experts through the engine: loss and every gradient against a model that sends every token through every expert."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import ExpertsConfig, MoeConfig
from tests.models import reference
from tests.train import runs

MODEL = dataclasses.replace(
    runs.MODEL, mlp_bias=False, dropout=0.0, moe=MoeConfig(experts=12, per_token=3, width=10, balance_weight=0.3, z_weight=0.02)
)


def model(**moe):
    return dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, **moe))


MODELS = {
    "softmax": model(),
    "softmax, not normalised, one": model(per_token=1, normalise=False, scale=2.0),
    "topk": model(router="topk_softmax", per_token=2),
    "sigmoid, shared": model(router="sigmoid", scale=2.5, shared_width=14),
}


@functools.cache
def dense(config):
    """(losses, gradients, load) of one batch, the balancing loss averaged over sequences, by jax.grad of the reference."""
    run = runs.config(model=config)
    batch = jax.tree.map(lambda a: jnp.asarray(a[0]), runs.batch(run))
    sequences, moe = run.train.batch, config.moe

    def loss(params):
        logits, balance, z, load = reference.logits_and_balance(params, batch, config)
        valid = batch["labels"] >= 0
        picked = jnp.take_along_axis(logits, jnp.maximum(batch["labels"], 0)[..., None], -1)[..., 0]
        entropy = jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) - picked, 0).sum() / valid.sum()
        total = entropy + (moe.balance_weight * balance + moe.z_weight * z) / sequences
        layers = len(load)
        return total, ({"loss": entropy, "balance_loss": balance / sequences / layers, "router_z_loss": z / sequences / layers}, load)

    (_, (losses, load)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(jax.tree.map(jnp.asarray, runs.host_params(config)))
    return jax.device_get((losses, grads, load))


def check(run, config, tolerance=1e-11):
    metrics, grads = runs.gradients(run)
    losses, want, _ = dense(config)
    for name, value in losses.items():
        assert metrics[name] == pytest.approx(value, rel=tolerance), name
    assert metrics["expert_overflow"] == 0
    worst = runs.gap(grads, want)
    assert worst[0] < tolerance, worst
    return metrics, grads


DEFAULT = ("softmax", "sigmoid, shared")  # the others in the slow group; test_patterns has topk, tests/ops/test_router all


@pytest.mark.parametrize("case", [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.slow) for case in MODELS])
def test_equals_every_token_through_every_expert(case):
    check(runs.config(model=MODELS[case]), MODELS[case])


def test_router_has_a_gradient_and_the_losses_are_part_of_it():
    """Of the reference, which the other tests hold the engine to: a negative control of theirs."""
    plain = dense(model(balance_weight=0.0, z_weight=0.0))[1]["layers"]["mlp"]["router"]
    assert np.abs(plain).max() > 1e-4
    assert runs.gap(dense(MODEL)[1]["layers"]["mlp"]["router"], plain)[0] > 1e-2


@pytest.mark.parametrize(
    "train",
    [
        pytest.param({"remat": "block"}, marks=pytest.mark.slow),
        pytest.param({"remat": "none", "accumulation": 4}, marks=pytest.mark.slow),
        {"interleave": 2, "accumulation": 2, "remat": "outputs"},
    ],
)
def test_remat_accumulation_and_interleaving(train):
    """The per-sequence balancing loss depends on none of them, and what is computed again is counted once."""
    check(runs.config(model=MODEL, **train), MODEL)


def test_only_segment_0_is_padding():
    """Documents may have any other number: the same losses, counts and gradients with negative ones. Control: one more token that is 0."""
    run = runs.config(model=MODELS["softmax"])
    built, batch, (metrics, grads) = runs.training(run), runs.batch(run), runs.gradients(run)
    program = jax.jit(built.gradients)

    def given(segments):
        return jax.device_get(
            program(runs.place_params(built), runs.place(built, batch | {"segments": segments}), jnp.asarray(3, jnp.int32))
        )

    other, other_grads = given(-batch["segments"])
    assert all(np.array_equal(metrics[name], other[name]) for name in metrics) and runs.gap(other_grads, grads)[0] == 0
    real = int((batch["segments"] != 0).sum())
    assert metrics["expert_load"].sum() == MODEL.layers * MODEL.moe.per_token * real
    shorter = batch["segments"].copy()
    shorter[0, 0, 0] = 0
    assert given(shorter)[0]["expert_load"].sum() == MODEL.layers * MODEL.moe.per_token * (real - 1)


def test_dropped_choices_are_a_share_of_all():
    """With half the balanced capacity: by plain counting of the load that the metrics report; the loss is finite and every gradient too."""
    config = model(per_token=2, correction=True)
    run = runs.config(model=config, experts=ExpertsConfig(dispatch="capacity", capacity_factor=0.5))
    metrics, grads = runs.gradients(run)
    room = -(-run.train.batch * runs.SEQUENCE * 2 // 2 // 12)  # rows of an expert, of tokens that are all on one device
    load = metrics["expert_load"]
    dropped = np.maximum(load - room, 0).sum()
    assert 0 < dropped == metrics["expert_dropped"] and metrics["expert_overflow"] == 0
    assert metrics["expert_dropped_share"] == pytest.approx(dropped / load.sum(), rel=1e-14)
    assert np.isfinite(metrics["loss"]) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
