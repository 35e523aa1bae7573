"""What `model.moe` refuses, by field and fix."""

import pytest

from jaxpar import configfile
from jaxpar.config import ModelConfig, MoeConfig


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"per_token": 9}, r"model.moe.per_token: 9 experts of a token exceed model.moe.experts 8"),
        ({"per_token": 0}, r"model.moe.per_token: 0 must be at least 1"),
        ({"per_token": 1}, r"model.moe.per_token: the weight of a single normalised expert is always 1"),
        ({"per_token": 1, "normalise": False, "router": "topk_softmax"}, r"always 1, so its router would learn nothing"),
        ({"router": "softmax"}, r"model.moe.router: 'softmax' is not one of softmax_topk, topk_softmax, sigmoid, expert_choice"),
        ({"router": "expert_choice", "correction": True}, r"model.moe.router: with expert_choice .*; set correction false and groups 1"),
        ({"balance": "batch"}, r"model.moe.balance: 'batch' is not one of sequence, microbatch"),
        ({"groups": 3}, r"model.moe.groups: 3 does not divide model.moe.experts 8"),
        ({"groups": 4, "kept_groups": 5}, r"model.moe.kept_groups: 5 exceeds model.moe.groups 4"),
        ({"groups": 4, "per_token": 3}, r"model.moe.kept_groups: 1 groups hold 2 experts, fewer than model.moe.per_token 3"),
        ({"scale": 0.0}, r"model.moe.scale: 0.0 must be positive"),
        ({"balance_weight": -1.0}, r"model.moe.balance_weight: -1.0 must not be negative"),
        ({"jitter": 1.0}, r"model.moe.jitter: 1.0 must be in \[0, 1\)"),
        ({"activation": "relu"}, r"model.moe.activation: 'relu' is not one of , silu, gelu_tanh, clamped_swiglu"),
        ({"correction_rate": -0.1}, r"model.moe.correction_rate: -0.1 must not be negative"),
        ({"every": 0}, r"model.moe.every: 0 must be at least 1"),
        ({"experts": -1}, r"model.moe.experts: -1 must be at least 1"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        MoeConfig(**{"experts": 8, **fields})
    assert "\n" not in str(error.value)


def test_width_of_experts_is_the_models_unless_given():
    assert ModelConfig(mlp_width=48, moe=MoeConfig(experts=4)).moe.width == 48
    assert ModelConfig(mlp_width=48, moe=MoeConfig(experts=4, width=12)).moe.width == 12


def test_dense_models_say_nothing_of_it():
    assert ModelConfig().moe == MoeConfig() and MoeConfig().experts == 0
    MoeConfig(per_token=1)  # what a dense model leaves at odd values does no harm


def test_experts_have_no_biases():
    with pytest.raises(ValueError, match="model.mlp_bias: experts have no biases; set it false"):
        ModelConfig(mlp_bias=True, moe=MoeConfig(experts=4))


def test_yaml_round_trip():
    config = configfile.from_dict({"model": {"moe": {"experts": 8, "per_token": 4, "balance_weight": 1e-2}}})
    assert config.model.moe.per_token == 4
    assert configfile.from_dict(configfile.dump(config)) == config
    dense = configfile.from_dict({"model": {"moe": {"experts": 0, "per_token": 4, "balance_weight": 1e-2}}})
    assert configfile.from_dict(configfile.dump(dense)) == dense != config


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"dense_layers": 6}, r"model.moe.dense_layers: 6 of model.layers 6 leave none with experts; use less"),
        (
            {"dense_layers": 2, "every": 3},
            r"model.moe.every: 3 does not divide the 4 layers behind the dense ones; numbers that work: 1, 2, 4",
        ),
    ],
)
def test_layers_of_a_pattern(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(layers=6, moe=MoeConfig(experts=8, **fields))
    ModelConfig(layers=6, moe=MoeConfig(experts=0, **fields))
