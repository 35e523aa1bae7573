"""Mixtral: Mistral with a mixture of experts in every layer; the weights of the chosen ones always sum to 1."""

from torch_bridge.families.decoder import ATTENTION, BEGIN, END, Family, Traits
from torch_bridge.families.experts import MIXTRAL_PER_EXPERT, STACKED, ExpertTraits

MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    rules=BEGIN + ATTENTION + MIXTRAL_PER_EXPERT + END,
    stacked=BEGIN + ATTENTION + STACKED + END,
    traits=Traits(
        kv_heads=8,
        norm_eps=1e-5,
        theta=1e6,
        windows="uniform",
        experts=ExpertTraits(
            count_key="num_local_experts",
            other_count_key="num_experts",
            count=8,
            per_token=2,
            width_key="intermediate_size",
            width=None,
            normalise=True,
            patterned=False,
        ),
        inert={"router_jitter_noise": 0.0},
    ),
)
