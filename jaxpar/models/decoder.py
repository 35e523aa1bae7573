"""The decoder: embedding, L blocks, norm, head. A tree of parameters to declare, and pure per-device functions for whoever runs the layers.

    Decoder             nnx module that holds the declarations; `Decoder(config, padded).specs`
    decoder_functions   embed, block, block_cached, loss, logits on plain nested dicts of local arrays

Dims: B batch, S sequence, D model width, V vocabulary, L layers, K key/value heads, H head width, M tokens that a cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import jax
from flax import nnx

from jaxpar.config import ModelConfig
from jaxpar.models.attention import Cache
from jaxpar.models.block import Block, Norm
from jaxpar.models.options import Options
from jaxpar.models.parameter import stacked, table
from jaxpar.parallel import vocabulary
from jaxpar.parallel.sequence import Boundary, Replicated
from jaxpar.params import Tree, bind, collect, padded_vocabulary

if TYPE_CHECKING:
    from jaxpar.parallel.stack import Context


class Table(nnx.Module):
    """Rows of the vocabulary: the embedding, or an untied head."""

    def __init__(self, config: ModelConfig, padded: int, role: str):
        self.table = table(padded, config.vocabulary, config.width, role, config.init_std)


class Decoder(nnx.Module):
    """Declares every parameter of a model; needs no mesh and allocates nothing.

    `vocabulary_padded` is `params.padded_vocabulary(config.vocabulary, tensor)`. Blocks are alike, so their parameters are stacked: each
    leaf of `layers` has a leading dim L. `head` is absent (None) where it is tied to the embedding.
    """

    def __init__(self, config: ModelConfig, vocabulary_padded: int):
        self.embedding = Table(config, vocabulary_padded, "embedding")
        self.layers = stacked(Block(config, Replicated(), Options()), config.layers)
        self.norm = Norm(config)
        self.head = None if config.tied else Table(config, vocabulary_padded, "head")

    @property
    def specs(self) -> Tree:
        """Nested dict of `params.Parameter`."""
        return collect(self)


def declared(config: ModelConfig, tensor: int) -> Tree:
    """The parameters of a model whose vocabulary `tensor` devices split: nested dict of `params.Parameter`."""
    return Decoder(config, padded_vocabulary(config.vocabulary, tensor)).specs


@dataclass(frozen=True)
class DecoderFunctions:
    """Per-device functions of one model under one boundary; all run inside shard_map. `params` is the model's nested dict or, where only
    a part is read, at least that part. Parameters arrive in the compute dtype."""

    config: ModelConfig
    boundary: Boundary
    options: Options
    bind_block: Callable[[Tree], Block]
    bind_norm: Callable[[Tree], Norm]

    def embed(self, params: Tree, ids_BS: jax.Array, context: Context | None = None, columns: tuple[str, ...] = ()) -> jax.Array:
        """ids[B, S] int32 -> x as it lies between blocks. Reads `embedding`, whose columns may be split over the axes `columns`; sends one
        `leave`, and with `columns` an all-to-all. This family needs nothing of the context here."""
        table_VD, scale = params["embedding"]["table"], self.config.embedding_scale
        if columns:
            return vocabulary.embed_columns(table_VD, ids_BS, self.boundary, columns, scale)
        return vocabulary.embed(table_VD, ids_BS, self.boundary, scale)

    def block(self, layer_params: Tree, x_BSD: jax.Array, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
        """One layer: (y, {}). `layer_params` is one slice of `layers`, `context.layer` that layer's. Sends two `enter` and two `leave`."""
        return self.bind_block(layer_params)(x_BSD, context), {}

    def block_cached(self, layer_params: Tree, x_BSD: jax.Array, context: Context, cache: Cache) -> tuple[jax.Array, Cache]:
        """One layer on S new tokens with `key` and `value` [B, M, K_tensor, H] of the earlier ones; see `Attention.cached`."""
        return self.bind_block(layer_params).cached(x_BSD, context, cache)

    def loss(
        self, params: Tree, x_BSD: jax.Array, labels_BS: jax.Array, scale: jax.Array | float = 1.0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Final norm, head and cross entropy: (scale times the sum over this device's valid tokens, aux), see `vocabulary.loss`.
        labels[B, S], -1 ignored.

        Reads `norm` and the head's table; sends one `enter` and three scalars a token."""
        settings = vocabulary.LossSettings(
            vocabulary=self.config.vocabulary,
            chunk=self.options.loss_chunk,
            z_loss=self.options.z_loss,
            softcap=self.config.logit_softcap,
        )
        return vocabulary.loss(self.normed(params, x_BSD), self.head_table(params), labels_BS, settings, scale)

    # Names of the metrics that `auxiliary` returns.
    auxiliary_metrics: ClassVar[tuple[str, ...]] = ()

    def auxiliary(self, aux: Tree, sequences: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The model's own loss on what its blocks returned as aux, stacked over layers: (this device's and microbatch's share, metrics).

        Shares are added up over devices and microbatches of a step, which has `sequences` in all. Called only where blocks return
        something; this family's return nothing.
        """
        raise AssertionError("a family whose blocks return aux says what its loss on it is")

    def logits(self, params: Tree, x_BSD: jax.Array) -> jax.Array:
        """Final norm and head: this device's logits [B, S, V_tensor], float32 or wider, soft cap applied, padding -inf. Sends one
        `enter`."""
        return vocabulary.logits(self.normed(params, x_BSD), self.head_table(params), self.config.vocabulary, self.config.logit_softcap)

    def normed(self, params: Tree, x_BSD: jax.Array) -> jax.Array:
        return self.boundary.enter(self.bind_norm(params["norm"])(x_BSD))

    def head_table(self, params: Tree) -> jax.Array:
        return params["embedding" if self.config.tied else "head"]["table"]


def decoder_functions(config: ModelConfig, boundary: Boundary, options: Options) -> DecoderFunctions:
    """The functions of a model; modules are taken apart here, once."""
    return DecoderFunctions(config, boundary, options, bind(Block(config, boundary, options)), bind(Norm(config)))


def cache_shape(config: ModelConfig, tensor: int, rows: int, length: int) -> tuple[int, int, int, int]:
    """Global shape [B, M, heads, H] of one layer's `key` or `value` cache, to be split over `tensor` in its third dim.

    With fewer key/value heads than devices each device keeps the one that its queries use, so heads are counted t/K times.
    """
    return rows, length, max(config.kv_heads, tensor), config.head_width
