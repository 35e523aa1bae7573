"""Mixtures of experts against torch in float64: every rung, on one device and over data, expert and tensor, with and without the balancing
loss; every rung fails when its part is broken; greedy tokens are torch's."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import lax

from jaxpar.config import Config, ExpertsConfig, MeshShape, TrainConfig
from jaxpar.generation import build_generator
from jaxpar.mesh import make_mesh
from jaxpar.models.decoder import DecoderFunctions
from jaxpar.train.step import build_training
from tests.bridge import hostile
from tests.bridge.test_negative_controls import logits_gap, stepped, with_layers, with_model
from tests.bridge.test_parity import check
from torch_bridge import reference
from torch_bridge.convert import import_params, read_model, torch_arrays
from torch_bridge.parity import backward, forward, training
from torch_bridge.parity.ladder import Subject, run_parity, subject, torch_side
from torch_bridge.parity.report import Rung, compared, gap

TOLERANCE = 1e-10
ONE, MESH = MeshShape(), MeshShape(data=2, expert=2, tensor=2)
LOSS, NO_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.3}, {"output_router_logits": False}
CASES = {
    "mixtral": ("mixtral", LOSS),
    "mixtral, no balancing loss": ("mixtral", NO_LOSS),
    "qwen3_moe": ("qwen3_moe", NO_LOSS),
    "qwen3_moe, normalised, balancing loss": ("qwen3_moe", {**LOSS, "norm_topk_prob": True}),
}


PATTERN = {"mlp_only_layers": [0, 1, 3], "num_hidden_layers": 5, **LOSS}  # two dense layers, then one between those with experts
CASES["qwen3_moe, dense layers, balancing loss"] = ("qwen3_moe", PATTERN)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [ONE, MESH], ids=lambda mesh: f"{mesh.devices}")
@pytest.mark.parametrize("case", CASES)
def test_float64(case, mesh, tmp_path):
    """Logits, loss, every gradient, three AdamW steps: within 1e-10."""
    name, changes = CASES[case]
    report = run_parity(hostile.save(tmp_path, name, **changes), mesh, "float64", 3, sequence=hostile.SEQUENCE)
    torch_names = {key for key, _ in hostile.model(name, **changes).named_parameters()}
    assert "model.layers.2.mlp.gate.weight" in torch_names
    check(report, torch_names)


@pytest.mark.slow
def test_every_module_agrees_where_some_layers_are_dense(tmp_path):
    source = read_model(hostile.save(tmp_path, "qwen3_moe", **PATTERN))
    one = subject(source, MESH, "float64", 1, hostile.SEQUENCE)
    (batch,) = training.batches(one.training.config, 1)
    found = forward.activations(one.training, one.params, training.step_batch(one.training.config, batch))
    wanted = reference.load(tmp_path).activations(batch["ids"])
    assert max(map(gap, found, wanted.values())) < 1e-12 and len(found) == len(wanted) == 2 + 5 * 5


def test_logits_loss_and_gradients_on_a_mesh(tmp_path):
    """Those of the rungs above that need no second backward program; experts folded over expert × tensor."""
    source = read_model(hostile.save(tmp_path, "mixtral"))
    config = training.run_config(source.model, MESH, "float64", 1, hostile.SEQUENCE, experts=("expert", "tensor"))
    built = build_training(config, make_mesh(MESH))
    one = Subject(
        built,
        import_params(source, built.mesh, built.shardings["params"], "float64"),
        lambda tree: torch_arrays(tree, source.model, stacked=True),
    )
    batches = training.batches(config, 1)
    wanted = torch_side(reference.load(tmp_path), batches, config)
    assert logits_gap(one, batches, wanted) < TOLERANCE
    loss, grads = backward.gradients(one.training, one.params, stepped(one, batches)[0])
    assert gap(loss, wanted.loss) < TOLERANCE
    assert Rung(compared(one.by_name(grads), wanted.gradients)).max_relative < TOLERANCE


# A router that is square, so that shapes would not tell a transposed one.
SQUARE = {"hidden_size": 12, "head_dim": 4, "num_hidden_layers": 2, **LOSS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hostile.save(tmp_path_factory.mktemp("controls"), "mixtral", **SQUARE)


@pytest.fixture(scope="module")
def source(folder):
    return read_model(folder)


@pytest.fixture(scope="module")
def one(source):
    return made(source)


@pytest.fixture(scope="module")
def batches(one):
    return training.batches(one.training.config, 1)


@pytest.fixture(scope="module")
def wanted(folder, batches, one):
    return torch_side(reference.load(folder), batches, one.training.config)


def made(source):
    return subject(source, ONE, "float64", 1, hostile.SEQUENCE)


def exchanged(mlp, order):
    """Experts in another order, the router left alone."""
    return {("mlp", name): mlp[name][:, order] for name in ("gate", "up", "down")}


SWAPPED = [0, 2, 1, *range(3, 12)]
LEXICOGRAPHIC = sorted(range(12), key=str)
FORWARD = {
    "two experts exchanged": lambda layers: exchanged(layers["mlp"], SWAPPED),
    "experts in lexicographic order": lambda layers: exchanged(layers["mlp"], LEXICOGRAPHIC),
    "w1 and w3 exchanged": lambda layers: {("mlp", "gate"): layers["mlp"]["up"], ("mlp", "up"): layers["mlp"]["gate"]},
    "router transposed": lambda layers: {("mlp", "router"): np.ascontiguousarray(layers["mlp"]["router"].transpose(0, 2, 1))},
}


@pytest.mark.parametrize("fault", FORWARD)
def test_a_fault_of_the_weights_fails_the_logits(fault, one, batches, wanted):
    assert logits_gap(with_layers(one, FORWARD[fault]), batches, wanted) > 1e4 * TOLERANCE


def test_weights_that_are_not_normalised_fail_the_logits(source, batches, wanted):
    other = with_model(source, moe=dataclasses.replace(source.model.moe, normalise=False))
    assert logits_gap(made(other), batches, wanted) > 1e4 * TOLERANCE


def test_the_gradients_and_under_exchanged_names(one, batches, wanted):
    """Without a fault; under exchanged names."""
    assert logits_gap(one, batches, wanted) < TOLERANCE
    loss, grads = backward.gradients(one.training, one.params, stepped(one, batches)[0])
    assert gap(loss, wanted.loss) < TOLERANCE
    assert Rung(compared(one.by_name(grads), wanted.gradients)).max_relative < TOLERANCE
    mlp = {**grads["layers"]["mlp"], **{name: value for (_, name), value in exchanged(grads["layers"]["mlp"], SWAPPED).items()}}
    misnamed = {**grads, "layers": {**grads["layers"], "mlp": mlp}}
    assert Rung(compared(one.by_name(misnamed), wanted.gradients)).max_relative > 1e4 * TOLERANCE


@pytest.mark.slow
def test_a_router_without_a_gradient_fails_its_own_leaf_alone(source, batches, wanted, monkeypatch):
    """Neither logits nor loss would show it."""
    block = DecoderFunctions.block

    def forgetful(self, layer, x, context):
        return block(self, {**layer, "mlp": {**layer["mlp"], "router": lax.stop_gradient(layer["mlp"]["router"])}}, x, context)

    monkeypatch.setattr(DecoderFunctions, "block", forgetful)
    one = made(source)
    loss, grads = backward.gradients(one.training, one.params, stepped(one, batches)[0])
    assert gap(loss, wanted.loss) < TOLERANCE
    leaves = compared(one.by_name(grads), wanted.gradients)
    wrong = {name for name, difference in leaves.items() if difference > TOLERANCE}
    assert wrong == {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


@pytest.mark.slow
@pytest.mark.parametrize("moe", [{"balance_weight": 0.3001}, {"balance_weight": 0.0}], ids=str)
def test_another_balancing_loss_fails_loss_and_gradients_and_not_the_logits(moe, source, batches, wanted):
    other = made(with_model(source, moe=dataclasses.replace(source.model.moe, **moe)))
    assert logits_gap(other, batches, wanted) < TOLERANCE
    loss, grads = backward.gradients(other.training, other.params, stepped(other, batches)[0])
    assert gap(loss, wanted.loss) > 1e4 * TOLERANCE
    assert Rung(compared(other.by_name(grads), wanted.gradients)).max_relative > 1e4 * TOLERANCE


@pytest.mark.slow
def test_a_fault_of_the_optimizer_fails_the_steps(source, batches, wanted):
    """Decay that spares the experts' matrices."""
    other = subject(source, ONE, "float64", 1, hostile.SEQUENCE, dataclasses.replace(training.OPTIMIZER, weight_decay=0.0))
    trained = training.train(other.training, other.params, stepped(other, batches))
    leaves = compared(other.by_name(trained.params), wanted.parameters)
    assert leaves["model.layers.0.mlp.experts.gate_up_proj"] > TOLERANCE
    assert gap(trained.losses[0], wanted.losses[0]) < TOLERANCE


