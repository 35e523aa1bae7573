"""The reference shares no code with us: it turns complex numbers, pair by pair, with frequencies from scalar formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import RopeConfig
from jaxpar.ops.rope import frequencies, phases, rotate, yarn_mscale

B, S, N, H = 2, 5, 3, 8


def turned(x: np.ndarray, positions: np.ndarray, inverse: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """float64: pair (i, i + P) is one complex number, multiplied by factor e^(i position frequency)."""
    pairs, y = len(inverse), x.copy()
    for p, frequency in enumerate(inverse):
        z = (x[..., p] + 1j * x[..., p + pairs]) * (factor * np.exp(1j * positions * frequency))[..., None]
        y[..., p], y[..., p + pairs] = z.real, z.imag
    return y


@pytest.fixture(scope="module")
def tokens() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(B, S, N, H)), draw.integers(0, 5000, (B, S)).astype(np.int32)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=12345.0),
        RopeConfig(type="linear", factor=3.0),
        RopeConfig(type="yarn", factor=40.0, original_length=4096),
        RopeConfig(fraction=0.5),
    ],
    ids=lambda rope: f"{rope.type}-{rope.fraction}",
)
def test_rotation_against_complex_numbers(rope: RopeConfig, tokens):
    x, positions = tokens
    inverse, factor = frequencies(rope, H)
    right = turned(x, positions, inverse, factor)
    np.testing.assert_allclose(rotate(jnp.array(x), jnp.array(positions), inverse, factor), right, rtol=0, atol=1e-12)
    interleaved = x[..., [0, 2, 4, 6, 1, 3, 5, 7]]
    assert abs(rotate(jnp.array(interleaved), jnp.array(positions), inverse, factor) - right).max() > 0.1
    y32 = rotate(jnp.array(x, jnp.float32), jnp.array(positions), inverse, factor)
    assert y32.dtype == jnp.float32
    np.testing.assert_allclose(y32, right, rtol=0, atol=4e-3)


def test_scores_depend_on_distance_only(tokens):
    x, _ = tokens
    inverse, _ = frequencies(RopeConfig(), H)

    def scores(start: int) -> np.ndarray:
        y = np.asarray(rotate(jnp.array(x), jnp.arange(start, start + S)[None].repeat(B, 0), inverse))
        return np.einsum("bsnh,btnh->bnst", y, y)

    np.testing.assert_allclose(scores(0), scores(777), rtol=0, atol=1e-11)


def test_default_and_theta():
    for theta in (1e4, 12345.0):
        inverse, factor = frequencies(RopeConfig(theta=theta), 8)
        np.testing.assert_allclose(inverse, [1, theta**-0.25, theta**-0.5, theta**-0.75], rtol=1e-15)
        assert factor == 1 and inverse.dtype == np.float64


def test_linear_divides_positions():
    np.testing.assert_allclose(frequencies(RopeConfig(type="linear", factor=4.0), 8)[0] * 4, frequencies(RopeConfig(), 8)[0], rtol=1e-15)


LLAMA3 = dict(type="llama3", theta=1e4, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=64)


def test_llama3_known_frequencies():
    inverse, factor = frequencies(RopeConfig(factor=8.0, **LLAMA3), 16)
    known = [1, 0.2443846, 0.0130423, 0.0039528, 0.00125, 0.0003953, 0.000125, 0.0000395]
    np.testing.assert_allclose(inverse, known, rtol=0, atol=5e-8)
    assert factor == 1
    assert abs(frequencies(RopeConfig(), 16)[0] - known).max() > 0.05


def test_llama3_factors_8_and_32_differ():
    eight, thirty_two = (frequencies(RopeConfig(factor=f, **LLAMA3), 16)[0] for f in (8.0, 32.0))
    assert eight[0] == thirty_two[0] == 1
    np.testing.assert_allclose(eight[-3:] / thirty_two[-3:], 4, rtol=1e-12)


def test_llama3_refuses_an_empty_blend():
    with pytest.raises(ValueError, match=r"model\.rope\.high_frequency_factor: 1\.0 must exceed"):
        frequencies(RopeConfig(factor=8.0, **(LLAMA3 | dict(high_frequency_factor=1.0))), 16)


def test_dynamic_has_no_history():
    def at(length: int) -> np.ndarray:
        return frequencies(RopeConfig(type="dynamic", factor=2.0, original_length=8, static_length=length), 8)[0]

    plain = frequencies(RopeConfig(), 8)[0]
    first, longer, third = at(4), at(32), at(4)
    np.testing.assert_array_equal(first, plain)
    np.testing.assert_array_equal(at(8), plain)
    np.testing.assert_array_equal(first, third)
    base = 1e4 * (2 * 32 / 8 - 1) ** (8 / 6)
    np.testing.assert_allclose(longer, [base ** (-i / 4) for i in range(4)], rtol=1e-14)
    assert (longer[1:] < plain[1:]).all()


def test_partial_rotary_uses_its_own_width(tokens):
    x, positions = tokens
    inverse, _ = frequencies(RopeConfig(fraction=0.5), 8)
    np.testing.assert_allclose(inverse, [1, 1e-2], rtol=1e-15)  # exponent over 4, not over 8
    np.testing.assert_array_equal(rotate(jnp.array(x), jnp.array(positions), inverse)[..., 4:], x[..., 4:])
    with pytest.raises(ValueError, match=r"model\.rope\.fraction: 0\.4 of head width 8 rotates 3 features"):
        frequencies(RopeConfig(fraction=0.4), 8)


def yarn(**more: float) -> RopeConfig:
    return RopeConfig(type="yarn", factor=40.0, original_length=4096, **more)


def test_yarn_attention_factor():
    assert yarn_mscale(40.0) ** 2 == pytest.approx(1.8739, abs=5e-5)
    assert yarn_mscale(40.0, 0.707) ** 2 == pytest.approx(1.5896, abs=5e-5)
    assert yarn_mscale(1.0) == 1
    for config, right in (
        (yarn(), yarn_mscale(40.0)),
        (yarn(mscale=1.0, mscale_all_dim=1.0), 1.0),
        (yarn(mscale=0.707, mscale_all_dim=0.707), 1.0),
        (yarn(mscale=1.0, mscale_all_dim=0.707), yarn_mscale(40.0) / yarn_mscale(40.0, 0.707)),
        (yarn(mscale=1.0), yarn_mscale(40.0)),  # both are needed, as in transformers
        (yarn(attention_factor=0.5), 0.5),
    ):
        assert frequencies(config, 64)[1] == pytest.approx(right, rel=1e-15)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_frequencies(truncate: bool):
    """Pair by pair from the turns it makes in the trained length."""
    inverse, _ = frequencies(yarn(truncate=truncate), 64)
    first, last = (64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32, 1))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    for pair in range(32):
        plain = 1e4 ** (-pair / 32)
        share = min(max((pair - first) / (last - first), 0), 1)
        assert inverse[pair] == pytest.approx(plain * (1 - share) + plain / 40 * share, rel=1e-13)
    assert inverse[0] == 1 and inverse[-1] == pytest.approx(1e4 ** (-31 / 32) / 40)


def test_phases_in_float32_against_float64():
    inverse, _ = frequencies(RopeConfig(), 128)
    positions = jnp.arange(4096, dtype=jnp.int32)[None]
    exact = np.cos(np.arange(4096)[:, None] * inverse)
    cos, _ = phases(positions, inverse, 1.0, jnp.float32)
    assert abs(cos[0] - exact).max() < 5e-4
    coarse = np.asarray(jnp.array(inverse, jnp.bfloat16), np.float64)
    assert abs(np.cos(4095 * coarse) - exact[-1]).max() > 0.8  # what bfloat16 frequencies would do


def test_bfloat16_input_keeps_float32_phases(tokens):
    x, positions = tokens
    inverse, _ = frequencies(RopeConfig(), H)
    x16 = jnp.array(x, jnp.bfloat16)
    y = rotate(x16, jnp.array(positions), inverse)
    assert y.dtype == jnp.bfloat16
    assert abs(np.asarray(y, np.float64) - turned(np.asarray(x16, np.float64), positions, inverse)).max() < 2.0**-6
