"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer, or in some; one window for all layers where use_sliding_window is set."""

from torch_bridge.families.decoder import ATTENTION, BEGIN, END, MLP, OUTPUT_BIAS, QK_NORM, QKV_BIAS, Family, Traits
from torch_bridge.families.experts import PER_EXPERT, STACKED, ExpertTraits

_ATTENTION = BEGIN + ATTENTION + QKV_BIAS + OUTPUT_BIAS + QK_NORM

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rules=_ATTENTION + PER_EXPERT + END,
    stacked=_ATTENTION + STACKED + END,
    dense=_ATTENTION + MLP + END,
    traits=Traits(
        kv_heads=4,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        windows="switched",
        window=4096,
        experts=ExpertTraits(
            count_key="num_experts",
            other_count_key="num_local_experts",
            count=128,
            per_token=8,
            width_key="moe_intermediate_size",
            width=768,
            normalise=False,
            patterned=True,
        ),
    ),
)
