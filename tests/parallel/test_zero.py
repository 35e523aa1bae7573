"""The norm of gradients that live split over the mesh: every parameter counts once, and only scalars are sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import DATA, TENSOR, make_mesh
from jaxpar.parallel import zero
from tests.traced import traced_collectives

SHAPES = {"both": (8, 6), "tensor": (4, 3), "data": (8,), "whole": (5,)}
SPECS = {"both": P((TENSOR, DATA)), "tensor": P(TENSOR), "data": P(DATA), "whole": P()}


def grads(dtype=jnp.float64):
    random = np.random.default_rng(0)
    return {name: jnp.asarray(random.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def norm(data, tensor):
    mesh = make_mesh(MeshShape(data=data, tensor=tensor), jax.devices()[: data * tensor])
    return jax.shard_map(zero.norm, mesh=mesh, in_specs=(SPECS,), out_specs=P())


@pytest.mark.parametrize("data, tensor", [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_every_parameter_counts_once(data, tensor):
    expected = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(jax.device_get(grads()))))
    assert float(jax.jit(norm(data, tensor))(grads())) == pytest.approx(expected, rel=1e-13)


def test_one_scalar_is_sent_for_each_set_of_axes():
    found = traced_collectives(jax.make_jaxpr(norm(4, 2))(grads()), {"data": 4, "tensor": 2})
    assert sorted(each.axes for each in found) == [("data",), ("data", "tensor"), ("tensor",)]
    assert all(each.payload == 8 for each in found)


def test_half_precision_is_summed_in_float32():
    """65536 equal values: a bfloat16 sum stops growing long before."""
    many = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in SHAPES.items()} | {"whole": jnp.full(1 << 16, 2**-8, jnp.bfloat16)}
    found = jax.jit(norm(1, 1))(many)
    assert found.dtype == jnp.float32 and float(found) == pytest.approx(1, rel=1e-6)
