"""Tiny checkpoints that hide nothing, written by transformers itself: head width that is not width / heads, odd vocabulary, more query than
key/value heads, norm weights far from 1, large biases, a large epsilon, square and non-square matrices, positions past every rope and
window boundary. `save(folder, name)` writes one of `NAMES`."""

import torch
import transformers

SEQUENCE = 24
SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.05,
}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12345.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


CONFIGS = {
    # width 24 is not heads × head width 40; output is then not square
    "llama": (
        transformers.LlamaConfig,
        {"head_dim": 10, "attention_bias": True, "mlp_bias": True, "rope_parameters": ROPE_LLAMA3},
    ),
    # heads × head width is the width, so query and output are square
    "llama-tied": (transformers.LlamaConfig, {"head_dim": 6, "tie_word_embeddings": True, "rope_parameters": _rope(77.0)}),
    "mistral": (transformers.MistralConfig, {"head_dim": 10, "sliding_window": 4, "rope_parameters": _rope(777.0)}),
    # the first layer sees all keys, the others a window
    "qwen2": (
        transformers.Qwen2Config,
        {
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "rope_parameters": _rope(1234.0),
        },
    ),
    "qwen3": (
        transformers.Qwen3Config,
        {"head_dim": 10, "tie_word_embeddings": True, "use_sliding_window": False, "rope_parameters": _rope(4321.0)},
    ),
}
NAMES = tuple(CONFIGS)
EXPERTS = {
    # of transformers' balancing loss too
    "mixtral": (
        transformers.MixtralConfig,
        {
            "head_dim": 10,
            "sliding_window": 7,
            "num_local_experts": 12,
            "num_experts_per_tok": 3,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.3,
            "rope_parameters": _rope(777.0),
        },
    ),
    # an expert's width is not the MLP's, chosen weights do not sum to 1
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "head_dim": 10,
            "attention_bias": True,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 14,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(4321.0),
        },
    ),
}
CONFIGS |= EXPERTS


def config(name, **changes):
    kind, own = CONFIGS[name]
    return kind(**{**SIZES, **own, **changes})


def model(name, seed=0, **changes):
    """The torch model in float32, every parameter far from its initial value."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = transformers.AutoModelForCausalLM.from_config(config(name, **changes))
        with torch.no_grad():
            for parameter_name, parameter in made.named_parameters():
                if "norm" in parameter_name:
                    parameter.uniform_(0.2, 2.5).mul_(torch.where(torch.rand_like(parameter) < 0.3, -1.0, 1.0))
                elif parameter_name.endswith("bias"):
                    parameter.normal_(std=0.7)
                elif "embed_tokens" in parameter_name:
                    parameter.normal_(std=0.5)
                else:
                    parameter.normal_(std=1.2 / parameter.shape[-1] ** 0.5)
    return made


def save(folder, name, stacked=False, **changes):
    """Writes the checkpoint `name` into `folder`, which is returned. `stacked`: a layer's experts in one tensor, as modules hold them."""
    model(name, **changes).save_pretrained(folder, save_original_format=not stacked)
    return folder
