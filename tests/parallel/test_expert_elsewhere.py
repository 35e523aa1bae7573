"""`jaxpar.parallel.expert.moe` in a `shard_map` that is not ours, given what its callers may give it: routers that choose alike everywhere,
no tokens, dtypes that differ; and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.ops.grouped_matmul import grouped_matmul
from jaxpar.ops.grouped_mlp import grouped_mlp
from jaxpar.ops.router import Router, select
from jaxpar.parallel.expert import METHODS, Dispatch, moe

WAYS, T, K, D, F, E = 4, 16, 2, 6, 5, 8  # tokens of all devices together
KIND, WORKERS = Router(k=K), P("workers")


def drawn(dtype):
    """x[T, D], the router's matrix, and gate, up, down of each expert."""
    random = np.random.default_rng(3)
    return [jnp.asarray(random.normal(size=size), dtype) for size in ((T, D), (E, D), (E, F, D), (E, F, D), (E, D, F))]


def by_scores(x, matrix):
    return select(KIND, x @ matrix.T)


def by_place(x, matrix):
    """A device's tokens in turn to experts 0 to 3, whatever they are: the same on each device."""
    tokens = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    return jnp.full((x.shape[0], K), 0.5, x.dtype), (tokens + jnp.arange(K, dtype=jnp.int32)) % 4


def served(rows, weights, sizes, gate, up, down):
    return grouped_mlp(rows, weights, gate, up, down, sizes, "silu")


def layer(method="ragged", route=by_scores, serve=served, tokens=WORKERS, **settings):
    """x, matrix, gate, up, down -> y, of `WAYS` devices along an axis that jaxpar has no name for."""
    mesh = jax.make_mesh((WAYS,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x, matrix, *held):
        options = {"experts": E, "axes": ("workers",), "method": method, "buffer_factor": 4.0, "capacity_factor": 8.0, **settings}
        y, lost = moe(x, lambda x: route(x, matrix), lambda *rows: serve(*rows, *held), Dispatch(**options))
        return y, (lost.overflow + lost.dropped)[None]

    return jax.shard_map(local, mesh=mesh, in_specs=(tokens, P(), WORKERS, WORKERS, WORKERS), out_specs=(tokens, WORKERS))


def plain(x, weights, chosen, gate, up, down):
    """Every token through every expert, in float64."""
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, gate, up, down))
    gates, ups = (np.einsum("td,efd->tef", x, a) for a in (gate, up))
    each = np.einsum("tef,edf->ted", gates / (1 + np.exp(-gates)) * ups, down)
    return (np.take_along_axis(each, np.asarray(chosen)[..., None], 1) * np.asarray(weights)[..., None]).sum(1)


