"""Llama 1 to 3.x and everything else of model type `llama`, SmolLM2 included."""

from torch_bridge.families.decoder import ATTENTION, BEGIN, END, MLP, MLP_BIAS, OUTPUT_BIAS, QKV_BIAS, Family, Traits

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    rules=BEGIN + ATTENTION + QKV_BIAS + OUTPUT_BIAS + MLP + MLP_BIAS + END,
    traits=Traits(kv_heads=None, qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
)
