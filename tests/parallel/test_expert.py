"""Dispatch of tokens to experts on several devices: results and every gradient equal one device; overflow and drops by plain counting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import BATCH, EXPERT, SEQ, TENSOR, make_mesh
from jaxpar.ops.grouped_matmul import grouped_matmul
from jaxpar.ops.router import Router, select
from jaxpar.parallel.collectives import all_reduce, padded_all_to_all, varying
from jaxpar.parallel.expert import Dispatch, moe, through

T, K, D, F, E = 48, 3, 5, 4, 12  # tokens of all devices together

FOLDS = {
    "expert": (MeshShape(expert=4), (EXPERT,)),
    "expert, tensor": (MeshShape(expert=2, tensor=2), (EXPERT, TENSOR)),
    "expert, seq, tensor, beside data": (MeshShape(data=2, expert=1, seq=2, tensor=2), (EXPERT, SEQ, TENSOR)),
    "expert beside tensor": (MeshShape(expert=2, tensor=2), (EXPERT,)),
}
TOKENS = (*BATCH, SEQ, TENSOR)


def drawn(kind="uneven", seed=0):
    """x, weights, choices [T, K] and the experts' two matrices. Kinds of choices say how even the load is."""
    rng = np.random.default_rng(seed)
    score = rng.random((T, E)) + {"uneven": np.linspace(0, 0.6, E), "even": 0, "one takes all": 10.0 * (np.arange(E) == 7)}[kind]
    chosen = np.argsort(-score, axis=1)[:, :K].astype(np.int32)
    chosen[rng.random(T) < 0.1] = E  # padding goes nowhere
    return rng.normal(size=(T, D)), rng.random((T, K)), chosen, rng.normal(size=(E, F, D)), rng.normal(size=(E, D, F))


def reference(x, weights, chosen, up, down, kept=None):
    y = np.zeros_like(x)
    for t in range(T):
        for k in range(K):
            e = chosen[t, k]
            if e < E and (kept is None or kept[t, k]):
                y[t] += weights[t, k] * (down[e] @ np.tanh(up[e] @ x[t]))
    return y


def served(up, down):
    """Experts of two matrices with tanh between them, on rows sorted by expert."""

    def experts(rows, weights, sizes):
        return grouped_matmul(jnp.tanh(grouped_matmul(rows, up, sizes, 8)) * weights[:, None], down, sizes, 8)

    return experts


@functools.cache
def program(fold, method, **settings):
    return _program(FOLDS[fold][0], Dispatch(experts=E, axes=FOLDS[fold][1], method=method, **settings))


def _program(shape, dispatch):
    """Jitted (x, weights, chosen, up, down, dy) -> y, lost of each device, gradients of the four, on global arrays."""
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    tokens, held = P(TOKENS), P(dispatch.axes)

    def local(x, weights, chosen, up, down, dy):
        def forward(x, weights, up, down):
            return through(x, weights, chosen, served(up, down), dispatch)[:2]

        y, transpose, lost = jax.vjp(forward, x, weights, up, down, has_aux=True)
        dx, dweights, dup, ddown = transpose(dy)
        partial = [tuple(sorted(varying(g) - set(dispatch.axes))) for g in (dup, ddown)]
        dup, ddown = (all_reduce(g, axes) if axes else g for g, axes in zip((dup, ddown), partial, strict=True))
        return y, jax.tree.map(lambda n: n[None], lost), dx, dweights, dup, ddown

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(tokens, tokens, tokens, held, held, tokens),
            out_specs=(tokens, tokens, tokens, tokens, held, held),
        )
    )


def outcome(program, kind="uneven"):
    x, weights, chosen, up, down = drawn(kind)
    dy = np.random.default_rng(9).normal(size=(T, D))
    return jax.device_get(program(x, weights, chosen, up, down, dy))


@functools.cache
def one_device(kind):
    return outcome(_program(MeshShape(), Dispatch(experts=E, axes=(EXPERT,))), kind)


def gap(got, want):
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, want, strict=True))


def test_one_device_equals_a_loop():
    y, lost, *_ = one_device("uneven")
    np.testing.assert_allclose(y, reference(*drawn()), rtol=1e-11, atol=1e-12)
    assert not lost.overflow.any() and not lost.dropped.any()


@pytest.mark.parametrize("method", ["gather", "ragged", "capacity"])
@pytest.mark.parametrize("fold", FOLDS)
def test_equals_one_device(fold, method):
    """Room for the worst case: then all methods compute the same, whatever the load."""
    run = program(fold, method, buffer_factor=4.0, capacity_factor=4.0)
    for kind in ("uneven", "one takes all"):
        got, want = outcome(run, kind), one_device(kind)
        assert not got[1].overflow.any() and not got[1].dropped.any()
        assert gap((got[0], *got[2:]), (want[0], *want[2:])) < 1e-11, kind


def test_chunks_equal_one_device():
    """Each with a buffer of its own: three chunks of 4 tokens a device."""
    got, want = outcome(program("expert", "ragged", buffer_factor=4.0, chunks=3)), one_device("uneven")
    assert not got[1].overflow.any() and gap((got[0], *got[2:]), (want[0], *want[2:])) < 1e-11


