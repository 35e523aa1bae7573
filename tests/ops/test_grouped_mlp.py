"""The fused MLP of experts equals one of three grouped matmuls, and a loop over groups, in float64; its cost in the compiled program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.ops.grouped_matmul import grouped_matmul
from jaxpar.ops.grouped_mlp import grouped_mlp, in_sequence
from jaxpar.ops.mlp import gated
from jaxpar.plan.work import measure

R, D, F, G = 37, 6, 5, 4


def three(x, weight, gate, up, down, sizes, activation, block=0):
    hidden = gated(grouped_matmul(x, gate, sizes, block), grouped_matmul(x, up, sizes, block), activation)
    return grouped_matmul((hidden * weight[:, None]).astype(x.dtype), down, sizes, block)


@functools.cache
def program(function, activation, block):
    def run(x, weights, sizes, dy):
        y, transpose = jax.vjp(lambda x, w: function(x, *w, sizes, activation, block), x, weights)
        return jax.tree.leaves((y, transpose(dy)))

    return jax.jit(run)


def drawn(dtype=np.float64):
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape) for shape in ((R,), (G, F, D), (G, F, D), (G, D, F))]
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), (rng.normal(size=(R, D)), weights, rng.normal(size=(R, D))))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("sizes", [[9, 0, 17, 11], [0, 37, 0, 0], [8, 8, 8, 8], [0, 0, 0, 0], [1, 30, 1, 2]], ids=str)
def test_equals_three_grouped_matmuls(sizes, activation):
    x, weights, dy = drawn()
    got = program(grouped_mlp, activation, 8)(x, weights, np.array(sizes, np.int32), dy)
    want = program(three, activation, 8)(x, weights, np.array(sizes, np.int32), dy)
    assert len(got) == 6
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_equals_a_loop():
    x, (weight, gate, up, down), _ = drawn()
    sizes = [9, 0, 17, 5]
    got = np.asarray(grouped_mlp(x, weight, gate, up, down, jnp.asarray(sizes), "silu", 8))
    group = np.repeat(np.arange(G), sizes)
    for r, g in enumerate(group):
        a, b = gate[g] @ x[r], up[g] @ x[r]
        np.testing.assert_allclose(got[r], weight[r] * (down[g] @ (a / (1 + np.exp(-a)) * b)), rtol=1e-11)
    assert not got[len(group) :].any()


def test_bfloat16():
    x, weights, dy = drawn(jnp.bfloat16)
    sizes = np.array([20, 0, 3, 14], np.int32)
    got = program(grouped_mlp, "silu", 8)(x, weights, sizes, dy)
    wide = jax.tree.map(lambda a: a.astype(jnp.float64), (x, weights, dy))
    for a, b in zip(got, program(three, "silu", 8)(wide[0], wide[1], sizes, wide[2]), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float64), b, rtol=3e-2, atol=3e-2 * float(abs(b).max()))


def test_chunks_in_sequence_share_one_gradient():
    """Rows in two chunks, each with its own sizes: y and every gradient are those of two calls, the experts' the sum of both.

    Control: neither's alone."""
    chunks = [[9, 0, 17, 11], [0, 37, 0, 0]]

    def chained(x, weight, experts):
        total = []
        for sizes in chunks:
            y, experts = in_sequence(x, weight, experts, jnp.asarray(sizes), "silu", 8)
            total.append(y)
        return total

    def each_alone(x, weight, experts):
        return [grouped_mlp(x, weight, *experts, jnp.asarray(sizes), "silu", 8) for sizes in chunks]

    def run(function, *factors):
        x, (weight, *experts), dy = drawn()

        def both(x, weight, experts, dy):
            y, transpose = jax.vjp(function, x, weight, experts)
            return jax.tree.leaves((y, transpose([factor * dy for factor in factors])))

        return jax.jit(both)(x, weight, tuple(experts), dy)

    together, apart = run(chained, 1.0, 2.0), run(each_alone, 1.0, 2.0)
    for a, b in zip(together, apart, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    for alone in (run(each_alone, 1.0, 0.0), run(each_alone, 0.0, 2.0)):
        assert all(abs(a - b).max() > 1e-2 for a, b in zip(alone[-3:], together[-3:], strict=True))


def test_visits_without_rows_are_not_made(monkeypatch):
    """64 rows in blocks of 8 with 4 groups are 11 visits at most; 9, 0, 7 and 5 rows need 4 of them."""
    from jaxpar.ops import grouped_matmul as module

    made, own_rows = [], module.own_rows

    def counted(block, here):
        jax.debug.callback(lambda group: made.append(int(group)), here.group)
        return own_rows(block, here)

    monkeypatch.setattr(module, "own_rows", counted)
    x, (_, gate, up, down), _ = drawn()
    x, weight = jnp.concatenate([x, x])[:64], jnp.ones(64)
    for sizes, visited in (([9, 0, 7, 5], [0, 0, 2, 3]), ([0, 0, 0, 0], []), ([20, 20, 20, 4], None)):
        made.clear()
        jax.block_until_ready(grouped_mlp(x, weight, gate, up, down, jnp.asarray(sizes, jnp.int32), "silu", 8))
        jax.effects_barrier()
        assert sorted(made) == visited if visited is not None else len(made) == 10


def test_cost_and_memory():
    """11 matmuls of the rows, at most 4% more; no array of R rows by F, which three matmuls have."""
    rows, width, wide, groups = 32768, 8, 32, 4
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    weights = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows,), (groups, wide, width), (groups, wide, width), (groups, width, wide))
    ]
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    fused, apart = (program(function, "silu", 0).lower(x, weights, sizes, x).compile() for function in (grouped_mlp, three))
    once = 2 * rows * width * wide
    assert 11 * once <= measure(fused.as_text()).flops <= 11 * 1.04 * once
    assert 9 * once <= measure(apart.as_text()).flops <= 9 * 1.04 * once
    assert f"f32[{rows},{wide}]" not in fused.as_text() and f"f32[{rows},{wide}]" in apart.as_text()
