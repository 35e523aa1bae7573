"""Faults that others met in XLA: operations along a dim that devices split. Not our code; a new JAX or XLA is held against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import make_mesh
from jaxpar.parallel import collectives

BATCH, SEQUENCE, WIDTH = 4, 32, 6
# Whole numbers, so that every order of additions gives the same float32.
X, Y = np.random.default_rng(0).integers(-9, 10, (2, BATCH, SEQUENCE, WIDTH)).astype(np.float32)


def cumsum(x, y):
    return jnp.cumsum(x, 1)


def cumsum_of_two(x, y):
    """Along both the split dim and one that is not split."""
    return jnp.cumsum(jnp.cumsum(x + y, 2), 1)


def concatenate_sequence(x, y):
    return jnp.concatenate([x, y], 1)


def concatenate_unequal(x, y):
    """The seams do not fall on the borders of shards."""
    return jnp.concatenate([x[:, :5], y[:, 3:], x[:, 5:8]], 1)


def concatenate_width(x, y):
    """What rope does with the halves of a head."""
    return jnp.concatenate([-x[..., WIDTH // 2 :], y[..., : WIDTH // 2]], -1)


def concatenate_batch(x, y):
    return jnp.concatenate([x, y], 0)


def segments(x, y):
    """Document numbers: a cumsum of booleans."""
    return jnp.cumsum(x[..., 0] > 5, 1, dtype=jnp.int32)


OPERATIONS = {
    cumsum: X.cumsum(1),
    cumsum_of_two: (X + Y).cumsum(2).cumsum(1),
    concatenate_sequence: np.concatenate([X, Y], 1),
    concatenate_unequal: np.concatenate([X[:, :5], Y[:, 3:], X[:, 5:8]], 1),
    concatenate_width: np.concatenate([-X[..., WIDTH // 2 :], Y[..., : WIDTH // 2]], -1),
    concatenate_batch: np.concatenate([X, Y], 0),
    segments: (X[..., 0] > 5).cumsum(1),
}


def mesh_of(devices, data=1):
    return make_mesh(MeshShape(data=data, seq=devices // data), jax.devices()[:devices])


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_under_jit(devices, data):
    """The sequence split over all devices or, with the batch split too, over half of them; the result left to XLA and split again."""
    place = NamedSharding(mesh_of(devices, data), P("data", "seq"))
    x, y = jax.device_put((X, Y), place)

    def every(x, y):
        return [operation(x, y) for operation in OPERATIONS]

    for program in (
        jax.jit(every),
        jax.jit(every, out_shardings=[place if want.shape[1] % 8 == 0 else None for want in OPERATIONS.values()]),
    ):
        for operation, got, want in zip(OPERATIONS, program(x, y), OPERATIONS.values(), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=operation.__name__)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_under_shard_map(devices):
    """Cumsum with the sums of the earlier shards added; concatenation of gathered sequences, of which each device keeps its part."""

    def local(x, y):
        me, size = collectives.axis_index("seq"), collectives.axis_size("seq")
        sums = collectives.all_gather(x.sum(1, keepdims=True), "seq", 1)
        before = jnp.where(jnp.arange(size)[None, :, None] < me, sums, 0).sum(1, keepdims=True)
        both = jnp.concatenate([collectives.all_gather(x, "seq", 1), collectives.all_gather(y, "seq", 1)], 1)
        length = both.shape[1] // size
        return jnp.cumsum(x, 1) + before, jax.lax.dynamic_slice_in_dim(both, me * length, length, 1), concatenate_width(x, y)

    split = P(None, "seq")
    program = jax.jit(jax.shard_map(local, mesh=mesh_of(devices), in_specs=split, out_specs=split))
    for got, operation in zip(program(X, Y), (cumsum, concatenate_sequence, concatenate_width), strict=True):
        np.testing.assert_array_equal(got, OPERATIONS[operation], err_msg=operation.__name__)
