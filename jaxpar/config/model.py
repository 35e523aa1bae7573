"""The section `model` of a run: an architecture."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jaxpar.config.checks import divisors, one_of, require
from jaxpar.config.moe import MoeConfig


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
