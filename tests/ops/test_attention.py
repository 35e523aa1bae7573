from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import DATA, TENSOR, make_mesh
from jaxpar.ops.attention import attention, attention_with_lse
from tests.ops import dense


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.array(np.random.default_rng(seed).normal(size=shape))


def documents(lengths: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Positions that restart and segments from 1, of rows of documents; a negative length is padding."""
    positions = [[p for n in row for p in range(abs(n))] for row in lengths]
    segments = [[(d + 1) * (n > 0) for d, n in enumerate(row) for _ in range(abs(n))] for row in lengths]
    return np.array(positions, np.int32), np.array(segments, np.int32)


def both(q, k, v, marks: dict, *, window: int = 0, causal: bool = True, softcap: float | None = None, traced: bool = False, **more):
    """(o, lse, dq, dk, dv) of ours and of the dense one, with derivatives through o and lse at once."""
    arrays = {f"{side}_{name}_BS": jnp.array(value) for (side, name), value in marks.items() if value is not None}
    visible = dense.visibility(
        *(marks["q", "positions"], marks["k", "positions"], marks.get(("q", "segments")), marks.get(("k", "segments"))), causal, window
    )
    scale = 0.7

    def ours(q, k, v, window):
        given = window if traced else int(static_window)
        return attention_with_lse(q, k, v, **arrays, window=given, causal=causal, softcap=softcap, scale=scale, platform="gpu", **more)

    static_window = window
    weights = normal(9, *q.shape[:-1], v.shape[-1]), normal(8, q.shape[0], q.shape[2], q.shape[1])

    def run(function, *inputs):
        def loss(q, k, v):
            o, lse = function(q, k, v, *inputs)
            return (o * weights[0]).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * weights[1]).sum(), (o, lse)

        (_, outputs), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return (*outputs, *grads)

    mine = jax.jit(lambda window: run(ours, window))(jnp.int32(window))
    return mine, jax.jit(lambda: run(lambda q, k, v: dense.attention(q, k, v, visible, scale, softcap)))()


def same(mine, right, atol: float = 1e-12) -> None:
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), mine, right, strict=True):
        assert a.dtype == jnp.float64 and (name == "lse" or np.isfinite(a).all()), name
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)


@st.composite
def cases(draw) -> dict:
    rows, group, kv_heads = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3])), draw(st.integers(1, 2))
    length = draw(st.integers(1, 19))
    lengths = []
    for _ in range(rows):
        row = []
        while (left := length - sum(map(abs, row))) > 0:
            row.append(draw(st.integers(1, left)) * (1 if draw(st.integers(0, 4)) else -1))
        lengths.append(row)
    return dict(
        shape=(rows, length, group * kv_heads, kv_heads, draw(st.sampled_from([2, 4])), draw(st.sampled_from([2, 6]))),
        lengths=lengths,
        block=draw(st.integers(2, 20)),
        window=draw(st.sampled_from([0, 1, 4, 9])),
        causal=draw(st.sampled_from([True, True, False])),
        softcap=draw(st.sampled_from([None, 1.5])),
        traced=draw(st.booleans()),
        ordered=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])  # shrinking would compile for minutes
@given(cases())
def test_any_case_equals_dense(case: dict):
    rows, length, heads, kv_heads, head, value = case["shape"]
    positions, segments = documents(case["lengths"])
    marks = {("q", "positions"): positions, ("k", "positions"): positions, ("q", "segments"): segments, ("k", "segments"): segments}
    if not case["ordered"]:  # then the order of the arrays must not matter: shuffle keys
        order = np.random.default_rng(case["seed"]).permutation(length)
        marks |= {("k", "positions"): positions[:, order], ("k", "segments"): segments[:, order]}
    seed = case["seed"]
    q, k, v = (
        normal(seed, rows, length, heads, head),
        normal(seed + 1, rows, length, kv_heads, head),
        normal(seed + 2, rows, length, kv_heads, value),
    )
    options = {name: case[name] for name in ("block", "window", "causal", "softcap", "traced", "ordered")}
    same(*both(q, k, v, marks, **options))


def one_document(length: int, rows: int = 1) -> dict:
    positions, _ = documents([[length]] * rows)
    return {("q", "positions"): positions, ("k", "positions"): positions}


@pytest.mark.parametrize(("causal", "ordered"), [(True, True), (True, False), (False, True), (False, False)])
def test_no_segments(causal: bool, ordered: bool):
    """Length 11 in blocks of 4 needs padding that only the kernel knows of. The other order is far off."""
    q, k, v = normal(0, 1, 11, 4, 4), normal(1, 1, 11, 2, 4), normal(2, 1, 11, 2, 4)
    mine, right = both(q, k, v, one_document(11), causal=causal, ordered=ordered, block=4)
    same(mine, right)
    positions = jnp.arange(11, dtype=jnp.int32)[None]
    other = attention(q, k, v, q_positions_BS=positions, k_positions_BS=positions, causal=not causal, scale=0.7)
    assert abs(other - right[0]).max() > 0.1


def test_queries_and_keys_of_different_length():
    """One new token, and a block of queries beside a longer cache, with soft-capped scores."""
    for queries in (1, 5):
        q, k, v = normal(0, 2, queries, 4, 4), normal(1, 2, 13, 2, 4), normal(2, 2, 13, 2, 4)
        positions = np.arange(13, dtype=np.int32)[None].repeat(2, 0)
        marks = {("q", "positions"): positions[:, 13 - queries :], ("k", "positions"): positions}
        same(*both(q, k, v, marks, block=4, softcap=1.5))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_window_4_sees_1_2_3_4_4(ordered: bool, traced: bool):
    """With equal scores and values one-hot by key, o times the count of keys seen is 1 for each of them."""
    length = 9
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    q, k, v = jnp.zeros((1, length, 1, 2)), jnp.zeros((1, length, 1, 2)), jnp.eye(length)[None, :, None]
    window = jnp.int32(4) if traced else 4
    o = attention(q, k, v, q_positions_BS=positions, k_positions_BS=positions, window=window, ordered=ordered, block=3)
    np.testing.assert_array_equal((o[0, :, 0] > 0).sum(-1), [1, 2, 3, 4, 4, 4, 4, 4, 4])
    assert all(o[0, i, 0, i] > 0 for i in range(length))


@pytest.mark.parametrize("block", [4, 32])
def test_packed_documents_do_not_leak(block: int):
    positions, segments = map(jnp.array, documents([[5, 6, 3]]))
    q, k, v = normal(0, 1, 14, 2, 4), normal(1, 1, 14, 2, 4), normal(2, 1, 14, 2, 4)

    @jax.jit
    def run(x, segments):
        marks = dict(q_positions_BS=positions, k_positions_BS=positions, q_segments_BS=segments, k_segments_BS=segments)
        return attention(x[0], x[1], x[2], **marks, block=block, ordered=True)

    touched = tuple(x.at[:, :5].add(100.0) for x in (q, k, v))
    before, after = run((q, k, v), segments), run(touched, segments)
    np.testing.assert_array_equal(before[:, 5:], after[:, 5:])
    assert abs(before[:, :5] - after[:, :5]).max() > 1
    grads = jax.grad(lambda x: (run(x, segments)[:, 5:11] ** 2).sum())((q, k, v))
    for g in grads:
        assert (g[:, :5] == 0).all() and (g[:, 11:] == 0).all() and (g[:, 5:11] != 0).any()
    one = jnp.ones_like(segments)  # positions that restart are not enough
    assert abs(run((q, k, v), one)[:, 5:] - run(touched, one)[:, 5:]).max() > 0.1


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("block", [4, 32])
def test_rows_that_see_nothing(block: int, dtype):
    """Padding, and queries before every key: zeros, log-sum-exp -inf, finite gradients, zero where nothing is seen."""
    positions, segments = map(jnp.array, documents([[-3, 4, -4]]))
    q, k, v = (normal(i, 1, 11, 2, 4).astype(dtype) for i in range(3))

    @jax.jit
    def run(q, k, v):
        return attention_with_lse(
            q, k, v, q_positions_BS=positions, k_positions_BS=positions + 2, q_segments_BS=segments, k_segments_BS=segments, block=block
        )

    o, lse = run(q, k, v)
    blind = np.array([0, 1, 2, 3, 4, 7, 8, 9, 10])
    assert (o[:, blind] == 0).all() and (lse[:, :, blind] == -jnp.inf).all() and np.isfinite(lse[:, :, 5:7]).all()
    assert lse.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32) and o.dtype == dtype
    dq, dk, dv = jax.grad(lambda *x: (run(*x)[0] ** 2).sum().astype(jnp.float64), (0, 1, 2))(q, k, v)
    assert all(np.isfinite(np.asarray(g, np.float64)).all() for g in (dq, dk, dv))
    assert (dq[:, blind] == 0).all() and (dv[:, [0, 1, 2, 5, 6, 7, 8, 9, 10]] == 0).all() and (dv[:, 3:5] != 0).any()


@pytest.mark.parametrize("block", [16, 64])
def test_bfloat16_and_large_scores(block: int):
    """Statistics in float32: as close to the exact result as bfloat16 weights allow, with scores in the hundreds."""
    q, k, v = (normal(i, 2, 64, n, 16).astype(jnp.bfloat16) for i, n in enumerate((4, 2, 2)))
    q = q * 20
    positions = jnp.arange(64, dtype=jnp.int32)[None].repeat(2, 0)
    visible = dense.visibility(positions.tolist(), positions.tolist(), None, None, True, 0)

    @partial(jax.jit, static_argnums=0)
    def with_gradients(function, *x):
        y, pullback = jax.vjp(function, *x)
        return y, *pullback(jnp.ones_like(y))

    def run(*x):
        return attention(*x, q_positions_BS=positions, k_positions_BS=positions, ordered=True, block=block)

    ours = with_gradients(run, q, k, v)
    exact = with_gradients(lambda *x: dense.attention(*x, visible, 0.25)[0], *(x.astype(jnp.float64) for x in (q, k, v)))
    for mine, other in zip(ours, exact, strict=True):
        assert mine.dtype == jnp.bfloat16
        assert abs(mine.astype(jnp.float64) - other).max() < 0.02 * abs(other).max() + 0.02


def test_inside_shard_map_with_heads_over_tensor():
    """Queries over data and tensor, one key/value head replicated over tensor: its gradient is the sum over the group."""
    mesh = make_mesh(MeshShape(data=2, tensor=4))
    positions, segments = map(jnp.array, documents([[5, 6], [11], [2, -3, 6], [7, 4]]))
    q, k, v = normal(0, 4, 11, 8, 4), normal(1, 4, 11, 1, 4), normal(2, 4, 11, 1, 4)

    def run(q, k, v, positions, segments, window):
        marks = dict(q_positions_BS=positions, k_positions_BS=positions, q_segments_BS=segments, k_segments_BS=segments)
        return attention(q, k, v, **marks, window=window, block=4, ordered=True)

    def local(q, k, v, dy, *rest):
        y, pullback = jax.vjp(lambda *x: run(*x, *rest), q, k, v)
        return y, *pullback(dy)

    heads, rows = P(DATA, None, TENSOR), P(DATA)
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(heads, rows, rows, heads, rows, rows, P()), out_specs=(heads, heads, rows, rows), check_vma=True
    )
    inputs = (q, k, v, normal(3, *q.shape), positions, segments, jnp.int32(3))
    for mine, right in zip(jax.jit(sharded)(*inputs), jax.jit(local)(*inputs), strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-13)
