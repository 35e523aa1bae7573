"""The backward half of parity: loss and the gradient of every parameter, by the program that a training step runs."""

from __future__ import annotations

import jax
import numpy as np

from jaxpar.params import Tree
from jaxpar.train.step import Training
from torch_bridge.parity.report import Arrays


def gradients(training: Training, params: Tree, batch: Arrays) -> tuple[float, Tree]:
    """Placed masters and a step's batch -> (loss, gradients on the host, vocabulary padding included)."""
    placed = {name: jax.device_put(value, training.batch_shardings[name]) for name, value in batch.items()}
    metrics, grads = jax.device_get(jax.jit(training.gradients)(params, placed, np.int32(0)))
    return float(metrics["loss"]), grads
