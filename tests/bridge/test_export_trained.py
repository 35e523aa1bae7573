"""What training leaves is exported whole: ZeRO-3 with tensor parallelism, AdamW and muon, tied and untied, bfloat16 files."""

import jax
import numpy as np
import pytest
import torch

from jaxpar import configfile
from jaxpar.config import MeshShape
from jaxpar.train import loop
from tests.bridge import hostile
from tests.bridge.loading import load_quietly
from torch_bridge import cli
from torch_bridge.arrays import ShardedView
from torch_bridge.checkpoints import read_checkpoint
from torch_bridge.compare import compare
from torch_bridge.convert import torch_arrays
from torch_bridge.views import ArrayView

RUN = """
mesh: {data: 2, tensor: 2}
data: {source: tokens, path: PATH, sequence: 16}
train: {steps: 2, batch: 4, zero: 3, compute_dtype: float32, attention_block: 16, loss_chunk: 16}
optimizer: {name: NAME, learning_rate: 1.0e-2}
checkpoint: {every: 2}
"""


@pytest.mark.parametrize(("name", "optimizer"), [pytest.param("llama", "adamw", marks=pytest.mark.slow), ("llama-tied", "muon")])
def test_zero_3_with_tensor_parallelism(tmp_path, name, optimizer):
    from jaxpar.train.corpus import write_tokens

    hostile.model(name).to(torch.bfloat16).save_pretrained(tmp_path / "in")
    write_tokens(tmp_path / "tokens", [np.arange(90) % 97] * 4, 97)
    (tmp_path / "run.yaml").write_text(RUN.replace("PATH", str(tmp_path / "tokens")).replace("NAME", optimizer))
    checkpoint = tmp_path / "checkpoint"
    assert cli.main(["import", str(tmp_path / "in"), str(checkpoint), "--run", str(tmp_path / "run.yaml")]) == 0
    config = configfile.load(checkpoint / "run.yaml")
    assert (config.train.zero, config.mesh) == (3, MeshShape(data=2, tensor=2))
    assert loop.train(config, devices=jax.devices()[:4]) == 0
    assert cli.main(["export", str(checkpoint), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert cli.main(["export", str(checkpoint), str(tmp_path / "narrow")]) == 0

    saved = read_checkpoint(checkpoint)
    assert saved.step == 2
    wanted = torch_arrays(saved.params, saved.config.model, "llama")
    model = load_quietly(tmp_path / "out")
    for key, parameter in model.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), wanted[key]), key
    assert load_quietly(tmp_path / "narrow").dtype == torch.bfloat16
    before = torch_arrays(read_checkpoint(checkpoint, 0).params, saved.config.model, "llama")
    first, last = ({key: ArrayView(value) for key, value in arrays.items()} for arrays in (before, wanted))
    moved = list(compare(last, first))
    assert len(moved) == len(wanted) and not any(difference.equal for difference in moved)


def test_parts_of_other_processes_are_refused(monkeypatch):
    """An array of which this process holds a part cannot be exported by it: no wrong file, a line that says what to do."""

    class Elsewhere:
        is_fully_addressable = False
        shape, dtype = (2,), np.dtype(np.float32)

    monkeypatch.setattr("torch_bridge.arrays.jax.Array", Elsewhere)
    with pytest.raises(ValueError, match=r"layers/a: .* restore the checkpoint in one process"):
        ShardedView("layers/a", Elsewhere())
