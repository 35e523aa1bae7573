"""What the report says in words is true of the run: by its optimizer, microbatches, ZeRO level, dropout and recomputation."""

import dataclasses

import pytest

from jaxpar.config import Config, ContextConfig, DataConfig, MeshShape, ModelConfig, OptimizerConfig, TrainConfig
from jaxpar.plan import show
from jaxpar.plan.report import block_facts, kept_bytes
from tests.train.programs import training

GIB = 2**30
PARTS = {"parameters": 3, "optimizer": 6, "weights": 1, "gradients": 4, "activations": 9, "rest": 0}
MEMORY = {
    "parts": {name: size * GIB for name, size in PARTS.items()},
    "formulas": {"state": 12 * GIB, "activations": 10 * GIB, "kept": 7 * GIB},
}


def run(optimizer="adamw", dropout=0.0, data=2, **train):
    return Config(
        model=ModelConfig(vocabulary=1024, width=64, layers=2, heads=8, kv_heads=4, mlp_width=128, dropout=dropout),
        mesh=MeshShape(data=data),
        data=DataConfig(sequence=64, vocabulary=1024),
        optimizer=OptimizerConfig(name=optimizer),
        train=TrainConfig(**{"batch": 16, "zero": 3, **train}),
    )


ADAMW = (
    "16 bytes a parameter with ZeRO's share: 12.00; here 14.00 (2.00): masters and moments take 9.00, 12 of the 16; for the other 4 there "
    "are 1.00 of weights in the compute dtype, those in use, and 4.00 of gradients: a buffer in the masters' dtype, and those being sent"
)


def test_adamw_with_microbatches():
    assert show.state_line(run(accumulation=2), MEMORY) == ADAMW


def test_lion_in_one_microbatch():
    """8 bytes a parameter, and no buffer that gradients are added up in."""
    said = show.state_line(run("lion"), MEMORY)
    assert "where AdamW's in float32 are 12 of the 16 and lion's here 8;" in said
    assert said.endswith("of gradients: of the only microbatch, without a buffer that adds up, and those being sent")


@pytest.mark.parametrize(
    ("change", "there", "missing"),  # what AdamW's line has
    [
        ({"optimizer": "sgd"}, "sgd's here 8;", "moments take 9.00, 12"),
        ({"optimizer": "adafactor"}, "adafactor's here another number;", "moments take 9.00, 12"),
        ({"master_dtype": "bfloat16"}, "adamw's here 6;", "moments take 9.00, 12"),
        ({"zero": 1}, "of weights in the compute dtype, and", "those in use"),
        ({"data": 1}, "a buffer in the masters' dtype", "being sent"),
    ],
    ids=str,
)
def test_what_is_not_so_is_not_said(change, there, missing):
    said = show.state_line(run(**{"accumulation": 2, **change}), MEMORY)
    assert there in said and missing in ADAMW and missing not in said


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"remat": "outputs"},
            "7.00 are kept for the backward, with a gated MLP, 4 key heads, no dropout masks and remat outputs; the other 2.00",
        ),
        ({"remat": "outputs", "dropout": 0.1}, "4 key heads, masks of dropout drawn again and remat outputs; the other 2.00 are"),
        (
            {"remat": "none", "dropout": 0.1},
            "with a gated MLP, 4 key heads, masks of dropout drawn again and remat none; the other 2.00 are",
        ),
    ],
    ids=str,
)
def test_activations(change, why):
    said = show.activations_line(run(**change), MEMORY)
    assert said.startswith("Korthikanti's activations of 2 layers: 10.00; here 9.00 (-1.00): ") and why in said
    assert said.endswith(" works with")
    assert "the other" not in show.activations_line(run(**change), {**MEMORY, "formulas": {**MEMORY["formulas"], "kept": 2**40}})


@pytest.mark.parametrize("policy", ["none", "matmuls"])
def test_masks_of_dropout_are_kept_by_no_policy(policy):
    """As the line says, read from the cut of a block."""
    with_masks, without = (kept_bytes(block_facts(training(run(remat=policy, dropout=rate, data=1)))) for rate in (0.1, 0.0))
    assert with_masks == without


def test_more_work_than_the_policys_is_explained():
    """By what the run has of it; no line where there is no more, as of full recomputation's 1.24."""
    assert show.excess(run(remat="outputs"), 1.005, at_most=False, cudnn=True, again=False) == ""
    assert show.excess(run(remat="block"), 1.24, at_most=False, cudnn=True, again=False) == ""
    said = show.excess(run(remat="outputs"), 1.023, at_most=False, cudnn=True, again=True)
    assert said == "more than the 1 that remat outputs takes at most; what may add to it: XLA computes values again to save memory"
    assert show.excess(run(remat="block"), 1.5, False, True, False).endswith(
        "than the 1.33 that remat block takes at most; what may add to it: nothing that is known"
    )
    tiles = show.excess(run(remat="outputs", loss_chunk=100), 1.29, at_most=False, cudnn=False, again=False)
    assert "tiles of 512 × 512 scores" in tiles and "the last chunk of the loss" in tiles and "contiguous" not in tiles
    assert show.excess(run(), 1.7, True, True, False).endswith("may add to it: loops that end early are counted whole")
    apart = dataclasses.replace(run(context=ContextConfig(method="gather", layout="contiguous")), mesh=MeshShape(data=2, seq=2))
    assert "every GPU goes through as many tiles" in show.excess(apart, 1.24, False, True, False)
