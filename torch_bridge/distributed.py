"""The second witness: torch's own parallel training of a checkpoint, over processes of this machine. Imports no JAX.

    STRATEGIES   name -> processes along (data, tensor)
    train        a checkpoint, batches, an optimizer, a strategy -> Witness

    ddp          DistributedDataParallel: parameters replicated
    fsdp2        fully_shard, layer by layer: parameters, gradients and optimizer state sharded
    tensor       parallelize_module: embedding and head split by vocabulary, attention by heads, MLP by columns
    fsdp2-tensor both, on a mesh of data × tensor

Processes talk through Gloo on the loopback interface and find one another through a file. What each process computes with is
`reference.load`'s model, in float64.
"""

from __future__ import annotations

import datetime
import logging
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torch_bridge import reference

STRATEGIES = {"ddp": (2, 1), "fsdp2": (2, 1), "tensor": (1, 2), "fsdp2-tensor": (2, 2)}
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Witness:
    """What training came to, and the largest part of the parameters that a process held."""

    trained: reference.Trained
    share: float


def train(
    folder: str | Path, strategy: str, batches: Sequence[reference.Arrays], rule: Any, dtype: str = "float64", seconds: float = 600
) -> Witness:
    """A step of AdamW on each batch under `strategy`, in new processes. Each data replica takes its part of a batch's rows; the loss is
    the sum of token losses over the labels of the whole batch. Raises what a process raised, or TimeoutError after `seconds`."""
    data, tensor = STRATEGIES[strategy]
    with tempfile.TemporaryDirectory() as shared:
        work = (shared, str(folder), strategy, list(batches), rule, dtype)
        processes = torch.multiprocessing.start_processes(_work, work, nprocs=data * tensor, join=False, start_method="spawn")
        deadline = time.monotonic() + seconds
        try:
            while not processes.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{strategy}: {data * tensor} processes did not finish in {seconds:.0f} s")
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        trained, shares = (pickle.loads((Path(shared) / name).read_bytes()) for name in ("trained", "shares"))
        return Witness(trained, max(shares))


def _work(rank: int, shared: str, folder: str, strategy: str, batches: list[reference.Arrays], rule: Any, dtype: str) -> None:
    """One process. Process 0 writes what came out. Raises what went wrong; does not return otherwise."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Of no consequence here: nothing is written in place into logits, and gathering a tensor that is split twice may be slow.
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    data, tensor = STRATEGIES[strategy]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{shared}/store", rank=rank, world_size=data * tensor, timeout=datetime.timedelta(seconds=300)
    )
    try:
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
        model = reference.load(folder, dtype).model
        called = parallelize(model, strategy, mesh)
        shares: list[float] = [0.0] * (data * tensor)
        torch.distributed.all_gather_object(shares, share(model))
        steps = [_Loss(called, batch, dtype, mesh) for batch in batches]
        trained = reference.train(model, rule, steps)
        losses = torch.tensor(trained.losses, dtype=torch.float64)
        torch.distributed.all_reduce(losses, group=mesh["data"].get_group())
        trained.losses[:] = (losses / data).tolist()
        if rank == 0:
            for name, value in (("trained", trained), ("shares", shares)):
                (Path(shared) / name).write_bytes(pickle.dumps(value))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
    # Not through the interpreter's teardown: a thread of Gloo may still hold a tensor of a finished collective, and freeing it needs the
    # interpreter, which by then ends the thread and with it, now and then, the process by SIGABRT. All that matters is on disk.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def parallelize(model: Any, strategy: str, mesh: DeviceMesh) -> Any:
    """Distributes a Llama in place over ("data", "tensor"); returns what to call."""
    if strategy == "ddp":
        return DistributedDataParallel(model, process_group=mesh["data"].get_group())
    if mesh["tensor"].size() > 1:
        columns, rows = {name: ColwiseParallel() for name in COLUMNS}, {name: RowwiseParallel() for name in ROWS}
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tensor"], {**columns, **rows})
        outer = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], outer)
    if mesh["data"].size() > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


def share(model: Any) -> float:
    """The part of the parameters that this process holds."""
    held = [(p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()]
    return sum(held) / sum(p.numel() for p in model.parameters())


class _Loss:
    """This replica's rows of a batch -> its share of the loss, times the replicas, for torch averages their gradients."""

    def __init__(self, model: Any, batch: reference.Arrays, dtype: str, mesh: DeviceMesh) -> None:
        replicas, replica = mesh["data"].size(), mesh["data"].get_local_rank()
        self.model, self.dtype = model, dtype
        self.ids, self.labels = (torch.from_numpy(batch[name]).chunk(replicas)[replica] for name in ("ids", "labels"))
        self.scale = replicas / int((batch["labels"] != reference.IGNORED).sum())

    def __call__(self) -> torch.Tensor:
        return reference.loss_sum(self.model, self.ids, self.labels, self.dtype) * self.scale
