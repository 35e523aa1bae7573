"""Parameter records, their way into and out of nnx modules, and values that no mesh changes."""

import dataclasses
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpar import initial, params, rules
from jaxpar.config import MeshShape
from jaxpar.mesh import make_mesh
from jaxpar.params import Parameter

VOCABULARY = 37


def declare(*args, **fields):
    spec = Parameter(*args, **fields)
    return nnx.Param(jax.ShapeDtypeStruct(spec.shape, jnp.float32), spec=spec)


class Norm(nnx.Module):
    def __init__(self):
        self.weight = declare((16,), ("embed",), "ones", role="norm")


class Linear(nnx.Module):
    def __init__(self):
        self.weight = declare((8, 16), ("mlp", "embed"), std=0.5, matrix=1)
        self.bias = declare((8,), ("mlp",), "zeros", role="bias")


class Block(nnx.Module):
    def __init__(self):
        self.scale = 2.0
        self.up = Linear()
        self.norm = Norm()


def model_specs(tensor, layers=3):
    table = Parameter(
        (params.padded_vocabulary(VOCABULARY, tensor), 16), ("vocabulary", "embed"), std=0.02, matrix=1, role="embedding", rows=VOCABULARY
    )
    key = Parameter((2, 6, 16), ("kv_heads", "head_dim", "embed"), std=0.1, matrix=2)
    return {
        "embedding": {"table": table},
        "layers": params.stack({"key": key} | params.collect(Block()), layers),
    }


def test_parameter_views():
    (stacked,) = params.stack({"key": Parameter((2, 6, 16), ("kv_heads", "head_dim", "embed"), matrix=2)}, 3).values()
    assert (stacked.shape, stacked.axes, stacked.stacked) == ((3, 2, 6, 16), ("layers", "kv_heads", "head_dim", "embed"), True)
    assert stacked.layer_shape == (2, 6, 16)
    assert stacked.one_layer() == dataclasses.replace(stacked, shape=(2, 6, 16), axes=stacked.axes[1:], stacked=False)
    with pytest.raises(AssertionError, match="stacked already"):
        params.stack({"key": stacked}, 3)
    with pytest.raises(AssertionError, match="other dims"):
        Parameter((2, 3), ("embed",))


@settings(deadline=None, max_examples=50)
@given(vocabulary=st.integers(1, 5000), tensor=st.integers(1, 16))
def test_padded_vocabulary_is_the_least_multiple(vocabulary, tensor):
    padded = params.padded_vocabulary(vocabulary, tensor)
    assert padded % tensor == 0 and vocabulary <= padded < vocabulary + tensor


def test_count_leaves_padding_out():
    assert params.count(model_specs(8)) == params.count(model_specs(1)) == 37 * 16 + 3 * (2 * 6 * 16 + 8 * 16 + 8 + 16)


def test_collect_and_bind_round_trip_inside_jit():
    module = Block()
    specs = params.collect(module)
    assert params.paths(specs) == ("norm/weight", "up/bias", "up/weight")
    assert specs["up"]["weight"] == Parameter((8, 16), ("mlp", "embed"), std=0.5, matrix=1)
    merge = params.bind(module)
    # Insertion order differs from the module's; values are told apart by their shapes and contents.
    values = {
        "up": {"weight": np.full((8, 16), 2.0, np.float32), "bias": np.full(8, 3.0, np.float32)},
        "norm": {"weight": np.full(16, 5.0, np.float32)},
    }

    @jax.jit
    def read(values):
        block = merge(values)
        return block.scale * block.up.weight[...], block.up.bias[...], block.norm.weight[...]

    weight, bias, norm = read(values)
    assert (weight == 4).all() and weight.shape == (8, 16) and (bias == 3).all() and (norm == 5).all()


@pytest.mark.parametrize(
    "broken", [{"norm": {"weight": 0}, "up": {"weight": 0}}, {"norm": {"weight": 0}, "up": {"weight": 0, "offset": 0}}]
)
def test_bind_refuses_other_paths(broken):
    with pytest.raises(AssertionError, match="are not the module's"):
        params.bind(Block())(broken)


