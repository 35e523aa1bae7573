"""The gated MLP of a block: down(activation(gate(x)) * up(x)).

Dims: B batch, S sequence, D model width, F MLP width.
"""

from __future__ import annotations

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar.config import ModelConfig
from jaxpar.models.parameter import bias, matrix, value
from jaxpar.ops.mlp import gated
from jaxpar.parallel.sequence import Boundary
from jaxpar.parallel.tensor import column_linear, row_linear


class MLP(nnx.Module):
    """gate and up [F_tensor, D] are column-parallel, down [D, F_tensor] is row-parallel. Source: Shazeer, "GLU variants" (2020)."""

    def __init__(self, config: ModelConfig, boundary: Boundary, width: int = 0):
        """`width` 0 is the model's `mlp_width`."""
        width, wide = config.width, width or config.mlp_width
        self.boundary = boundary
        self.activation = config.activation
        self.gate = matrix((wide, width), ("mlp", "embed"), 1, config.init_std)
        self.up = matrix((wide, width), ("mlp", "embed"), 1, config.init_std)
        self.down = matrix((width, wide), ("embed", "mlp"), 1, config.init_std)
        self.gate_bias = bias((wide,), ("mlp",)) if config.mlp_bias else None
        self.up_bias = bias((wide,), ("mlp",)) if config.mlp_bias else None
        self.down_bias = bias((width,), ("embed",)) if config.mlp_bias else None

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """x as it lies between blocks -> y likewise. Sends one `enter` and one `leave`."""
        x_BSD = self.boundary.enter(x_BSD)
        gate_BSF = checkpoint_name(column_linear(x_BSD, value(self.gate), value(self.gate_bias)), "mlp_gate")
        up_BSF = checkpoint_name(column_linear(x_BSD, value(self.up), value(self.up_bias)), "mlp_up")
        return row_linear(gated(gate_BSF, up_BSF, self.activation), value(self.down), self.boundary, value(self.down_bias))
