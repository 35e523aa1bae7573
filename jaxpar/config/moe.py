"""The section `model.moe` of a run: a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpar.config.checks import one_of, require


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """A mixture of experts in the place of every layer's MLP; `experts` 0, the default, is a dense model.

    Each token passes `per_token` experts of `width` (0: model.mlp_width), chosen by `router` (`jaxpar/ops/router.py` says how, and what
    `normalise`, `scale` and the groups are), and a shared one of `shared_width` (0: none). `balance` is the scope of the balancing loss,
    `sequence` or `microbatch`, added with `balance_weight` for each layer, or `layers`, one loss of all layers together as transformers
    computes it; `z_weight` weighs each layer's squared log-sum-exp of logits.
    With `correction` each layer's experts have a bias that only selects and that no gradient moves: after a step it rises by
    `correction_rate` for experts below the mean load and falls for those above.

    The first `dense_layers` layers have an MLP instead, and of the others all but every `every`-th. `activation` is the experts' ("": the
    model's; clamped_swiglu is gpt-oss's), with `biases` those of router, gate, up and down. `jitter` multiplies what the router reads in
    training by noise in 1 ± jitter.
    """

    experts: int = 0
    per_token: int = 2
    width: int = 0
    shared_width: int = 0
    router: str = "softmax_topk"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    balance: str = "sequence"
    balance_weight: float = 0.0
    z_weight: float = 0.0
    correction: bool = False
    correction_rate: float = 0.001
    dense_layers: int = 0
    every: int = 1
    activation: str = ""
    biases: bool = False
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.experts == 0:
            return
        require(self.experts >= 1, f"model.moe.experts: {self.experts} must be at least 1, or 0 for a dense model")
        one_of("model.moe.router", self.router, ("softmax_topk", "topk_softmax", "sigmoid", "expert_choice"))
        one_of("model.moe.balance", self.balance, ("sequence", "microbatch", "layers"))
        require(self.per_token >= 1, f"model.moe.per_token: {self.per_token} must be at least 1")
        require(
            self.per_token <= self.experts,
            f"model.moe.per_token: {self.per_token} experts of a token exceed model.moe.experts {self.experts}",
        )
        choosing = self.router == "expert_choice"
        require(
            not choosing or (self.groups == 1 and not self.correction),
            "model.moe.router: with expert_choice the load is even and there are no groups; set correction false and groups 1",
        )
        constant = self.router == "topk_softmax" or (self.normalise and not choosing)
        require(
            self.per_token > 1 or not constant,
            "model.moe.per_token: the weight of a single normalised expert is always 1, so its router would learn nothing; "
            "use router softmax_topk or sigmoid with normalise false",
        )
        for name in ("width", "shared_width", "balance_weight", "z_weight", "correction_rate"):
            require(getattr(self, name) >= 0, f"model.moe.{name}: {getattr(self, name)} must not be negative")
        require(self.scale > 0, f"model.moe.scale: {self.scale} must be positive")
        require(0 <= self.jitter < 1, f"model.moe.jitter: {self.jitter} must be in [0, 1)")
        one_of("model.moe.activation", self.activation, ("", "silu", "gelu_tanh", "clamped_swiglu"))
        require(self.dense_layers >= 0, f"model.moe.dense_layers: {self.dense_layers} must not be negative")
        for name in ("groups", "kept_groups", "group_best", "every"):
            require(getattr(self, name) >= 1, f"model.moe.{name}: {getattr(self, name)} must be at least 1")
        require(self.experts % self.groups == 0, f"model.moe.groups: {self.groups} does not divide model.moe.experts {self.experts}")
        require(self.kept_groups <= self.groups, f"model.moe.kept_groups: {self.kept_groups} exceeds model.moe.groups {self.groups}")
        reach = self.kept_groups * self.experts // self.groups
        require(
            self.per_token <= reach,
            f"model.moe.kept_groups: {self.kept_groups} groups hold {reach} experts, fewer than model.moe.per_token {self.per_token}",
        )
