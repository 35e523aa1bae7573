"""Mistral: Llama without biases, one sliding window for all layers."""

from torch_bridge.families.decoder import ATTENTION, BEGIN, END, MLP, Family, Traits

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    rules=BEGIN + ATTENTION + MLP + END,
    traits=Traits(kv_heads=8, windows="uniform", window=4096),
)
