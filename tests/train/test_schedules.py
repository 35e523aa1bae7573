"""Exact learning rates at the places that the docstring names, worked out by hand."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxpar.config import OptimizerConfig
from jaxpar.train.schedules import learning_rate

STEPS, WARMUP, PEAK, RATIO = 20, 4, 0.5, 0.1


def config(**fields):
    return OptimizerConfig(**{"learning_rate": PEAK, "warmup": WARMUP, "final_ratio": RATIO, **fields})


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
def test_warmup_end_of_warmup_last_step_and_beyond(name):
    rate = learning_rate(config(schedule=name), STEPS)
    for step in range(WARMUP + 1):
        assert float(rate(step)) == pytest.approx(PEAK * (step + 1) / 5, rel=1e-15)
    assert float(rate(WARMUP)) == PEAK
    final = PEAK if name == "constant" else PEAK * RATIO
    for step in (STEPS - 1, STEPS, STEPS + 100):
        assert float(rate(step)) == pytest.approx(final, rel=1e-15)
    assert float(rate(STEPS - 2)) > final or name == "constant"


def test_values_between():
    halfway = {"cosine": 0.5 * (1 + math.cos(math.pi * 5 / 15)), "linear": 1 - 5 / 15}
    for name, left in halfway.items():
        rate = learning_rate(config(schedule=name), STEPS)
        assert float(rate(WARMUP + 5)) == pytest.approx(PEAK * (RATIO + (1 - RATIO) * left), rel=1e-15)
    # wsd: a tenth of 20 steps decays, so 17 is the last stable one and 18 is halfway
    rate = learning_rate(config(schedule="wsd"), STEPS)
    assert [float(rate(step)) for step in (5, 16, 17)] == [PEAK] * 3
    assert float(rate(18)) == pytest.approx(PEAK * (1 + RATIO) / 2, rel=1e-15)


def test_decay_steps():
    rate = learning_rate(config(schedule="linear", decay_steps=30), STEPS)
    assert float(rate(WARMUP + 15)) == pytest.approx(PEAK * (1 + RATIO) / 2, rel=1e-15)
    rate = learning_rate(config(schedule="cosine", decay_steps=3), STEPS)
    assert float(rate(WARMUP + 3)) == float(rate(STEPS - 1)) == pytest.approx(PEAK * RATIO, rel=1e-15)
    rate = learning_rate(config(schedule="wsd", decay_steps=15), STEPS)
    assert float(rate(WARMUP)) == PEAK and float(rate(WARMUP + 1)) == pytest.approx(PEAK * (1 - 0.9 / 15), rel=1e-15)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear", "wsd"])
def test_short_runs(name):
    assert float(learning_rate(config(schedule=name, warmup=0), STEPS)(0)) == PEAK
    assert float(learning_rate(config(schedule=name, warmup=0), 1)(0)) == PEAK
    assert float(learning_rate(config(schedule=name), WARMUP + 1)(WARMUP)) == PEAK
    assert float(learning_rate(config(schedule=name, warmup=0, final_ratio=0.0), 2)(1)) == (PEAK if name == "constant" else 0)


def test_a_traced_int32_step_gives_the_same_number():
    rate = learning_rate(config(schedule="cosine"), STEPS)
    traced = jax.jit(rate)(jnp.arange(STEPS, dtype=jnp.int32))
    assert max(abs(float(rate(step)) / float(traced[step]) - 1) for step in range(STEPS)) < 1e-14


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup": 20}, "optimizer.warmup: 20 does not fit in train.steps 20; at most 19"),
        ({"schedule": "wsd", "decay_steps": 16}, "optimizer.decay_steps: 16 .* at most 15"),
        ({"decay_steps": 0}, "optimizer.decay_steps"),
        ({"final_ratio": -0.1}, "optimizer.final_ratio"),
    ],
)
def test_what_does_not_fit_is_an_error_naming_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        learning_rate(config(**fields), STEPS)
