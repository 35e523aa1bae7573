"""config.json as torch reads it: raw values win, each with its origin; what cannot be computed here is refused by name."""

import json

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.config import ModelConfig, RopeConfig
from jaxpar.ops.rope import frequencies
from tests.bridge import hostile
from torch_bridge.families import FAMILIES, find_family

PLAIN = {
    "vocab_size": 31,
    "hidden_size": 40,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def library_of(family):
    """The configuration class of transformers."""
    return getattr(transformers, find_family(family).library)


def settings_of(family, rope_length=None, ignore=(), **changes):
    raw = {key: value for key, value in {**PLAIN, **changes}.items() if value != "absent"}
    return find_family(family).read(raw, rope_length, frozenset(ignore))


def read(family, rope_length=None, ignore=(), **changes):
    model, settings = settings_of(family, rope_length, ignore, **changes)
    assert not settings.problems, settings.problems
    return model, settings.provenance


def refused(family, rope_length=None, **changes):
    model, settings = settings_of(family, rope_length, **changes)
    assert model is None
    return [str(problem) for problem in settings.problems]


SPELLINGS = {
    "rope_parameters": {"rope_parameters": {"rope_theta": 12345.0, "rope_type": "default"}},
    "rope_parameters, no type": {"rope_parameters": {"rope_theta": 12345}},
    "rope_theta": {"rope_theta": 12345.0},
    "rope_theta, scaling null": {"rope_theta": 12345, "rope_scaling": None},
    "theta outside of rope_parameters": {"rope_theta": 12345.0, "rope_parameters": {"rope_type": "default"}},
    "both, equal": {"rope_theta": 12345.0, "rope_parameters": {"rope_theta": 12345.0}},
    "scaling": {"rope_theta": 12345.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "linear in rope_parameters": {"rope_parameters": {"rope_theta": 12345.0, "rope_type": "linear", "factor": 2.0}},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SPELLINGS)
def test_theta_of_either_spelling(family, name):
    model, provenance = read(family, **SPELLINGS[name])
    assert model.rope.theta == 12345
    assert provenance["model.rope.theta"].startswith("config.json: rope_")
    library = library_of(family)(**{**PLAIN, **SPELLINGS[name]})
    assert library.rope_parameters["rope_theta"] == model.rope.theta
    assert library.rope_parameters["rope_type"] == model.rope.type
    assert library.rope_parameters.get("factor", 1.0) == model.rope.factor


def test_no_theta_is_the_librarys():
    model, provenance = read("llama")
    assert model.rope == RopeConfig(theta=10_000)
    assert provenance["model.rope.theta"] == "LlamaConfig's default (rope_theta is absent)"


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_llama3_frequencies(spelling):
    rope = {**LLAMA3, "rope_type": "llama3"}
    model, _ = read("llama", head_dim=16, rope_theta=1e4, **{spelling: rope})
    expected = [1, 0.2443846, 0.0130423, 0.0039528, 0.00125, 0.0003953, 0.000125, 0.0000395]
    np.testing.assert_allclose(frequencies(model.rope, 16)[0], expected, rtol=2e-3)
    other, _ = read("llama", head_dim=16, rope_theta=1e4, **{spelling: {**rope, "factor": 32.0}})
    assert other.rope.factor == 32 and not np.allclose(frequencies(other.rope, 16)[0], expected, rtol=2e-3)


def test_original_length_comes_from_the_section_then_the_file_then_the_longest():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read("qwen3", rope_scaling={**yarn, "original_max_position_embeddings": 16})[0].rope.original_length == 16
    assert read("qwen3", rope_scaling=yarn, original_max_position_embeddings=20)[0].rope.original_length == 20
    assert read("qwen3", rope_scaling=yarn)[0].rope.original_length == 64


def test_yarn_settings():
    section = {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    }
    rope = read("llama", rope_parameters={**section, "rope_theta": 5.0})[0].rope
    assert (rope.factor, rope.mscale, rope.mscale_all_dim, rope.beta_fast, rope.beta_slow, rope.truncate) == (40, 0.707, 1, 16, 2, False)


def test_dynamic_rope_needs_a_declared_length():
    rope = {"rope_type": "dynamic", "factor": 2.0}
    assert "--rope-length" in refused("llama", rope_scaling=rope)[0]
    model, provenance = read("llama", 256, rope_scaling=rope)
    assert (model.rope.original_length, model.rope.static_length) == (64, 256)
    assert provenance["model.rope.original_length"] == "config.json: max_position_embeddings"


def test_head_width_given_derived_or_the_classes():
    assert read("llama", head_dim=16)[0].head_width == 16
    model, provenance = read("llama")
    assert model.head_width == 10 and provenance["model.head_width"].startswith("derived")
    assert read("llama", head_dim=None)[0].head_width == 10
    assert read("qwen3")[0].head_width == transformers.Qwen3Config(**PLAIN).head_dim == 128


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_have_the_librarys_defaults(family):
    library = library_of(family)(**{**PLAIN, "num_attention_heads": 32, "hidden_size": 64, "num_key_value_heads": 32})
    absent = dict.fromkeys(("num_key_value_heads",), "absent")
    model, provenance = read(family, **absent, num_attention_heads=32, hidden_size=64)
    raw = {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"}
    bare = library_of(family)(**{**raw, "num_attention_heads": 32, "hidden_size": 64})
    assert model.kv_heads == bare.num_key_value_heads
    assert model.norm_eps == library.rms_norm_eps
    assert model.tied == library.tie_word_embeddings
    assert "default" in provenance["model.kv_heads"] and "rms_norm_eps is absent" in provenance["model.norm_eps"]
    window = library.sliding_window if family == "mistral" else 0
    assert model.windows == (window,)


def test_null_kv_heads_are_the_heads():
    assert all(read(family, num_key_value_heads=None)[0].kv_heads == 4 for family in FAMILIES)


WINDOWS = [
    ("mistral", {"sliding_window": 7}, (7,)),
    ("mistral", {"sliding_window": None}, (0,)),
    ("qwen2", {"sliding_window": 7}, (0,)),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, (7,)),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}, (0, 0, 0, 7)),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 9}, (0,)),
    ("qwen3", {"use_sliding_window": True, "sliding_window": None}, (0,)),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"] * 2},
        (0, 7, 0, 7),
    ),
    ("qwen2", {"layer_types": ["full_attention"] * 4}, (0,)),
]


