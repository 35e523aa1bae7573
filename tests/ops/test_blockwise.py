"""What the numbers of test_attention do not show: memory, skipped tiles, names, blocks that add up."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.ops.blockwise import attend, block_backward, block_forward
from jaxpar.ops.tiles import Marks, Masking, Tiles, tile_pairs
from tests.ops import dense
from tests.ops.test_attention import normal


def marks_of(positions: jax.Array) -> Marks:
    return Marks(positions, positions)


def causal(length: int) -> Marks:
    return marks_of(jnp.arange(length, dtype=jnp.int32)[None])


def largest_buffer(text: str) -> int:
    """Elements of the largest array in a compiled program."""
    shapes = re.findall(r"\b(?:f32|f64|bf16|pred|s32)\[([\d,]+)\]", text)
    return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)


def test_no_buffer_of_s_by_s():
    length, block = 4096, 512
    x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)

    def compiled(function):
        return jax.jit(jax.grad(lambda *x: function(*x).sum(), (0, 1, 2))).lower(x, x, x).compile()

    ours = compiled(lambda q, k, v: attend(Masking(scale=1.0, ordered=True, block=block), q, k, v, causal(length))[0])
    plain = compiled(lambda q, k, v: dense.attention(q, k, v, jnp.tril(jnp.ones((1, length, length), bool)), 1.0)[0])
    assert largest_buffer(ours.as_text()) <= block**2
    assert ours.memory_analysis().temp_size_in_bytes < 8 * block**2 * 4
    assert largest_buffer(plain.as_text()) >= length**2 and plain.memory_analysis().temp_size_in_bytes > length**2 * 4


def pairs(**options) -> list[tuple[int, int]]:
    return tile_pairs(8, 8, 16, 16, Masking(scale=1.0, **options))


def test_hidden_tiles_are_not_in_the_list():
    assert len(pairs()) == 64
    assert sorted(pairs(ordered=True)) == [(i, j) for i in range(8) for j in range(i + 1)]
    assert len(pairs(ordered=True, causal=False)) == 64
    for window in (1, 2, 17, 18, 40):
        kept = pairs(ordered=True, window=window)
        needed = {(q // 16, k // 16) for q in range(128) for k in range(q + 1) if q - k < window}
        assert set(kept) == needed, window


def test_a_traced_window_needs_a_prefix_of_the_list():
    q = jnp.zeros((1, 128, 1, 2))
    for window in (0, 1, 17, 18, 40, 1000):
        tiles = Tiles(Masking(scale=1.0, ordered=True, block=16), q, q, causal(128)._replace(window=jnp.int32(window)))
        assert set(tiles.pairs[: int(tiles.count())]) == set(pairs(ordered=True, window=window)), window


def count(jaxpr, name: str) -> int:
    """Equations of that primitive, inner programs included."""
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == name
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            total += count(inner, name) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize("block", [8, 2])
def test_a_policy_that_keeps_the_names_recomputes_no_attention(block: int):
    q = k = v = jnp.ones((1, 8, 2, 4), jnp.float32)
    masking = Masking(scale=1.0, ordered=True, block=block)

    def exponentials(*names: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        run = jax.checkpoint(lambda q, k, v: attend(masking, q, k, v, causal(8))[0] * 2, policy=policy)
        return count(jax.make_jaxpr(jax.grad(lambda q: (run(q, k, v) ** 2).sum()))(q).jaxpr, "exp")

    forward = count(jax.make_jaxpr(lambda q: attend(masking, q, k, v, causal(8))[0])(q).jaxpr, "exp")
    assert exponentials("attention_out", "attention_lse") == forward + 1
    assert exponentials() == 2 * forward + 1


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_of_keys_add_up(softcap: float | None):
    """Forward by merging with the log-sum-exp, backward with the global one: what ring attention does. Some queries see one block only."""
    masking = Masking(scale=0.5, softcap=softcap, block=4)
    q, k, v, do = (normal(i, 1, 10, n, 4) for i, n in enumerate((4, 2, 2, 4)))
    positions = jnp.arange(10, dtype=jnp.int32)[None]
    whole = marks_of(positions)
    parts = [(slice(n, n + 5), Marks(positions, positions[:, n : n + 5])) for n in (5, 0)]
    blocks = [block_forward(masking, q, k[:, at], v[:, at], marks) for at, marks in parts]
    lse = jnp.logaddexp(blocks[0][1], blocks[1][1])
    o = sum(x * jnp.exp(part - lse).transpose(0, 2, 1)[..., None] for x, part in blocks)
    right_o, right_lse = block_forward(masking, q, k, v, whole)
    np.testing.assert_allclose(o, right_o, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse, right_lse, rtol=0, atol=1e-14)
    right = block_backward(masking, q, k, v, o, lse, do, whole)
    shares = [block_backward(masking, q, k[:, at], v[:, at], o, lse, do, marks) for at, marks in parts]
    np.testing.assert_allclose(shares[0][0] + shares[1][0], right[0], rtol=0, atol=1e-13)
    for n in (1, 2):
        np.testing.assert_allclose(jnp.concatenate([shares[1][n], shares[0][n]], 1), right[n], rtol=0, atol=1e-13)
    own = [block_backward(masking, q, k[:, at], v[:, at], *blocks[i], do, marks) for i, (at, marks) in enumerate(parts)]
    assert abs(own[0][0] + own[1][0] - right[0]).max() > 0.01  # each with its own log-sum-exp is something else
