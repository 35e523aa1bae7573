"""Every rung of parity fails when its part is broken. A fault is put into the jaxpar side; the checkpoint and torch stay as they are."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import lax

from jaxpar.config import MeshShape
from jaxpar.models.decoder import DecoderFunctions
from tests.bridge import hostile
from torch_bridge import reference
from torch_bridge.convert import read_model
from torch_bridge.mapping import Rule
from torch_bridge.parity import backward, forward, training
from torch_bridge.parity.ladder import against, jaxpar_side, subject, torch_side
from torch_bridge.parity.report import Rung, compared, gap

TOLERANCE = 1e-10
ONE = MeshShape()
SIZES = {"num_hidden_layers": 2}  # query and output are square


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hostile.save(tmp_path_factory.mktemp("controls"), "llama-tied", **SIZES)


@pytest.fixture(scope="module")
def source(folder):
    return read_model(folder)


@pytest.fixture(scope="module")
def batches(source):
    return training.batches(made(source).training.config, 2)


@pytest.fixture(scope="module")
def wanted(folder, batches, source):
    return torch_side(reference.load(folder), batches, made(source).training.config)


def made(source, **changes):
    return subject(source, ONE, "float64", 2, hostile.SEQUENCE, **changes)


def stepped(one, batches):
    return [training.step_batch(one.training.config, batch) for batch in batches]


def logits_gap(one, batches, wanted):
    return gap(forward.logits(one.training, one.params, stepped(one, batches)[0]), wanted.logits)


def with_model(source, **changes):
    return dataclasses.replace(source, model=dataclasses.replace(source.model, **changes))


def with_rules(source, *rules):
    """The source with other rules for the same leaves."""
    changed = {rule.leaf: rule for rule in rules}
    table = tuple(changed.get(rule.leaf, rule) for rule in source.family.rules)
    assert table != source.family.rules
    return dataclasses.replace(source, family=dataclasses.replace(source.family, rules=table))


def with_layers(one, change):
    """`change(layers)` returns other values for some leaves of `layers`, as {(module, name): host array}."""
    layers = dict(one.params["layers"])
    for (module, name), value in change(jax.device_get(layers)).items():
        old = layers[module][name]
        assert value.shape == old.shape and not np.array_equal(value, old)
        layers[module] = {**layers[module], name: jax.device_put(value, old.sharding)}
    return dataclasses.replace(one, params={**one.params, "layers": layers})


def transposed_query(layers):
    query_LNHD = layers["attention"]["query"]
    count, _, _, width = query_LNHD.shape
    square = query_LNHD.reshape(count, -1, width)
    assert square.shape[1] == width
    return {("attention", "query"): np.ascontiguousarray(square.transpose(0, 2, 1)).reshape(query_LNHD.shape)}


def interleaved_query(layers):
    """Rope's other layout: entries of a head in pairs instead of halves."""
    query = layers["attention"]["query"]
    head = query.shape[2]
    return {("attention", "query"): query[:, :, [*range(0, head, 2), *range(1, head, 2)]]}


def swapped_gate_and_up(layers):
    return {("mlp", "gate"): layers["mlp"]["up"], ("mlp", "up"): layers["mlp"]["gate"]}


BLOCK = "model.layers.{layer}."
FORWARD = {
    "theta": (lambda source: made(with_model(source, rope=dataclasses.replace(source.model.rope, theta=77.001))), "self_attn"),
    "eps": (lambda source: made(with_model(source, norm_eps=0.050001)), "input_layernorm"),
    "window": (lambda source: made(with_model(source, windows=(hostile.SEQUENCE - 1,))), "self_attn"),
    "transposed square matrix": (lambda source: with_layers(made(source), transposed_query), "self_attn"),
    "rope layout": (lambda source: with_layers(made(source), interleaved_query), "self_attn"),
    "swapped gate and up": (lambda source: with_layers(made(source), swapped_gate_and_up), "mlp"),
    "rule: heads in the wrong order": (
        lambda source: made(
            with_rules(source, Rule("layers/attention/query", BLOCK + "self_attn.q_proj.weight", "(head_dim heads) embed"))
        ),
        "self_attn",
    ),
    "rule: key and value exchanged": (
        lambda source: made(
            with_rules(
                source,
                Rule("layers/attention/key", BLOCK + "self_attn.v_proj.weight", "(kv_heads head_dim) embed"),
                Rule("layers/attention/value", BLOCK + "self_attn.k_proj.weight", "(kv_heads head_dim) embed"),
            )
        ),
        "self_attn",
    ),
    "rule: norms exchanged": (
        lambda source: made(
            with_rules(
                source,
                Rule("layers/attention_norm/weight", BLOCK + "post_attention_layernorm.weight"),
                Rule("layers/mlp_norm/weight", BLOCK + "input_layernorm.weight"),
            )
        ),
        "input_layernorm",
    ),
}


