"""How a model is executed, as opposed to what it computes: nothing here changes a result beyond rounding, but for the z-loss that
training adds."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpar.config import ContextConfig, ExpertsConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Options:
    """`attention` is auto, blockwise or cudnn; `attention_block` the queries and keys of one tile; `loss_chunk` the tokens whose logits
    exist at once, `mlp_chunk` those whose hidden values do (0: all); `context` how `seq` shares attention; `platform` the devices that run
    it ("cpu", "gpu"), which need not be those that compile it; `experts` how tokens reach experts; `expert_fused` computes experts' gate
    and up again in the backward, for policies that would anyway."""

    attention: str = "auto"
    attention_block: int = 512
    loss_chunk: int = 1024
    mlp_chunk: int = 0
    z_loss: float = 0.0
    context: ContextConfig = field(default_factory=ContextConfig)
    platform: str = "cpu"
    experts: ExpertsConfig = field(default_factory=lambda: ExpertsConfig(dispatch="gather"))
    expert_fused: bool = False


def train_options(train: TrainConfig, platform: str) -> Options:
    """The options that a run's `train` section asks for."""
    return Options(
        attention=train.attention,
        attention_block=train.attention_block,
        loss_chunk=train.loss_chunk,
        mlp_chunk=train.mlp_chunk,
        z_loss=train.z_loss,
        context=train.context,
        platform=platform,
        experts=train.experts,
        expert_fused=train.remat in ("attention", "block"),
    )