def test_moe_in_somebody_elses_shard_map():
    """Axes of another name, a router with weights of its own, gradients by jax.grad from outside: equal to every token through each of its
    experts without any mesh."""
    x, _, _, up, down = drawn()
    matrix = np.random.default_rng(5).normal(size=(E, D))
    kind = Router(kind="softmax_topk", k=K)
    mesh = jax.make_mesh((4,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, matrix, up, down):
        dispatch = Dispatch(experts=E, axes=("workers",), method="ragged", buffer_factor=4.0, chunks=2)
        y, lost = moe(x, lambda x: select(kind, x @ matrix.T), served(up, down), dispatch)
        return y, lost.overflow[None]

    by_worker = P("workers")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(by_worker, P(), by_worker, by_worker), out_specs=(by_worker, by_worker))

    def plain(x, matrix, up, down):
        weights, chosen = select(kind, x @ matrix.T)
        each = jnp.einsum("tef,edf->ted", jnp.tanh(jnp.einsum("td,efd->tef", x, up)), down)
        return (jnp.take_along_axis(each, chosen[..., None], 1) * weights[..., None]).sum(1), jnp.zeros(1)

    def run(function):
        def loss(*arrays):
            y, overflow = function(*arrays)
            return jnp.sin(y).sum(), overflow

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(x, matrix, up, down)

    ((value, overflow), grads), ((want, _), want_grads) = run(sharded), run(plain)
    assert abs(value - want) < 1e-11 * abs(want) and gap(grads, want_grads) < 1e-11
    assert not overflow.any() and np.abs(want_grads[1]).max() > 1e-3