@pytest.mark.parametrize(("family", "changes", "windows"), WINDOWS)
def test_windows(family, changes, windows):
    assert read(family, **changes)[0].windows == windows
    library = library_of(family)(**{**PLAIN, **changes})
    if family != "mistral":
        torch_windows = [library.sliding_window if kind == "sliding_attention" else 0 for kind in library.layer_types]
        assert [windows[layer % len(windows)] for layer in range(4)] == torch_windows


REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act: expected silu"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_scaling.rope_type: expected one of"),
    ("llama", {"rope_scaling": {"type": "su"}}, "rope_scaling.type"),
    ("llama", {"rope_scaling": {"factor": 2.0}}, "rope_scaling.rope_type: expected one of"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: expected a number"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor: expected a number"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, "rope_scaling.type: expected what"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 1}}, "rope_scaling.beta_fast"),
    ("llama", {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta: expected what rope_parameters.rope_theta says"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 3}},
        "rope_scaling.factor: expected what rope_parameters says",
    ),
    (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 8},
        "original_max_position_embeddings",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1"),
    ("llama", {"sliding_window": 4}, "sliding_window"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ("llama", {"some_new_switch": True}, "some_new_switch"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout: expected 0.0"),
    ("llama", {"head_dim": 5}, "model.head_width: 5 must be even"),
    ("llama", {"head_dim": True}, "head_dim: expected a whole number, found True"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps: expected a number"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false"),
    ("llama", {"hidden_size": "absent"}, "hidden_size: expected a whole number, found no such key"),
    ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers: expected at most 10000"),
    ("llama", {"vocab_size": None}, "vocab_size: expected a whole number"),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 3}, "model.kv_heads: 3 must divide"),
    ("mistral", {"attention_bias": True}, "attention_bias: expected False"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types: expected one kind"),
    ("mistral", {"sliding_window": 0}, "sliding_window: expected at least 1"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 4}, "layer_types: expected a sliding_window in use"),
    ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types: expected num_hidden_layers entries"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types[0]"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias"),
]


@pytest.mark.parametrize(("family", "changes", "named"), REFUSED, ids=[named.split(":")[0] for _, _, named in REFUSED])
def test_refused_by_name(family, changes, named):
    problems = refused(family, **changes)
    assert any(named in problem for problem in problems), problems


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 10**40)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["silu", "yarn", "full_attention"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), inner, max_size=4)
    ),
    max_leaves=6,
)
KEYS = (*PLAIN, "head_dim", "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "sliding_window",
        "use_sliding_window", "max_window_layers", "tie_word_embeddings", "attention_bias", "initializer_range", "attention_dropout",
        "original_max_position_embeddings", "partial_rotary_factor", "dtype")  # fmt: skip


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
@settings(max_examples=300, deadline=5000)
def test_any_configuration_gives_a_model_or_problems(family, changes):
    model, found = find_family(family).read({**PLAIN, **changes}, None, frozenset())
    assert (model is None) == bool(found.problems)
    assert all(str(problem).isprintable() for problem in found.problems)


