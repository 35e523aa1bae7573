"""Losses on what blocks return beside their outputs: the same value and gradients on every mesh and for every accumulation."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from jaxpar.models.decoder import DecoderFunctions
from tests.train import runs


@dataclasses.dataclass(frozen=True)
class Spread(DecoderFunctions):
    """A decoder whose blocks report the squares of their outputs and a count of tokens; the loss weighs layers and averages sequences."""

    auxiliary_metrics: ClassVar[tuple[str, ...]] = ("spread", "counted")

    def block(self, layer_params, x_BSD, context):
        y_BSD, _ = super().block(layer_params, x_BSD, context)
        return y_BSD, {
            "squares": (y_BSD**2).sum((0, 1, 2)),
            "tokens": jnp.ones_like(y_BSD[..., 0], jnp.int32).sum() + 0 * y_BSD.astype(jnp.int32).sum(),
        }

    def auxiliary(self, aux, sequences, accumulation):
        share = (aux["squares"] * jnp.arange(1.0, aux["squares"].size + 1)).sum() / sequences * 0.01
        return share, {"spread": jax.lax.stop_gradient(share), "counted": aux["tokens"].sum()}


def gradients(**mesh):
    run = runs.config(**mesh)
    built = runs.training(run)
    fields = {field.name: getattr(built.gradients.functions, field.name) for field in dataclasses.fields(DecoderFunctions)}
    engine = dataclasses.replace(built.gradients, functions=Spread(**fields))
    program = jax.jit(engine)
    return jax.device_get(program(runs.place_params(built), runs.place(built, runs.batch(run)), jnp.asarray(3, jnp.int32)))


@pytest.fixture(scope="module")
def one_device():
    return gradients()


@pytest.mark.parametrize(
    "mesh",
    [
        {"accumulation": 4},
        {"data": 2, "tensor": 2, "zero": 1, "accumulation": 2},
        {"data": 4, "tensor": 2, "zero": 3, "interleave": 2},
        {"data": 2, "zero": 2, "accumulation": 4, "sequence_parallel": False},
    ],
)
def test_equals_one_device(mesh, one_device):
    metrics, grads = gradients(**mesh)
    assert metrics["spread"] == pytest.approx(one_device[0]["spread"], rel=1e-12)
    tokens = runs.BATCH * runs.SEQUENCE * runs.MODEL.layers
    assert metrics["counted"] == one_device[0]["counted"] == tokens
    worst = runs.gap(grads, one_device[1])
    assert worst[0] < 1e-11, worst


def test_it_is_part_of_the_gradient(one_device):
    assert runs.gap(one_device[1], runs.gradients(runs.config())[1])[0] > 1e-3
