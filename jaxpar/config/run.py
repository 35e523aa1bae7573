"""A whole run, and its smaller sections."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxpar.config.checks import one_of, require
from jaxpar.config.model import ModelConfig
from jaxpar.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each axis; their product is the number of devices."""

    data: int = 1
    pipe: int = 1
    expert: int = 1
    seq: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "pipe", "expert", "seq", "tensor"):
            require(getattr(self, name) >= 1, f"mesh.{name}: {getattr(self, name)} must be at least 1")

    @property
    def devices(self) -> int:
        return math.prod((self.data, self.pipe, self.expert, self.seq, self.tensor))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Token source. `embedded` is the language reference inside every CPython, `text` a file or folder of .txt, `jsonl` one document a
    line in `field`, `tokens` a folder written by `jaxpar tokenize` (memory-mapped). `tokenizer` is a Hugging Face tokenizer.json; without
    it a byte-level BPE of `vocabulary` entries is trained on the corpus. `documents` packed into a row are `isolated` (attention and
    positions end with each) or `joined` (a row is one text; cuDNN attention on GPUs needs this, for its masks know no documents)."""

    source: str = "embedded"
    path: str | None = None
    field: str = "text"
    sequence: int = 128
    tokenizer: str | None = None
    vocabulary: int = 2048
    documents: str = "isolated"
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("data.documents", self.documents, ("isolated", "joined"))
        one_of("data.source", self.source, ("embedded", "text", "jsonl", "tokens"))
        require(self.source == "embedded" or self.path is not None, f"data.path: source {self.source} needs a path")
        require(2 <= self.sequence < 2**31, f"data.sequence: {self.sequence} must be at least 2 tokens, and below 2^31")
        require(self.vocabulary >= 1, f"data.vocabulary: {self.vocabulary} must be at least 1")
        require(0 <= self.seed < 2**32, f"data.seed: {self.seed} must be in 0 to 2^32 - 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Update rule by name. `decay` says which parameters weight decay touches: `matrices` (no norms, no biases) or `all`."""

    name: str = "adamw"
    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup: int = 0
    final_ratio: float = 0.1
    decay_steps: int | None = None
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    decay: str = "matrices"
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        one_of("optimizer.name", self.name, ("adamw", "lion", "sgd", "adafactor", "muon"))
        one_of("optimizer.schedule", self.schedule, ("constant", "cosine", "linear", "wsd"))
        one_of("optimizer.decay", self.decay, ("matrices", "all"))
        require(self.learning_rate > 0, f"optimizer.learning_rate: {self.learning_rate} must be positive")
        require(self.warmup >= 0, f"optimizer.warmup: {self.warmup} must not be negative")
        require(self.clip is None or self.clip > 0, f"optimizer.clip: {self.clip} must be positive, or absent")
        for name in ("b1", "b2", "momentum"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}: {getattr(self, name)} must be in [0, 1)")
        for name in ("eps", "weight_decay"):
            require(getattr(self, name) >= 0, f"optimizer.{name}: {getattr(self, name)} must not be negative")
        require(0 <= self.final_ratio <= 1, f"optimizer.final_ratio: {self.final_ratio} must be in [0, 1]")
        require(
            self.decay_steps is None or self.decay_steps >= 1, f"optimizer.decay_steps: {self.decay_steps} must be at least 1, or absent"
        )


@dataclass(frozen=True, kw_only=True)
class GpuConfig:
    """`flags` are XLA options for the training step on GPUs, "name=value", over those of `jaxpar/gpu.py`."""

    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for text in self.flags:
            name, equals, value = text.partition("=")
            require(
                name.startswith("xla_") and equals == "=" and value != "",
                f"gpu.flags: {text!r} is not of the form xla_gpu_some_flag=value",
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`folder` None keeps no checkpoints. `every` is in steps; the last step is always saved."""

    folder: str | None = None
    every: int = 100
    keep: int = 3

    def __post_init__(self) -> None:
        require(self.every >= 1, f"checkpoint.every: {self.every} must be at least 1 step")
        require(self.keep >= 1, f"checkpoint.keep: {self.keep} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """`folder` None writes no metrics; else metrics.jsonl and TensorBoard events go there. `every` is in steps."""

    folder: str | None = None
    every: int = 10

    def __post_init__(self) -> None:
        require(self.every >= 1, f"log.every: {self.every} must be at least 1 step")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. What needs two sections at once (heads and mesh, batch and mesh) is checked in `jaxpar/run_checks.py`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshShape = field(default_factory=MeshShape)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
