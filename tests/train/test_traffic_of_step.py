"""Every collective of a training step, as written and as compiled, is what the formulas say: kind, axes, count, bytes, and nothing else."""

import dataclasses

import jax
import pytest

from jaxpar.config import ExpertsConfig, ModelConfig, MoeConfig
from jaxpar.parallel import collectives, zero
from jaxpar.parallel.collectives import vary_like
from jaxpar.plan import formulas
from jaxpar.plan.traffic import summary
from jaxpar.train.gradients import Gradients
from tests.train.programs import LEVELS, config, each, level, measured, pairwise, traced

PLAIN = ModelConfig(vocabulary=62, width=32, layers=3, heads=4, kv_heads=2, head_width=8, mlp_width=48)
# Vectors that 4 replicas do not divide, biases, a tied and padded vocabulary, dropout.
HOSTILE = ModelConfig(
    vocabulary=61,
    width=40,
    layers=3,
    heads=4,
    kv_heads=2,
    head_width=6,
    mlp_width=48,
    qk_norm=True,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied=True,
    dropout=0.1,
)
ROWS = pairwise(
    mesh=[(8, 1), (4, 2), (2, 4), (1, 4), (1, 1)],
    zero=[0, 1, 2, 3],
    remat=["none", "matmuls", "outputs", "attention", "block"],
    accumulation=[1, 2],
    sequence_parallel=[True, False],
    interleave=[1, 2],
    model=[PLAIN, HOSTILE],
    attention_block=[8, 16],
)


def step(mesh, **settings):
    return config(*mesh, **{"batch": 32, "compute_dtype": "bfloat16", **settings})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(value) for name, value in row.items() if name != "model"))
def test_a_step_as_written_sends_exactly_what_the_formulas_say(row):
    run = step(**row)
    assert each(traced(run)) == each(formulas.step_traffic(run))


@pytest.mark.parametrize("remat", ["none", "matmuls", "block"])
def test_a_ring_sends_what_gathers_and_scatters_would(remat):
    """The formulas' permutes, and over `tensor` the bytes of the same step without a ring."""
    run = step((2, 4), zero=3, remat=remat, model=HOSTILE, collective_matmul=True)
    assert each(traced(run)) == each(formulas.step_traffic(run))
    plain = dataclasses.replace(run, train=dataclasses.replace(run.train, collective_matmul=False))
    rings, others = (sum(one.bytes for one in formulas.step_traffic(way) if one.axes == ("tensor",)) for way in (run, plain))
    assert rings == others and each(traced(run)) != each(formulas.step_traffic(plain))


@pytest.mark.parametrize("run", [level(number) for number in LEVELS], ids=lambda run: f"zero{run.train.zero}")
def test_a_compiled_step_sends_exactly_what_the_formulas_say(run):
    """Bytes of every kind, axes and dtype; operations too, but for all-reduces, which XLA may combine."""
    expected, found = summary(formulas.step_traffic(run)), summary(measured(run).sent)
    assert {key: total.payload for key, total in found.items()} == {key: total.payload for key, total in expected.items()}
    for key, total in found.items():
        assert total.count <= expected[key].count
        assert key[0] == "all_reduce" or total.count == expected[key].count


FEW_LAYERS = [(1, "matmuls", 0), (1, "block", 3), (2, "matmuls", 3), (3, "outputs", 3)]


def few(layers, remat, zero):
    return config(2, 2, zero=zero, remat=remat, model=dataclasses.replace(PLAIN, layers=layers))


@pytest.mark.parametrize("layers, remat, zero", FEW_LAYERS)
def test_layers_outside_loops_send_again_what_the_formulas_say(layers, remat, zero):
    """Too few layers for a loop forward or backward: what the backward gathers again is not the forward's, kept until then."""
    run = few(layers, remat, zero)
    expected, found = summary(formulas.step_traffic(run)), summary(measured(run).sent)
    assert {key: total.payload for key, total in found.items()} == {key: total.payload for key, total in expected.items()}


@pytest.mark.skipif(not jax.__version__.startswith("0.10."), reason="the XLA of jaxlib 0.12 leaves weights' gathers apart by itself")
def test_equal_gathers_outside_loops_would_be_one(monkeypatch):
    """Negative control: XLA merges what is not told apart, weights over `data` and activations over `tensor`."""
    run = few(2, "matmuls", 3)
    monkeypatch.setattr(collectives, "distinct", lambda tree: tree)
    expected, found = summary(formulas.step_traffic(run)), summary(measured.__wrapped__(run).sent)
    for axes in (("data",), ("tensor",)):
        assert found["all_gather", axes, "float32"].payload < expected["all_gather", axes, "float32"].payload


def test_each_microbatch_gathers_its_weights(monkeypatch):
    """ZeRO-3's of embedding, norm, head, first and last layer too, which no loop over layers holds.

    Control: XLA sends in front of the loop over microbatches what it repeats unchanged."""
    run, key = config(2, 2, zero=3, remat="block", accumulation=2, model=PLAIN), ("all_gather", ("data",), "float32")
    expected = summary(formulas.step_traffic(run))
    assert {key: total.payload for key, total in summary(measured(run).sent).items()} == {key: t.payload for key, t in expected.items()}
    monkeypatch.setattr(collectives, "anew", lambda x, turn: x)
    assert summary(measured.__wrapped__(run).sent)[key].payload < expected[key].payload


