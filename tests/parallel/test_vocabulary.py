"""Vocabulary-parallel embedding and loss against dense ones, in float64: values, every gradient, and what the program sends."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import DATA, TENSOR, make_mesh
from jaxpar.parallel import vocabulary
from jaxpar.parallel.collectives import all_reduce, vary
from jaxpar.parallel.sequence import boundary

B, S, D, V, PADDED = 4, 8, 6, 5, 8
TOLERANCE = 1e-12


def mesh_of(data, tensor):
    return make_mesh(MeshShape(data=data, tensor=tensor), jax.devices()[: data * tensor])


def arrays(seed=0):
    random = np.random.default_rng(seed)
    x_BSD = random.normal(size=(B, S, D)) * 2
    table_VD = np.zeros((PADDED, D))
    table_VD[:V] = random.normal(size=(V, D))
    labels_BS = random.integers(0, V, size=(B, S)).astype(np.int32)
    labels_BS[random.random((B, S)) < 0.3] = -1
    labels_BS[0] = -1
    return jnp.asarray(x_BSD), jnp.asarray(table_VD), jnp.asarray(labels_BS)


def dense_loss(x_BSD, table_VD, labels_BS, z_loss, cap):
    logits_BSV = x_BSD @ table_VD[:V].T
    logits_BSV = logits_BSV if cap is None else cap * jnp.tanh(logits_BSV / cap)
    log_z_BS = jax.scipy.special.logsumexp(logits_BSV, axis=-1)
    label_BS = (logits_BSV * jax.nn.one_hot(labels_BS, V, dtype=logits_BSV.dtype)).sum(-1)
    return jnp.where(labels_BS >= 0, log_z_BS - label_BS + z_loss * log_z_BS**2, 0).sum()


def sharded_loss(mesh, settings, scale=1.0):
    """(loss, aux, dx, dtable) over data × tensor, gradients of 3 times the loss reduced as a step does; a part of the 3 as the loss's own
    scale, the rest from outside."""

    def local(x_BSD, table_VD, labels_BS):
        x_BSD, table_VD = vary(x_BSD, TENSOR), vary(table_VD, DATA)

        def scaled(x_BSD, table_VD):
            total, aux = vocabulary.loss(x_BSD, table_VD, labels_BS, settings, scale)
            return 3 / scale * total, (total / scale, aux)

        (dx, dtable), (total, aux) = jax.grad(scaled, argnums=(0, 1), has_aux=True)(x_BSD, table_VD)
        return jax.tree.map(lambda a: all_reduce(a, DATA), (total, aux)), all_reduce(dx, TENSOR), all_reduce(dtable, DATA)

    specs = (P(DATA), P(TENSOR), P(DATA))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), P(DATA), P(TENSOR))))


def close(a, b, tolerance=TOLERANCE):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    gap = np.abs(a - b).max() / np.abs(b).max()
    assert gap <= tolerance, gap


CASES = [
    # data, tensor, chunk, z-loss, cap, scale: chunks that divide and not, one token, more than there are
    (1, 1, 32, 0.0, None, 1.0),
    (2, 2, 16, 0.0, None, 3.0),
    (2, 4, 5, 0.1, None, 0.01),
    (1, 4, 7, 0.0, 1.5, 3.0),
    (2, 2, 1, 0.1, 1.5, 1.0),
    (1, 2, 1000, 0.1, 1.5, 0.01),
]


@pytest.mark.parametrize("data, tensor, chunk, z_loss, cap, scale", CASES)
def test_loss_and_gradients_equal_the_dense_ones(data, tensor, chunk, z_loss, cap, scale):
    x_BSD, table_VD, labels_BS = arrays()
    settings = vocabulary.LossSettings(V, chunk, z_loss, cap)
    (total, aux), dx, dtable = sharded_loss(mesh_of(data, tensor), settings, scale)(x_BSD, table_VD, labels_BS)
    expected, (expected_dx, expected_dtable) = jax.value_and_grad(dense_loss, argnums=(0, 1))(x_BSD, table_VD, labels_BS, z_loss, cap)
    close(total, expected)
    close(dx, 3 * expected_dx)
    close(dtable, 3 * expected_dtable)
    plain = dense_loss(x_BSD, table_VD, labels_BS, 0.0, cap)
    close(aux["cross_entropy"], plain)
    np.testing.assert_allclose(aux["z_loss"], expected - plain, atol=1e-11)
    assert aux["tokens"] == (labels_BS >= 0).sum()
    assert not np.asarray(dtable)[V:].any(), "padding rows have a gradient"
    assert not np.asarray(dx)[np.asarray(labels_BS) < 0].any(), "ignored tokens have a gradient"


def test_without_differentiation_the_value_is_the_same():
    x_BSD, table_VD, labels_BS = arrays()
    settings = vocabulary.LossSettings(V, 5, 0.1, 1.5)

    def local(x_BSD, table_VD, labels_BS):
        return all_reduce(vocabulary.loss(x_BSD, table_VD, labels_BS, settings)[0], DATA)

    run = jax.shard_map(local, mesh=mesh_of(2, 2), in_specs=(P(DATA), P(TENSOR), P(DATA)), out_specs=P())
    close(jax.jit(run)(x_BSD, table_VD, labels_BS), dense_loss(x_BSD, table_VD, labels_BS, 0.1, 1.5))


def test_the_scale_has_a_gradient_like_any_other_factor():
    x_BSD, table_VD, labels_BS = arrays()
    settings = vocabulary.LossSettings(V, 16, 0.1)

    def local(x_BSD, table_VD, labels_BS, scale):
        total = lambda scale: vocabulary.loss(x_BSD, table_VD, labels_BS, settings, scale)[0] ** 2  # noqa: E731
        return jax.grad(total)(scale)

    run = jax.shard_map(local, mesh=mesh_of(1, 4), in_specs=(P(), P(TENSOR), P(), P()), out_specs=P())
    close(jax.jit(run)(x_BSD, table_VD, labels_BS, 3.0), 6 * dense_loss(x_BSD, table_VD, labels_BS, 0.1, None) ** 2)


def test_unmasked_padding_would_be_noticed(monkeypatch):
    x_BSD, table_VD, labels_BS = arrays()
    monkeypatch.setattr(vocabulary, "mask_padding", lambda logits, first, vocabulary: logits)
    (total, _), _, _ = sharded_loss(mesh_of(2, 2), vocabulary.LossSettings(V, 16))(x_BSD, table_VD, labels_BS)
    with pytest.raises(AssertionError):
        close(total, dense_loss(x_BSD, table_VD, labels_BS, 0.0, None), 1e-3)


def test_extreme_logits_stay_finite():
    x_BSD, table_VD, labels_BS = arrays()
    (total, _), dx, dtable = sharded_loss(mesh_of(1, 4), vocabulary.LossSettings(V, 16))(x_BSD * 1e4, table_VD, labels_BS)
    assert np.isfinite(total) and np.isfinite(dx).all() and np.isfinite(dtable).all()
    close(total, dense_loss(x_BSD * 1e4, table_VD, labels_BS, 0.0, None))


def test_all_labels_ignored():
    x_BSD, table_VD, labels_BS = arrays()
    (total, aux), dx, dtable = sharded_loss(mesh_of(2, 2), vocabulary.LossSettings(V, 16))(x_BSD, table_VD, -jnp.ones_like(labels_BS))
    assert total == 0 and aux["tokens"] == 0 and not np.asarray(dx).any() and not np.asarray(dtable).any()


def test_bfloat16_accumulates_the_table_gradient_in_float32():
    """512 chunks of one token with a common direction: as near as one rounding, where a sum kept in bf16 is far off."""
    x_BSD = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8, D)) + 2, jnp.bfloat16)
    table_VD = arrays()[1].astype(jnp.bfloat16)
    labels_BS = jnp.asarray(np.random.default_rng(1).integers(0, 2, size=(64, 8)), jnp.int32)
    settings = vocabulary.LossSettings(V, 1)
    (total, _), _, dtable = sharded_loss(mesh_of(1, 2), settings)(x_BSD, table_VD, labels_BS)
    assert total.dtype == jnp.float32 and dtable.dtype == jnp.bfloat16
    wide = x_BSD.astype(jnp.float64), table_VD.astype(jnp.float64)
    exact = 3 * jax.grad(dense_loss, argnums=1)(*wide, labels_BS, 0.0, None)
    close(dtable.astype(jnp.float64), exact, 2**-7)

    def add(total, token):
        return total + jax.grad(dense_loss, argnums=1)(token[0][None, None], wide[1], token[1][None, None], 0.0, None).astype(
            jnp.bfloat16
        ), None

    narrow, _ = jax.lax.scan(add, jnp.zeros((PADDED, D), jnp.bfloat16), (wide[0].reshape(-1, D), labels_BS.reshape(-1)))
    with pytest.raises(AssertionError):
        close(3 * narrow.astype(jnp.float64), exact, 4 * 2**-7)


def collectives(jaxpr, times=1):
    """(primitive, axes, values sent) of every collective, counted through loops."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name.startswith(("psum", "pmax", "all_", "reduce_scatter", "ppermute")):
            axes = eqn.params.get("axes") or eqn.params.get("axis_name")
            yield name, tuple(axes), times * sum(v.aval.size for v in eqn.invars)
        inner = times * eqn.params["length"] if name == "scan" else times
        for value in eqn.params.values():
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                yield from collectives(value, inner)


