"""Column- and row-parallel layers and shared key/value heads against unsharded ones: forward and every gradient, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import TENSOR, make_mesh
from jaxpar.parallel.collectives import all_reduce, vary
from jaxpar.parallel.sequence import boundary
from jaxpar.parallel.tensor import check_heads, column_linear, own_kv_heads, row_linear

B, S, D, N, H = 2, 8, 6, 8, 4
TOLERANCE = 1e-12


def mesh_of(tensor):
    return make_mesh(MeshShape(tensor=tensor), jax.devices()[:tensor])


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def close(a, b):
    gap = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()
    assert gap <= TOLERANCE, gap


ARGS = {
    "x": normal(0, B, S, D),
    "column": normal(1, N, H, D),
    "column_bias": 5 * normal(2, N, H),
    "row": normal(3, D, N, H),
    "row_bias": 5 * normal(4, D),
}
DY = normal(5, B, S, D)


def layers(args, edge, row=row_linear):
    h = jnp.tanh(column_linear(edge.enter(args["x"]), args["column"], args["column_bias"]))
    return row(h, args["row"], edge, args["row_bias"])


def dense(args):
    h = jnp.tanh(jnp.einsum("bsd,nhd->bsnh", args["x"], args["column"]) + args["column_bias"])
    return jnp.einsum("bsnh,dnh->bsd", h, args["row"]) + args["row_bias"]


def sharded(tensor, sequence_parallel, row=row_linear):
    """(y, gradients) of `layers`, the gradient of the replicated bias reduced as a step does: once, where it is a partial sum."""
    edge = boundary(sequence_parallel)
    between = P(None, TENSOR) if sequence_parallel else P()
    specs = {"x": between, "column": P(TENSOR), "column_bias": P(TENSOR), "row": P(None, TENSOR), "row_bias": P()}

    def local(args, dy):
        if sequence_parallel:
            args = {**args, "row_bias": vary(args["row_bias"], TENSOR)}
        y, vjp = jax.vjp(lambda args: layers(args, edge, row), args)
        (grads,) = vjp(dy)
        if sequence_parallel:
            grads["row_bias"] = all_reduce(grads["row_bias"], TENSOR)
        return y, grads

    return jax.jit(jax.shard_map(local, mesh=mesh_of(tensor), in_specs=(specs, between), out_specs=(between, specs)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_column_then_row_equal_the_dense_layers(tensor, sequence_parallel):
    y, grads = sharded(tensor, sequence_parallel)(ARGS, DY)
    expected, vjp = jax.vjp(dense, ARGS)
    close(y, expected)
    for name, gradient in vjp(DY)[0].items():
        close(grads[name], gradient)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bias_added_to_each_partial_sum_would_be_noticed(sequence_parallel):
    def biased_before(h, weight, edge, bias):
        return edge.leave(jnp.einsum("bsnh,dnh->bsd", h, weight) + bias)

    y, _ = sharded(2, sequence_parallel, biased_before)(ARGS, DY)
    with pytest.raises(AssertionError):
        close(y, dense(ARGS))


def test_a_row_output_left_unreduced_is_a_type_error():
    run = jax.shard_map(
        lambda h, weight: jnp.einsum("bsf,df->bsd", h, weight),
        mesh=mesh_of(2),
        in_specs=(P(None, None, TENSOR), P(None, TENSOR)),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="tensor"):
        run(normal(0, B, S, D), normal(1, D, D))


@pytest.mark.parametrize("sequence_parallel, sizes", [(False, {"psum": 2}), (True, {"all_gather": 2, "reduce_scatter": 2})])
def test_what_is_sent(sequence_parallel, sizes):
    """Forward and backward of a column-row pair: two all-reduces of B·S·D, or two gathers and two scatters."""
    edge = boundary(sequence_parallel)
    between = P(None, TENSOR) if sequence_parallel else P()

    def local(x, column, row):
        _, vjp = jax.vjp(lambda x: row_linear(column_linear(edge.enter(x), column), row, edge), x)
        return vjp(x)[0]

    run = jax.shard_map(local, mesh=mesh_of(2), in_specs=(between, P(TENSOR), P(None, TENSOR)), out_specs=between)
    text = str(jax.make_jaxpr(run)(ARGS["x"], ARGS["column"], ARGS["row"]))
    kinds = {"psum": text.count(" psum"), "all_gather": text.count(" all_gather["), "reduce_scatter": text.count(" reduce_scatter[")}
    assert {kind: count for kind, count in kinds.items() if count} == sizes


def grouped(q_BSNH, k_BSKH):
    """A stand-in for attention: every query head reads its key head."""
    group = q_BSNH.shape[2] // k_BSKH.shape[2]
    return jnp.sin(q_BSNH * jnp.repeat(k_BSKH, group, axis=2))


def key_gradients(kv_heads, tensor, reduce):
    """((o, dkey, dbias) over `tensor`, the same unsharded). Without `reduce` the gradients are the first device's."""
    key_KHD, bias_KH = normal(6, kv_heads, H, D), normal(7, kv_heads, H)
    whole = kv_heads < tensor

    def local(x, query, key, bias):
        x_BSD = vary(x, TENSOR)

        def out(key, bias):
            k_BSKH = column_linear(x_BSD, own_kv_heads(key, kv_heads), own_kv_heads(bias, kv_heads))
            return grouped(column_linear(x_BSD, query), k_BSKH)

        o, vjp = jax.vjp(out, vary(key, TENSOR), vary(bias, TENSOR))
        grads = vjp(jnp.cos(o))
        return o, jax.tree.map(lambda a: all_reduce(a, TENSOR), grads) if whole and reduce else grads

    def reference(key, bias):
        k_BSKH = jnp.einsum("bsd,khd->bskh", ARGS["x"], key) + bias
        return grouped(jnp.einsum("bsd,nhd->bsnh", ARGS["x"], ARGS["column"]), k_BSKH)

    spec = P() if whole else P(TENSOR)
    outs = (P(None, None, TENSOR), spec if reduce else P(TENSOR))
    run = jax.shard_map(local, mesh=mesh_of(tensor), in_specs=(P(), P(TENSOR), spec, spec), out_specs=outs)
    o, grads = jax.jit(run)(ARGS["x"], ARGS["column"], key_KHD, bias_KH)
    expected, vjp = jax.vjp(reference, key_KHD, bias_KH)
    return (o, *(grad[:kv_heads] for grad in grads)), (expected, *vjp(jnp.cos(expected)))