def test_lost_choices_are_an_error():
    config = Config(model=dataclasses.replace(Config().model, moe=dataclasses.replace(Config().model.moe, experts=4)))
    with pytest.raises(ValueError, match="expert_overflow 3; give train.experts.buffer_factor room"):
        backward.total(config, {"loss": 1.0, "expert_overflow": 3, "expert_dropped": 0})


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [12, 0, 11, 2]]
TOKENS = 8


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("mixtral", MeshShape(data=1, expert=2, tensor=2)),
        pytest.param("mixtral", ONE, marks=pytest.mark.slow),
        pytest.param("mixtral", MeshShape(expert=4, seq=2), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", ONE, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", MESH, marks=pytest.mark.slow),
        pytest.param("qwen3_moe, dense layers, balancing loss", MeshShape(expert=2, tensor=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_greedy_tokens_are_torchs(name, mesh, tmp_path):
    """Prompts of three lengths, past the window; torch runs the whole sequence again for every token."""
    family, changes = CASES[name]
    source, model = read_model(hostile.save(tmp_path, family, **changes)), reference.load(tmp_path)
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(TOKENS):
            scores = model.logits(np.asarray([ids], np.int32))[0, -1]
            second, first = np.sort(scores)[-2:]
            assert first - second > 1e-9, "a tie would let rounding choose"
            ids.append(int(scores.argmax()))
        expected.append(ids[len(prompt) :])
    assert len({token for row in expected for token in row}) > 5, "tokens that repeat would hide a wrong cache"
    config = Config(
        model=source.model, train=TrainConfig(compute_dtype="float64", experts=ExpertsConfig(axes=("expert", "tensor"), buffer_factor=1.0))
    )
    placed = make_mesh(mesh, jax.devices()[: mesh.devices])
    generator = build_generator(config, placed, import_params(source, placed, dtype="float64"))
    assert generator.generate(PROMPTS, TOKENS) == expected