SLOW = ("window", "rope layout", "rule: norms exchanged")


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=pytest.mark.slow) if fault in SLOW else fault for fault in FORWARD])
def test_a_fault_of_the_forward_fails_the_logits(fault, source, folder, batches, wanted):
    """And bisecting names the module of layer 0 that has it."""
    make, module = FORWARD[fault]
    one = make(source)
    assert logits_gap(one, batches, wanted) > 1e4 * TOLERANCE
    found = forward.activations(one.training, one.params, stepped(one, batches)[0])
    name, _ = forward.first_gap(found, reference.load(folder).activations(batches[0]["ids"]), TOLERANCE)
    assert name == f"model.layers.0.{module}"


def test_without_a_fault_every_rung_passes(source, batches, wanted):
    rungs = against(jaxpar_side(made(source), batches), wanted)
    assert max(rung.max_relative for rung in rungs.values()) < TOLERANCE


def test_a_mean_of_means_fails_the_loss_and_not_the_logits(source, batches, wanted):
    """Each microbatch divided by its own number of labels."""
    one = made(source)
    parts = stepped(one, batches)[0]
    losses = []
    for part in range(2):
        alone = {name: value.copy() for name, value in parts.items()}
        alone["labels"][1 - part] = -1
        losses.append(backward.gradients(one.training, one.params, alone)[0])
    assert gap(np.mean(losses), wanted.loss) > 1e4 * TOLERANCE
    assert logits_gap(one, batches, wanted) < TOLERANCE


def test_a_fault_of_the_backward_fails_the_gradients_and_nothing_before(source, batches, wanted, monkeypatch):
    """No gradient goes into the keys: logits and loss are right all the same."""
    block = DecoderFunctions.block

    def forgetful(self, layer, x, context):
        attention = {**layer["attention"], "key": lax.stop_gradient(layer["attention"]["key"])}
        return block(self, {**layer, "attention": attention}, x, context)

    monkeypatch.setattr(DecoderFunctions, "block", forgetful)
    one = made(source)
    loss, grads = backward.gradients(one.training, one.params, stepped(one, batches)[0])
    assert logits_gap(one, batches, wanted) < TOLERANCE and gap(loss, wanted.loss) < TOLERANCE
    rung = Rung(compared(one.by_name(grads), wanted.gradients))
    wrong = {name for name, difference in rung.leaves.items() if difference > TOLERANCE}
    assert wrong == {f"model.layers.{layer}.self_attn.k_proj.weight" for layer in range(2)}


def test_gradients_under_the_wrong_names_fail(source, batches, wanted):
    """An export that exchanges gate and up: forward and loss never see it."""
    one = made(source)
    loss, grads = backward.gradients(one.training, one.params, stepped(one, batches)[0])
    mlp = grads["layers"]["mlp"]
    exchanged = {**grads, "layers": {**grads["layers"], "mlp": {**mlp, "gate": mlp["up"], "up": mlp["gate"]}}}
    assert gap(loss, wanted.loss) < TOLERANCE
    assert Rung(compared(one.by_name(grads), wanted.gradients)).max_relative < TOLERANCE
    assert Rung(compared(one.by_name(exchanged), wanted.gradients)).max_relative > 1e4 * TOLERANCE


OPTIMIZERS = [{"b2": 0.96}, {"decay": "all"}]
SLOW_OPTIMIZERS = [{"eps": 1e-7}, {"learning_rate": 1.0001e-3}, {"clip": 0.5}]


@pytest.mark.parametrize("change", [*OPTIMIZERS, *(pytest.param(change, marks=pytest.mark.slow) for change in SLOW_OPTIMIZERS)], ids=str)
def test_a_fault_of_the_optimizer_fails_the_steps(change, source, batches, wanted):
    one = made(source, optimizer=dataclasses.replace(training.OPTIMIZER, **change))
    trained = training.train(one.training, one.params, stepped(one, batches))
    differences = {
        **compared(one.by_name(trained.params), wanted.parameters),
        **compared(one.by_name(trained.mean), wanted.mean, "exp_avg "),
    }
    assert Rung(differences).max_relative > TOLERANCE
    assert gap(trained.losses[0], wanted.losses[0]) < TOLERANCE
