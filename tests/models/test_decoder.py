"""The decoder against an independent reference on one device, against itself on meshes; the key/value cache against the whole forward."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import BATCH, TENSOR
from jaxpar.models import attention
from jaxpar.models.decoder import Decoder, cache_shapes
from jaxpar.models.pattern import REST
from jaxpar.parallel.block_context import Context
from jaxpar.params import count, flatten, map_leaves
from tests.models import reference
from tests.models.whole import OPTIONS, Whole, assert_close, compiled, gemma, hostile, layer_flags, packed, plain, sinks, specs_of, values

CONFIGS = {"plain": plain, "hostile": hostile, "gemma": gemma, "sinks": sinks}


@lru_cache
def one_device(name):
    """(model, batch, outcome) on one device: what every mesh is compared with."""
    model = Whole(CONFIGS[name]())
    batch = packed(model.config)
    return model, batch, model.step(model.params, batch)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_device_equals_the_reference(name):
    model, batch, ours = one_device(name)
    arrays = jax.tree.map(jnp.asarray, batch)

    def both(params):
        return reference.loss(params, arrays, model.config, OPTIONS.z_loss), reference.logits(params, arrays, model.config)

    (loss, logits), grads = jax.device_get(compiled(jax.value_and_grad(both, has_aux=True))(model.params))
    assert np.abs(ours.logits - logits).max() <= 1e-12 * np.abs(logits).max()
    assert ours.loss == pytest.approx(float(loss), rel=1e-12)
    assert ours.aux["tokens"] == (batch["labels"] >= 0).sum()
    assert ours.aux["cross_entropy"] + ours.aux["z_loss"] == pytest.approx(ours.loss, rel=1e-12)
    assert_close(ours.grads, model.without_padding(grads), 1e-11)


MESHES = [
    # data, tensor, sequence parallel, configuration
    (1, 2, False, "hostile"),
    (2, 4, True, "hostile"),
    (1, 4, False, "gemma"),
    (2, 2, True, "gemma"),
    (4, 2, True, "plain"),
    (2, 2, True, "sinks"),
]


@pytest.mark.parametrize("data, tensor, sequence_parallel, name", MESHES)
def test_meshes_equal_one_device(data, tensor, sequence_parallel, name):
    _, batch, one = one_device(name)
    model = Whole(CONFIGS[name](), data, tensor, sequence_parallel)
    many = model.step(model.params, batch)
    assert many.loss == pytest.approx(one.loss, rel=1e-12)
    assert many.aux == pytest.approx(one.aux, rel=1e-11)
    np.testing.assert_allclose(many.logits, one.logits, atol=1e-11)
    assert_close(many.grads, one.grads, 1e-11)


def test_a_wrong_key_head_would_be_noticed(monkeypatch):
    _, batch, one = one_device("hostile")
    monkeypatch.setattr(attention, "own_kv_heads", lambda parameter, kv_heads: parameter[:1])
    model = Whole(hostile(), tensor=4)
    assert np.abs(model.logits(model.params, batch) - one.logits).max() > 1e-3


def test_norm_after_rope_would_be_noticed(monkeypatch):
    """Qwen3's order is norm, then rope. With norm weights of ones the two are the same, so the values must not be ones."""
    model, batch, one = one_device("hostile")
    rotate, config = attention.rotate, model.config
    weight_H = jnp.asarray(model.params["layers"]["attention"]["query_norm"][0])
    monkeypatch.setattr(attention, "rms_norm", lambda x, weight, eps, one_plus: x)
    monkeypatch.setattr(attention, "rotate", lambda x, *turn: reference.rms(rotate(x, *turn), weight_H, config))
    assert np.abs(Whole(config).logits(model.params, batch) - one.logits).max() > 1e-3


def test_documents_do_not_leak():
    """Other ids in document 1 change nothing in document 2."""
    model, batch, one = one_device("hostile")
    other = dict(batch, ids=np.where(batch["segments"] == 1, (batch["ids"] + 1) % model.config.vocabulary, batch["ids"]).astype(np.int32))
    before, after = (model.logits(model.params, b) for b in (batch, other))
    changed = np.abs(after - before).max(-1)
    assert changed[batch["segments"] == 2].max() == 0
    assert changed[batch["segments"] == 1].min() > 0
    np.testing.assert_allclose(before, one.logits, atol=1e-12)


def test_bfloat16_stays_bfloat16_and_near():
    _, batch, one = one_device("plain")
    half = Whole(plain(), tensor=2, sequence_parallel=True)
    logits = half.logits(jax.tree.map(lambda a: a.astype(jnp.bfloat16), half.params), batch)
    assert logits.dtype == np.float32
    assert np.abs(logits - one.logits).max() < 0.1 * np.abs(one.logits).max()


