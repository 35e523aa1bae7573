"""What a run is: frozen, keyword-only dataclasses, validated where they are built.

    Config                                                              run.py
      model       ModelConfig, with RopeConfig and MoeConfig            model.py, moe.py     the architecture
      mesh        MeshShape                                             run.py               how many devices each named axis takes
      data        DataConfig                                            run.py               where tokens come from
      optimizer   OptimizerConfig                                       run.py               update rule, learning-rate schedule
      train       TrainConfig, with ContextConfig and ExpertsConfig     train.py, context.py, experts.py     how a step runs
      gpu         GpuConfig                                             run.py               compiler options on GPUs
      checkpoint  CheckpointConfig                                      run.py               where, how often, how many
      log         LogConfig                                             run.py               progress and metrics

YAML and `--set a.b=c` are read in `jaxpar/configfile.py`.
"""

from jaxpar.config.context import ContextConfig
from jaxpar.config.experts import ExpertsConfig
from jaxpar.config.model import ModelConfig, RopeConfig
from jaxpar.config.moe import MoeConfig
from jaxpar.config.run import CheckpointConfig, Config, DataConfig, GpuConfig, LogConfig, MeshShape, OptimizerConfig
from jaxpar.config.train import REMAT, TrainConfig

__all__ = [
    "REMAT",
    "CheckpointConfig",
    "Config",
    "ContextConfig",
    "DataConfig",
    "ExpertsConfig",
    "GpuConfig",
    "LogConfig",
    "MeshShape",
    "ModelConfig",
    "MoeConfig",
    "OptimizerConfig",
    "RopeConfig",
    "TrainConfig",
]
