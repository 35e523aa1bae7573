"""The gated MLP of a block: down(activation(gate(x)) * up(x)).

Dims: B batch, S sequence, D model width, F MLP width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.config import ModelConfig
from jaxpar.models.options import Options
from jaxpar.models.parameter import bias, matrix, value
from jaxpar.ops.mlp import gated
from jaxpar.parallel.sequence import Boundary
from jaxpar.parallel.tensor import column_linear, row_product


class MLP(nnx.Module):
    """gate and up [F_tensor, D] are column-parallel, down [D, F_tensor] is row-parallel. Source: Shazeer, "GLU variants" (2020)."""

    def __init__(self, config: ModelConfig, boundary: Boundary, options: Options, width: int = 0):
        """`width` 0 is the model's `mlp_width`."""
        width, wide = config.width, width or config.mlp_width
        self.boundary, self.chunk = boundary, options.mlp_chunk
        self.activation = config.activation
        self.gate = matrix((wide, width), ("mlp", "embed"), 1, config.init_std)
        self.up = matrix((wide, width), ("mlp", "embed"), 1, config.init_std)
        self.down = matrix((width, wide), ("embed", "mlp"), 1, config.init_std)
        self.gate_bias = bias((wide,), ("mlp",)) if config.mlp_bias else None
        self.up_bias = bias((wide,), ("mlp",)) if config.mlp_bias else None
        self.down_bias = bias((width,), ("embed",)) if config.mlp_bias else None

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """x as it lies between blocks -> y likewise. Sends one `enter` and one `leave`."""

        def product(x_BSD: jax.Array) -> jax.Array:
            if self.chunk and x_BSD.shape[1] > self.chunk:
                return self.in_chunks(x_BSD)
            gate_BSF = checkpoint_name(column_linear(x_BSD, value(self.gate), value(self.gate_bias)), "mlp_gate")
            up_BSF = checkpoint_name(column_linear(x_BSD, value(self.up), value(self.up_bias)), "mlp_up")
            return row_product(gated(gate_BSF, up_BSF, self.activation), value(self.down))

        y_BSD = self.boundary.through(x_BSD, product)
        return y_BSD if self.down_bias is None else y_BSD + value(self.down_bias)

    def in_chunks(self, x_BSD: jax.Array) -> jax.Array:
        """This device's partial sums of y, some tokens at a time: hidden values of at most `chunk` tokens exist, in the backward too, which
        computes them again. The gradients of the weights add up over chunks in float32."""
        batch, tokens, width = x_BSD.shape
        pieces = next(n for n in range(-(-tokens // self.chunk), tokens + 1) if tokens % n == 0)
        wide = jnp.promote_types(x_BSD.dtype, jnp.float32)
        weights = [weight[...].astype(wide) for weight in (self.gate, self.up, self.down)]
        biases = [None if bias is None else bias[...].astype(wide) for bias in (self.gate_bias, self.up_bias)]

        def piece(nothing: None, x_BCD: jax.Array) -> tuple[None, jax.Array]:
            gate, up, down = (weight.astype(x_BCD.dtype) for weight in weights)
            gate_bias, up_bias = (None if bias is None else bias.astype(x_BCD.dtype) for bias in biases)
            hidden_BCF = gated(column_linear(x_BCD, gate, gate_bias), column_linear(x_BCD, up, up_bias), self.activation)
            return nothing, column_linear(hidden_BCF, down)

        x_nBCD = jnp.moveaxis(x_BSD.reshape(batch, pieces, -1, width), 1, 0)
        _, y_nBCD = lax.scan(jax.checkpoint(piece, prevent_cse=False), None, x_nBCD)
        return jnp.moveaxis(y_nBCD, 0, 1).reshape(batch, tokens, -1)
