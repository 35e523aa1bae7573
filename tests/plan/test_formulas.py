"""Formulas of a step's traffic against arithmetic by hand, and properties that any of them must have."""

import math

import pytest

from jaxpar.config import Config, DataConfig, MeshShape, ModelConfig, OptimizerConfig, TrainConfig
from jaxpar.plan import formulas, saved
from jaxpar.plan.traffic import summary

D, F, V, L, N, K, H = 32, 48, 62, 3, 4, 2, 8
MODEL = ModelConfig(vocabulary=V, width=D, layers=L, heads=N, kv_heads=K, head_width=H, mlp_width=F)
MATRICES = L * (2 * N * H * D + 2 * K * H * D + 3 * F * D) + 2 * V * D
NORMS = (2 * L + 1) * D
BATCH, SEQUENCE = 16, 16


def config(data=1, tensor=1, model=MODEL, optimizer="adamw", **train):
    return Config(
        model=model,
        mesh=MeshShape(data=data, tensor=tensor),
        data=DataConfig(sequence=SEQUENCE, vocabulary=model.vocabulary),
        optimizer=OptimizerConfig(name=optimizer),
        train=TrainConfig(**{"batch": BATCH, **train}),
    )


def sent(config, kind, axes, dtype, word=""):
    """(operations, payload) of the formula, of one purpose."""
    found = [each for each in formulas.step_traffic(config) if word in each.source]
    total = summary(found).get((kind, axes, dtype))
    return (total.count, total.payload) if total else (0, 0)


def test_weights_of_a_device_add_up_to_the_model():
    assert sum(weight.total for weight in formulas.weights(config())) == MATRICES + NORMS
    assert sum(weight.total for weight in formulas.weights(config(data=2, tensor=2))) == MATRICES // 2 + NORMS


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_zero_0_reduces_the_parameters_once_whatever_the_accumulation(accumulation):
    run = config(data=4, zero=0, accumulation=accumulation)
    assert sent(run, "all_reduce", ("data",), "float32", "gradients,") == (12, 4 * (MATRICES + NORMS))


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_zero_1_scatters_and_gathers_the_parameters_once(accumulation):
    run = config(data=4, zero=1, accumulation=accumulation)
    assert sent(run, "reduce_scatter", ("data",), "float32") == (12, 4 * (MATRICES + NORMS))
    assert sent(run, "all_gather", ("data",), "bfloat16") == (12, 2 * (MATRICES + NORMS))


def test_zero_2_scatters_every_microbatch():
    layer = (MATRICES + NORMS - 2 * V * D - D) // L
    payload = 2 * 4 * (L * layer + 2 * V * D + D)
    assert sent(config(data=4, zero=2, accumulation=2), "reduce_scatter", ("data",), "float32") == (2 * (L * 9 + 3), payload)


def test_zero_3_gathers_each_layer_twice_but_the_last_once():
    layer = (MATRICES + NORMS - 2 * V * D - D) // L
    payload = 2 * ((2 * L - 1) * layer + 2 * V * D + D)
    assert sent(config(data=4, zero=3), "all_gather", ("data",), "bfloat16") == ((2 * L - 1) * 9 + 3, payload)


def test_with_remat_block_the_last_layer_gathers_its_mlp_again():
    plain, again = (sent(config(data=4, zero=3, remat=remat), "all_gather", ("data",), "bfloat16") for remat in ("attention", "block"))
    assert (again[0] - plain[0], again[1] - plain[1]) == (3, 2 * 3 * F * D)


def test_zero_3_sends_rows_of_the_embedding_where_tokens_are_fewer_than_entries():
    """8 sequences of 16 tokens over 4 devices are 32 tokens each, of 62 entries: ids to all, rows and their gradients back."""
    run = config(data=4, zero=3, batch=8)
    assert sent(run, "all_gather", ("data",), "int32") == (1, 4 * 4 * 32)
    assert sent(run, "all_to_all", ("data",), "bfloat16") == (2, 2 * 2 * 32 * D)
    assert sent(config(data=4, zero=3), "all_to_all", ("data",), "bfloat16") == (0, 0), "64 tokens each: the table is less"


