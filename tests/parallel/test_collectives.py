"""The strict collectives: value and transpose against numpy, what they refuse, and that an axis of size 1 costs nothing.

The data of a test is the local arrays of all devices side by side, X[data, tensor, rows, columns], on data 4 × tensor 2.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import make_mesh
from jaxpar.parallel import collectives
from tests.traced import traced_collectives

DATA, TENSOR, SIZE = 4, 2, 8
MESH = make_mesh(MeshShape(data=DATA, tensor=TENSOR))
ALONE = make_mesh(MeshShape(), jax.devices()[:1])
BOTH = ("data", "tensor")
EACH = P("data", "tensor")
X = np.random.default_rng(0).normal(size=(DATA, TENSOR, SIZE, SIZE))


# ---- what each verb does to the arrays of n devices along one axis, s[n, ...]


def everywhere(whole, s):
    return np.broadcast_to(whole, (len(s), *whole.shape))


def gather(s, dim):
    return everywhere(np.concatenate(list(s), dim), s)


def scatter(s, dim):
    return np.stack(np.split(s.sum(0), len(s), dim))


def trade(s, split_dim, join_dim):
    pieces = [np.split(each, len(s), split_dim) for each in s]
    return np.stack([np.concatenate([piece[me] for piece in pieces], join_dim) for me in range(len(s))])


def send(s, pairs):
    out = np.zeros_like(s)
    for source, destination in pairs:
        out[destination] = s[source]
    return out


def along(axes, f, x):
    """`f` over the devices of `axes`, for every place on the other axes."""
    if axes == "data":
        return np.stack([f(x[:, j]) for j in range(TENSOR)], 1)
    if axes == "tensor":
        return np.stack([f(x[i]) for i in range(DATA)])
    out = f(x.reshape(-1, *x.shape[2:]))
    return out.reshape(DATA, TENSOR, *out.shape[1:])


@dataclass(frozen=True)
class Verb:
    """One collective with its arguments after `axes`; `value` and `transpose` are functions of s[n, ...]."""

    call: object
    arguments: tuple
    value: object
    transpose: object
    keeps_varying: bool
    axes: tuple = ("data", "tensor", BOTH)


PAIRS = {"data": ((0, 1), (1, 2), (3, 0)), "tensor": ((1, 0),)}
BACK = {axis: tuple((b, a) for a, b in pairs) for axis, pairs in PAIRS.items()}
VERBS = {
    "all_reduce": Verb(collectives.all_reduce, (), lambda s: everywhere(s.sum(0), s), lambda g: g, False),
    "all_reduce_max": Verb(collectives.all_reduce_max, (), lambda s: everywhere(s.max(0), s), np.zeros_like, False),
    "all_gather 0": Verb(collectives.all_gather, (0,), partial(gather, dim=0), partial(scatter, dim=0), True),
    "all_gather 1": Verb(collectives.all_gather, (1,), partial(gather, dim=1), partial(scatter, dim=1), True),
    "reduce_scatter 0": Verb(collectives.reduce_scatter, (0,), partial(scatter, dim=0), partial(gather, dim=0), True),
    "reduce_scatter 1": Verb(collectives.reduce_scatter, (1,), partial(scatter, dim=1), partial(gather, dim=1), True),
    "all_to_all": Verb(
        collectives.all_to_all, (0, 1), partial(trade, split_dim=0, join_dim=1), partial(trade, split_dim=1, join_dim=0), True
    ),
    **{
        f"permute {axis}": Verb(collectives.permute, (pairs,), partial(send, pairs=pairs), partial(send, pairs=BACK[axis]), True, (axis,))
        for axis, pairs in PAIRS.items()
    },
}
TABLE = [(name, axes) for name, verb in VERBS.items() for axes in verb.axes]
# By the name of the function alone, with arguments that fit any axis.
ARGUMENTS = {
    "all_reduce": (),
    "all_reduce_max": (),
    "all_gather": (0,),
    "reduce_scatter": (0,),
    "all_to_all": (0, 1),
    "permute": (((0, 0),),),
}


def on_each(f, mesh=MESH):
    """Run `f` on every device's own array of X; results side by side."""

    def local(x):
        return jax.tree.map(lambda y: collectives.vary(y, BOTH)[None, None], f(x[0, 0]))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=EACH, out_specs=EACH))


@pytest.mark.parametrize(("name", "axes"), TABLE, ids=str)
def test_value_type_and_transpose(name, axes):
    """The cotangent is cos(y), so it has the type of the result; the gradient has the type of the operand."""
    verb = VERBS[name]

    def f(x):
        y, transpose = jax.vjp(lambda x: verb.call(x, axes, *verb.arguments), x)
        left = frozenset() if verb.keeps_varying else frozenset(collectives.as_tuple(axes))
        assert collectives.varying(y) == collectives.varying(x) - left
        return y, *transpose(jnp.cos(y))

    y, dx = on_each(f)(X)
    want = along(axes, verb.value, X)
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-14)
    np.testing.assert_allclose(dx, along(axes, verb.transpose, np.cos(want)), rtol=0, atol=1e-14)


def traced(f, mesh):
    return str(jax.make_jaxpr(jax.shard_map(f, mesh=mesh, in_specs=EACH, out_specs=EACH))(X))


