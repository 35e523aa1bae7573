"""A step whose experts got more tokens than their buffers hold is repeated with room for all, and nothing of it is lost."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpar.config import ExpertsConfig, MeshShape
from tests.train import runs
from tests.train.test_experts import model


def collapsed(built):
    """A first state in which every token prefers the experts 0 to 2."""
    params = runs.place_params(built)
    leaf = params["layers"]["mlp_norm"]["weight"]
    params["layers"]["mlp_norm"]["weight"] = jax.device_put(np.ones(leaf.shape), leaf.sharding)
    leaf = params["layers"]["mlp"]["router"]
    few = np.asarray(leaf) * 1e-3
    few[:, :3] *= 1e5
    params["layers"]["mlp"]["router"] = jax.device_put(few, leaf.sharding)
    return built.first_state(params)


# Each chunk of each microbatch has a buffer of its own.
SLOW = [("ragged", 1, 4, {"zero": 1}), ("ragged", 2, 4, {"zero": 1, "accumulation": 2})]


@pytest.mark.parametrize(
    "dispatch, chunks, devices, train", [("gather", 1, 2, {}), *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_overflow_repeats_the_step(dispatch, chunks, devices, train):
    """What it should have been comes from a run that has the room: in the slow group one device, by default a program like the repeat's,
    compiled once; that such a program equals one device is `test_experts_meshes`'."""
    experts = ExpertsConfig(dispatch=dispatch, buffer_factor=1.0, chunks=chunks)
    run = runs.config(model=model(per_token=2, correction=True), experts=experts, **train)
    run = dataclasses.replace(run, mesh=MeshShape(data=1, expert=devices))
    roomy = runs.training(
        runs.config(model=run.model)
        if devices == 4
        else runs.changed(run, experts=dataclasses.replace(experts, buffer_factor=float(devices)))
    )
    assert roomy.repeat is None, "it has room for everything"
    want, metrics = roomy.advance(collapsed(roomy), runs.place(roomy, runs.batch(roomy.config)))
    assert metrics["expert_overflow"] == 0

    built = runs.training(run)
    start, batch = collapsed(built), runs.place(built, runs.batch(run))
    before = jax.device_get(start)
    attempt, metrics = built.step(start, batch)
    overflow = int(metrics["expert_overflow"])
    assert overflow > 10 and metrics["skipped"] == 0
    assert runs.gap(jax.device_get(attempt), before)[0] == 0, "an attempt that overflowed changes nothing, not even the step's number"

    state, metrics = built.advance(attempt, batch)
    assert metrics["expert_overflow"] == overflow and int(state["step"]) == 1
    worst = runs.gap(jax.device_get(state["params"]), jax.device_get(want["params"]))
    assert worst[0] < 1e-11, worst
    assert runs.gap(jax.device_get(want["params"]), before["params"])[0] > 1e-3
    bias = np.asarray(state["params"]["layers"]["mlp"]["correction"])
    assert np.abs(bias).max() == run.model.moe.correction_rate, "the correction bias moved once, with the repeated step"
