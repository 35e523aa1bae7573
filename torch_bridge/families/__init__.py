"""Model families by the `model_type` of config.json. Each is one file: a rule table and what its torch class reads of a configuration."""

from __future__ import annotations

from jaxpar.config import ModelConfig
from torch_bridge.families.decoder import Family
from torch_bridge.families.llama import LLAMA
from torch_bridge.families.mistral import MISTRAL
from torch_bridge.families.mixtral import MIXTRAL
from torch_bridge.families.qwen2 import QWEN2
from torch_bridge.families.qwen3 import QWEN3
from torch_bridge.families.qwen3_moe import QWEN3_MOE

FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)}


def find_family(name: str) -> Family:
    """The family of a `model_type`. ValueError naming those there are."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"model_type: {name!r} is not supported; there are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def infer_family(model: ModelConfig) -> Family:
    """The first family that can hold `model`. ValueError with each one's reason where none can."""
    reasons = []
    for family in FAMILIES.values():
        try:
            family.write(model)
        except ValueError as error:
            reasons.append(f"{family.name}: {error}")
        else:
            return family
    raise ValueError(f"model: no family of torch can hold it ({'; '.join(reasons)})")