@pytest.mark.parametrize("remat", ["none", "matmuls"])
def test_xla_drops_the_biases_that_no_backward_reads(remat):
    """A step as written gathers all of a layer again; as compiled not the last bias, or none of them where their sums are kept."""
    run = config(4, 2, zero=3, remat=remat, model=dataclasses.replace(HOSTILE, layers=5, dropout=0.0))
    found, key = summary(measured(run).sent), ("all_gather", ("data",), "float32")
    assert found[key].payload == summary(formulas.step_traffic(run, compiled=True))[key].payload
    assert found[key].payload < summary(formulas.step_traffic(run))[key].payload


@pytest.mark.parametrize("balance, accumulation, documents", [("sequence", 1, "isolated"), ("microbatch", 2, "joined")])
def test_xla_drops_the_counts_of_experts_that_nobody_reads(balance, accumulation, documents):
    """Those that the backward makes again, but where a row's loss reads them. How many tokens of a row are no padding nobody sends."""
    model = dataclasses.replace(PLAIN, layers=4, moe=MoeConfig(experts=8, per_token=2, width=16, balance=balance))
    train = {"zero": 1, "remat": "matmuls", "experts": ExpertsConfig(dispatch="gather"), "accumulation": accumulation}
    run = config(2, 2, model=model, **train)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, documents=documents))
    found, key = summary(measured(run).sent), ("all_reduce", ("tensor",), "int32")
    assert found[key].payload == summary(formulas.step_traffic(run, compiled=True))[key].payload
    assert (found[key].payload < summary(formulas.step_traffic(run))[key].payload) is (balance == "microbatch")


def test_compiled_zero_0_reduces_its_gradients_in_one_operation_for_four_microbatches():
    run = level(0)
    assert run.train.accumulation == 4
    whole = summary(measured(run).sent)["all_reduce", ("data",), "float32"]
    split = sum(weight.total for weight in formulas.weights(run) if not weight.partial)
    assert whole.count == 1 and whole.payload == 4 * (split + 2)  # and the two sums of losses


def test_zero_0_sends_the_same_over_data_for_any_accumulation():
    def over_data(accumulation):
        run = step((4, 2), zero=0, accumulation=accumulation, model=PLAIN)
        return {key: total for key, total in summary(traced(run)).items() if "data" in key[1]}

    assert over_data(1) == over_data(2) == over_data(4) != {}


def test_reduction_and_gather_have_the_dtypes_asked_for():
    run = step((4, 2), zero=1, model=PLAIN, compute_dtype="bfloat16", reduce_dtype="bfloat16")
    assert each(traced(run)) == each(formulas.step_traffic(run))
    assert {key[2] for key in summary(traced(run)) if key[0] in ("all_gather", "reduce_scatter")} == {"bfloat16"}


def test_the_logits_are_never_sent():
    """No collective over tensor in the loss is larger than two scalars a token."""
    run = step((2, 4), zero=0, model=PLAIN, loss_chunk=24)
    reductions = [one for one in traced(run) if one.axes == ("tensor",) and one.kind == "all_reduce"]
    floats = [one for one in reductions if one.dtype == "float32" and one.count > 1]
    assert floats and max(one.payload / one.count for one in floats) == 2 * 4 * 24


@pytest.mark.parametrize(
    "change",
    [
        {"zero": 1},
        {"zero": 2},
        {"accumulation": 4},
        {"remat": "none"},
        {"sequence_parallel": False},
        {"reduce_dtype": "bfloat16"},
        {"interleave": 2},
    ],
    ids=str,
)
def test_another_step_does_not_match(change):
    """Negative control: the formulas of any other setting disagree with the program."""
    run = step((4, 2), zero=3, accumulation=2, model=PLAIN)
    other = dataclasses.replace(run, train=dataclasses.replace(run.train, **change))
    assert each(traced(run)) == each(formulas.step_traffic(run))
    assert each(traced(run)) != each(formulas.step_traffic(other))


def test_one_reduction_too_many_does_not_match(monkeypatch):
    """Negative control: a program that reduces gradients in every microbatch is noticed, with its bytes."""
    microbatch = Gradients.microbatch

    def eager(self, *arguments):
        sums, grads = microbatch(self, *arguments)
        finished = zero.finish(grads, self.places, self.config.train.reduce_dtype)
        return sums, jax.tree.map(vary_like, finished, grads)

    run = step((4, 2), zero=0, accumulation=2, model=PLAIN)
    expected = summary(formulas.step_traffic(run))["all_reduce", ("data",), "float32"].payload
    monkeypatch.setattr(Gradients, "microbatch", eager)
    found = summary(traced.__wrapped__(run))["all_reduce", ("data",), "float32"].payload
    assert found == 3 * (expected - 8) + 8  # but the two sums of losses