def test_all_problems_at_once():
    problems = refused("llama", hidden_act="relu", vocab_size="absent", rope_scaling={"type": "su"}, strange=1)
    assert len(problems) == 4


def test_what_changes_no_number_passes():
    names = {"use_cache": False, "_name_or_path": "x", "bos_token_id": [1, 2], "pretraining_tp": 2, "rope_scaling": None, "strange": None}
    assert read("llama", **names)[0] == read("llama")[0]
    assert read("llama", ignore=("strange", "attention_dropout"), strange=1, attention_dropout=0.1)[0] == read("llama")[0]


ROPES = [
    RopeConfig(theta=5e5),
    RopeConfig(type="linear", factor=2.5, theta=123.5),
    RopeConfig(type="llama3", factor=8, low_frequency_factor=1, high_frequency_factor=4, original_length=32),
    RopeConfig(type="yarn", factor=4, original_length=16, beta_fast=20, mscale=0.7, mscale_all_dim=1.0, truncate=False),
]
MODELS = [
    ("llama", {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
    ("llama", {"tied": True, "head_width": 6}),
    ("mistral", {"windows": (5,)}),
    ("mistral", {"windows": (0,)}),
    ("qwen2", {"qkv_bias": True, "windows": (0, 9)}),
    ("qwen2", {"qkv_bias": True, "windows": (0, 0, 9, 9)}),
    ("qwen3", {"qk_norm": True, "head_width": 8}),
    ("qwen3", {"qk_norm": True, "qkv_bias": True, "output_bias": True, "windows": (3,)}),
]


@pytest.mark.parametrize(("family", "changes"), MODELS)
@pytest.mark.parametrize("rope", ROPES, ids=[rope.type for rope in ROPES])
def test_what_is_written_is_read_again(family, changes, rope):
    model = ModelConfig(**{"width": 16, "heads": 4, "kv_heads": 2, "layers": 4, "mlp_width": 8, "norm_eps": 0.1, "rope": rope, **changes})
    raw = json.loads(json.dumps({**find_family(family).write(model), "max_position_embeddings": 64}))
    again, settings = find_family(family).read(raw, None, frozenset())
    assert not settings.problems, settings.problems
    windows = [[one.windows[layer % len(one.windows)] for layer in range(4)] for one in (model, again)]
    assert windows[0] == windows[1]
    assert {**vars(again), "windows": 0} == {**vars(model), "windows": 0}


UNSAID = [
    ("llama", {"qkv_bias": True}, "output_bias"),
    ("llama", {"windows": (4,)}, "windows"),
    ("llama", {"qk_norm": True}, "qk_norm"),
    ("mistral", {"qkv_bias": True}, "qkv_bias"),
    ("mistral", {"windows": (4, 0)}, "windows"),
    ("qwen2", {}, "qkv_bias"),
    ("qwen3", {"qk_norm": True, "windows": (4, 5)}, "windows"),
    ("llama", {"activation": "gelu_tanh"}, "activation"),
    ("llama", {"logit_softcap": 30.0}, "logit_softcap"),
    ("llama", {"score_scale": 1.0}, "score_scale"),
    ("llama", {"embedding_scale": 2.0}, "embedding_scale"),
    ("llama", {"rope": RopeConfig(fraction=0.5)}, "rope.fraction"),
]


@pytest.mark.parametrize(("family", "changes", "named"), UNSAID)
def test_what_a_family_cannot_say(family, changes, named):
    with pytest.raises(ValueError, match=rf"model\.{named}"):
        find_family(family).write(ModelConfig(**changes))


@pytest.mark.parametrize("name", hostile.NAMES)
def test_hostile_configurations(name):
    library = hostile.config(name)
    model, settings = find_family(library.model_type).read(library.to_dict(), None, frozenset())
    assert not settings.problems
    assert (model.vocabulary, model.width, model.mlp_width, model.layers) == (97, 24, 36, 3)
    assert (model.heads, model.kv_heads, model.norm_eps, model.tied) == (4, 2, 0.05, library.tie_word_embeddings)
    assert model.head_width == (getattr(library, "head_dim", None) or 6)


def test_unknown_family():
    with pytest.raises(ValueError, match=r"model_type: 'gpt2' is not supported; there are llama, mistral, qwen2, qwen3"):
        find_family("gpt2")
