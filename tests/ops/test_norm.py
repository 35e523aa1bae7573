import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.ops.norm import rms_norm

EPS = 0.1  # large, so that a wrong place for it shows
D = 6


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def by_hand(x: np.ndarray, factor: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, dx, and the gradient of the factor, from the derivative on paper."""
    size = np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    dn = dy * factor
    dx = dn / size - x * (dn * x).sum(-1, keepdims=True) / (x.shape[-1] * size**3)
    return x / size * factor, dx, (dy * x / size).sum(0)


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("weight", [3.0, 1e-3])
def test_forward_and_every_gradient(one_plus: bool, weight: float):
    x, dy = numbers(0, 5, D), numbers(1, 5, D)
    w = weight * (1 + 0.1 * numbers(2, D))
    y, pullback = jax.vjp(lambda x, w: rms_norm(x, w, EPS, one_plus), jnp.array(x), jnp.array(w))
    for got, right in zip((y, *pullback(jnp.array(dy))), by_hand(x, w + one_plus, dy), strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-13)
    for got, other in zip((y, pullback(jnp.array(dy))[0]), by_hand(x, w + (not one_plus), dy)[:2], strict=True):
        assert abs(got - other).max() > 0.1  # the other convention is far off, in the backward too


def test_bfloat16_is_rounded_once():
    x = jnp.array(numbers(3, 7, 512) * 30, jnp.bfloat16)
    w = jnp.array(numbers(4, 512), jnp.float32)
    y = rms_norm(x, w, 1e-6, False)
    assert y.dtype == jnp.bfloat16
    exact = by_hand(np.asarray(x, np.float64), np.asarray(w, np.float64), np.ones((7, 512)))[0]
    exact = exact * np.sqrt((np.asarray(x, np.float64) ** 2).mean(-1, keepdims=True) + EPS)
    exact = exact / np.sqrt((np.asarray(x, np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    assert (abs(np.asarray(y, np.float64) - exact) <= 2.0**-8 * abs(exact) + 1e-12).all()
