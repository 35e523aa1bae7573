"""What a run is: frozen, keyword-only dataclasses, validated where they are built.

    Config
      model       ModelConfig, with MoeConfig, RopeConfig   the architecture
      mesh        MeshShape                         how many devices each named axis takes
      data        DataConfig                        where tokens come from
      optimizer   OptimizerConfig                   update rule and learning-rate schedule
      train       TrainConfig, with ContextConfig   steps, batch, ZeRO level, precision, recomputation, how `seq` shares attention
      gpu         GpuConfig                         compiler options on GPUs
      checkpoint  CheckpointConfig                  where, how often, how many
      log         LogConfig                         progress and metrics

MoeConfig is in `jaxpar/config_experts.py`; reading YAML and `--set a.b=c` in `jaxpar/configfile.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from jaxpar.config_checks import divisors, one_of, require
from jaxpar.config_experts import MoeConfig

# Recomputation policies, the most kept first; `jaxpar/parallel/remat.py` says what each keeps.
REMAT = ("none", "matmuls", "outputs", "attention", "block")


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
class RopeConfig:
    """Rotary position embedding, half-split layout. Lengths are in tokens.

    `factor` must be given for every scaled type (0, the default, means absent) and is 1 for `default`.
    `static_length` is the length that `dynamic` scaling assumes: torch makes it depend on the batch and on history, a program cannot.
    `attention_factor` None means the factor that YaRN's paper derives from `factor` and `mscale`.
    """

    type: str = "default"
    theta: float = 10_000.0
    fraction: float = 1.0
    factor: float = 0.0
    original_length: int | None = None
    static_length: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        one_of("model.rope.type", self.type, ("default", "linear", "dynamic", "llama3", "yarn"))
        require(self.theta > 0, f"model.rope.theta: {self.theta} must be positive")
        require(0 < self.fraction <= 1, f"model.rope.fraction: {self.fraction} must be in (0, 1]")
        if self.factor == 0:
            require(self.type == "default", f"model.rope.factor: {self.type} rope needs the factor it scales by")
            object.__setattr__(self, "factor", 1.0)
        require(self.factor >= 1, f"model.rope.factor: {self.factor} must be at least 1")
        for name in ("original_length", "static_length"):
            length = getattr(self, name)
            require(length is None or length >= 1, f"model.rope.{name}: {length} must be at least 1 token, or absent")
        if self.type in ("dynamic", "llama3", "yarn"):
            require(self.original_length is not None, f"model.rope.original_length: {self.type} rope needs the trained length")
        if self.type == "yarn":
            require(self.theta > 1, f"model.rope.theta: {self.theta} must exceed 1 for yarn")
            for name in ("beta_fast", "beta_slow"):
                require(getattr(self, name) > 0, f"model.rope.{name}: {getattr(self, name)} must be positive")
        if self.type == "dynamic":
            require(self.static_length is not None, "model.rope.static_length: dynamic rope needs the length to assume, in tokens")
        low, high = self.low_frequency_factor, self.high_frequency_factor
        require(self.type != "llama3" or low > 0, f"model.rope.low_frequency_factor: {low} must be positive")
        require(self.type != "llama3" or high > low, f"model.rope.high_frequency_factor: {high} must exceed low_frequency_factor {low}")

    @property
    def reach(self) -> int | None:
        """Tokens that a rope with a declared length is scaled for; None where it declares none."""
        if self.type == "dynamic":
            return self.static_length
        return None if self.original_length is None else round(self.original_length * self.factor)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family and its neighbours.

    `head_width` 0 means width / heads; `value_head_width`, of values alone, 0 the same as `head_width`. `windows` is the attention window
    of each layer, in keys seen, 0 for all of them; it repeats over the layers ((4096, 0) alternates). `score_scale` None means
    1/sqrt(head width). `sinks`: a learned logit for each query head that every softmax counts and that has no value (gpt-oss).
    `prefix`: so many tokens at the start of each document are seen by all of it, by earlier tokens too, and no token predicts what it sees
    (prefix LM: Raffel et al., "T5" (2020), section 3.2.1).
    """

    vocabulary: int = 32_000
    width: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_width: int = 0
    value_head_width: int = 0
    mlp_width: int = 688
    moe: MoeConfig = field(default_factory=MoeConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: float = 1e-5
    norm_one_plus: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    activation: str = "silu"
    windows: tuple[int, ...] = (0,)
    sinks: bool = False
    prefix: int = 0
    score_scale: float | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "mlp_width"):
            require(getattr(self, name) >= 1, f"model.{name}: {getattr(self, name)} must be at least 1")
        require(self.heads % self.kv_heads == 0, f"model.kv_heads: {self.kv_heads} must divide model.heads {self.heads}")
        if self.head_width == 0:
            require(self.width % self.heads == 0, f"model.head_width: width {self.width} does not divide into {self.heads} heads; give it")
            object.__setattr__(self, "head_width", self.width // self.heads)
        if self.moe.experts and self.moe.width == 0:
            object.__setattr__(self, "moe", replace(self.moe, width=self.mlp_width))
        if self.moe.experts:
            dense, rest = self.moe.dense_layers, self.layers - self.moe.dense_layers
            require(rest >= 1, f"model.moe.dense_layers: {dense} of model.layers {self.layers} leave none with experts; use less")
            works = ", ".join(map(str, divisors(rest)))
            require(
                rest % self.moe.every == 0,
                f"model.moe.every: {self.moe.every} does not divide the {rest} layers behind the dense ones; numbers that work: {works}",
            )
        require(not (self.moe.experts and self.mlp_bias), "model.mlp_bias: experts have no biases; set it false")
        require(self.head_width >= 0, f"model.head_width: {self.head_width} must be positive, or 0 for width / heads")
        require(self.head_width % 2 == 0, f"model.head_width: {self.head_width} must be even for rope")
        require(self.value_head_width >= 0, f"model.value_head_width: {self.value_head_width} must be positive, or 0 for model.head_width")
        object.__setattr__(self, "value_head_width", self.value_head_width or self.head_width)
        require(0 <= self.prefix < 2**31, f"model.prefix: {self.prefix} must be in 0 (none) to 2^31 - 1 tokens")
        rotated, least = self.head_width * self.rope.fraction, 4 if self.rope.type == "dynamic" else 2
        require(
            rotated % 2 == 0 and rotated >= least,
            f"model.rope.fraction: {self.rope.fraction} of head width {self.head_width} rotates {rotated:g} features; "
            f"it must be an even number of at least {least}",
        )
        one_of("model.activation", self.activation, ("silu", "gelu_tanh"))
        require(self.norm_eps > 0, f"model.norm_eps: {self.norm_eps} must be positive")
        require(self.init_std >= 0, f"model.init_std: {self.init_std} must not be negative")
        require(
            len(self.windows) >= 1 and min(self.windows) >= 0 and max(self.windows) < 2**31,
            f"model.windows: {self.windows} needs one or more sizes below 2^31, 0 for full attention",
        )
        require(0 <= self.dropout < 1, f"model.dropout: {self.dropout} must be in [0, 1)")
        for name in ("score_softcap", "logit_softcap"):
            cap = getattr(self, name)
            require(cap is None or cap > 0, f"model.{name}: {cap} must be positive, or absent")

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The attention window of each of the layers."""
        return tuple(self.windows[layer % len(self.windows)] for layer in range(self.layers))


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
class ContextConfig:
    """How `mesh.seq` devices share the attention of a row; `jaxpar/parallel/context` says what each way sends.

    `method` ring and gather bring keys to queries, ulysses trades tokens for heads, usp trades among `ulysses` neighbours and rings over
    the rest. `layout` is which tokens a device holds: contiguous ones, an early and a late chunk (zigzag), or every n-th (striped).
    """

    method: str = "ring"
    layout: str = "zigzag"
    ulysses: int = 2

    def __post_init__(self) -> None:
        one_of("train.context.method", self.method, ("ring", "ulysses", "gather", "usp"))
        one_of("train.context.layout", self.layout, ("contiguous", "zigzag", "striped"))
        require(self.ulysses >= 1, f"train.context.ulysses: {self.ulysses} must be at least 1")

    def split(self, devices: int) -> tuple[int, int]:
        """(groups that keys travel over, neighbours of a group that trade heads) of that many devices; their product is `devices`."""
        if devices == 1:
            return 1, 1
        inner = {"ulysses": devices, "usp": self.ulysses}.get(self.method, 1)
        works = ", ".join(map(str, divisors(devices)))
        require(devices % inner == 0, f"train.context.ulysses: {inner} does not divide mesh.seq {devices}; sizes that work: {works}")
        return devices // inner, inner

    def check_heads(self, heads: int, kv_heads: int, devices: int) -> None:
        """Raise ValueError, listing the degrees that work, where neighbours cannot trade tokens for the heads that each of them has."""
        _, inner = self.split(devices)
        deals = lambda size: heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)  # noqa: E731
        if not deals(inner):
            field, sizes = ("mesh.seq", divisors(heads)) if self.method == "ulysses" else ("train.context.ulysses", divisors(devices))
            works = ", ".join(str(size) for size in sizes if deals(size))
            raise ValueError(
                f"{field}: {inner} devices cannot trade tokens for the {heads} query heads and {kv_heads} key/value heads that "
                f"each has; degrees that work: {works}"
            )

    def fitted(self, heads: int, kv_heads: int, devices: int) -> ContextConfig:
        """The nearest to this that so many devices and heads allow: usp among fewer neighbours, else a ring. The result of attention is the
        same, so what was trained in one way runs in another."""
        context = replace(self, ulysses=math.gcd(self.ulysses, devices)) if self.method == "usp" else self
        try:
            context.check_heads(heads, kv_heads, devices)
        except ValueError:
            return replace(self, method="ring")
        return context

    def unit(self, devices: int) -> int:
        """What a row's length must be a multiple of: a device holds whole tokens of both chunks of its group."""
        ring, _ = self.split(devices)
        return math.lcm(devices, 2 * ring if self.layout == "zigzag" and ring > 1 else ring)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a step runs. `batch` is sequences a step over all devices and microbatches; `accumulation` the microbatches it is cut in.

    `zero` 0 replicates, 1 shards optimizer state and masters, 2 also gradients, 3 also parameters. `remat` names a policy of
    `jaxpar/parallel/remat.py`. `interleave` cuts the local batch of a microbatch in that many parts inside one layer body.
    `collective_matmul` sends activations over `tensor` around a ring, each chunk behind the products of another (`parallel/ring.py`).
    `matmul_precision` is JAX's: with float32 compute, GPUs multiply in TF32 unless it is `highest`.
    `loss_chunk` is the tokens whose logits exist at once, `mlp_chunk` those of a row whose hidden values of the MLP do (0: all; else they
    are computed again in the backward, whatever `remat` says), `attention_block` the queries and keys of one attention tile.
    Experts are split over `expert_axes` and reached by `expert_dispatch` (`jaxpar/parallel/expert.py`): with `ragged` and `gather` a device
    has room for `expert_buffer` times its balanced load, with `capacity` an expert for `expert_capacity` times its own, the rest dropped by
    `expert_priority`. A device's tokens go in `expert_chunks`, one of which travels while another is served. `expert_columns` splits each
    expert's columns and rows over `tensor`, as an MLP's, instead of folding `expert_axes` over it.
    `cpu_devices` is how many devices to simulate where JAX runs on CPU, over all processes; absent, or where XLA_FLAGS says how many,
    nothing is changed.
    """

    steps: int = 100
    batch: int = 16
    accumulation: int = 1
    zero: int = 1
    sequence_parallel: bool = True
    context: ContextConfig = field(default_factory=ContextConfig)
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
    expert_axes: tuple[str, ...] = ("expert",)
    expert_dispatch: str = "ragged"
    expert_buffer: float = 1.5
    expert_capacity: float = 1.25
    expert_priority: str = "position"
    expert_chunks: int = 1
    expert_columns: bool = False
    seed: int = 0
    cpu_devices: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulation", "interleave", "attention_block", "loss_chunk", "expert_chunks"):
            require(getattr(self, name) >= 1, f"train.{name}: {getattr(self, name)} must be at least 1")
        require(self.mlp_chunk >= 0, f"train.mlp_chunk: {self.mlp_chunk} must be at least 1 token, or 0 for all at once")
        one_of("train.zero", self.zero, (0, 1, 2, 3))
        for name in ("compute_dtype", "master_dtype", "reduce_dtype"):
            one_of(f"train.{name}", getattr(self, name), ("bfloat16", "float32", "float64"))
        one_of("train.remat", self.remat, REMAT)
        one_of("train.expert_axes", self.expert_axes, (("expert",), ("expert", "tensor"), ("expert", "seq", "tensor")))
        one_of("train.expert_dispatch", self.expert_dispatch, ("ragged", "capacity", "gather"))
        one_of("train.expert_priority", self.expert_priority, ("position", "weight"))
        require(self.expert_buffer >= 1, f"train.expert_buffer: {self.expert_buffer} must be at least 1, the balanced load")
        require(self.expert_capacity > 0, f"train.expert_capacity: {self.expert_capacity} must be positive")
        require(
            not (self.expert_columns and "tensor" in self.expert_axes),
            "train.expert_columns: tensor cannot split both experts and their columns; leave it out of train.expert_axes",
        )
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