def generate_logits(model, ids_BS, lengths_B, prompt):
    """Logits of every real token through the cache: the first `prompt` at once (right-padded), then one by one."""
    config, functions = model.config, model.functions
    rows, length = ids_BS.shape
    tensor = model.mesh.shape[TENSOR]
    place = P(None, BATCH, None, TENSOR)
    cache = {name: jnp.zeros((config.layers, *shape)) for name, shape in cache_shapes(config, tensor, rows, length).items()}

    def local(params, ids_BS, positions_BS, segments_BS, cache):
        batch = {"positions": positions_BS, "segments": segments_BS}
        x_BSD = functions.embed(params, ids_BS)

        def step(x_BSD, layer):
            weights, flags, cache = layer
            ((block, own),) = functions.bound(REST, weights, flags)
            return block.cached(x_BSD, Context(batch, {}, own), cache)

        x_BSD, cache = jax.lax.scan(step, x_BSD, (params["layers"], layer_flags(config), cache))
        return functions.logits(params, x_BSD), cache

    specs = (model.partitions, P(BATCH), P(BATCH), P(BATCH), place)
    run = compiled(jax.shard_map(local, mesh=model.mesh, in_specs=specs, out_specs=(P(BATCH, None, TENSOR), place)))
    pieces = [(0, prompt)] + [(token, token + 1) for token in range(prompt, length)]
    found = []
    for start, stop in pieces:
        positions_BS = np.broadcast_to(np.arange(start, stop, dtype=np.int32), (rows, stop - start))
        segments_BS = (positions_BS < lengths_B[:, None]).astype(np.int32)
        logits, cache = run(model.params, ids_BS[:, start:stop], positions_BS, segments_BS, cache)
        found.append(np.asarray(logits)[..., : config.vocabulary])
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("name, data, tensor", [("hostile", 1, 1), ("hostile", 2, 4), ("gemma", 1, 2), ("sinks", 1, 2)])
def test_cache_equals_the_whole_forward(name, data, tensor):
    config = CONFIGS[name]()
    model = Whole(config, data, tensor)
    lengths_B = np.asarray([7, 3])
    positions_BS = np.broadcast_to(np.arange(7, dtype=np.int32), (2, 7))
    ids_BS = np.random.default_rng(3).integers(0, config.vocabulary, size=(2, 7)).astype(np.int32)
    real = positions_BS < lengths_B[:, None]
    batch = {
        "ids": ids_BS,
        "labels": ids_BS,
        "positions": positions_BS,
        "segments": real.astype(np.int32),
        "rows": np.arange(2, dtype=np.int32),
    }
    whole = model.logits(model.params, batch)
    assert np.abs(generate_logits(model, ids_BS, lengths_B, prompt=4) - whole)[real].max() < 1e-12


def test_tree_of_parameters():
    """Paths, shapes and logical axes that sharding, optimizers and conversion rely on."""
    specs = specs_of(hostile(), 4)
    paths = {path: (parameter.shape, parameter.axes, parameter.stacked) for path, parameter in flatten(specs)}
    assert paths["embedding/table"] == ((16, 12), ("vocabulary", "embed"), False)
    assert paths["head/table"] == ((16, 12), ("vocabulary", "embed"), False)
    assert paths["norm/weight"] == ((12,), ("embed",), False)
    assert paths["layers/attention/query"] == ((2, 4, 6, 12), ("layers", "heads", "head_dim", "embed"), True)
    assert paths["layers/attention/key_bias"] == ((2, 2, 6), ("layers", "kv_heads", "head_dim"), True)
    assert paths["layers/attention/output"] == ((2, 12, 4, 6), ("layers", "embed", "heads", "head_dim"), True)
    assert paths["layers/attention/key_norm"] == ((2, 6), ("layers", "head_dim"), True)
    assert paths["layers/mlp/gate"] == ((2, 20, 12), ("layers", "mlp", "embed"), True)
    assert paths["layers/mlp/down"] == ((2, 12, 20), ("layers", "embed", "mlp"), True)
    assert paths["layers/mlp/down_bias"] == ((2, 12), ("layers", "embed"), True)
    assert len(paths) == 3 + 2 + 4 + 4 + 2 + 3 + 3
    assert "head" not in specs_of(gemma(), 1)
    attention_count = 2 * 4 * 6 * 12 + 2 * 2 * 6 * 12 + (4 + 2 + 2) * 6 + 12 + 2 * 6
    assert count(specs) == 2 * 13 * 12 + 12 + 2 * (2 * 12 + attention_count + 3 * 20 * 12 + 2 * 20 + 12)


def test_norms_start_as_the_identity():
    inits = lambda config: {p.init for _, p in flatten(specs_of(config, 1)) if p.role == "norm"}  # noqa: E731
    assert inits(hostile()) == {"ones"} and inits(gemma()) == {"zeros"}


def test_decoder_is_an_ordinary_nnx_module():
    decoder = Decoder(plain(), 13)
    graph, state = nnx.split(decoder)
    merged = nnx.merge(graph, state)
    assert merged.layers.attention.query.shape == (2, 4, 6, 12)
    assert jax.tree.structure(map_leaves(lambda path, p: 0, merged.specs)) == jax.tree.structure(
        jax.tree.map(lambda a: 0, values(specs_of(plain(), 1)))
    )
