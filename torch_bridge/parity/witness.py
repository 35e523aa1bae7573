"""The second witness: the same checkpoint trained in parallel by torch and by jaxpar, step by step the same losses and weights.

MESHES    strategy of torch -> the meshes and ZeRO levels of jaxpar that do the same
testify   a folder, a strategy -> what both sides came to
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpar.config import MeshShape
from torch_bridge import distributed
from torch_bridge.convert import read_model
from torch_bridge.parity import training
from torch_bridge.parity.ladder import Subject, precise, subject
from torch_bridge.parity.report import Arrays, Rung, compared, gap

MESHES = {
    "ddp": ((MeshShape(data=2), 0), (MeshShape(data=2), 1)),
    "fsdp2": ((MeshShape(data=2), 3),),
    "tensor": ((MeshShape(tensor=2), 0),),
    "fsdp2-tensor": ((MeshShape(data=2, tensor=2), 3),),
}
SEQUENCE = 24


@dataclass(frozen=True)
class Testimony:
    """`losses` and `weights`: relative differences of jaxpar from torch, of each step's loss and of the final weights by name. `share`: the
    largest part of the parameters that a process of torch held."""

    strategy: str
    share: float
    mesh: MeshShape
    zero: int
    losses: Rung
    weights: Rung


def testify(folder: str | Path, strategy: str, steps: int = 5, dtype: str = "float64", sequence: int = SEQUENCE) -> list[Testimony]:
    """`steps` steps of AdamW in torch under `strategy`, and on each of its meshes here. One entry a mesh."""
    source = read_model(folder)
    runs = [subject(source, mesh, dtype, steps, sequence, zero=zero) for mesh, zero in MESHES[strategy]]
    config = runs[0].training.config
    batches = training.batches(config, steps)
    witness = distributed.train(folder, strategy, batches, config.optimizer, dtype)
    return [
        Testimony(strategy, witness.share, mesh, zero, *heard(one, batches, witness))
        for (mesh, zero), one in zip(MESHES[strategy], runs, strict=True)
    ]


def heard(one: Subject, batches: Sequence[Arrays], witness: distributed.Witness) -> tuple[Rung, Rung]:
    """Train `one` on `batches`: differences from `witness` in losses and final weights."""
    with precise():
        trained = training.train(one.training, one.params, [training.step_batch(one.training.config, batch) for batch in batches])
    losses = {f"step {step}": gap(a, b) for step, (a, b) in enumerate(zip(trained.losses, witness.trained.losses, strict=True), 1)}
    return Rung(losses), Rung(compared(one.by_name(trained.params), witness.trained.parameters))
