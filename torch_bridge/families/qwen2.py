"""Qwen2 and 2.5: query, key and value always have a bias, the output never; windows from some layer on."""

from torch_bridge.families.decoder import ATTENTION, BEGIN, END, MLP, QKV_BIAS, Family, Traits

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    rules=BEGIN + ATTENTION + QKV_BIAS + MLP + END,
    traits=Traits(kv_heads=32, qkv_bias=True, windows="by layer", window=4096),
)
