import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.ops.mlp import activation, gated

POINTS = np.linspace(-6, 6, 41)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("name", "right", "wrong"), [("silu", silu, gelu_tanh), ("gelu_tanh", gelu_tanh, silu)])
def test_values_and_slopes(name: str, right, wrong):
    function = activation(name)
    exact = np.array([right(x) for x in POINTS])
    np.testing.assert_allclose(function(jnp.array(POINTS)), exact, rtol=0, atol=1e-14)
    assert abs(function(jnp.array(POINTS)) - np.array([wrong(x) for x in POINTS])).max() > 0.05
    slope = np.array([(right(x + 1e-5) - right(x - 1e-5)) / 2e-5 for x in POINTS])
    np.testing.assert_allclose(jax.vmap(jax.grad(function))(jnp.array(POINTS)), slope, rtol=0, atol=1e-9)


def test_the_gate_is_the_one_activated():
    gate, up = jnp.array(POINTS), jnp.array(POINTS[::-1] + 3)
    np.testing.assert_allclose(gated(gate, up, "silu"), [silu(g) * u for g, u in zip(gate, up, strict=True)], rtol=0, atol=1e-13)
    assert abs(gated(gate, up, "silu") - gated(up, gate, "silu")).max() > 1


def test_bfloat16_is_rounded_once():
    gate, up = (jnp.array(x, jnp.bfloat16) for x in (POINTS, POINTS[::-1] + 3))
    y = gated(gate, up, "gelu_tanh")
    assert y.dtype == jnp.bfloat16
    exact = np.array([gelu_tanh(float(g)) * float(u) for g, u in zip(gate, up, strict=True)])
    assert (abs(np.asarray(y, np.float64) - exact) <= 2.0**-8 * abs(exact) + 1e-5).all()  # 1 + tanh cancels far below 0


def test_unknown_name():
    with pytest.raises(ValueError, match=r"model\.activation: 'relu' is not one of silu, gelu_tanh"):
        activation("relu")
