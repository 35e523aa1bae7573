"""Tokens chosen from split logits: the same on every mesh, and of the right distribution."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import BATCH, TENSOR, make_mesh
from jaxpar.parallel import sampling

ROWS, VOCABULARY, PADDED = 4096, 13, 16
MESHES = [(1, 1), (2, 2), (1, 4)]


def rows_of(logits_V, rows=ROWS):
    padded_V = np.pad(np.asarray(logits_V, np.float64), (0, PADDED - VOCABULARY), constant_values=-np.inf)
    return np.broadcast_to(padded_V, (rows, PADDED))


@lru_cache
def program(how, data, tensor):
    """`how` is a function of the module, run under shard_map on (logits, row numbers, seed, position, settings)."""
    mesh = make_mesh(MeshShape(data=data, tensor=tensor), jax.devices()[: data * tensor])

    def local(logits_BV, row_B, seed, position, settings):
        draw = sampling.Draw(seed, row_B, jnp.zeros_like(row_B) + position)
        return how(logits_BV, *settings, *([] if how is sampling.likeliest else [draw]))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(BATCH, TENSOR), P(BATCH), P(), P(), P()), out_specs=P(BATCH)))


def choose(how, logits_BV, data=1, tensor=1, *settings, seed=3, position=5):
    run = program(how, data, tensor)
    return np.asarray(run(logits_BV, np.arange(len(logits_BV), dtype=np.int32), np.uint32(seed), np.int32(position), settings))


def cut(k, p):
    return np.float32(0.7), np.int32(k), np.float32(p)


@pytest.fixture(scope="module")
def logits_V():
    return np.random.default_rng(0).normal(size=VOCABULARY) * 1.5


def shares(logits_V, temperature):
    weights_V = np.exp((logits_V - logits_V.max()) / temperature)
    return weights_V / weights_V.sum()


def far_from(tokens_B, shares_V):
    """Largest deviation of a frequency, in standard deviations; infinite where a token of share 0 was chosen."""
    found_V = np.bincount(tokens_B, minlength=VOCABULARY)
    if found_V[shares_V == 0].any():
        return np.inf
    real_V = shares_V > 0
    sigma_V = np.sqrt(len(tokens_B) * shares_V * (1 - shares_V)) + 1e-9
    return (np.abs(found_V - len(tokens_B) * shares_V) / sigma_V)[real_V].max()


@pytest.mark.parametrize("data, tensor", MESHES)
def test_likeliest_is_argmax_and_the_smaller_of_equals(data, tensor):
    logits_BV = np.random.default_rng(1).integers(-3, 3, size=(ROWS, PADDED)).astype(np.float64)  # full of ties
    logits_BV[:, VOCABULARY:] = -np.inf
    assert (choose(sampling.likeliest, logits_BV, data, tensor) == logits_BV.argmax(-1)).all()


def test_not_a_number_is_no_token():
    logits_BV = np.full((ROWS, PADDED), np.nan)
    assert (choose(sampling.likeliest, logits_BV, 1, 4) == sampling.NO_TOKEN).all()


def test_sample_follows_the_softmax_on_every_mesh(logits_V):
    found = [choose(sampling.sample, rows_of(logits_V), *mesh, np.float32(0.7)) for mesh in MESHES]
    assert all((other == found[0]).all() for other in found[1:])
    assert far_from(found[0], shares(logits_V, 0.7)) < 4.5
    assert far_from(found[0], shares(logits_V, 0.9)) > 6  # the test can tell a temperature from another


@pytest.mark.parametrize("k, p", [(3, 2.0), (VOCABULARY, 0.8), (4, 0.6)])
def test_cut_leaves_the_likeliest_and_their_shares(logits_V, k, p):
    found = [choose(sampling.sample_cut, rows_of(logits_V), *mesh, *cut(k, p)) for mesh in MESHES]
    assert all((other == found[0]).all() for other in found[1:])
    expected_V = shares(logits_V, 0.7)
    order_V = np.argsort(-expected_V)
    expected_V[order_V[k:]] = 0
    expected_V /= expected_V.sum()
    before_V = np.cumsum(expected_V[order_V]) - expected_V[order_V]
    expected_V[order_V[before_V >= p]] = 0
    assert 1 < (expected_V > 0).sum() < VOCABULARY
    assert far_from(found[0], expected_V / expected_V.sum()) < 4.5


def test_cut_of_equals_keeps_exactly_k():
    found = choose(sampling.sample_cut, rows_of(np.zeros(VOCABULARY)), 1, 4, *cut(3, 2.0))
    assert set(found) == {0, 1, 2}


def test_an_extreme_temperature_is_greedy_and_overflows_nothing(logits_V):
    found = choose(sampling.sample, rows_of(logits_V * 1e30), 1, 4, np.finfo(np.float32).tiny)
    assert (found == logits_V.argmax()).all()


def test_seed_row_and_position_all_matter(logits_V):
    one = choose(sampling.sample, rows_of(logits_V), 1, 1, np.float32(1))
    assert len(set(one)) > 3
    assert (one != choose(sampling.sample, rows_of(logits_V), 1, 1, np.float32(1), seed=4)).any()
    assert (one != choose(sampling.sample, rows_of(logits_V), 1, 1, np.float32(1), position=6)).any()


def test_noise_by_place_on_the_device_would_be_noticed(logits_V, monkeypatch):
    """Devices that draw for their own columns 0, 1, … repeat one another's noise."""
    right = choose(sampling.sample, rows_of(logits_V), 1, 4, np.float32(0.7))
    noise = sampling._noise
    monkeypatch.setattr(sampling, "_noise", lambda ids_V, draw: noise(ids_V % (PADDED // 4), draw))
    program.cache_clear()
    wrong = choose(sampling.sample, rows_of(logits_V), 1, 4, np.float32(0.7))
    program.cache_clear()
    assert (wrong != right).mean() > 0.1