def sent(function, *args):
    return list(collectives(jax.make_jaxpr(function)(*args).jaxpr))


def test_three_scalars_a_token_cross_tensor_and_nothing_in_the_backward():
    x_BSD, table_VD, labels_BS = arrays()
    tokens = B * S

    def local(x_BSD, table_VD, labels_BS):
        x_BSD = vary(x_BSD, TENSOR)
        settings = vocabulary.LossSettings(V, 8)
        loss = jax.value_and_grad(lambda x, table: vocabulary.loss(x, table, labels_BS, settings)[0], argnums=(0, 1))
        total, grads = loss(x_BSD, vary(table_VD, DATA))
        return total[None], grads

    specs = (P(DATA), P(TENSOR), P(DATA))
    outs = (P(DATA), (P(DATA, TENSOR), P((DATA, TENSOR))))
    run = jax.shard_map(local, mesh=mesh_of(1, 4), in_specs=specs, out_specs=outs)
    found = sent(run, x_BSD, table_VD, labels_BS)
    assert {axes for _, axes, _ in found} == {(TENSOR,)}
    assert sum(size for _, _, size in found) == 3 * tokens, found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_embedding_and_its_gradient(tensor, sequence_parallel):
    _, table_VD, _ = arrays()
    ids_BS = jnp.asarray(np.random.default_rng(1).integers(0, V, size=(B, S)), jnp.int32)
    weight_BSD = jnp.asarray(np.random.default_rng(2).normal(size=(B, S, D)))
    edge = boundary(sequence_parallel)
    between = P(DATA, TENSOR) if sequence_parallel else P(DATA)

    def local(table_VD, ids_BS, weight_BSD):
        x_BSD, vjp = jax.vjp(lambda table: vocabulary.embed(table, ids_BS, edge, scale=3.25), vary(table_VD, DATA))
        return x_BSD, all_reduce(vjp(weight_BSD)[0], DATA)

    run = jax.shard_map(local, mesh=mesh_of(2, tensor), in_specs=(P(TENSOR), P(DATA), between), out_specs=(between, P(TENSOR)))
    x_BSD, dtable_VD = jax.jit(run)(table_VD, ids_BS, weight_BSD)
    expected, vjp = jax.vjp(lambda table: table[ids_BS] * 3.25, table_VD)
    close(x_BSD, expected)
    close(dtable_VD, vjp(weight_BSD)[0])


