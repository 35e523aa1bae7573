"""Qwen3: queries and keys are normed per head before rope; the head width stands for itself; windows as Qwen2."""

from torch_bridge.families.decoder import ATTENTION, BEGIN, END, MLP, OUTPUT_BIAS, QK_NORM, QKV_BIAS, Family, Traits

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    rules=BEGIN + ATTENTION + QKV_BIAS + OUTPUT_BIAS + QK_NORM + MLP + END,
    traits=Traits(
        kv_heads=32, head_width=128, qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, windows="by layer", window=4096
    ),
)
