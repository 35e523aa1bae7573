"""How a model is executed, as opposed to what it computes: nothing here changes a result beyond rounding, but for the z-loss that
training adds."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxpar.config import ContextConfig, TrainConfig
from jaxpar.mesh import EXPERT


@dataclass(frozen=True, kw_only=True)
class Options:
    """`attention` is auto, blockwise or cudnn; `attention_block` the queries and keys of one tile; `loss_chunk` the tokens whose logits
    exist at once, `mlp_chunk` those whose hidden values do (0: all); `context` how `seq` shares attention; `platform` the devices that run
    it ("cpu", "gpu"), which need not be those that compile it. The `expert_` fields are
    `parallel.expert.Dispatch`'s, `expert_columns` as in `config.TrainConfig`; `expert_fused` computes experts' gate and up again in the
    backward, for policies that would anyway."""

    attention: str = "auto"
    attention_block: int = 512
    loss_chunk: int = 1024
    mlp_chunk: int = 0
    z_loss: float = 0.0
    context: ContextConfig = field(default_factory=ContextConfig)
    platform: str = "cpu"
    expert_axes: tuple[str, ...] = (EXPERT,)
    expert_dispatch: str = "gather"
    expert_buffer: float = 1.5
    expert_capacity: float = 1.25
    expert_priority: str = "position"
    expert_chunks: int = 1
    expert_columns: bool = False
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
        expert_axes=train.expert_axes,
        expert_dispatch=train.expert_dispatch,
        expert_buffer=train.expert_buffer,
        expert_capacity=train.expert_capacity,
        expert_priority=train.expert_priority,
        expert_chunks=train.expert_chunks,
        expert_columns=train.expert_columns,
        expert_fused=train.remat in ("attention", "block"),
    )