def test_bind_inside_shard_map_sees_local_shards():
    mesh = make_mesh(MeshShape(data=1, tensor=8))
    merge = params.bind(Linear())

    def body(values):
        linear = merge(values)
        assert linear.weight[...].shape == (1, 16)
        return linear.weight[...] + linear.bias[...][:, None]

    values = {"weight": jnp.arange(128.0, dtype=jnp.float32).reshape(8, 16), "bias": jnp.ones(8, jnp.float32)}
    specs = {"weight": P("tensor", None), "bias": P("tensor")}
    out = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=P("tensor", None)))(values)
    np.testing.assert_array_equal(out, values["weight"] + 1)


def test_collect_refuses_a_variable_without_a_record():
    module = Norm()
    module.extra = nnx.Param(jnp.zeros(3, jnp.float32))
    with pytest.raises(AssertionError, match="extra.*not an nnx.Param with spec"):
        params.collect(module)


def test_map_leaves_takes_none_and_demands_equal_keys():
    tree = {"b": {"x": 1}, "a": 2}
    assert params.map_leaves(lambda path, one, other: (path, one, other), tree, {"a": None, "b": {"x": 3}}) == {
        "a": ("a", 2, None),
        "b": {"x": ("b/x", 1, 3)},
    }
    with pytest.raises(AssertionError, match="b/: keys"):
        params.map_leaves(lambda *_: None, tree, {"a": 0, "b": {"y": 0}})


def values_on(shape, zero, dtype, seed=7):
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    specs = model_specs(shape.tensor)
    places = params.partition_specs(specs, rules.Rules(dict(mesh.shape), rules.DENSE))
    if zero:
        places = params.zero_specs(places, params.zero_placements(specs, places, dict(mesh.shape)))
    shardings = params.shardings(places, mesh)
    values = initial.init_params(specs, seed, mesh, shardings, dtype)
    assert all(leaf.sharding == sharding for (_, leaf), (_, sharding) in zip(params.flatten(values), params.flatten(shardings)))
    return values


def without_padding(values):
    table = np.asarray(values["embedding"]["table"])
    assert (table[VOCABULARY:] == 0).all()
    leaves = dict(params.flatten(values)) | {"embedding/table": table[:VOCABULARY]}
    return {path: np.asarray(leaf) for path, leaf in leaves.items()}


@pytest.fixture(scope="module")
def one_device():
    return without_padding(values_on(MeshShape(), zero=False, dtype=jnp.float32))


@pytest.mark.parametrize(
    "shape, zero",
    [
        (MeshShape(data=8), True),
        (MeshShape(data=4, tensor=2), False),
        (MeshShape(data=4, tensor=2), True),
        (MeshShape(data=2, tensor=4), True),
        (MeshShape(tensor=8), False),
        (MeshShape(data=2, seq=2, expert=2), True),
    ],
)
def test_values_are_bitwise_the_same_on_every_mesh(one_device, shape, zero):
    for path, leaf in without_padding(values_on(shape, zero, jnp.float32)).items():
        assert leaf.tobytes() == one_device[path].tobytes(), path


def test_values_in_other_dtypes_are_the_same_draws(one_device):
    double, half = (without_padding(values_on(MeshShape(data=4, tensor=2), True, dtype)) for dtype in (jnp.float64, jnp.bfloat16))
    for path, leaf in one_device.items():
        assert (double[path].dtype, half[path].dtype) == (np.float64, jnp.bfloat16)
        np.testing.assert_allclose(double[path], leaf, rtol=1e-6)
        assert (half[path] == leaf.astype(jnp.bfloat16)).all()


