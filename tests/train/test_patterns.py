"""Models some of whose layers have experts: dense layers first, experts in every n-th, as stacks in a chain; and gpt-oss's experts with
biases. Loss and every gradient against the reference, which goes layer by layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import MeshShape
from jaxpar.generation import build_generator
from jaxpar.mesh import make_mesh
from jaxpar.models import pattern
from tests.models import reference
from tests.train import runs
from tests.train.test_experts import MODEL, check, model

LAYERS = 5  # one dense, then twice a dense one and one with experts
GPT_OSS = {"router": "topk_softmax", "activation": "clamped_swiglu", "biases": True}
MOE = dataclasses.replace(MODEL.moe, dense_layers=1, every=2, shared_width=14, **GPT_OSS)
MIXED = dataclasses.replace(MODEL, layers=LAYERS, windows=(5, 0, 0), moe=MOE)  # groups of two, whose windows differ between groups
SHORT = dataclasses.replace(MIXED, layers=3, windows=(5, 0))  # a dense layer, then one group
MESH = {"data": 2, "expert": 2, "tensor": 2}


def test_first_layers_dense_then_every_other():
    run = dataclasses.replace(runs.config(model=MIXED, zero=1, experts=runs.roomy()), mesh=MeshShape(data=2, expert=2))
    metrics, grads = check(run, MIXED)
    assert metrics["expert_load"].shape == (2, MIXED.moe.experts)
    assert grads["layers"]["first"]["mlp"]["gate"].shape[0] == 1 and grads["layers"]["rest"]["sparse"]["mlp"]["gate"].shape[:2] == (2, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, fields, mesh, train",
    [
        (MIXED, {}, MESH, {"zero": 3, "accumulation": 2, "remat": "block", "experts": runs.roomy(axes=("expert", "tensor"))}),
        (SHORT, {}, MESH, {"zero": 2, "remat": "none", "sequence_parallel": False}),
        (SHORT, {"every": 1}, {"expert": 4}, {"zero": 1, "interleave": 2}),
        (SHORT, {"dense_layers": 0, "every": 3}, {"expert": 2, "tensor": 2}, {"zero": 3}),
        (SHORT, {"dense_layers": 2, "every": 1}, {"data": 4}, {"zero": 3, "interleave": 2}),
    ],
    ids=["two groups, folded", "one group", "every layer but the first", "one of three", "the last alone"],
)
def test_on_meshes(model, fields, mesh, train):
    config = dataclasses.replace(model, moe=dataclasses.replace(model.moe, **fields))
    run = dataclasses.replace(runs.config(model=config, **{"experts": runs.roomy(), **train}), mesh=MeshShape(**mesh))
    check(run, config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, train",
    [
        ({}, {"remat": "outputs"}),
        ({"expert": 2, "tensor": 2}, {"remat": "block", "experts": runs.roomy(columns=True)}),
        ({"data": 2, "tensor": 2}, {"zero": 2, "experts": runs.roomy(columns=True), "sequence_parallel": False}),
    ],
)
def test_experts_with_biases_in_every_layer(mesh, train):
    config = model(per_token=4, **GPT_OSS)
    check(dataclasses.replace(runs.config(model=config, **{"experts": runs.roomy(), **train}), mesh=MeshShape(**mesh)), config)


def test_layers_and_their_stacks():
    """Each layer is in one stack, with its own index and window."""
    assert [each[:4] for each in pattern.segments(MIXED)] == [("first", 0, 1, 1), ("rest", 1, 2, 2)]
    assert [each[:4] for each in pattern.segments(dataclasses.replace(MIXED, moe=MODEL.moe))] == [("rest", 0, LAYERS, 1)]
    flags = pattern.flags(MIXED, {})
    np.testing.assert_array_equal(flags["first"]["index"], [0])
    np.testing.assert_array_equal(flags["rest"]["index"], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(flags["rest"]["window"], [[0, 0], [5, 0]])
    assert [each.windows for each in pattern.segments(MIXED)] == [(5,), ((0, 0), (5, 0))]


NOISY = dataclasses.replace(model(jitter=0.3, correction=True, router="sigmoid"), dropout=0.1)


@pytest.mark.slow
def test_jitter_is_the_same_on_every_mesh_and_another_in_every_step():
    """Beside dropout on a mesh that splits rows, tokens and features' matrices; alone for the steps, where nothing else draws."""
    run = runs.config(model=NOISY, experts=runs.roomy())
    alone, grads = runs.gradients(run)
    cut = runs.changed(run, zero=3, accumulation=2, interleave=2)
    found, others = runs.gradients(dataclasses.replace(cut, mesh=MeshShape(expert=2, seq=2, tensor=2)))
    worst = runs.gap({"metrics": found, "gradients": others}, {"metrics": alone, "gradients": grads})
    assert worst[0] < 1e-11, worst
    built = runs.training(runs.config(model=dataclasses.replace(NOISY, dropout=0.0)))
    program, params, batch = jax.jit(built.gradients), runs.place_params(built), runs.place(built, runs.batch(built.config))
    steps = [jax.device_get(program(params, batch, jnp.asarray(step, jnp.int32))[1]) for step in (3, 4)]
    assert runs.gap(*steps)[0] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, train", [({}, {}), (MESH, {"zero": 3, "accumulation": 2}), ({"seq": 2, "expert": 2}, {"experts": runs.roomy(dispatch="ragged")})]
)
def test_experts_choose(mesh, train):
    """Of whole sequences, wherever these are split, and never more than their share."""
    config = model(router="expert_choice", per_token=3, scale=1.5)
    metrics, _ = check(dataclasses.replace(runs.config(model=config, **train), mesh=MeshShape(**mesh)), config)
    assert metrics["expert_load"].max() <= runs.BATCH * (runs.SEQUENCE * 3 // 12)


@pytest.mark.slow
def test_a_chain_trains():
    """Three steps with the correction bias on a mesh, equal to one device's."""
    config = dataclasses.replace(SHORT, moe=dataclasses.replace(SHORT.moe, router="sigmoid", correction=True, correction_rate=0.02))
    ends = []
    for mesh, zero in ((MESH, 3), ({}, 0)):
        built = runs.training(dataclasses.replace(runs.config(model=config, zero=zero, experts=runs.roomy()), mesh=MeshShape(**mesh)))
        state = built.first_state(runs.place_params(built))
        for number in range(3):
            state, metrics = built.advance(state, runs.place(built, runs.batch(built.config, number)))
        ends.append(jax.device_get(state["params"]))
    assert metrics["expert_overflow"] == 0 and np.any(ends[1]["layers"]["rest"]["sparse"]["mlp"]["correction"])
    np.testing.assert_array_equal(*(end["layers"]["rest"]["sparse"]["mlp"]["correction"] for end in ends))
    assert runs.gap(*ends)[0] < 1e-9


@pytest.mark.slow
def test_generation_goes_through_the_same_layers():
    """Each greedy token is the likeliest by the whole forward of the reference, on a row as long as the prompt and what follows."""
    params = jax.tree.map(jnp.asarray, runs.host_params(SHORT))
    built = build_generator(runs.config(model=SHORT), make_mesh(MeshShape(data=2), jax.devices()[:2]), params)
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    rows = [[*prompt, *found] for prompt, found in zip(prompts, built.generate(prompts, 5), strict=True)]
    ids = jnp.asarray([row + [0] * (10 - len(row)) for row in rows])  # no token sees those behind it
    batch = {"ids": ids, "positions": jnp.arange(10) + jnp.zeros_like(ids), "segments": jnp.ones_like(ids)}
    likeliest = jax.jit(lambda batch: reference.logits(params, batch, SHORT).argmax(-1))(batch)
    for prompt, row, want in zip(prompts, rows, likeliest, strict=True):
        np.testing.assert_array_equal(want[len(prompt) - 1 : len(row) - 1], row[len(prompt) :])