@pytest.mark.parametrize("data, tensor, sequence_parallel", [(2, 1, True), (2, 2, True), (2, 4, False)])
def test_embedding_of_a_table_whose_columns_are_split_too(data, tensor, sequence_parallel):
    """Rows travel; the gradient of a device's columns is complete where it lives."""
    _, table_VD, _ = arrays()
    ids_BS = jnp.asarray(np.random.default_rng(1).integers(0, V, size=(B, S)), jnp.int32)
    weight_BSD = jnp.asarray(np.random.default_rng(2).normal(size=(B, S, D)))
    edge = boundary(sequence_parallel)
    between, table = P(DATA, TENSOR) if sequence_parallel else P(DATA), P(TENSOR, DATA)

    def local(table_VD, ids_BS, weight_BSD):
        x_BSD, vjp = jax.vjp(lambda table: vocabulary.embed_columns(table, ids_BS, edge, (DATA,), scale=3.25), table_VD)
        return x_BSD, vjp(weight_BSD)[0]

    run = jax.shard_map(local, mesh=mesh_of(data, tensor), in_specs=(table, P(DATA), between), out_specs=(between, table))
    x_BSD, dtable_VD = jax.jit(run)(table_VD, ids_BS, weight_BSD)
    expected, vjp = jax.vjp(lambda table: table[ids_BS] * 3.25, table_VD)
    close(x_BSD, expected)
    close(dtable_VD, vjp(weight_BSD)[0])