@pytest.mark.parametrize("method", METHODS)
def test_a_router_that_chooses_alike_on_each_device(method):
    arrays = drawn(jnp.float64)
    y, lost = jax.jit(layer(method, by_place))(*arrays)
    weights, chosen = (np.tile(a, (WAYS, 1)) for a in by_place(arrays[0][: T // WAYS], None))
    want = plain(arrays[0], weights, chosen, *arrays[2:])
    assert np.abs(y - want).max() < 1e-11 * np.abs(want).max() and not lost.any()
    other = plain(arrays[0], weights, (chosen + 1) % E, *arrays[2:])
    assert np.abs(y - other).max() > 1e-2 * np.abs(want).max(), "control: other experts"


@pytest.mark.parametrize("method", METHODS)
def test_no_tokens(method):
    """On each device: nothing comes out, and every gradient is 0."""
    x, *held = drawn(jnp.float64)
    loss = lambda *arrays: (lambda y, lost: (y.sum(), (y, lost)))(*layer(method, chunks=2)(*arrays))  # noqa: E731
    grads, (y, lost) = jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(x[:0], *held)
    assert y.shape == (0, D) and not lost.any() and not any(grad.any() for grad in grads)


def apart(rows, weights, sizes, gate, up, down):
    hidden = jax.nn.silu(grouped_matmul(rows, gate, sizes)) * grouped_matmul(rows, up, sizes)
    return grouped_matmul(hidden * weights[:, None].astype(hidden.dtype), down, sizes)


@pytest.mark.parametrize(("serve", "tokens", "weights"), [(served, "bfloat16", "float32"), (apart, "float32", "float64")])
def test_experts_of_another_dtype(serve, tokens, weights):
    """y in the tokens' dtype, gradients each in its own array's, as near to float64 as the narrower of the two allows."""
    x, matrix, *held = drawn(jnp.float64)
    x, held = x.astype(tokens), [a.astype(weights) for a in held]
    dy = jnp.asarray(np.random.default_rng(4).normal(size=x.shape))

    def loss(x, *held):
        y, _ = layer(serve=serve, route=lambda x, matrix: by_scores(x.astype(jnp.float64), matrix))(x, matrix, *held)
        return (y * dy).sum(), y

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (grads, y), (want_grads, want) = run(x, *held), run(*(a.astype(jnp.float64) for a in (x, *held)))
    assert y.dtype == x.dtype and [grad.dtype for grad in grads] == [a.dtype for a in (x, *held)]
    bound = 0.02 if tokens == "bfloat16" else 1e-6
    for a, b in zip((y, *grads), (want, *want_grads), strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() < bound * np.abs(b).max()


def routed(weights=(T // WAYS, K), chosen=(T // WAYS, K), kind=jnp.int32):
    return lambda x, matrix: (jnp.ones(weights), jnp.zeros(chosen, kind))


BAD = [
    ({"chunks": 3}, ValueError, r"chunks: 4 tokens of a device do not divide in 3 chunks"),
    ({"chunks": 0}, ValueError, r"chunks: 0 must be at least 1"),
    ({"experts": 6}, ValueError, r"experts: 6 do not divide over 4 devices; numbers of devices that work: 1, 2, 3, 6"),
    ({"experts": 0}, ValueError, r"experts: 0 do not divide over 4 devices; numbers of devices that work: none"),
    ({"method": "dense"}, ValueError, r"method: 'dense' is not one of gather, ragged, capacity"),
    ({"buffer_factor": 0.5}, ValueError, r"buffer_factor: 0\.5 must be at least 1"),
    ({"capacity_factor": 0.0}, ValueError, r"capacity_factor: 0\.0 must be positive"),
    ({"tokens": P()}, TypeError, r"x_TD: it does not vary over \['workers'\].*; split .* with check_vma=True"),
    ({"x": (WAYS, 4, D)}, ValueError, r"x_TD: shape \(1, 4, 6\) is not \[tokens, width\]"),
    ({"dtype": jnp.int32}, ValueError, r"x_TD: int32 are not floating-point numbers"),
    ({"route": routed(weights=(4,))}, ValueError, r"router: weights_TK of shape \(4,\) is not \[4 tokens, experts of a token\]"),
    ({"route": routed(chosen=(3, K))}, ValueError, r"router: chosen_TK of shape \(3, 2\) is not \[4 tokens, "),
    ({"route": routed(weights=(4, 1))}, ValueError, r"router: weights_TK \(4, 1\) and chosen_TK \(4, 2\) differ in shape"),
    ({"route": routed(kind=jnp.float32)}, ValueError, r"router: chosen_TK, float32, are not whole numbers"),
    ({"serve": lambda rows, *_: rows[:, :3]}, ValueError, r"experts: a result of shape \(32, 3\) for rows \(32, 6\)"),
    ({"serve": lambda rows, *_: rows[:1]}, ValueError, r"experts: a result of shape \(1, 6\) for rows \(32, 6\)"),
]


@pytest.mark.parametrize(("case", "kind", "message"), BAD, ids=[message[:24] for *_, message in BAD])
def test_bad_input(case, kind, message):
    x, *held = drawn(jnp.float64)
    case = dict(case)
    tokens = jax.ShapeDtypeStruct(case.pop("x", x.shape), case.pop("dtype", x.dtype))
    with pytest.raises(kind, match=f"^{message}") as error:
        jax.eval_shape(layer(**case), tokens, *held)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_that_an_axis_of_one_device_does_not_split(method):
    """Refused as on more devices, by name, whatever the method."""
    mesh = jax.make_mesh((1,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    dispatch = Dispatch(experts=E, axes=("workers",), method=method)
    local = lambda x: moe(x, lambda x: by_place(x, None), lambda rows, *_: rows, dispatch)[0]  # noqa: E731
    for spec in (P("workers"), P()):
        program = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
        if spec == P():
            with pytest.raises(TypeError, match=r"^x_TD: it does not vary over \['workers'\]"):
                jax.eval_shape(program, jnp.ones((T, D)))
        else:
            assert jax.eval_shape(program, jnp.ones((T, D))).shape == (T, D)
