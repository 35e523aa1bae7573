"""One block: what it sends, what it names for the remat policies, and its dropout, the same on every mesh."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import BATCH, TENSOR
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.sequence import SequenceParallel
from tests.models.whole import Whole, assert_close, hostile, packed, plain

DROPOUT = 0.4


@lru_cache
def one_device():
    """(model, batch, outcome with dropout)."""
    model = Whole(plain(dropout=DROPOUT))
    batch = packed(model.config)
    return model, batch, model.step(model.params, batch, dropout_seed=3)


@pytest.mark.parametrize("data, tensor, sequence_parallel", [(1, 2, False), (2, 4, True)])
def test_dropout_is_the_same_on_every_mesh(data, tensor, sequence_parallel):
    """Loss and gradients with a mask that depends on (key, layer, place, row, token, feature) only."""
    one, batch, expected = one_device()
    model = Whole(one.config, data, tensor, sequence_parallel)
    found = model.step(model.params, batch, dropout_seed=3)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert_close(found.grads, expected.grads, 1e-11)


def test_dropout_by_index_within_the_shard_would_be_noticed(monkeypatch):
    one, batch, expected = one_device()
    monkeypatch.setattr(SequenceParallel, "tokens", lambda self, length: jnp.arange(length, dtype=jnp.int32))
    model = Whole(one.config, 1, 2, True)
    assert np.abs(model.step(model.params, batch, dropout_seed=3).logits - expected.logits).max() > 1e-3


def test_layers_and_places_draw_different_masks():
    """Two layers of equal weights, fed the same x, and the two places of one layer."""
    model = Whole(plain(dropout=DROPOUT, layers=1))
    block = model.functions.bind_block(jax.tree.map(lambda a: jnp.asarray(a[0]), model.params["layers"]))
    rows = {"rows": np.arange(2, dtype=np.int32)}
    ones = jnp.ones((2, 64, 12), jnp.float64)

    def mask(index, place, seed=0):
        context = Context(rows, {"dropout": jax.random.key(seed)}, {"index": jnp.int32(index)})
        return np.asarray(block.drop(ones, place, context)) > 0

    masks = [mask(0, 0), mask(0, 1), mask(1, 0), mask(0, 0, seed=1)]
    assert abs(masks[0].mean() - (1 - DROPOUT)) < 0.05
    for first in range(4):
        for second in range(first):
            agreement = (masks[first] == masks[second]).mean()
            assert abs(agreement - (DROPOUT**2 + (1 - DROPOUT) ** 2)) < 0.05
    assert (mask(0, 0) == masks[0]).all()


def test_evaluation_drops_nothing():
    config = plain(dropout=DROPOUT)
    model, without = Whole(config), Whole(plain())
    batch = packed(config)
    logits = model.logits(model.params, batch)
    np.testing.assert_array_equal(logits, without.logits(without.params, batch))
    assert np.abs(logits - one_device()[2].logits).max() > 1e-3


def traced(config, sequence_parallel, differentiated):
    """One block on tensor 2, forward only or with its backward, as text."""
    model = Whole(config, 1, 2, sequence_parallel)
    layer = jax.tree.map(lambda a: jnp.asarray(a[0]), model.params["layers"])
    specs = jax.tree.map(lambda spec: P(*spec[1:]), model.partitions["layers"], is_leaf=lambda a: isinstance(a, P))
    between = P(BATCH, TENSOR) if sequence_parallel else P(BATCH)
    batch = {name: a for name, a in packed(config).items() if name in ("positions", "segments", "rows")}

    def local(layer, x_BSD, batch):
        context = Context(batch, {}, {"index": jnp.int32(0), "window": jnp.int32(0)})
        y_BSD, aux = model.functions.block(layer, x_BSD, context)
        assert aux == {}
        return y_BSD

    def both(layer, x_BSD, batch):
        y_BSD, vjp = jax.vjp(lambda x: local(layer, x, batch), x_BSD)
        return vjp(y_BSD)[0]

    body = both if differentiated else local
    run = jax.shard_map(body, mesh=model.mesh, in_specs=(specs, between, {name: P(BATCH) for name in batch}), out_specs=between)
    return str(jax.make_jaxpr(run)(layer, jnp.zeros((4, 8, 12), jnp.float64), batch))


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("sequence_parallel, sent", [(False, (2, 0, 0)), (True, (0, 2, 2))])
def test_what_a_block_sends(sequence_parallel, sent, differentiated):
    """Two all-reduces, or two all-gathers and two reduce-scatters, and as much in the backward; nothing else, with every option on."""
    text = traced(hostile(), sequence_parallel, differentiated)
    times = 2 if differentiated else 1
    assert (text.count(" psum"), text.count(" all_gather["), text.count(" reduce_scatter[")) == tuple(times * count for count in sent)
    assert "ppermute" not in text and "all_to_all" not in text


def test_values_carry_the_names_that_remat_policies_use():
    text = traced(hostile(), True, differentiated=True)
    for name in ("query", "key", "value", "attention_out", "attention_lse", "mlp_gate", "mlp_up"):
        assert f"name={name}" in text, name
