"""Torch's own parallel training of the hostile Llama against jaxpar's: the same losses and weights after five steps, in float64."""

import pytest

from tests.bridge import hostile
from torch_bridge import distributed
from torch_bridge.convert import read_model
from torch_bridge.parity import training, witness
from torch_bridge.parity.ladder import subject

SHARES = {"ddp": 1.0, "fsdp2": 0.52, "tensor": 0.52, "fsdp2-tensor": 0.27}  # what a process of torch may hold at most
STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hostile.save(tmp_path_factory.mktemp("witness"), "llama", num_hidden_layers=2)


def test_every_strategy_has_a_mesh():
    assert set(witness.MESHES) == set(distributed.STRATEGIES)
    for name, meshes in witness.MESHES.items():
        assert all((mesh.data, mesh.tensor) == distributed.STRATEGIES[name] for mesh, _ in meshes)


def test_ddp(folder):
    """Replicated, and with ZeRO-1; and what tells one run from another."""
    source = read_model(folder)
    runs = [subject(source, mesh, "float64", STEPS, zero=zero) for mesh, zero in witness.MESHES["ddp"]]
    config = runs[0].training.config
    batches = training.batches(config, STEPS)
    heard = distributed.train(folder, "ddp", batches, config.optimizer)
    for one in runs:
        losses, weights = witness.heard(one, batches, heard)
        assert losses.max_relative < 1e-10 and weights.max_relative < 1e-10
        assert len(losses.leaves) == STEPS
    other = [*batches[:-1], {**batches[-1], "labels": batches[-1]["ids"]}]
    losses, weights = witness.heard(runs[0], other, heard)
    assert losses.worst == f"step {STEPS}" and losses.max_relative > 1e-6 and weights.max_relative > 1e-6


@pytest.mark.parametrize(
    "strategy", ["tensor", pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("fsdp2-tensor", marks=pytest.mark.slow)]
)
def test_sharded(strategy, folder):
    for found in witness.testify(folder, strategy, STEPS):
        assert found.losses.max_relative < 1e-10, found
        assert found.weights.max_relative < 1e-10, found
        assert 0.2 < found.share <= SHARES[strategy], "torch did not split the parameters"


@pytest.mark.slow
def test_a_failing_process_ends_the_others(folder):
    """One process cannot have its rows: the others must not wait for it."""
    source = read_model(folder)
    config = subject(source, witness.MESHES["ddp"][0][0], "float64", 1).training.config
    (batch,) = training.batches(config, 1)
    one_row = {name: value[:1] for name, value in batch.items()}
    with pytest.raises(Exception, match="terminated with the following error"):
        distributed.train(folder, "ddp", [one_row], config.optimizer)