@pytest.mark.parametrize("width, rounded", [(1152, 34.0), (3072, 55.5), (640, 25.25)])
def test_embedding_scale_is_rounded_to_the_compute_dtype(width, rounded):
    """As Gemma: sqrt(width) in bf16, then one product. Scaling in float32 and rounding after gives other bits."""
    table_VD = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.bfloat16)
    ids_BS = jnp.arange(4, dtype=jnp.int32)[None]
    embed = partial(vocabulary.embed, boundary=boundary(False), scale=width**0.5)
    x_BSD = jax.jit(jax.shard_map(embed, mesh=mesh_of(1, 2), in_specs=(P(TENSOR), P()), out_specs=P()))(table_VD, ids_BS)
    assert x_BSD.dtype == jnp.bfloat16
    assert (x_BSD[0] == table_VD * jnp.bfloat16(rounded)).all()
    wrong = (table_VD.astype(jnp.float32) * jnp.float32(width**0.5)).astype(jnp.bfloat16)
    assert width == 640 or (x_BSD[0] != wrong).any()


def test_repeated_ids_add_their_gradients_in_float32():
    """1000 tokens of one id: bf16 addition of ones stops at 256."""
    table_VD = jnp.ones((4, 2), jnp.bfloat16)
    ids_BS = jnp.full((1, 1000), 3, jnp.int32)

    def local(table_VD, ids_BS):
        embed = partial(vocabulary.embed, ids_BS=ids_BS, boundary=boundary(False))
        x_BSD, vjp = jax.vjp(embed, table_VD)
        return vjp(jnp.ones_like(x_BSD))[0]

    grad = jax.jit(jax.shard_map(local, mesh=mesh_of(1, 2), in_specs=(P(TENSOR), P()), out_specs=P(TENSOR)))(table_VD, ids_BS)
    assert (grad[3] == 1000).all() and not grad[:3].any()


def test_logits_are_capped_like_the_loss_and_padding_is_never_chosen():
    """cap 30, logit 120 -> 29.98."""
    x_BSD = jnp.full((1, 1, 1), 120.0)
    table_VD = jnp.asarray([[1.0], [0.5], [-1.0], [0.0]])
    run = jax.shard_map(
        lambda x, table: vocabulary.logits(vary(x, TENSOR), table, 3, 30.0),
        mesh=mesh_of(1, 2),
        in_specs=(P(), P(TENSOR)),
        out_specs=P(None, None, TENSOR),
    )
    logits_V = np.asarray(run(x_BSD, table_VD))[0, 0]
    np.testing.assert_allclose(logits_V[:3], [29.98, 28.92, -29.98], atol=0.01)
    assert logits_V[3] == -np.inf
