"""The decoder: embedding, L blocks, norm, head. A tree of parameters to declare, and pure per-device functions for whoever runs the layers.

    Decoder             nnx module that holds the declarations; `Decoder(config, padded).specs`
    decoder_functions   embed, block, loss, logits on plain nested dicts of local arrays

Dims: B batch, S sequence, D model width, V vocabulary, L layers, K key/value heads, H head width, W value width,
M tokens that a cache holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from jaxpar.config import ModelConfig
from jaxpar.models import balance
from jaxpar.models.block import Block, Norm
from jaxpar.models.options import Options
from jaxpar.models.parameter import table
from jaxpar.models.pattern import FIRST, REST, Group, Segment, declared_layers, segments, unit
from jaxpar.parallel import vocabulary
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.sequence import Boundary
from jaxpar.params import Tree, bind, collect, merge, padded_vocabulary

LayerFunction = Callable[[Tree, Any, Any], tuple[Any, Tree]]  # (layer's parameters, x, context) -> (y, aux)


class Table(nnx.Module):
    """Rows of the vocabulary: the embedding, or an untied head."""

    def __init__(self, config: ModelConfig, padded: int, role: str):
        self.table = table(padded, config.vocabulary, config.width, role, config.init_std)


class Decoder(nnx.Module):
    """Declares every parameter of a model; needs no mesh and allocates nothing.

    `vocabulary_padded` is `params.padded_vocabulary(config.vocabulary, tensor)`. Blocks are alike, so their parameters are stacked: each
    leaf of `layers` has a leading dim L. Where some layers have experts and some do not, `pattern.py` says how they lie. `head` is absent
    (None) where it is tied to the embedding.
    """

    def __init__(self, config: ModelConfig, vocabulary_padded: int):
        self.embedding = Table(config, vocabulary_padded, "embedding")
        self.layers = declared_layers(config)
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
    bind_block: Callable[[Tree], Block | Group]
    bind_norm: Callable[[Tree], Norm]
    bind_first: Callable[[Tree], Block] | None = None

    def embed(self, params: Tree, ids_BS: jax.Array, context: Context | None = None, columns: tuple[str, ...] = ()) -> jax.Array:
        """ids[B, S] int32 -> x as it lies between blocks. Reads `embedding`, whose columns may be split over the axes `columns`; sends one
        `leave`, and with `columns` an all-to-all. This family needs nothing of the context here."""
        table_VD, scale = params["embedding"]["table"], self.config.embedding_scale
        if columns:
            return vocabulary.embed_columns(table_VD, ids_BS, self.boundary, columns, scale)
        return vocabulary.embed(table_VD, ids_BS, self.boundary, scale)

    def block(self, layer_params: Tree, x_BSD: jax.Array, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
        """One layer or group: (y, aux), see `Block` and `Group`. `layer_params` is one slice of `layers`, `context.layer` that layer's, its
        `window` a number or an array. State may come in there as `held`, which no gradient reaches."""
        return self.bind_block(merge(layer_params, context.layer.get("held", {})))(x_BSD, context)

    def first_block(self, layer_params: Tree, x_BSD: jax.Array, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
        """One of the dense layers before the others."""
        assert self.bind_first is not None
        return self.bind_first(layer_params)(x_BSD, context)

    def bound(self, name: str, layer_params: Tree, flags: Tree) -> list[tuple[Block, Tree]]:
        """The layers of one slice of the stack of that name, each with its own of `flags`: one, or a group's."""
        bound = self.bind_first(layer_params) if name == FIRST and self.bind_first is not None else self.bind_block(layer_params)
        return bound.blocks(flags) if isinstance(bound, Group) else [(bound, flags)]

    def blocks(self, segment: Segment) -> tuple[LayerFunction, ...]:
        """The block of each unit of a stack, its attention windows known while tracing. Units of the same windows share a function."""
        block = self.first_block if segment.name == FIRST else self.block

        def known(windows: Any, layer_params: Tree, x_BSD: jax.Array, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
            return block(layer_params, x_BSD, context._replace(layer=context.layer | {"window": windows}))

        of = {windows: partial(known, windows) for windows in segment.windows}
        return tuple(of[windows] for windows in segment.windows)

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

    @property
    def auxiliary_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `auxiliary` returns."""
        return balance.METRICS if self.config.moe.experts else ()

    def auxiliary(self, aux: Tree, sequences: int, accumulation: int) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The model's own loss on what its blocks returned as aux, stacked over layers: (this device's and microbatch's share, metrics).

        Shares are added up over devices and microbatches of a step, which has `sequences` in all and `accumulation` microbatches. Called
        only where blocks return something.
        """
        return balance.loss(self.config.moe, aux.get(REST, aux), sequences, accumulation)

    def summary(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Metrics of a step from their sums over its devices and microbatches."""
        return balance.summary(self.config.moe, sums) if self.config.moe.experts else sums

    def advance(self, held: Tree, metrics: dict[str, jax.Array]) -> Tree:
        """The state of the model after a step with these metrics."""
        return balance.corrected(self.config.moe, held, metrics["expert_load"]) if held else held

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
    *first, rest = (bind(unit(config, boundary, options, segment)) for segment in segments(config))
    return DecoderFunctions(config, boundary, options, rest, bind(Norm(config)), first[0] if first else None)


def cache_shapes(config: ModelConfig, tensor: int, rows: int, length: int) -> dict[str, tuple[int, int, int, int]]:
    """Global shapes of one layer's caches, `key` [B, M, heads, H] and `value` [B, M, heads, W], split over `tensor` in their third dim.

    With fewer key/value heads than devices each device keeps the one that its queries use, so heads are counted t/K times.
    """
    heads = max(config.kv_heads, tensor)
    return {"key": (rows, length, heads, config.head_width), "value": (rows, length, heads, config.value_head_width)}