def see(f, mesh, spec):
    """Trace `f` on an array of this sharding."""
    jax.eval_shape(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=P()), X[0, 0])


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("mesh", [MESH, ALONE], ids=["8 devices", "1 device"])
def test_a_value_that_does_not_vary_is_refused(name, mesh):
    """Also over an axis of size 1, or a program that is wrong on a larger mesh would pass on a smaller one."""
    verb = getattr(collectives, name)
    with pytest.raises(TypeError, match=rf"^{name} over \('tensor',\): .* does not vary over \['tensor'\]"):
        see(lambda x: verb(x, "tensor", *ARGUMENTS[name]), mesh, P("data"))


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "permute"])
def test_a_value_that_varies_over_one_of_two_axes_is_refused(name):
    with pytest.raises(TypeError, match=r"does not vary over \['tensor'\].* counted 2 times"):
        see(lambda x: getattr(collectives, name)(x, BOTH, *ARGUMENTS[name]), MESH, P("data"))


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_an_axis_of_size_1_costs_nothing(name):
    """The traced program has no such operation and the value passes; with 8 devices it is there."""
    primitive = getattr(collectives, name)

    def f(x):
        return primitive(x[0, 0], BOTH, *ARGUMENTS[name])[None, None]

    assert name in traced(f, MESH)
    assert not {"all_gather", "reduce_scatter", "all_to_all"} & set(traced(f, ALONE).replace("[", " ").split())
    x = X[:1, :1]
    np.testing.assert_array_equal(on_each(lambda x: f(x[None, None])[0, 0], ALONE)(x), x)


def test_reduce_scatter_over_a_dim_that_does_not_divide():
    for dim in (0, 1):
        with pytest.raises(ValueError, match=rf"reduce_scatter: dim {dim} of shape \(6, 6\) does not divide over \('data',\) of size 4"):
            on_each(lambda x: collectives.reduce_scatter(x[:6, :6], "data", dim))(X)


# ---- marking, which sends nothing


def test_vary_sends_nothing_and_its_transpose_is_an_all_reduce():
    """x is equal over tensor; each device multiplies it with its own number."""
    factors = np.arange(1.0, 9.0).reshape(DATA, TENSOR)

    def forward(x, factor):
        y = collectives.vary(x[0], BOTH)
        assert collectives.varying(x) == {"data"} and collectives.varying(y) == {"data", "tensor"}
        return y[None, None]

    def backward(x, factor):
        y, transpose = jax.vjp(lambda x: collectives.vary(x, BOTH), x[0])
        return transpose(y * factor)[0][None]

    x = X[:, 0]
    for f, spec, want, kinds in (
        (forward, EACH, np.stack([x, x], 1), []),
        (backward, P("data"), x * factors.sum(1)[:, None, None], [("all_reduce", ("tensor",))]),
    ):
        program = jax.jit(jax.shard_map(f, mesh=MESH, in_specs=(P("data"), EACH), out_specs=spec))
        np.testing.assert_allclose(program(x, factors), want, rtol=1e-14)
        sent = traced_collectives(jax.make_jaxpr(program)(x, factors), dict(MESH.shape))
        assert [(each.kind, each.axes) for each in sent] == kinds


def test_vary_of_what_varies_is_the_value_itself():
    def local(x):
        assert collectives.vary(x, BOTH) is x and collectives.vary(x, ()) is x and collectives.vary_like(x, x) is x
        return x

    jax.eval_shape(jax.shard_map(local, mesh=MESH, in_specs=EACH, out_specs=EACH), X)


def test_vary_like_and_zeros_take_the_axes_of_another():
    def local(x):
        for axes in ((), ("data",), ("tensor",), BOTH):
            like = collectives.vary(jnp.ones(()), axes)
            assert collectives.varying(collectives.vary_like(jnp.ones(3), like)) == set(axes)
            assert collectives.varying(collectives.vary_like(collectives.vary(jnp.ones(3), "data"), like)) == {"data", *axes}
            zeros = collectives.zeros(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), frozenset(axes))
            assert collectives.varying(zeros) == set(axes)
            assert (zeros.shape, zeros.dtype) == ((2, 3), jnp.bfloat16)
            type_ = jax.eval_shape(lambda like=like: like * 2)
            assert collectives.varying_of(type_) == set(axes)
        return collectives.vary(zeros.astype(x.dtype), BOTH)[None, None]

    assert not np.any(jax.jit(jax.shard_map(local, mesh=MESH, in_specs=EACH, out_specs=EACH))(X))
    assert collectives.varying_of(jax.eval_shape(lambda: jnp.ones(3))) == set()


def test_index_and_size_count_the_first_axis_slowest():
    def f(x):
        for axes, size in (("data", DATA), ("tensor", TENSOR), (BOTH, DATA * TENSOR)):
            index = collectives.axis_index(axes)
            assert collectives.varying(index) == set(collectives.as_tuple(axes)) and index.dtype == jnp.int32
            assert collectives.axis_size(axes) == size
        return [collectives.axis_index(axes) for axes in ("data", "tensor", BOTH, BOTH[::-1])]

    data, tensor = np.indices((DATA, TENSOR))
    for got, want in zip(on_each(f)(X), (data, tensor, 2 * data + tensor, 4 * tensor + data), strict=True):
        np.testing.assert_array_equal(got, want)