@pytest.mark.parametrize("kv_heads, tensor", [(1, 1), (1, 2), (1, 4), (2, 4), (4, 4), (8, 2)])
def test_key_heads_and_their_gradient(kv_heads, tensor):
    """With fewer key heads than devices each device takes its own, and the gradients are partial sums."""
    for ours, theirs in zip(*key_gradients(kv_heads, tensor, reduce=True)):
        close(ours, theirs)


@pytest.mark.parametrize("kv_heads, tensor", [(1, 2), (2, 4)])
def test_key_gradient_that_is_not_reduced_would_be_noticed(kv_heads, tensor):
    (o, *grads), (expected, *expected_grads) = key_gradients(kv_heads, tensor, reduce=False)
    close(o, expected)
    for ours, theirs in zip(grads, expected_grads):
        with pytest.raises(AssertionError):
            close(ours, theirs)


def test_heads_that_do_not_divide_name_the_sizes_that_do():
    check_heads(8, 2, 4)
    check_heads(8, 1, 8)
    with pytest.raises(ValueError, match=r"mesh\.tensor: 3 cannot share 8 query heads and 2 key/value heads; sizes that work: 1, 2, 4, 8"):
        check_heads(8, 2, 3)
    with pytest.raises(ValueError, match="sizes that work: 1, 3, 6, 12"):
        check_heads(12, 3, 2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tokens_are_indices_within_the_row(sequence_parallel):
    edge = boundary(sequence_parallel)
    length = S // 4 if sequence_parallel else S
    run = jax.shard_map(lambda: edge.tokens(length), mesh=mesh_of(4), in_specs=(), out_specs=P(TENSOR) if sequence_parallel else P())
    np.testing.assert_array_equal(run(), np.arange(S))
