"""Grouped matmul and its gradients against a loop over groups, in float64, for group sizes of all kinds; FLOPs of the compiled programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpar.models.moe import BLOCK
from jaxpar.ops import grouped_matmul as module
from jaxpar.ops.grouped_matmul import default_block, grouped_matmul, visits
from jaxpar.plan.work import measure

R, I, O, G = 37, 6, 5, 4  # noqa: E741


@functools.cache
def program(block):
    """y, dx, dweight of cotangent dy, jitted once for all group sizes."""

    def run(x, weight, sizes, dy):
        y, transpose = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, block), x, weight)
        return y, *transpose(dy)

    return jax.jit(run)


def reference(x, weight, sizes, dy):
    y, dx, dweight, start = np.zeros((len(x), weight.shape[1])), np.zeros_like(x), np.zeros_like(weight), 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows], dx[rows], dweight[group] = x[rows] @ weight[group].T, dy[rows] @ weight[group], dy[rows].T @ x[rows]
        start += size
    return y, dx, dweight


def drawn(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(R, I)), rng.normal(size=(G, O, I)), rng.normal(size=(R, O))


def check(sizes, block):
    x, weight, dy = drawn()
    got = program(block)(x, weight, np.array(sizes, np.int32), dy)
    for a, b in zip(got, reference(x, weight, sizes, dy), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@st.composite
def group_sizes(draw):
    cuts = sorted(draw(st.lists(st.integers(0, R), min_size=G, max_size=G)))
    return np.diff([0, *cuts]).tolist()


@given(group_sizes(), st.sampled_from([8, 5, 64]))
@example([0, 0, 0, 0], 8)
@example([0, R, 0, 0], 8)
@example([0, 0, 0, R], 5)
@example([8, 8, 8, 8], 8)
@example([1, 7, 1, 28], 8)
@example([33, 1, 1, 1], 8)
@settings(deadline=None, max_examples=100)
def test_equals_a_loop(sizes, block):
    check(sizes, block)


def test_a_wrong_group_is_noticed():
    with pytest.raises(AssertionError):
        x, weight, dy = drawn()
        got = program(8)(x, weight, np.array([9, 9, 9, 10], np.int32), dy)
        np.testing.assert_allclose(got[0], reference(x, weight, [9, 10, 9, 9], dy)[0], rtol=1e-12)


@given(group_sizes(), st.sampled_from([1, 4, 8, 37]))
@settings(deadline=None, max_examples=40)
def test_visits_cover_every_row_once(sizes, block):
    with jax.disable_jit():
        found = visits(jnp.asarray(sizes), R, block)
    seen = np.full(R, -1)
    for group, start, first, last in zip(*map(np.asarray, found), strict=True):
        assert 0 <= start <= R - block and (first == last or start <= first < last <= start + block)
        assert (seen[first:last] == -1).all()
        seen[first:last] = group
    want = np.repeat(np.arange(G), sizes)
    np.testing.assert_array_equal(seen, [*want, *[-1] * (R - len(want))])
    assert len(found.group) == -(-R // block) + G - 1


def test_bfloat16_sums_in_float32():
    """Hundreds of rows of one sign in blocks of 8, against float64: half a unit in the last place, of the one rounding of each result.

    Control: the weights' gradients added up in bfloat16, block by block."""
    rng, sizes, block = np.random.default_rng(0), [600, 0, 333, 91], 8
    shapes = (sum(sizes), I), (G, O, I), (sum(sizes), O)
    x, weight, dy = (jnp.asarray(1 + rng.random(shape), jnp.bfloat16) for shape in shapes)
    wide = [np.asarray(a, np.float64) for a in (x, weight, dy)]
    want = reference(*wide[:2], sizes, wide[2])
    for a, b in zip(program(block)(x, weight, jnp.asarray(sizes), dy), want, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=2.0**-8)
    total = jnp.zeros((O, I), jnp.bfloat16)
    for start in range(0, sizes[0], block):
        total += dy[start : start + block].T @ x[start : start + block]
    assert np.abs(np.asarray(total, np.float64) / want[2][0] - 1).max() > 2.0**-7