@pytest.mark.parametrize("method", ["gather", "ragged"])
def test_overflow_is_counted(method):
    """A buffer of 1.0 times the balanced load holds an expert axis of 4 only if none gets more."""
    run = program("expert", method, buffer_factor=1.0)
    room = T // 4 * K
    for kind in ("uneven", "one takes all"):
        chosen = drawn(kind)[2]
        load = np.array([(chosen // (E // 4) == device).sum() for device in range(4)])
        assert load.max() > room
        np.testing.assert_array_equal(outcome(run, kind)[1].overflow, np.maximum(load - room, 0))


@pytest.mark.parametrize("method", ["gather", "ragged"])
@pytest.mark.parametrize("chunks", [1, 3])
@given(bias=st.lists(st.floats(0, 3), min_size=E, max_size=E), padding=st.sampled_from([0, 0.3, 1]), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_overflow_of_any_load(method, chunks, bias, padding, seed):
    """Each chunk's buffer by itself; tokens that lost nothing have what a plain loop gives them."""
    x, weights, _, up, down = drawn()
    rng = np.random.default_rng(seed)
    chosen = np.argsort(-rng.random((T, E)) - np.array(bias), axis=1)[:, :K].astype(np.int32)
    chosen[rng.random(T) < padding] = E
    y, lost, *_ = jax.device_get(program("expert", method, buffer_factor=1.0, chunks=chunks)(x, weights, chosen, up, down, np.ones((T, D))))
    by_chunk = chosen.reshape(4, chunks, -1)  # of a device's tokens
    load = np.array([[(by_chunk[:, chunk] // (E // 4) == device).sum() for chunk in range(chunks)] for device in range(4)])
    over = np.maximum(load - T // 4 * K // chunks, 0)
    np.testing.assert_array_equal(lost.overflow, over.sum(1))
    full = np.zeros((T // 4, 5), bool)  # by place on its device and the device that serves it; 4 is nobody
    full[:, :4] = np.repeat(over.T > 0, T // 4 // chunks, axis=0)
    safe = ~full[np.arange(T)[:, None] % (T // 4), chosen // (E // 4)].any(1)
    np.testing.assert_allclose(y[safe], reference(x, weights, chosen, up, down)[safe], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("by_weight", [False, True])
@pytest.mark.parametrize("ways", [1, 4])
def test_capacity_drops_as_a_plain_loop_does(ways, by_weight):
    x, weights, chosen, up, down = drawn()
    dispatch = Dispatch(experts=E, axes=(EXPERT,), method="capacity", capacity_factor=0.75, by_weight=by_weight)
    y, lost, *grads = outcome(_program(MeshShape(expert=ways), dispatch))
    capacity, here, kept, dropped = dispatch.capacity(T // ways, K), T // ways, np.zeros((T, K), bool), []
    assert capacity == -(-0.75 * here * K // E)
    for device in range(ways):
        mine = [(t, k) for t in range(device * here, (device + 1) * here) for k in range(K)]
        mine = sorted(mine, key=lambda at: -weights[at]) if by_weight else mine
        filled = [0] * (E + 1)
        for t, k in mine:
            filled[chosen[t, k]] += 1
            kept[t, k] = filled[chosen[t, k]] <= capacity
        dropped.append(sum(max(n - capacity, 0) for n in filled[:E]))
    assert sum(dropped) > 5
    np.testing.assert_array_equal(lost.dropped, dropped)
    np.testing.assert_allclose(y, reference(x, weights, chosen, up, down, kept), rtol=1e-11, atol=1e-12)
    assert gap([reference(x, weights, chosen, up, down)], [y]) > 1e-3
    # Gradients of what a plain reference keeps: a dropped choice gives and gets none, and a token that lost all of its choices is 0.
    dy = np.random.default_rng(9).normal(size=(T, D))
    want = plain_gradients(x, weights, chosen, up, down, kept, dy)
    assert all(np.isfinite(each).all() for each in grads) and gap(grads, want) < 1e-11
    assert not grads[1][(chosen < E) & ~kept].any() and gap(plain_gradients(x, weights, chosen, up, down, chosen < E, dy), want) > 1e-3
    lost_all = (kept & (chosen < E)).sum(1) == 0
    assert lost_all.any() and not y[lost_all].any() and not grads[0][lost_all].any()


def plain_gradients(x, weights, chosen, up, down, kept, dy):
    """Gradients of the sum of dy times `reference`, by hand, choice by choice: dx, dweights, dup, ddown."""
    grads = [np.zeros_like(a) for a in (x, weights, up, down)]
    for t, k in np.argwhere(kept & (chosen < E)):
        e = chosen[t, k]
        hidden = np.tanh(up[e] @ x[t])
        back = weights[t, k] * (down[e].T @ dy[t]) * (1 - hidden**2)
        grads[0][t] += up[e].T @ back
        grads[1][t, k] += dy[t] @ down[e] @ hidden
        grads[2][e] += np.outer(back, x[t])
        grads[3][e] += weights[t, k] * np.outer(dy[t], hidden)
    return grads


def test_padded_exchange_has_the_semantics_of_the_ragged_one():
    """By hand on 2 devices: offsets with gaps, an empty part, rows that nothing fills."""
    mesh = make_mesh(MeshShape(expert=2), jax.devices()[:2])
    x = np.arange(1.0, 11).reshape(10, 1)
    begins, sizes = np.array([[3, 0], [1, 2]]), np.array([[2, 3], [0, 2]])
    lands = np.array([[1, 0], [4, 4]])  # where device 0's rows land on devices 0 and 1, then device 1's
    arrive = sizes.T

    def local(x, *offsets):
        return padded_all_to_all(x, 6, *(a[0] for a in offsets), EXPERT)

    run = jax.shard_map(local, mesh=mesh, in_specs=P(EXPERT), out_specs=P(EXPERT))
    got = np.asarray(jax.jit(run)(x, *(a.astype(np.int32) for a in (begins, sizes, lands, arrive)))).reshape(2, 6)
    np.testing.assert_array_equal(got, [[0, 4, 5, 0, 0, 0], [1, 2, 3, 0, 8, 9]])


def test_the_real_exchange_gets_what_the_padded_one_gets(monkeypatch):
    """`ragged_all_to_all` exists on GPUs alone and is not run here. Up to the call the program is one: for "gpu" JAX's primitive is given,
    value for value, the rows, offsets and sizes that the padded exchange of "cpu" is given, whose meaning the test above has by hand."""
    from jax import lax

    seen: dict[str, list] = {"cpu": [], "gpu": []}
    filled: list[bool] = []  # whether what the primitive writes into holds anything yet

    def recorded(name, real, arguments):
        where = jax.lax.axis_index("expert")
        jax.debug.callback(lambda place, *values: seen[name].append((int(place), *map(np.asarray, values))), where, *arguments)
        return real

    def primitive(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        assert axis_name == (EXPERT,)
        jax.debug.callback(lambda output: filled.append(output.any()), output)
        arguments = operand, input_offsets, send_sizes, output_offsets, recv_sizes
        return recorded("gpu", padded(operand, output.shape[0], *arguments[1:], axis_name), arguments)

    padded = padded_all_to_all

    def emulated(x, rows, *offsets_and_axes):
        *offsets, axes = offsets_and_axes
        return recorded("cpu", padded(x, rows, *offsets, axes), (x, *offsets))

    monkeypatch.setattr(lax, "ragged_all_to_all", primitive)
    monkeypatch.setattr("jaxpar.parallel.collectives.padded_all_to_all", emulated)
    results = {}
    for platform in seen:
        dispatch = Dispatch(experts=E, axes=(EXPERT,), method="ragged", buffer_factor=1.0, platform=platform)
        results[platform] = outcome(_program(MeshShape(expert=4), dispatch))
        jax.effects_barrier()
    assert gap([results["gpu"][0], *results["gpu"][2:]], [results["cpu"][0], *results["cpu"][2:]]) == 0
    calls = {name: sorted((place, *(value.tobytes() for value in values)) for place, *values in found) for name, found in seen.items()}
    assert calls["gpu"] == calls["cpu"] and len(calls["gpu"]) == 4 * 6  # rows, weights and results, and the gradients of each
    assert len(filled) == len(calls["gpu"]) and not any(filled), "rows that nothing arrives in would not be zeros"
    sizes = [values[2] for _, *values in seen["gpu"]]
    assert any((size == 0).any() for size in sizes) or len({tuple(size) for size in sizes}) > 4, "an uneven load"
