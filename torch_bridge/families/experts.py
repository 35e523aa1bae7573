"""Mixtures of experts of the Llama kind: rules for routers and experts, and what of a configuration their torch classes read.

PER_EXPERT, MIXTRAL_PER_EXPERT    every expert's matrices are tensors of their own: what the Hub has and transformers writes
STACKED                           all experts of a layer in one tensor, gate and up joined: what transformers 5 computes with, and
                                  writes with save_original_format=False
ExpertTraits, read_experts, write_experts
with_training                     settings that no number of the forward depends on, of another model
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxpar.config import ModelConfig, MoeConfig
from torch_bridge.families.settings import CONFIG, REQUIRED, Settings
from torch_bridge.mapping import Rule

MOST_TENSORS = 500_000  # layers × experts: each has keys of its own
TRAINING = ("balance", "balance_weight", "z_weight", "jitter")

_MLP = "model.layers.{layer}.mlp."
_MIXTRAL = "model.layers.{layer}.block_sparse_moe."
NORM = Rule("layers/mlp_norm/weight", "model.layers.{layer}.post_attention_layernorm.weight")
PER_EXPERT = (
    NORM,
    Rule("layers/mlp/router", _MLP + "gate.weight"),
    Rule("layers/mlp/gate", _MLP + "experts.{expert}.gate_proj.weight"),
    Rule("layers/mlp/up", _MLP + "experts.{expert}.up_proj.weight"),
    Rule("layers/mlp/down", _MLP + "experts.{expert}.down_proj.weight"),
)
MIXTRAL_PER_EXPERT = (
    NORM,
    Rule("layers/mlp/router", _MIXTRAL + "gate.weight"),
    Rule("layers/mlp/gate", _MIXTRAL + "experts.{expert}.w1.weight"),
    Rule("layers/mlp/up", _MIXTRAL + "experts.{expert}.w3.weight"),
    Rule("layers/mlp/down", _MIXTRAL + "experts.{expert}.w2.weight"),
)
STACKED = (
    NORM,
    Rule("layers/mlp/router", _MLP + "gate.weight"),
    Rule("layers/mlp/gate", _MLP + "experts.gate_up_proj", joined=("layers/mlp/up",), along="expert_mlp"),
    Rule("layers/mlp/down", _MLP + "experts.down_proj"),
)


@dataclass(frozen=True, kw_only=True)
class ExpertTraits:
    """How a torch class of experts reads its configuration. `count_key` is how the Hub spells the number of experts, `other_count_key` how
    some versions of transformers write it; `width_key` the width of one, and a `width` of None that of a dense MLP, intermediate_size. The
    other numbers are the class's defaults. `normalise`: chosen weights
    always sum to 1 (True) or as norm_topk_prob says. `patterned`: settings may leave layers without experts."""

    count_key: str
    other_count_key: str
    count: int
    per_token: int
    width_key: str
    width: int | None
    normalise: bool
    patterned: bool


def read_experts(settings: Settings, traits: ExpertTraits, layers: int | None, mlp_width: int | None) -> MoeConfig | None:
    """The mixture of a configuration with that many layers and that intermediate_size; None when a problem was noted.

    Torch adds its balancing loss, here that of scope `layers`, only where output_router_logits is true.
    """
    before = len(settings.problems)
    count, per_token = _count(settings, traits, layers), settings.take("model.moe.per_token", "num_experts_per_tok", int, traits.per_token)
    fields: dict[str, Any] = {"experts": count, "per_token": per_token}
    if traits.width is None:
        fields["width"] = mlp_width
        settings.provenance["model.moe.width"] = settings.provenance.get("model.mlp_width", CONFIG)
    else:
        fields["width"] = settings.take("model.moe.width", traits.width_key, int, traits.width)
    fields["normalise"] = True
    if not traits.normalise:
        fields["normalise"] = settings.take("model.moe.normalise", "norm_topk_prob", bool, False)
    added = settings.take("model.moe.balance_weight", "output_router_logits", bool, False, null=False)
    weight = settings.take("model.moe.balance_weight", "router_aux_loss_coef", float, 0.001)
    if added and weight:
        fields |= {"balance": "layers", "balance_weight": weight}
        settings.provenance["model.moe.balance"] = "transformers' load_balancing_loss_func"
    else:
        settings.provenance["model.moe.balance_weight"] = f"{CONFIG}: no output_router_logits, so torch adds none"
    for name, value in (("experts", count), ("width", fields["width"])):
        if value is not None and value < 1:
            settings.refuse(traits.count_key if name == "experts" else traits.width_key, "at least 1", str(value))
    if traits.patterned:
        fields |= _pattern(settings, layers)
    if len(settings.problems) > before or None in (count, per_token, fields["width"]):
        return None
    try:
        return MoeConfig(**fields)
    except ValueError as error:
        settings.refuse("num_experts_per_tok", "experts that can be built", str(error))
        return None


def _count(settings: Settings, traits: ExpertTraits, layers: int | None) -> int | None:
    keys = (traits.count_key, traits.other_count_key)
    there = [key for key in keys if key in settings.raw]
    values = [settings.take("model.moe.experts", key, int, REQUIRED) for key in there]
    if len(values) == 2 and values[0] != values[1]:
        settings.refuse(keys[1], f"what {keys[0]} says, {values[0]!r}", repr(values[1]))
    count = values[0] if values else settings.take("model.moe.experts", traits.count_key, int, traits.count)
    if count is not None and count * (layers or 1) > MOST_TENSORS:
        settings.refuse((*there, traits.count_key)[0], f"at most {MOST_TENSORS} over all layers", f"{count} in each of {layers}")
        return None
    return count


def _pattern(settings: Settings, layers: int | None) -> dict[str, int]:
    """Which layers have experts: some dense ones, then every n-th, the last of all among them."""
    step = settings.take("model.moe.every", "decoder_sparse_step", int, 1)
    dense = settings.take("model.moe.dense_layers", "mlp_only_layers", list, [], null=[])
    if step < 1:
        settings.refuse("decoder_sparse_step", "at least 1", repr(step))
    if any(type(layer) is not int for layer in dense):
        settings.refuse("mlp_only_layers", "numbers of layers", repr(dense))
    if layers is None or step < 1 or any(type(layer) is not int for layer in dense):
        return {}
    without = set(dense)
    sparse = [layer for layer in range(step - 1, layers, step) if layer not in without]
    every = step if not without else sparse[-1] - sparse[-2] if len(sparse) > 1 else 1
    first = sparse[0] - every + 1 if sparse else 0
    if sparse != list(range(first + every - 1, layers, every)) or first < 0 or not sparse or sparse[-1] != layers - 1:
        found = f"layers {', '.join(map(str, sparse[:8]))}{', …' if len(sparse) > 8 else ''}" if sparse else "no layer"
        settings.refuse(
            "mlp_only_layers" if without else "decoder_sparse_step",
            f"experts in every n-th layer behind the first dense ones, and in the last, {layers - 1}; other orders cannot be stacked",
            f"experts in {found}",
        )
        return {}
    return {"dense_layers": first, "every": every}


def write_experts(model: ModelConfig, traits: ExpertTraits, name: str) -> dict[str, Any]:
    """The part of config.json that is about experts. ValueError naming the field of `model.moe` that the family cannot say."""
    moe, plain = model.moe, MoeConfig()
    if not moe.experts:
        raise ValueError(f"model.moe.experts: 0 cannot be said, every layer of {name} has experts")
    free = {"experts", "per_token", "width", "normalise", "correction_rate", *TRAINING}
    if traits.patterned:
        free |= {"dense_layers", "every"}
    for field in vars(plain):
        if field not in free and getattr(moe, field) != getattr(plain, field):
            raise ValueError(f"model.moe.{field}: {getattr(moe, field)} cannot be said by {name}")
    if traits.normalise and not moe.normalise:
        raise ValueError(f"model.moe.normalise: false cannot be said, {name} always normalises")
    added = moe.balance == "layers" and moe.balance_weight > 0
    return {
        traits.count_key: moe.experts,
        "num_experts_per_tok": moe.per_token,
        traits.width_key: moe.width,
        **({} if traits.normalise else {"norm_topk_prob": moe.normalise}),
        **(_write_pattern(model) if traits.patterned else {}),
        "output_router_logits": added,
        "router_aux_loss_coef": moe.balance_weight if added else 0.0,
    }


def _write_pattern(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    if not moe.dense_layers:
        return {"decoder_sparse_step": moe.every, "mlp_only_layers": []}
    sparse = range(moe.dense_layers + moe.every - 1, model.layers, moe.every)
    return {"decoder_sparse_step": 1, "mlp_only_layers": [layer for layer in range(model.layers) if layer not in sparse]}


def with_training(moe: MoeConfig, other: MoeConfig) -> MoeConfig:
    """`moe` with the training-only settings of `other`."""
    return replace(moe, **{name: getattr(other, name) for name in TRAINING})
