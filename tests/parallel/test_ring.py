"""Collective matmul: chunks around a ring equal an all-gather and a reduce-scatter, forward and every gradient, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape, TrainConfig
from jaxpar.mesh import TENSOR, make_mesh
from jaxpar.parallel.ring import Ring
from jaxpar.parallel.sequence import SequenceParallel
from jaxpar.parallel.tensor import column_linear, row_linear, row_product
from tests.traced import traced_collectives

B, S, D, W = 2, 16, 6, 8
SPECS = {"x": P(None, TENSOR), "in": P(TENSOR), "out": P(None, TENSOR), "up": P(TENSOR), "down": P(None, TENSOR)}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


ARGS = {"x": normal(0, B, S, D), "in": normal(1, W, D), "out": normal(2, D, W), "up": normal(3, W, D), "down": normal(4, D, W)}
DY = normal(5, B, S, D)


def layers(args, edge):
    """A layer that mixes tokens between its two products, then one that does not."""
    (h,) = edge.enter_with(args["x"], lambda x: (column_linear(x, args["in"]),))
    x = args["x"] + row_linear(jnp.cumsum(h, 1), args["out"], edge)
    return x + edge.through(x, lambda x: row_product(jnp.tanh(column_linear(x, args["up"])), args["down"]))


@functools.cache
def program(edge, tensor):
    def local(args, dy):
        y, transpose = jax.vjp(lambda args: layers(args, edge), args)
        return y, transpose(dy)[0]

    mesh = make_mesh(MeshShape(tensor=tensor), jax.devices()[:tensor])
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(SPECS, SPECS["x"]), out_specs=(SPECS["x"], SPECS)))


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_equals_gather_and_scatter(tensor):
    ring, plain = (program(edge, tensor)(ARGS, DY) for edge in (Ring(), SequenceParallel()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), ring, plain)


def test_sends_chunks_and_the_same_bytes():
    found = [traced_collectives(jax.make_jaxpr(program(edge, 4))(ARGS, DY), {"tensor": 4}) for edge in (Ring(), SequenceParallel())]
    assert {each.kind for each in found[0]} == {"permute"}
    assert {each.kind for each in found[1]} == {"all_gather", "reduce_scatter"}
    ring, plain = (sum(each.bytes for each in one) for one in found)
    assert ring == plain == 8 * (3 / 4) * B * S * D * 8  # four transfers in each pass


def test_needs_sequence_parallelism_and_whole_batches():
    for other in ({"sequence_parallel": False}, {"interleave": 2}):
        with pytest.raises(ValueError, match="train.collective_matmul: needs train.sequence_parallel=true and train.interleave=1"):
            TrainConfig(collective_matmul=True, **other)
