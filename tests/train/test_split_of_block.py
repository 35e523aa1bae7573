"""The Llama block of a real step, cut: what a pipeline relies on, on the mesh it trains on."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxpar.parallel import remat, split
from tests.train import runs
from tests.train.test_experts import model


def cut_of(monkeypatch, **options):
    """The cut that tracing a step makes of its block, and the step's configuration."""
    found = []
    original = split.cut

    def recording(*arguments, **keywords):
        found.append(original(*arguments, **keywords))
        return found[-1]

    monkeypatch.setattr(split, "cut", recording)
    run = runs.config(**options)
    built = runs.training(run)
    jax.eval_shape(built.gradients, built.abstract_state["params"], built.abstract_batch, jax.ShapeDtypeStruct((), jnp.int32))
    return found[0], run


@pytest.mark.parametrize("blocks_of_attention", [16, 8], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("keep", remat.POLICIES)
def test_a_pipeline_can_rely_on_it(monkeypatch, keep, blocks_of_attention):
    cut, _ = cut_of(monkeypatch, data=2, tensor=2, zero=1, remat=keep, attention_block=blocks_of_attention)
    cut.check_split()
    assert cut.facts.matmuls_backward_weight == 7  # query, key, value, output, gate, up, down


@pytest.mark.parametrize("keep", remat.POLICIES)
def test_no_weight_is_saved(monkeypatch, keep):
    """Kept values have a batch and tokens, in either order; none has the shape of a weight, whole or cast, in any precision."""
    cut, run = cut_of(monkeypatch, tensor=2, data=2, zero=3, remat=keep, compute_dtype="bfloat16", master_dtype="float32")
    local = run.train.batch // 2
    assert cut.facts.saved
    assert all(local in shape[:2] for shape, _ in cut.facts.saved)


def test_saved_falls_with_the_policy(monkeypatch):
    """Bytes that a layer saves, without sequence parallelism so that every policy counts the same tokens."""
    sizes = []
    for keep in remat.POLICIES:
        cut, _ = cut_of(monkeypatch, tensor=2, remat=keep)
        sizes.append(sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in cut.facts.saved))
        monkeypatch.undo()
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)


def test_attention_is_not_computed_again_where_its_output_is_kept(monkeypatch):
    """`attention` keeps output and log-sum-exp: its backward has the forward's matmuls less the scores and the weighted sum."""
    flops = {}
    for keep in ("attention", "block"):
        cut, run = cut_of(monkeypatch, remat=keep)
        flops[keep] = cut.facts.flops_backward
        monkeypatch.undo()
    model, tokens = run.model, run.train.batch * run.data.sequence
    forward_of_attention = 2 * 2 * tokens * run.data.sequence * model.heads * model.head_width
    assert flops["block"] - flops["attention"] == forward_of_attention


@pytest.mark.parametrize("keep", remat.POLICIES)
def test_experts_split_as_matmuls_do(monkeypatch, keep):
    """A shared expert's and the routed ones' matmuls, loops over blocks of rows: one in W for each weight; where the policy keeps matmuls'
    outputs, the backward has none of the experts' again. Fused experts (the last two policies) make their gradients in B."""
    cut, _ = cut_of(monkeypatch, data=2, remat=keep, model=model(router="sigmoid", shared_width=14))
    cut.check_split()
    fused = keep in ("attention", "block")
    assert cut.facts.matmuls_backward_weight == (8 if fused else 11)  # 4 of attention, the router, 3 of the shared expert, 3 of the others
    if not fused:
        none = 2 * cut.facts.flops_forward
        assert cut.facts.flops_backward < none * (1 if keep == "none" else 1.1)
