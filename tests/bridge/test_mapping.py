"""Rule tables: every element of every tensor has one place, and it is the right one."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import transformers

from jaxpar.config import ModelConfig
from jaxpar.models.decoder import Decoder
from jaxpar.params import flatten
from tests.bridge import hostile
from torch_bridge.families import FAMILIES, find_family, infer_family
from torch_bridge.mapping import Rule, bind, expected_shapes, to_leaves, to_torch
from torch_bridge.views import ArrayView, read_all

PADDED = 104


def family_and_model(name):
    raw = hostile.config(name).to_dict()
    family = find_family(raw["model_type"])
    model, settings = family.read(raw, None, frozenset())
    assert not settings.problems, settings.problems
    return family, model


def labelled(shapes):
    """{key: an array of labels}, no label twice, none 0."""
    arrays, start = {}, 1
    for key, shape in shapes.items():
        arrays[key] = np.arange(start, start + math.prod(shape), dtype=np.int64).reshape(shape)
        start += math.prod(shape)
    return arrays


@pytest.fixture(scope="module", params=hostile.NAMES)
def case(request):
    family, model = family_and_model(request.param)
    bindings = bind(family.rules, Decoder(model, PADDED).specs)
    return request.param, family, model, bindings


def test_keys_and_shapes_are_torchs(case):
    name, _, _, bindings = case
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hostile.config(name))
    state = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert expected_shapes(bindings) == state
    assert next(iter(expected_shapes(bindings))) == "model.embed_tokens.weight"


def leaves_of(bindings, arrays):
    views = to_leaves(bindings, {key: ArrayView(array) for key, array in arrays.items()})
    return {path: read_all(view) for path, view in views.items()}


def test_bijection(case):
    _, _, model, bindings = case
    arrays = labelled(expected_shapes(bindings))
    leaves = leaves_of(bindings, arrays)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {path: spec.shape for path, spec in flatten(Decoder(model, PADDED).specs)}
    labels = np.concatenate([leaf.ravel() for leaf in leaves.values()])
    assert np.array_equal(np.sort(labels[labels != 0]), np.arange(1, 1 + sum(array.size for array in arrays.values())))
    padding = (PADDED - model.vocabulary) * model.width * (1 if model.tied else 2)
    assert np.count_nonzero(labels == 0) == padding
    back = to_torch(bindings, {path: ArrayView(leaf) for path, leaf in leaves.items()})
    assert list(back) == list(arrays)
    assert all(np.array_equal(read_all(back[key]), array) for key, array in arrays.items())


def misplaced(bindings, arrays, model):
    """Leaves whose elements are not where the meaning of their dims puts them."""
    leaves, wrong = leaves_of(bindings, arrays), []
    head = model.head_width
    heads = {"q": "query", "k": "key", "v": "value"}
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        for letter, leaf in heads.items():
            torch_matrix, ours = arrays[f"{at}self_attn.{letter}_proj.weight"], leaves[f"layers/attention/{leaf}"][layer]
            wrong += [leaf for n in range(ours.shape[0]) for h in range(head) if not np.array_equal(ours[n, h], torch_matrix[n * head + h])]
        torch_matrix, ours = arrays[f"{at}self_attn.o_proj.weight"], leaves["layers/attention/output"][layer]
        wrong += [
            "output" for n in range(model.heads) for h in range(head) if not np.array_equal(ours[:, n, h], torch_matrix[:, n * head + h])
        ]
        for leaf in ("gate", "up", "down"):
            if not np.array_equal(leaves[f"layers/mlp/{leaf}"][layer], arrays[f"{at}mlp.{leaf}_proj.weight"]):
                wrong.append(leaf)
        if not np.array_equal(leaves["layers/attention_norm/weight"][layer], arrays[f"{at}input_layernorm.weight"]):
            wrong.append("attention_norm")
    return set(wrong)


def test_every_element_is_where_its_dims_say(case):
    _, _, model, bindings = case
    assert misplaced(bindings, labelled(expected_shapes(bindings)), model) == set()


def changed(rules, leaf, **changes):
    return tuple(dataclasses.replace(rule, **changes) if rule.leaf == leaf else rule for rule in rules)


MUTATIONS = {
    "gate and up swapped": lambda rules: changed(
        changed(rules, "layers/mlp/gate", key="model.layers.{layer}.mlp.up_proj.weight"),
        "layers/mlp/up",
        key="model.layers.{layer}.mlp.gate_proj.weight",
    ),
    "square query transposed": lambda rules: changed(rules, "layers/attention/query", layout="embed (heads head_dim)"),
    "heads interleaved": lambda rules: changed(rules, "layers/attention/query", layout="(head_dim heads) embed"),
    "output transposed": lambda rules: changed(rules, "layers/attention/output", layout="(heads head_dim) embed"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_rule_is_noticed(mutation):
    family, model = family_and_model("llama-tied")  # square query and output: shapes alone would not tell
    bindings = bind(MUTATIONS[mutation](family.rules), Decoder(model, PADDED).specs)
    assert expected_shapes(bindings) == expected_shapes(bind(family.rules, Decoder(model, PADDED).specs))
    assert misplaced(bindings, labelled(expected_shapes(bindings)), model) != set()


def test_a_leaf_without_a_rule_is_refused():
    model = ModelConfig(mlp_bias=True)
    with pytest.raises(ValueError, match=r"layers/mlp/(gate|up|down)_bias: this family has no tensor for it"):
        bind(FAMILIES["qwen2"].rules, Decoder(model, model.vocabulary).specs)


def test_rules_that_meet_are_a_programmers_error():
    specs = Decoder(ModelConfig(tied=True, layers=1), 32_000).specs
    rules = FAMILIES["llama"].rules
    with pytest.raises(AssertionError, match="two rules"):
        bind((*rules, rules[0]), specs)
    with pytest.raises(AssertionError, match="two rules"):
        bind(changed(rules, "layers/mlp/up", key="model.layers.{layer}.mlp.gate_proj.weight"), specs)
    with pytest.raises(AssertionError, match="not made of"):
        bind(changed(rules, "layers/mlp/up", layout="mlp width"), specs)
    with pytest.raises(AssertionError, match="disagree on layers"):
        bind((Rule("embedding/table", "layer.{layer}"), *rules[1:]), specs)


def test_infer_family():
    assert infer_family(ModelConfig()).name == "llama"
    assert infer_family(ModelConfig(windows=(8,))).name == "mistral"
    assert infer_family(ModelConfig(qkv_bias=True)).name == "qwen2"
    assert infer_family(ModelConfig(qk_norm=True)).name == "qwen3"
    with pytest.raises(ValueError, match=r"no family of torch can hold it.*norm_one_plus"):
        infer_family(ModelConfig(norm_one_plus=True))
    for name, value in (("sinks", True), ("prefix", 4), ("value_head_width", 16)):
        with pytest.raises(ValueError, match=rf"no family of torch can hold it.*model\.{name}: {value} cannot be said"):
            infer_family(ModelConfig(**{name: value}))
