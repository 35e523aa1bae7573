"""What a step of a mixture of experts sends, as written, is what the formulas say: kind, axes, count, bytes, and nothing else.

The CPU has no ragged exchange and runs a padded one in its place; here the program for GPUs is traced, which any machine can.
"""

import jax
import pytest

from jaxpar.config import Config, DataConfig, ExpertsConfig, MeshShape, ModelConfig, MoeConfig, TrainConfig
from jaxpar.mesh import make_mesh
from jaxpar.models.options import train_options
from jaxpar.plan import formulas
from jaxpar.plan.traffic import summary
from jaxpar.train import gradients
from jaxpar.train.step import build_training
from tests.traced import traced_collectives
from tests.train.programs import each, measured

E, K, D, TOKENS = 8, 2, 32, 32 * 16  # of a step
EXPERT, FOLDED, WHOLE = ("expert",), ("expert", "tensor"), ("expert", "seq", "tensor")


def run(data=1, expert=1, seq=1, tensor=1, shared=0, balance="sequence", moe=(), experts=(), documents="isolated", **train):
    given = {"per_token": K, **dict(moe)}
    moe = MoeConfig(experts=E, width=24, balance=balance, balance_weight=0.01, shared_width=shared, **given)
    return Config(
        model=ModelConfig(vocabulary=64, width=D, layers=3, heads=4, kv_heads=2, head_width=8, mlp_width=48, moe=moe),
        mesh=MeshShape(data=data, expert=expert, seq=seq, tensor=tensor),
        data=DataConfig(sequence=16, vocabulary=64, documents=documents),
        train=TrainConfig(**{"batch": 32, "attention": "blockwise", "experts": ExpertsConfig(**dict(experts)), **train}),
    )


FEW = {
    "ragged": run(2, 2, 1, 2, remat="block", balance="microbatch", accumulation=2, interleave=2, zero=1),
    "gather": run(2, 4, remat="matmuls", zero=3, experts={"dispatch": "gather"}),
    "capacity": run(2, 2, 1, 2, remat="outputs", shared=24, zero=2, experts={"dispatch": "capacity"}, sequence_parallel=False),
    "columns, in chunks": run(2, 2, 1, 2, remat="block", experts={"columns": True, "chunks": 2}, shared=24, moe={"dense_layers": 1}),
    "folded over tensor": run(2, 2, 1, 2, remat="block", zero=3, experts={"axes": FOLDED}),
    "folded over seq and tensor": run(1, 2, 2, 2, remat="attention", zero=3, experts={"axes": WHOLE}, shared=24),
}
MORE = {
    **{f"{m} {r}": run(2, 2, 1, 2, remat=r, experts={"dispatch": m}) for m in ("ragged", "gather", "capacity") for r in ("none", "block")},
    "no sequence parallelism": run(2, 2, 1, 2, sequence_parallel=False, zero=1),
    "expert alone": run(1, 8, remat="block", zero=3),
    **{f"columns {r}": run(2, 2, 1, 2, remat=r, experts={"columns": True}) for r in ("none", "matmuls", "outputs")},
    "columns, replicated": run(2, 2, 1, 2, experts={"columns": True}, sequence_parallel=False, zero=2),
    "columns, ring": run(2, 2, 1, 2, remat="block", experts={"columns": True}, shared=24, collective_matmul=True),
    "expert choice": run(2, 2, 1, 2, remat="block", moe={"router": "expert_choice"}),
    "expert choice, joined": run(1, 2, 2, 2, remat="block", moe={"router": "expert_choice"}, documents="joined"),
    **{f"biases {r}": run(2, 2, 1, 2, remat=r, zero=3, moe={"biases": True}) for r in ("none", "matmuls", "outputs")},
    "biases, float32": run(2, 2, 1, 2, remat="matmuls", moe={"biases": True}, compute_dtype="float32"),
    "biases, capacity": run(2, 2, 1, 2, remat="matmuls", moe={"biases": True}, experts={"dispatch": "capacity"}),
    "biases, columns": run(2, 2, 1, 2, remat="matmuls", moe={"biases": True}, experts={"columns": True}),
    "correction": run(2, 2, 1, 2, zero=3, accumulation=2, moe={"router": "sigmoid", "correction": True}),
    "every third": run(2, 2, 1, 2, remat="block", zero=2, accumulation=2, balance="layers", moe={"every": 3}),
    "data alone": run(8, 1, remat="block", zero=3),
    "seq beside expert": run(1, 2, 2, 2, zero=2, accumulation=2),
}


@pytest.fixture(autouse=True)
def for_gpus(monkeypatch):
    monkeypatch.setattr(gradients, "train_options", lambda train, platform: train_options(train, "gpu"))


def traced(config):
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.devices])
    built = build_training(config, mesh)
    return traced_collectives(built.step.trace(built.abstract_state, built.abstract_batch).jaxpr, mesh.shape)


