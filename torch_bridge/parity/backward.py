"""The backward half of parity: loss and the gradient of every parameter, by the program that a training step runs."""

from __future__ import annotations

import jax
import numpy as np

from jaxpar.config import Config
from jaxpar.params import Tree
from jaxpar.train.gradients import Metrics
from jaxpar.train.step import Training
from torch_bridge.parity.report import Arrays


def gradients(training: Training, params: Tree, batch: Arrays) -> tuple[float, Tree]:
    """Placed masters and a step's batch -> (loss, router losses included, and gradients on the host, vocabulary padding included)."""
    placed = {name: jax.device_put(value, training.batch_shardings[name]) for name, value in batch.items()}
    metrics, grads = jax.device_get(jax.jit(training.gradients)(params, placed, np.int32(0)))
    return total(training.config, metrics), grads


def total(config: Config, metrics: Metrics) -> float:
    """The loss whose gradient is taken, of a step's metrics: cross entropy and the balancing loss of torch's scope. Raises ValueError where
    choices of experts were lost: the numbers would not be this model's."""
    moe = config.model.moe
    if not moe.experts:
        return float(metrics["loss"])
    for name in ("expert_overflow", "expert_dropped"):
        if int(metrics[name]):
            raise ValueError(f"parity: {name} {int(metrics[name])}; give train.experts.buffer_factor room for every token")
    assert moe.z_weight == 0 and (moe.balance == "layers" or moe.balance_weight == 0), moe
    return float(metrics["loss"]) + moe.balance_weight * moe.per_token * float(metrics["balance_loss"])
