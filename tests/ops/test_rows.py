"""Tokens to rows and back: sums in float32, rounded once, and only gathers in both directions."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.ops.rows import combine, sort, spread

T, K, D, G = 16, 64, 3, 8
CHOICES = np.random.default_rng(0).integers(0, G, (T, K)).astype(np.int32)
ROWS = sort(jnp.asarray(CHOICES), G, T * K)[0]


def one_sign(*shape):
    """bfloat16 numbers in 1 to 2, whose running sum in bfloat16 soon loses most of each."""
    return jnp.asarray(1 + np.random.default_rng(1).random(shape), jnp.bfloat16)


def wide(x):
    return np.asarray(x, np.float64)


def spread_transpose(dy_RD, rows):
    return jax.vjp(lambda x_TD: spread(x_TD, rows), jnp.zeros((T, dy_RD.shape[1]), dy_RD.dtype))[1](dy_RD)[0]


def combine_transpose(dy_TD, rows):
    return jax.vjp(lambda y_RD: combine(y_RD, rows), jnp.zeros((T * K, dy_TD.shape[1]), dy_TD.dtype))[1](dy_TD)[0]


def scattered(y_RD, rows):
    """What the sums must not be: added up where they belong, one after another, in the rows' dtype."""
    return jnp.zeros((T, y_RD.shape[1]), y_RD.dtype).at[rows[0] // K].add(y_RD)


@pytest.mark.parametrize("function", [combine, spread_transpose])
def test_bfloat16_rows_are_added_up_in_float32(function):
    """64 rows a token against a float64 sum: half a unit in the last place, of the one rounding. Control: a sum in bfloat16."""
    y_RD = one_sign(T * K, D)
    want = wide(y_RD)[np.asarray(ROWS[1])].sum(1)
    got = function(y_RD, ROWS)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(got), want, rtol=2.0**-8)
    assert np.abs(wide(scattered(y_RD, ROWS)) / want - 1).max() > 2.0**-7


@pytest.mark.parametrize("function", [spread, combine_transpose])
def test_a_row_is_its_token(function):
    x_TD = one_sign(T, D)
    np.testing.assert_array_equal(wide(function(x_TD, ROWS)), wide(x_TD)[np.asarray(ROWS[0]) // K])


@pytest.mark.parametrize("choices", [CHOICES, np.full((T, K), G)], ids=["all", "none"])
@pytest.mark.parametrize("room", [T * K, T * K // 2])
def test_rows_and_choices_without_each_other_read_zeros(choices, room):
    """Float64, exact: with half the rows, and with no choice of any group."""
    rows, sizes_G, overflow = sort(jnp.asarray(choices, jnp.int32), G, room)
    x_TD = np.random.default_rng(2).integers(-9, 9, (T, D)).astype(np.float64)
    got = np.asarray(combine(spread(x_TD, rows), rows))
    kept = np.asarray(rows[1]) < room
    np.testing.assert_array_equal(got, x_TD * kept.sum(1)[:, None])
    assert kept.sum() == sizes_G.sum() == (choices < G).sum() - overflow


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


def scatters(function, x):
    return [name for name in primitives(jax.make_jaxpr(function)(x, ROWS).jaxpr) if "scatter" in name]


def test_no_scatter():
    """Neither forward nor in the transposes. Controls: a scatter-add, and the transpose that JAX itself makes of a gather."""
    tokens, rows = one_sign(T, D), one_sign(T * K, D)
    for function, x in ((spread, tokens), (spread_transpose, rows), (combine, rows), (combine_transpose, tokens)):
        assert "gather" in set(primitives(jax.make_jaxpr(function)(x, ROWS).jaxpr))
        assert not scatters(function, x)
    assert scatters(scattered, rows)
    assert scatters(lambda dy, rows: jax.vjp(lambda x: jnp.take(x, rows[0] // K, axis=0), tokens)[1](dy), rows)
