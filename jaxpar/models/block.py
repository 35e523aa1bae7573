"""One layer of a decoder: x + attention(norm(x)), then x + mlp(norm(x)), each with dropout before it is added.

Dims: B batch, S sequence, D model width.
"""

from __future__ import annotations

import jax
from flax import nnx

from jaxpar.config import ModelConfig
from jaxpar.models.attention import Attention, Cache
from jaxpar.models.mlp import MLP
from jaxpar.models.moe import MoE, row_tokens
from jaxpar.models.options import Options
from jaxpar.models.parameter import norm, value
from jaxpar.ops.dropout import dropout
from jaxpar.ops.norm import rms_norm
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.sequence import Boundary

ATTENTION, FEED_FORWARD = 0, 1  # the two places of a layer where dropout draws; a router's is 2


class Norm(nnx.Module):
    """RMS norm over the model width, on tokens as they lie between blocks."""

    def __init__(self, config: ModelConfig):
        self.eps, self.one_plus = config.norm_eps, config.norm_one_plus
        self.weight = norm(config.width, "embed", config.norm_one_plus)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return rms_norm(x_BSD, value(self.weight), self.eps, self.one_plus)


class Block(nnx.Module):
    """A pre-norm layer. Activations between blocks lie as `boundary` says."""

    def __init__(self, config: ModelConfig, boundary: Boundary, options: Options, experts: bool = True):
        """`experts` false makes a dense layer of a model that has experts in others."""
        self.dropout, self.boundary = config.dropout, boundary
        self.attention_norm = Norm(config)
        self.attention = Attention(config, boundary, options)
        self.mlp_norm = Norm(config)
        self.mlp = MoE(config, boundary, options) if config.moe.experts and experts else MLP(config, boundary, options)

    def __call__(self, x_BSD: jax.Array, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x as it lies between blocks -> (y likewise, aux: the router's, else empty). Sends two `enter` and two `leave`; experts in the
        MLP's place send what they say."""
        x_BSD = x_BSD + self.drop(self.attention(self.attention_norm(x_BSD), context), ATTENTION, context)
        y_BSD, aux = self.feed_forward(self.mlp_norm(x_BSD), context)
        return x_BSD + self.drop(y_BSD, FEED_FORWARD, context), aux

    def feed_forward(self, x_BSD: jax.Array, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The MLP or the experts on a normed x: (y, aux)."""
        return self.mlp(x_BSD, context) if isinstance(self.mlp, MoE) else (self.mlp(x_BSD), {})

    def cached(self, x_BSD: jax.Array, context: Context, cache: Cache) -> tuple[jax.Array, Cache]:
        """The same with a key/value cache (`Attention.cached`), without dropout."""
        y_BSD, cache = self.attention.cached(self.attention_norm(x_BSD), context, cache)
        x_BSD = x_BSD + y_BSD
        return x_BSD + self.feed_forward(self.mlp_norm(x_BSD), context)[0], cache

    def drop(self, y_BSD: jax.Array, place: int, context: Context) -> jax.Array:
        """Residual dropout, a function of (key of the step, layer, place, row, token, feature). A context without a key (evaluation)
        drops nothing. Where `seq` splits rows, `tokens` [S] are the indices in the row of this device's."""
        if not self.dropout or "dropout" not in context.shared:
            return y_BSD
        key = jax.random.fold_in(jax.random.fold_in(context.shared["dropout"], context.layer["index"]), place)
        return dropout(y_BSD, self.dropout, key, context.batch["rows"], row_tokens(self.boundary, y_BSD.shape[1], context))