@pytest.mark.parametrize("name", FEW)
def test_a_step_as_written_sends_exactly_what_the_formulas_say(name):
    assert each(traced(FEW[name])) == each(formulas.step_traffic(FEW[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_steps_as_written(name):
    assert each(traced(MORE[name])) == each(formulas.step_traffic(MORE[name]))


def test_each_fold_sends_something_else():
    """Negative control."""
    assert each(formulas.step_traffic(FEW["folded over tensor"])) != each(formulas.step_traffic(run(2, 2, 1, 2, remat="block", zero=3)))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_bytes_of_a_forward_and_of_a_backward_by_hand(n):
    """Dispatch and combine: 2 K tokens D dtype (n-1)/n a layer and direction, of tokens that a device has; gather n/K times that."""
    tokens, size, layers = TOKENS // n, 2, 3
    each_way = 2 * K * tokens * D * size * (n - 1) / n
    for method, times, kinds in (("ragged", 1, {"ragged_all_to_all"}), ("capacity", 1, {"all_to_all"})):
        config = run(expert=n, remat="none", experts={"dispatch": method, "capacity_factor": 1.0})
        total = sum(t.bytes for key, t in summary(formulas.step_traffic(config)).items() if key[0] in kinds and key[2] == "bfloat16")
        assert total == times * 2 * layers * each_way
    config = run(expert=n, remat="none", experts={"dispatch": "gather"})
    totals = summary([one for one in formulas.step_traffic(config) if "experts" in one.source])
    sent = [totals[kind, ("expert",), "bfloat16"].bytes for kind in ("all_gather", "reduce_scatter")]
    assert sent == [layers * each_way * n / K] * 2


@pytest.mark.parametrize("method", ["capacity", "gather"])
def test_bytes_as_compiled_by_hand(method):
    """Of the program that XLA makes for the CPU, where these two send what they do on GPUs. Capacity 1.0: of each choice D values and its
    weight there, D values back; backward as many. Gather: of each token D values and its choices' weights and numbers to every device, D
    values of sums back; backward as many but for the numbers.

    Control: one expert of a token more."""
    n, layers, size, k = 4, 3, 4, {"per_token": 3}
    settings = {
        "remat": "none",
        "zero": 0,
        "compute_dtype": "float32",
        "loss_chunk": 24,
        "experts": {"dispatch": method, "capacity_factor": 1.0},
    }
    found = summary(measured(run(expert=n, **settings)).sent)
    sent = {(kind, dtype): total.bytes for (kind, axes, dtype), total in found.items() if axes == EXPERT and kind != "all_reduce"}
    if method == "capacity":
        each_way = K * TOKENS // n * (2 * D + 1) * size * (n - 1) // n
        hand = {("all_to_all", "float32"): 2 * layers * each_way}
    else:
        each_way = (n - 1) * TOKENS // n * (2 * D + K) * size
        numbers = (n - 1) * TOKENS // n * K * size
        hand = {(kind, "float32"): layers * each_way for kind in ("all_gather", "reduce_scatter")}
        hand["all_gather", "int32"] = layers * numbers
    assert sent == hand
    other = summary(formulas.step_traffic(run(expert=n, moe=k, **settings)))
    assert any(other[kind, EXPERT, dtype].bytes != total for (kind, dtype), total in sent.items())


BIASES = [
    ("gather", "none"),
    ("gather", "matmuls"),
    ("capacity", "matmuls"),
    ("capacity", "none"),
    ("gather", "outputs"),
    ("gather", "block"),
]


@pytest.mark.parametrize(
    ("dispatch", "remat"), [row if n in (1, 2) else pytest.param(*row, marks=pytest.mark.slow) for n, row in enumerate(BIASES)]
)
def test_xla_drops_the_biases_of_experts_that_no_backward_reads(dispatch, remat):
    """ZeRO-3 over 8, as compiled for the CPU, where these two dispatch as on GPUs. Control: as written every bias is gathered again."""
    config = run(8, remat=remat, zero=3, moe={"biases": True}, experts={"dispatch": dispatch}, compute_dtype="float32", loss_chunk=24)
    found, key = summary(measured(config).sent), ("all_gather", ("data",), "float32")
    assert found[key].payload == summary(formulas.step_traffic(config, compiled=True))[key].payload
    read = (dispatch, remat) in (("capacity", "matmuls"), ("gather", "block"))
    assert (found[key].payload == summary(formulas.step_traffic(config))[key].payload) is read


def test_experts_belong_to_the_axes_that_do_not_split_them():
    """ZeRO's gathers: of experts over `data` alone, of all else over both."""
    totals = summary(formulas.step_traffic(FEW["folded over tensor"]))
    experts = 3 * E * 24 * D // 4
    assert totals["all_gather", ("data",), "bfloat16"].payload == 2 * 6 * experts
    assert ("all_gather", ("data", "expert"), "bfloat16") in totals
