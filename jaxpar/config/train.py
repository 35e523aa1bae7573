"""The section `train` of a run: how a step runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpar.config.checks import one_of, require
from jaxpar.config.context import ContextConfig
from jaxpar.config.experts import ExpertsConfig

# Recomputation policies, the most kept first; `jaxpar/parallel/remat.py` says what each keeps.
REMAT = ("none", "matmuls", "outputs", "attention", "block")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a step runs. `batch` is sequences a step over all devices and microbatches; `accumulation` the microbatches it is cut in.

    `zero` 0 replicates, 1 shards optimizer state and masters, 2 also gradients, 3 also parameters. `remat` names a policy of
    `jaxpar/parallel/remat.py`. `interleave` cuts the local batch of a microbatch in that many parts inside one layer body.
    `collective_matmul` sends activations over `tensor` around a ring, each chunk behind the products of another (`parallel/ring.py`).
    `matmul_precision` is JAX's: with float32 compute, GPUs multiply in TF32 unless it is `highest`.
    `loss_chunk` is the tokens whose logits exist at once, `mlp_chunk` those of a row whose hidden values of the MLP do (0: all; else they
    are computed again in the backward, whatever `remat` says), `attention_block` the queries and keys of one attention tile.
    `cpu_devices` is how many devices to simulate where JAX runs on CPU, over all processes; absent, or where XLA_FLAGS says how many,
    nothing is changed.
    """

    steps: int = 100
    batch: int = 16
    accumulation: int = 1
    zero: int = 1
    sequence_parallel: bool = True
    context: ContextConfig = field(default_factory=ContextConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    remat: str = "matmuls"
    interleave: int = 1
    collective_matmul: bool = False
    compute_dtype: str = "bfloat16"
    master_dtype: str = "float32"
    reduce_dtype: str = "float32"
    matmul_precision: str = "default"
    attention: str = "auto"
    attention_block: int = 512
    loss_chunk: int = 1024
    mlp_chunk: int = 0
    z_loss: float = 0.0
    seed: int = 0
    cpu_devices: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulation", "interleave", "attention_block", "loss_chunk"):
            require(getattr(self, name) >= 1, f"train.{name}: {getattr(self, name)} must be at least 1")
        require(self.mlp_chunk >= 0, f"train.mlp_chunk: {self.mlp_chunk} must be at least 1 token, or 0 for all at once")
        one_of("train.zero", self.zero, (0, 1, 2, 3))
        for name in ("compute_dtype", "master_dtype", "reduce_dtype"):
            one_of(f"train.{name}", getattr(self, name), ("bfloat16", "float32", "float64"))
        one_of("train.remat", self.remat, REMAT)
        one_of("train.matmul_precision", self.matmul_precision, ("default", "high", "highest"))
        one_of("train.attention", self.attention, ("auto", "blockwise", "cudnn"))
        require(0 <= self.seed < 2**32, f"train.seed: {self.seed} must be in 0 to 2^32 - 1")
        require(self.cpu_devices is None or self.cpu_devices >= 1, f"train.cpu_devices: {self.cpu_devices} must be at least 1, or absent")
        require(self.z_loss >= 0, f"train.z_loss: {self.z_loss} must not be negative")
        require(
            not self.collective_matmul or (self.sequence_parallel and self.interleave == 1),
            "train.collective_matmul: needs train.sequence_parallel=true and train.interleave=1: a ring hides what interleaving would",
        )
        require(
            self.batch % self.accumulation == 0,
            f"train.accumulation: {self.accumulation} does not divide train.batch {self.batch}",
        )