def test_values_depend_on_seed_path_and_layer(one_device):
    other = without_padding(values_on(MeshShape(), zero=False, dtype=jnp.float32, seed=8))
    assert not (other["embedding/table"] == one_device["embedding/table"]).any()
    key, weight = one_device["layers/key"], one_device["layers/up/weight"]
    assert not (key[0] == key[1]).any() and not (key.reshape(3, -1)[:, :128] / 0.1 == weight.reshape(3, -1) / 0.5).any()
    assert (one_device["layers/norm/weight"] == 1).all() and (one_device["layers/up/bias"] == 0).all()
    assert abs(weight.std() - 0.5) < 0.05


def test_initial_values_are_made_where_they_live():
    """No collective in the program, and no buffer of the whole table on a device."""
    mesh = make_mesh(MeshShape(data=4, tensor=2))
    specs = {"table": Parameter((4096, 64), ("vocabulary", "embed"), std=1.0, rows=4001)}
    shardings = params.shardings({"table": P("tensor", rules.REPLICA)}, mesh)
    text = initial.init_program(specs, shardings, jnp.float32).lower(jnp.uint32(0)).compile().as_text()
    assert "[2048,16]" in text
    for forbidden in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "[4096,64]", "[2048,64]", "[4096,16]"):
        assert forbidden not in text, forbidden


def test_standard_normal_is_normal():
    draws = np.sort(np.asarray(initial.standard_normal(jax.random.key(3), (200_000,)))) / 2**24
    assert abs(draws.mean()) < 0.01 and abs(draws.var() - 1) < 0.015
    expected = np.array([NormalDist().inv_cdf((i + 0.5) / 200) for i in range(200)])
    np.testing.assert_allclose(draws[500::1000], expected, atol=0.04)


def test_standard_normal_between_table_cells():
    """Words along the whole range, against the exact quantiles."""
    words = np.unique(np.concatenate([2 ** np.arange(31) + offset for offset in (-1, 0, 1)] + [np.arange(1, 2**31 - 1, 2**31 // 500)]))
    words = words[(words > 0) & (words < 2**31)].astype(np.uint32) | np.uint32(1)
    exact = np.array([-NormalDist().inv_cdf(float(word) / 2**32) for word in words])
    found = np.asarray(initial.quantiles(jnp.asarray(words))) / 2**24
    np.testing.assert_allclose(found, exact, atol=2e-5)
    negative = np.asarray(initial.quantiles(jnp.asarray(words | np.uint32(1 << 31)))) / 2**24
    np.testing.assert_array_equal(negative, -found)


def test_float64_without_64_bit_types_is_refused():
    with jax.enable_x64(False), pytest.raises(ValueError, match="train.master_dtype: float64 needs 64-bit types"):
        values_on(MeshShape(), zero=False, dtype=np.float64)


def test_zero_errors_name_the_parameter():
    specs = {"up": Parameter((3, 5), ("mlp", "embed"))}
    with pytest.raises(ValueError, match="^up: train.zero: matrix"):
        params.zero_placements(specs, {"up": P("tensor", None)}, {"data": 2, "expert": 1, "seq": 1, "tensor": 1})


def test_state_apart_and_together_again():
    """Branches that hold nothing are left out; state has no place of its own to be split to."""
    held = Parameter(shape=(4,), axes=("router",), init="zeros", role="state")
    weight = Parameter(shape=(8, 8), axes=("mlp", "embed"), std=0.1, matrix=1)
    specs = {"a": {"w": weight, "s": held}, "b": {"s": held}, "w": weight}
    tree = {"a": {"w": 1, "s": 2}, "b": {"s": 3}, "w": 4}
    trained, state = params.separate(specs, tree)
    assert trained == {"a": {"w": 1}, "w": 4} and state == {"a": {"s": 2}, "b": {"s": 3}}
    assert params.merge(trained, state) == tree and params.merge(trained, {}) == trained
    with pytest.raises(AssertionError, match="w is there twice"):
        params.merge(trained, {"w": 5})
    sizes = {"data": 4, "expert": 1, "seq": 1, "tensor": 1}
    assert rules.zero_placement(held, P(None), sizes) is None
    assert rules.unsharded({"s": held}, {"s": P(None)}, sizes) == ()