def test_a_device_sends_what_a_ring_needs():
    run = config(data=4, zero=1)
    total = summary(formulas.step_traffic(run))["reduce_scatter", ("data",), "float32"]
    assert total.bytes == 3 / 4 * 4 * (MATRICES + NORMS)


@pytest.mark.parametrize("chunk", [24, 1000])
def test_the_loss_sends_three_scalars_a_token(chunk):
    tokens = BATCH * SEQUENCE // 2
    padded = -(-tokens // chunk) * chunk if chunk < tokens else tokens
    count, payload = sent(config(data=2, tensor=2, loss_chunk=chunk), "all_reduce", ("tensor",), "float32", "loss")
    assert payload == 3 * 4 * padded
    assert count == 2 * math.ceil(tokens / chunk)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_sequence_parallelism_sends_the_bytes_of_the_all_reduces_that_it_replaces(zero):
    """Activations without recomputation: 4 gathers and 4 scatters a layer for 4 all-reduces; 2 and 2 outside the layers for 2."""

    def activations(on):
        run = config(data=2, tensor=4, zero=zero, remat="none", sequence_parallel=on, accumulation=2)
        return sum(each.bytes for each in formulas.step_traffic(run) if "activations" in each.source)

    assert activations(True) == activations(False) == 2 * (3 / 4) * (4 * L + 2) * BATCH * SEQUENCE // 2 * D * 2


def test_norms_are_reduced_over_tensor_once_a_step_under_sequence_parallelism():
    run = config(data=4, tensor=2, zero=1, accumulation=2)
    assert sent(run, "all_reduce", ("tensor",), "float32", "gradients,") == (3, 4 * NORMS // 4)
    assert sent(config(tensor=2, sequence_parallel=False), "all_reduce", ("tensor",), "float32", "gradients,") == (0, 0)


def test_key_and_value_heads_fewer_than_devices_are_reduced_over_tensor():
    run = config(tensor=4, sequence_parallel=False)
    assert sent(run, "all_reduce", ("tensor",), "float32", "gradients,") == (2, 4 * L * 2 * K * H * D)


def test_a_vector_that_replicas_do_not_divide_is_reduced_whole():
    model = ModelConfig(vocabulary=V, width=D, layers=L, heads=N, kv_heads=K, head_width=6, mlp_width=F, qk_norm=True)
    assert sent(config(data=4, zero=3, model=model), "all_reduce", ("data",), "float32", "gradients,") == (2, 4 * L * 2 * 6)


def test_one_device_sends_nothing():
    assert formulas.step_traffic(config(zero=3)) == []


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 3), ("lion", 2), ("sgd", 2)])
def test_state_is_masters_and_moments_over_the_replicas(optimizer, copies):
    whole, split = (formulas.state_bytes(config(data=4, zero=zero, optimizer=optimizer)) for zero in (0, 3))
    assert 0 <= whole - copies * 4 * (MATRICES + NORMS) <= 16
    assert 0 <= split - copies * (MATRICES + NORMS) <= 16


def test_kept_values_fall_with_the_policy():
    kept = [saved.saved_bytes(config(data=2, tensor=2, remat=policy)) for policy in ("matmuls", "outputs", "attention", "block")]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4
    assert kept[-1] == L * 2 * BATCH * SEQUENCE // 2 // 2 * D
    assert saved.saved_bytes(config(remat="none")) > 2 * kept[0]


def test_muon_keeps_one_moment_of_matrices_and_adafactor_none():
    inside = L * (2 * N * H * D + 2 * K * H * D + 3 * F * D)
    whole = MATRICES + NORMS
    assert formulas.state_bytes(config(optimizer="muon", zero=0)) == 4 * (2 * inside + 3 * (whole - inside))
    assert formulas.state_bytes(config(optimizer="adafactor", zero=0)) == 4 * whole
