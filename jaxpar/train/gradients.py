"""Loss and gradients of a global batch: the per-device program of a training step, without the optimizer.

One `shard_map` over the whole mesh holds forward and backward. Read `Gradients.local` from top to bottom: weights become whole (ZeRO),
microbatches run one after another and add to one buffer, what is still a partial sum is reduced once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpar.config import Config
from jaxpar.mesh import BATCH, REPLICA, SEQ, TENSOR
from jaxpar.models import pattern
from jaxpar.models.decoder import DecoderFunctions, declared, decoder_functions
from jaxpar.models.options import train_options
from jaxpar.parallel import collectives, joint, remat, zero
from jaxpar.parallel import context as context_parallel
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.chain import Chain, linked
from jaxpar.parallel.ring import Ring
from jaxpar.parallel.sequence import boundary
from jaxpar.parallel.stack import LayerStack
from jaxpar.params import Tree, separate
from jaxpar.rules import Rules, table

# ids, labels, positions and segments are [microbatch, sequence, token]; rows, a sequence's number in its step, [microbatch, sequence].
TOKENS = PartitionSpec(None, BATCH, SEQ)
BATCH_SPECS = {"ids": TOKENS, "labels": TOKENS, "positions": TOKENS, "segments": TOKENS, "rows": PartitionSpec(None, BATCH)}

Metrics = dict[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Gradients:
    """The model of a run on a mesh, ready to be differentiated.

    `specs` and `places` say of every parameter what it is and where it lives; `trained` leaves out those that are state and have no
    gradient. `__call__` is pure and may be jitted.
    """

    config: Config
    mesh: Mesh
    specs: Tree
    places: Tree
    functions: DecoderFunctions

    def trained(self, tree: Tree) -> Tree:
        """A tree with a leaf for every parameter, without those that are state."""
        return separate(self.specs, tree)[0]

    def __call__(self, params: Tree, batch: dict[str, jax.Array], step: jax.Array) -> tuple[Metrics, Tree]:
        """Masters at home, a global batch, the step's number -> metrics and gradients at home, in the master dtype.

        The loss is the sum of token losses over the number of labels in the whole batch, over all microbatches and devices.
        metrics: `loss` (cross entropy, mean), `z_loss` (mean), `tokens` (labels counted), `grad_norm` and the model's own, all replicated.
        """
        homes = jax.tree.map(lambda place: place.home, self.places)
        replicated = PartitionSpec()
        names = ("loss", "z_loss", "tokens", *self.functions.auxiliary_metrics)
        program = jax.shard_map(
            self.local,
            mesh=self.mesh,
            in_specs=(homes, BATCH_SPECS, replicated),
            out_specs=(dict.fromkeys((*names, "grad_norm"), replicated), self.trained(homes)),
        )
        precision = self.config.train.matmul_precision
        with jax.default_matmul_precision(precision) if precision != "default" else contextlib.nullcontext():
            return program(params, batch, step)

    def local(self, params: Tree, batch: dict[str, jax.Array], step: jax.Array) -> tuple[Metrics, Tree]:
        """The program of one device, on local shards."""
        train = self.config.train
        master, reduction = jnp.dtype(train.master_dtype), jnp.dtype(train.reduce_dtype)
        params, held = separate(self.specs, params)
        if self.config.model.prefix:  # what a query sees is no prediction
            seen = batch["positions"] < self.config.model.prefix - 1
            batch = batch | {"labels": jnp.where(seen, -1, batch["labels"])}
        places = self.trained(self.places)
        weights = zero.gather(params, places, train.compute_dtype) if train.zero < 3 else params
        tokens = collectives.all_reduce((batch["labels"] >= 0).sum(dtype=jnp.int32), REPLICA)
        scale = 1 / jnp.maximum(tokens, 1).astype(master)
        key = jax.random.fold_in(jax.random.key(train.seed, impl="threefry2x32"), step)  # others depend on how a mask is cut
        microbatch = partial(self.microbatch, held.get("layers", {}), scale, key)

        if train.accumulation == 1:
            sums, grads = microbatch(weights, None, jax.tree.map(lambda a: a[0], batch))
        else:
            first = jax.eval_shape(lambda b: microbatch(weights, None, jax.tree.map(lambda a: a[0], b)), batch)
            start = jax.tree.map(lambda t: collectives.zeros(t, collectives.varying_of(t)), first)

            def add(carry: Any, each: tuple[jax.Array, dict[str, jax.Array]]) -> tuple[Any, None]:
                (sums, grads), (turn, batch) = carry, each
                shards = jax.tree.map(lambda w: collectives.anew(w, turn), weights) if train.zero == 3 else weights
                more, grads = microbatch(shards, grads, batch)
                return (jax.tree.map(jnp.add, sums, more), grads), None

            (sums, grads), _ = lax.scan(add, start, (jnp.arange(train.accumulation, dtype=jnp.int32), batch))

        if train.zero == 1:
            grads = zero.scatter(grads, places, reduction)
        grads = jax.tree.map(lambda g: g.astype(master), zero.finish(grads, places, reduction))
        sums = jax.tree.map(lambda s: collectives.all_reduce(s, axes) if (axes := tuple(sorted(collectives.varying(s)))) else s, sums)
        return {**self.functions.summary(sums), "tokens": tokens, "grad_norm": zero.norm(grads)}, grads

    def microbatch(
        self, held: Tree, scale: jax.Array, key: jax.Array, weights: Tree, grads: Tree | None, batch: dict[str, jax.Array]
    ) -> tuple[Metrics, Tree]:
        """Forward and backward of one microbatch: this device's sums of losses, and its gradients added to `grads`. `held` is the state of
        the layers.

        Forward and backward are composed by hand rather than by `jax.grad`, because the layers' gradients go straight into the float32
        buffer that the microbatches share; a cotangent would have the dtype of the weights and be added afterwards.
        """
        train, master = self.config.train, jnp.dtype(self.config.train.master_dtype)
        layers, outer = weights["layers"], {name: part for name, part in weights.items() if name != "layers"}
        columns = self.columns(weights, batch["ids"])
        if train.zero == 3:
            cast = {"embedding": jax.tree.map(lambda w: w.astype(train.compute_dtype), outer.pop("embedding"))} if columns else {}
            outer = cast | zero.gather(outer, {name: self.places[name] for name in outer}, train.compute_dtype)
        table = {"embedding": outer["embedding"]}
        head = outer if self.config.model.tied else {name: part for name, part in outer.items() if name != "embedding"}
        stack: Any = self.stack()
        context = self.context(key, batch, held)

        x, embed_backward = jax.vjp(lambda p: self.functions.embed(p, batch["ids"], context, columns), table)
        y, saved, aux_layers = stack.forward(layers, x, context)
        daux, auxiliary = self.auxiliary(aux_layers)
        loss, loss_backward, aux = jax.vjp(lambda p, y: self.functions.loss(p, y, batch["labels"], scale), head, y, has_aux=True)
        d_loss, dy = loss_backward(collectives.vary_like(jnp.ones_like(loss), loss))
        tied = d_loss.pop("embedding", None)
        if train.zero >= 2:
            d_loss = jax.tree.map(lambda g: g.astype(train.reduce_dtype), d_loss)
        dx, d_layers = stack.backward(layers, saved, dy, daux, grads and grads["layers"], before=d_loss)
        d_outer = self.scattered(d_loss)
        (d_table,) = embed_backward(dx)
        if tied is not None:
            d_table = {"embedding": jax.tree.map(lambda a, b: a.astype(master) + b.astype(master), tied, d_table["embedding"])}

        d_outer |= d_table if columns else self.scattered(d_table)
        d_outer = jax.tree.map(lambda g: g.astype(master), d_outer)
        if grads is not None:
            d_outer = jax.tree.map(jnp.add, {name: grads[name] for name in d_outer}, d_outer)
        d_layers = jax.tree.map(lambda g: g.astype(master), d_layers)
        sums = {"loss": aux["cross_entropy"] * scale, "z_loss": aux["z_loss"] * scale, **auxiliary}
        return sums, {**d_outer, "layers": d_layers}

    def auxiliary(self, aux: Tree) -> tuple[list[jax.Array], Metrics]:
        """The model's own loss on what its blocks returned beside their outputs: gradients of its floating-point leaves, and its metrics.

        Nothing for a model whose blocks return nothing.
        """
        leaves, tree = jax.tree.flatten(aux)
        places = [n for n, leaf in enumerate(leaves) if joint.is_differentiable(leaf)]
        if not leaves:
            return [], {}

        def loss(floats: list[jax.Array]) -> tuple[jax.Array, Metrics]:
            whole = list(leaves)
            for n, leaf in zip(places, floats, strict=True):
                whole[n] = leaf
            train = self.config.train
            return self.functions.auxiliary(tree.unflatten(whole), train.batch, train.accumulation)

        value, backward, metrics = jax.vjp(loss, [leaves[n] for n in places], has_aux=True)
        (daux,) = backward(collectives.vary_like(jnp.ones_like(value), value))
        return daux, metrics

    def scattered(self, grads: Tree) -> Tree:
        """Gradients of parts outside the layers, reduced where ZeRO does so for each microbatch."""
        if self.config.train.zero < 2:
            return grads
        return zero.scatter(grads, {name: self.places[name] for name in grads}, self.config.train.reduce_dtype)

    def columns(self, weights: Tree, ids_BS: jax.Array) -> tuple[str, ...]:
        """The axes that split the columns of the embedding's table, where it is better to send the rows that a microbatch looks up than the
        table: under ZeRO-3, with fewer tokens between blocks than entries. A tied table is gathered for the head anyway."""
        split, rows = self.places["embedding"]["table"].split, weights["embedding"]["table"].shape[0]
        if self.config.train.zero < 3 or self.config.model.tied or split is None or split[0] != 1:
            return ()
        shards = self.mesh.shape[TENSOR] if self.config.train.sequence_parallel else 1
        return split[1] if ids_BS.size <= rows * shards else ()

    def stack(self) -> LayerStack | Chain:
        """The layers with this run's remat policy, interleaving and ZeRO; a chain where dense ones come first."""
        places, found = self.trained(self.places)["layers"], pattern.segments(self.config.model)
        return linked({each.name: self.stack_of(each, places if len(found) == 1 else places[each.name]) for each in found})

    def stack_of(self, segment: pattern.Segment, places: Tree) -> LayerStack:
        """One stack, whose parameters lie in `places`."""
        train = self.config.train
        gather: Callable[[Tree], Tree] | None = None
        if train.zero == 3:
            gather = lambda shards: zero.gather_layer(shards, {name: places[name] for name in shards}, train.compute_dtype)  # noqa: E731
        reduce: Callable[[Tree], Tree] | None = None
        if train.zero >= 2:
            reduce = lambda grads: zero.scatter_layer(grads, places, train.reduce_dtype)  # noqa: E731
        # A block that is computed again begins with attention: the MLP's weights, the larger part, can travel meanwhile.
        again = ("mlp",) if train.remat == "block" and segment.size == 1 else ()
        # The backward of a chunked MLP stays one loop: cut in two, it would keep the hidden values of all tokens in between.
        return LayerStack(
            self.functions.blocks(segment),
            remat.policy(train.remat),
            gather,
            reduce,
            parts=train.interleave,
            fused_loops=train.mlp_chunk > 0,
            again=again,
            # Full recomputation is for who has no memory to spare: two layers a turn may hold a matrix more. Of two interleaved layers in
            # one body XLA's scheduler hides less: a quarter more time (docs/compile.md). A ring's transfers, too, find less to hide behind.
            in_pairs=train.remat != "block" and train.interleave == 1 and self.config.mesh.seq == 1,
        )

    def context(self, key: jax.Array, batch: dict[str, jax.Array], held: Tree | None = None) -> Context:
        """What blocks read beside weights and activations, of one microbatch [sequence, token]; `held` is the state of the layers."""
        model = self.config.model
        names = ("positions", "rows") if self.config.data.documents == "joined" else ("positions", "segments", "rows")
        read = {name: batch[name] for name in names}
        if "segments" in read and self.config.mesh.seq > 1:
            read["segments_row"] = collectives.all_gather(read["segments"], SEQ, dim=1)
        if model.prefix and self.config.mesh.seq > 1:
            read["prefix_row"] = collectives.all_gather(read["positions"] < model.prefix, SEQ, dim=1)
        drawn = model.dropout or (model.moe.experts and model.moe.jitter)
        shared = {"dropout": key} if drawn else {}
        if drawn and self.config.mesh.seq > 1:
            length = read["positions"].shape[1]
            shared["tokens"] = context_parallel.row_tokens(self.config.train.context, jnp.arange(length, dtype=jnp.int32), length)
        return Context(batch=read, shared=shared, layer=pattern.flags(model, held or {}))


def build_gradients(config: Config, mesh: Mesh) -> Gradients:
    """The gradients of `config` on `mesh`. ValueError where a parameter cannot be placed."""
    sizes = dict(mesh.shape)
    specs = declared(config.model, config.mesh.tensor)
    # On one device the token shards are the tokens, and unlike an all-reduce a reduce-scatter over one device is nothing at all.
    sequence_parallel = config.train.sequence_parallel or config.mesh.tensor == 1
    between = Ring() if config.train.collective_matmul and config.mesh.tensor > 1 else boundary(sequence_parallel)
    functions = decoder_functions(config.model, between, train_options(config.train, mesh.devices.flat[0].platform))
    return Gradients(
        config, mesh, specs, zero.places(specs, Rules(sizes, table(config.train)), config.train.zero, sequence_parallel), functions
    )
