"""Sections refuse what makes no sense alone, naming the field."""

import pytest

from jaxpar.config import (
    CheckpointConfig,
    Config,
    ContextConfig,
    DataConfig,
    LogConfig,
    MeshShape,
    ModelConfig,
    OptimizerConfig,
    RopeConfig,
    TrainConfig,
)


def test_defaults_are_a_run():
    assert Config().mesh.devices == 1


def test_head_width_given_is_kept_and_derived_only_when_absent():
    assert ModelConfig(width=40, heads=4, kv_heads=2, head_width=16).head_width == 16
    assert ModelConfig(width=40, heads=4, kv_heads=2).head_width == 10
    with pytest.raises(ValueError, match="model.head_width: width 42 does not divide into 4 heads"):
        ModelConfig(width=42, heads=4, kv_heads=2)


LLAMA3 = {"type": "llama3", "factor": 8.0, "original_length": 64}


@pytest.mark.parametrize(
    "section, values, field",
    [
        (MeshShape, {"tensor": 0}, "mesh.tensor"),
        (RopeConfig, {"type": "ntk"}, "model.rope.type"),
        (RopeConfig, {"theta": 0.0}, "model.rope.theta"),
        (RopeConfig, {"fraction": 0.0}, "model.rope.fraction"),
        (RopeConfig, {"factor": 0.5}, "model.rope.factor"),
        (RopeConfig, {"type": "linear"}, "model.rope.factor"),
        (RopeConfig, {"type": "llama3", "original_length": 64}, "model.rope.factor"),
        (RopeConfig, {"type": "yarn", "factor": 4.0}, "model.rope.original_length"),
        (RopeConfig, LLAMA3 | {"low_frequency_factor": 4.0}, "model.rope.high_frequency_factor"),
        (RopeConfig, {"original_length": 0}, "model.rope.original_length"),
        (RopeConfig, {"type": "dynamic", "factor": 2.0, "original_length": 8}, "model.rope.static_length"),
        (RopeConfig, {"type": "yarn", "factor": 2.0, "original_length": 8, "theta": 1.0}, "model.rope.theta"),
        (RopeConfig, {"type": "yarn", "factor": 2.0, "original_length": 8, "beta_fast": 0.0}, "model.rope.beta_fast"),
        (RopeConfig, {"type": "yarn", "factor": 2.0, "original_length": 8, "beta_slow": -1.0}, "model.rope.beta_slow"),
        (ModelConfig, {"layers": 0}, "model.layers"),
        (ModelConfig, {"kv_heads": 3}, "model.kv_heads"),
        (ModelConfig, {"head_width": 7}, "model.head_width"),
        (ModelConfig, {"head_width": -2}, "model.head_width"),
        (ModelConfig, {"activation": "relu"}, "model.activation"),
        (ModelConfig, {"windows": ()}, "model.windows"),
        (ModelConfig, {"windows": (-1,)}, "model.windows"),
        (ModelConfig, {"prefix": -1}, "model.prefix"),
        (ModelConfig, {"prefix": 2**31}, "model.prefix"),
        (ModelConfig, {"value_head_width": -1}, "model.value_head_width"),
        (ModelConfig, {"windows": (10**12,)}, "model.windows"),
        (ModelConfig, {"norm_eps": 0.0}, "model.norm_eps"),
        (ModelConfig, {"init_std": -1.0}, "model.init_std"),
        (ModelConfig, {"dropout": 1.0}, "model.dropout"),
        (ModelConfig, {"logit_softcap": 0.0}, "model.logit_softcap"),
        (DataConfig, {"source": "web"}, "data.source"),
        (DataConfig, {"source": "text"}, "data.path"),
        (DataConfig, {"sequence": 1}, "data.sequence"),
        (DataConfig, {"sequence": 2**31}, "data.sequence"),
        (DataConfig, {"seed": -1}, "data.seed"),
        (ContextConfig, {"method": "spiral"}, "train.context.method"),
        (ContextConfig, {"layout": "folded"}, "train.context.layout"),
        (ContextConfig, {"ulysses": 0}, "train.context.ulysses"),
        (OptimizerConfig, {"name": "adam"}, "optimizer.name"),
        (OptimizerConfig, {"learning_rate": 0.0}, "optimizer.learning_rate"),
        (OptimizerConfig, {"b2": 1.0}, "optimizer.b2"),
        (OptimizerConfig, {"clip": 0.0}, "optimizer.clip"),
        (OptimizerConfig, {"final_ratio": 2.0}, "optimizer.final_ratio"),
        (OptimizerConfig, {"decay_steps": 0}, "optimizer.decay_steps"),
        (TrainConfig, {"steps": 0}, "train.steps"),
        (TrainConfig, {"zero": 4}, "train.zero"),
        (TrainConfig, {"batch": 10, "accumulation": 4}, "train.accumulation"),
        (TrainConfig, {"compute_dtype": "float16"}, "train.compute_dtype"),
        (TrainConfig, {"seed": 2**32}, "train.seed"),
        (TrainConfig, {"cpu_devices": 0}, "train.cpu_devices"),
        (CheckpointConfig, {"keep": 0}, "checkpoint.keep"),
        (LogConfig, {"every": 0}, "log.every"),
    ],
)
def test_refusals_are_one_line_that_starts_with_the_field(section, values, field):
    with pytest.raises(ValueError, match=rf"^{field}: ") as error:
        section(**values)
    assert "\n" not in str(error.value)