def test_no_rows():
    y = grouped_matmul(jnp.zeros((0, I)), jnp.ones((G, O, I)), jnp.zeros(G, jnp.int32))
    assert y.shape == (0, O)


def test_default_block():
    assert default_block(4096, 8) == 16
    assert default_block(131072, 8) == 512
    assert default_block(524288, 16) == 1024
    assert default_block(524288, 1) == 1024
    assert default_block(5, 3) == 5
    for rows, groups in ((131072, 8), (524288, 128), (8192, 4)):
        assert (groups - 1) * default_block(rows, groups) <= 0.04 * rows


def flops(function, *arguments):
    compiled = jax.jit(function).lower(*arguments).compile()
    return measure(compiled.as_text()).flops


@pytest.mark.parametrize("groups", [1, 8, 32])
def test_cost_is_that_of_the_rows(groups):
    """Matmul FLOPs of forward and both gradients in the compiled program: routed rows and at most 4% more, whatever the number of groups.

    The negative control is `lax.ragged_dot`, whose forward alone costs `groups` times as much."""
    rows, inputs, outputs = 32768, 16, 8
    x, weight = jnp.zeros((rows, inputs), jnp.float32), jnp.zeros((groups, outputs, inputs), jnp.float32)
    sizes, dy = jnp.zeros(groups, jnp.int32), jnp.zeros((rows, outputs), jnp.float32)
    once = 2 * rows * inputs * outputs

    def all_three(x, weight, sizes, dy):
        y, transpose = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, weight)
        return y, transpose(dy)

    assert 3 * once <= flops(all_three, x, weight, sizes, dy) <= 3.12 * once
    if groups == 8:
        assert flops(lambda x, w, s: jax.lax.ragged_dot(x, w.swapaxes(1, 2), s), x, weight, sizes) >= groups * once


@pytest.mark.parametrize(("platform", "routed"), [("cpu", 8192), ("gpu", 20480)])
@pytest.mark.parametrize("load", ["even", "uneven", "one takes all", "nothing"])
def test_rows_that_a_buffer_has_to_spare_cost_nothing(monkeypatch, platform, routed, load):
    """A buffer of 1.5 times the routed rows in the model's own blocks (128, 512): turns that forward, input gradient and weight gradient
    really make, together the routed rows and one block more for each group at most.

    Control: the work list of the whole buffer has more."""
    rows, groups = routed * 3 // 2, 8
    block = default_block(rows, groups, BLOCK[platform])
    assert block == BLOCK[platform]
    part = {"even": np.ones(8), "uneven": np.array([0, 3, 1, 0, 2, 5, 0.5, 1]), "one takes all": np.eye(8)[5], "nothing": np.zeros(8)}[load]
    sizes = np.floor(part / max(part.sum(), 1) * routed).astype(np.int32)
    turns, own_rows = [], module.own_rows

    def counted(block, here):
        jax.debug.callback(lambda first, last: turns.append(int(last - first)), here.first, here.last)
        return own_rows(block, here)

    monkeypatch.setattr(module, "own_rows", counted)
    x, weight, dy = jnp.ones((rows, 2)), jnp.ones((groups, 3, 2)), jnp.ones((rows, 3))

    def all_three(x, weight, dy):
        y, transpose = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), block), x, weight)
        return y, *transpose(dy)

    y, dx, dweight = jax.block_until_ready(jax.jit(all_three)(x, weight, dy))
    jax.effects_barrier()
    assert sum(turns) == 3 * sizes.sum() and len(turns) % 3 == 0 and min(turns, default=1) > 0
    assert len(turns) // 3 * block <= sizes.sum() + block * (sizes > 0).sum()
    assert len(visits(jnp.asarray(sizes), rows, block).group) * block > sizes.sum() + block * groups
    assert (y == 2 * (np.arange(rows) < sizes.sum())[:, None]).all() and (dx == 3 * (np.arange(rows) < sizes.sum())[:, None]).all()
    assert (dweight == sizes[:, None, None]).all()
