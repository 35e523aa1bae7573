import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import DATA, TENSOR, make_mesh
from jaxpar.ops.dropout import dropout

KEY = jax.random.key(7)
ROWS, POSITIONS = jnp.arange(8, dtype=jnp.int32), jnp.arange(12, dtype=jnp.int32)
X = jnp.ones((8, 12, 31), jnp.float32)


@pytest.fixture(scope="module")
def whole() -> np.ndarray:
    return np.asarray(dropout(X, 0.25, KEY, ROWS, POSITIONS))


def test_rate_and_scale(whole):
    assert set(np.unique(whole)) == {np.float32(0), np.float32(1) / np.float32(0.75)}
    assert abs((whole == 0).mean() - 0.25) < 4 * (0.25 * 0.75 / whole.size) ** 0.5


def test_every_sharding_drops_the_same(whole):
    mesh = make_mesh(MeshShape(data=4, tensor=2))
    split = (P(DATA, TENSOR), P(), P(DATA), P(TENSOR))
    local = jax.shard_map(
        lambda x, key, rows, tokens: dropout(x, 0.25, key, rows, tokens), mesh=mesh, in_specs=split, out_specs=P(DATA, TENSOR)
    )
    np.testing.assert_array_equal(jax.jit(local)(X, KEY, ROWS, POSITIONS), whole)
    np.testing.assert_array_equal(dropout(X[3:5, 5:6], 0.25, KEY, ROWS[3:5], POSITIONS[5:6]), whole[3:5, 5:6])
    ignorant = dropout(X[3:5, 5:6], 0.25, KEY, ROWS[:2], POSITIONS[:1])  # local instead of global numbers
    assert (np.asarray(ignorant) != whole[3:5, 5:6]).any()


def test_masks_of_rows_positions_features_and_keys_are_independent(whole):
    kept = whole != 0
    for other in (
        np.roll(kept, 1, 0),
        np.roll(kept, 1, 1),
        np.roll(kept, 1, 2),
        np.asarray(dropout(X, 0.25, jax.random.key(8), ROWS, POSITIONS)) != 0,
    ):
        agree = 0.75**2 + 0.25**2
        assert abs((kept == other).mean() - agree) < 5 * (agree * (1 - agree) / kept.size) ** 0.5


def test_gradient_has_the_same_mask(whole):
    grad = jax.grad(lambda x: dropout(x, 0.25, KEY, ROWS, POSITIONS).sum())(X)
    np.testing.assert_array_equal(grad, whole)


def test_dtype_and_rate_zero():
    x = jnp.ones((1, 2, 4), jnp.bfloat16)
    assert dropout(x, 0.5, KEY, ROWS[:1], POSITIONS[:2]).dtype == jnp.bfloat16
    assert dropout(x, 0.0, KEY, ROWS[:1], POSITIONS[:2]) is x
    with pytest.raises(ValueError, match=r"model\.dropout: 1 must be in"):
        dropout(x, 1, KEY, ROWS[:1], POSITIONS[:2])
