"""The layer stack: what runs between the embedding and the head, forward and backward, for any block.

    forward(layers, x, context)                       -> y, saved, aux
    backward(layers, saved, dy, daux, grads)          -> dx, grads           one pass, what plain training runs
    backward_input(layers, saved, dy, daux)           -> dx, deferred        \\ the same work in two parts,
    backward_weight(saved, deferred, grads)           -> grads               /  for pipeline schedules
    differentiable(layers, x, context)                -> y, aux              all of it under jax.custom_vjp

`layers` is a tree of arrays with a leading dim L. The functions run under `shard_map`, on local shards. The stack owns what the backward
over layers costs: what is saved (`split.py`: never a weight), the gather of the next layer's weights while this one computes, the
reduction of the previous layer's gradients behind this layer's backward (ZeRO-2 and -3), the accumulation buffer, and interleaving: the
batch in `parts` inside one layer body, so that one part's collectives can run behind another's matmuls.

`aux` is what the block returns beside its output, stacked over layers; it must be additive over sequences (sums and counts, not means),
so that parts, microbatches and devices can be added. `daux` holds the gradients of its floating-point leaves, stacked alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel import collectives, remat, split, stacked
from jaxpar.parallel.stacked import add_at, in_turn, length, per_turn, pick, pick_after, unwritten

Tree = Any


class Context(NamedTuple):
    """What a block reads beside its parameters and its input; never differentiated.

    batch: leaves [B, ...], such as positions and segments [B, S]; shared: leaves of any shape, such as a dropout key;
    layer: leaves [L, ...], of which a block sees its own layer's, such as the attention window.
    """

    batch: dict[str, Any]
    shared: dict[str, Any]
    layer: dict[str, Any]


@partial(jax.tree_util.register_dataclass, data_fields=["parts", "context", "first", "last", "weights"], meta_fields=["cut"])
@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward. `parts`: for each part of the batch, the kept values stacked over layers [L, ...].

    Where weights are gathered layer by layer, the last layer stands outside the loop: `parts` then holds L - 1 layers, `last` the kept
    values of the last, `weights` its gathered weights but those gathered `again`, with which the backward begins at once. The first layer
    too stands outside where the loop takes the others two by two: `first` are its kept values, `parts` those of L - 2.
    """

    parts: tuple[tuple[Any, ...], ...]
    context: tuple[Context, ...]
    cut: split.Cut
    first: tuple[tuple[Any, ...], ...] | None = None
    last: tuple[tuple[Any, ...], ...] | None = None
    weights: Tree | None = None

    def before_last(self, i: Any) -> tuple[tuple[Any, ...], ...]:
        """The kept values of layer i, which is not the last where that stands outside; nor, a number inside a loop, the first."""
        if self.first is None:
            return pick(self.parts, i)
        return self.first if isinstance(i, int) and i == 0 else pick(self.parts, i - 1)


@dataclass(frozen=True, eq=False)
class LayerStack:
    """A stack of one `block(layer, x, context) -> (y, aux)`.

    keep:    remat policy.
    gather:  shards of one layer -> whole local weights (ZeRO-3); None: `layers` are whole.
    reduce:  local gradients of one layer -> what the accumulation buffer holds (ZeRO-2, -3); None: they are added as they are.
    parts:   how many parts of the batch run interleaved inside a layer body.
    again:   names in a layer whose weights are not held from the last layer's forward to its backward, with `gather`.
    in_pairs: with `gather` or `reduce`, a turn of a loop takes two layers, so that weights and gradients are not copied when it turns.
    """

    block: Callable[[Tree, Any, Context], tuple[Any, Tree]]
    keep: remat.Policy
    gather: Callable[[Tree], Tree] | None = None
    reduce: Callable[[Tree], Tree] | None = None
    parts: int = 1
    again: tuple[str, ...] = ()
    fused_loops: bool = False
    in_pairs: bool = False

    def forward(self, layers: Tree, x: Any, context: Context) -> tuple[Any, Saved, Tree]:
        """x [B, S, D] -> y [B, S, D], what the backward needs, and aux stacked over layers.

        Sharding of x and y is the block's. Bytes moved: the block's collectives, and with `gather` each layer's weights once.
        """
        xs, contexts, every = stacked.cut(x, self.parts), _cut_context(context, self.parts), range(length(layers))
        layer_types = jax.eval_shape(lambda: self._whole(pick(layers, 0)))
        first = contexts[0]._replace(layer=pick(context.layer, 0))
        cut = split.cut(self.block, layer_types, xs[0], first, self.keep, fused_loops=self.fused_loops)

        def layer(weights: Tree, xs: tuple[Any, ...], flags: Tree, due: Tree = None) -> tuple[tuple[Any, ...], tuple[Any, Any], Tree]:
            results, due = cut.forward_parts(weights, xs, [c._replace(layer=flags) for c in contexts], due)
            return tuple(r[0] for r in results), (stacked.add([r[1] for r in results]), tuple(r[2] for r in results)), due

        if self.gather is None:

            def step(xs: Any, i: Any) -> Any:
                return layer(pick(layers, i), xs, pick(context.layer, i))[:2]

            ys, (aux, saved) = in_turn(step, xs, every, written=unwritten(step, xs, every))
            return stacked.join(ys), Saved(saved, tuple(contexts), cut), aux

        def step_ahead(carry: Any, i: Any) -> Any:
            xs, weights = carry
            xs, shards = pick_after(xs, layers, i + 1, self.in_pairs)
            ys, out, following = layer(weights, xs, pick(context.layer, i), due=self._whole(shards))
            return (ys, following), out

        end, kept_first, carry, auxes = length(layers) - 1, None, (xs, self._whole(pick(layers, 0))), []
        if apart := end % (each := per_turn(end) if self.in_pairs else 1):
            carry, (first_aux, kept_first) = step_ahead(carry, 0)
            auxes.append(jax.tree.map(lambda a: a[None], first_aux))
        written = unwritten(step_ahead, carry, every[apart:end])
        (xs, weights), (aux, saved) = in_turn(step_ahead, carry, every[apart:end], each, written)
        ys, (last_aux, last), _ = layer(weights, xs, pick(context.layer, end))
        aux = jax.tree.map(lambda *a: jnp.concatenate(a), *auxes, aux, jax.tree.map(lambda a: a[None], last_aux))
        held = {name: weight for name, weight in weights.items() if name not in self.again}
        return stacked.join(ys), Saved(saved, tuple(contexts), cut, kept_first, last, held), aux

    def _shards_again(self, layers: Tree) -> Tree:
        """Of the last layer, what its backward gathers again."""
        return {name: pick(layers[name], length(layers) - 1) for name in self.again}

    def _whole(self, shards: Tree) -> Tree:
        return self.gather(shards) if self.gather is not None else shards

    def backward(
        self, layers: Tree, saved: Saved, dy: Any, daux: list[Any], grads: Tree | None = None, before: Tree = ()
    ) -> tuple[Any, Tree]:
        """dy [B, S, D] -> dx [B, S, D] and the gradients of all layers, added to `grads` (in its dtype) when given.

        `before`, used where layers are gathered or reduced one by one: values that shall be there before the last layer begins, such as
        the head's gradient in a narrow dtype; the float32 one would else wait in memory beside a layer's working set.

        Bytes moved: the block's collectives, with `gather` each layer's weights once more, with `reduce` each layer's gradients once.
        """

        def layer(weights: Tree, kept: Any, dys: tuple[Any, ...], daux: list[Any], flags: Tree, due: Tree = None) -> tuple[Any, Tree, Tree]:
            results, due = saved.cut.backward_parts(weights, kept, [c._replace(layer=flags) for c in saved.context], dys, daux, due)
            return tuple(r[0] for r in results), stacked.add([r[1] for r in results]), due

        if self.gather is not None or self.reduce is not None:
            return self._backward_one_by_one(layer, layers, saved, dy, daux, grads, before)

        def body(carry: Any, inputs: Any) -> tuple[Any, Any]:
            (i, kept, daux, flags), weights = inputs
            dys, dparams, _ = layer(weights, kept, carry[0], daux, flags)
            if grads is None:
                return (dys, None), dparams
            return (dys, add_at(carry[1], dparams, i)), None

        steps = (jnp.arange(length(layers)), saved.parts, daux, saved.context[0].layer)
        (dxs, total), separate = lax.scan(body, (stacked.cut(dy, self.parts), grads), (steps, layers), reverse=True)
        return stacked.join(dxs), separate if grads is None else total

    def _backward_one_by_one(
        self, layer: Any, layers: Tree, saved: Saved, dy: Any, daux: list[Any], grads: Tree | None, before: Tree
    ) -> tuple[Any, Tree]:
        """`backward` where layers are gathered or reduced one by one: behind the compute of layer i travel the weights of layer i - 1 and
        the gradients of layer i + 1.

        The last layer, which has nobody's gradients to reduce, and under ZeRO-3 the first, which has nobody's weights to gather, stand
        outside the loop: inside it they would send a layer of zeros and a layer of weights for nothing.
        """
        end, gathered, flags = length(layers) - 1, self.gather is not None, saved.context[0].layer
        reduce = self.reduce if self.reduce is not None else lambda tree: tree

        def step(i: Any, kept: Any, dys: Any, weights: Tree, ahead: bool) -> tuple[Any, Tree, Tree]:
            """dx of layer i, its gradients, and the weights of the layer before."""
            dys, shards = pick_after(dys, layers, i - 1, self.in_pairs) if ahead else (dys, None)
            due = self._whole(shards) if ahead else None
            return layer(weights if gathered else pick(layers, i), kept, dys, pick(daux, i), pick(flags, i), due)

        dys = stacked.cut(dy, self.parts)
        last = saved.last if saved.last is not None else pick(saved.parts, end)
        # Behind a barrier, or what the forward did not keep would be kept after all.
        dys, last, shards, _ = collectives.barrier((dys, last, self._shards_again(layers) if gathered else {}, before))
        weights = {**saved.weights, **self._whole(shards)} if saved.weights is not None else None
        dys, waiting, weights = step(end, last, dys, weights, gathered and end > 0)
        if grads is None:
            grads = stacked.zeros(jax.eval_shape(reduce, waiting), end + 1)

        def turn(carry: Any, i: Any) -> Any:
            dys, weights, waiting, grads = carry
            grads = add_at(grads, reduce(waiting), i + 1)
            dys, dparams, following = step(i, saved.before_last(i), dys, weights, gathered)
            return (dys, following, dparams, grads), ()

        carry, numbers = (dys, weights, waiting, grads), range(end - 1, int(gathered) - 1, -1)
        each = per_turn(len(numbers)) if self.in_pairs else 1
        if len(numbers) % each:
            (carry, _), numbers = turn(carry, jnp.asarray(numbers[0])), numbers[1:]
        (dys, weights, waiting, grads), _ = in_turn(turn, carry, numbers, each)
        if gathered and end > 0:
            grads = add_at(grads, reduce(waiting), 1)
            dys, waiting, _ = step(0, saved.before_last(0), dys, weights, False)
        return stacked.join(dys), add_at(grads, reduce(waiting), 0)

    def backward_input(self, layers: Tree, saved: Saved, dy: Any, daux: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The part of `backward` that dx needs. `deferred` is what `backward_weight` needs besides `saved`, stacked over layers as `saved`
        is: with first and last layer apart where weights are gathered.

        Bytes moved: the block's collectives, with `gather` each layer's weights once. AssertionError where the block cannot be split, see
        `Cut.check_split`, unless its loops were declared fused.
        """
        if not self.fused_loops:
            saved.cut.check_split()

        def layer(weights: Tree, dys: Any, inputs: Any) -> tuple[Any, Any]:
            kept, daux, flags = inputs
            results = [
                saved.cut.backward_input(weights, k, c._replace(layer=flags), dy, daux)
                for k, c, dy in zip(kept, saved.context, dys, strict=True)
            ]
            return tuple(r[0] for r in results), tuple(r[1] for r in results)

        flags = saved.context[0].layer
        dys = stacked.cut(dy, self.parts)
        if saved.last is None:
            steps = (saved.parts, daux, flags)
            dxs, deferred = lax.scan(lambda dys, inputs: layer(inputs[1], dys, inputs[0]), dys, (steps, layers), reverse=True)
            return stacked.join(dxs), deferred

        def body(carry: Any, inputs: Any) -> tuple[Any, Any]:
            (dys, weights), (i, kept) = carry, inputs
            following = self._whole(pick(layers, jnp.maximum(i - 1, 0)))
            dys, deferred = layer(weights, dys, (kept, pick(daux, i), pick(flags, i)))
            return (dys, following), deferred

        end = length(layers) - 1
        weights = {**(saved.weights or {}), **self._whole(self._shards_again(layers))}
        dys, last = layer(weights, dys, (saved.last, pick(daux, end), pick(flags, end)))
        start, apart = (dys, self._whole(pick(layers, max(end - 1, 0)))), int(saved.first is not None)
        (dxs, weights), deferred = lax.scan(body, start, (jnp.arange(apart, end), saved.parts), reverse=True)
        first = None
        if saved.first is not None:
            dxs, first = layer(weights, dxs, (saved.first, pick(daux, 0), pick(flags, 0)))
        return stacked.join(dxs), (first, deferred, last)

    def backward_weight(self, saved: Saved, deferred: tuple[Any, ...], grads: Tree) -> Tree:
        """The rest of `backward`: adds every layer's gradients to `grads`. Reads no weight.

        Bytes moved: with `reduce` each layer's gradients once, right behind the matmuls that made them.
        """
        reduce = self.reduce if self.reduce is not None else lambda tree: tree
        flags = saved.context[0].layer

        def add(grads: Tree, i: Any, kept: Any, deferred: Any) -> Tree:
            here = [c._replace(layer=pick(flags, i)) for c in saved.context]
            parts = [saved.cut.backward_weight(k, d, c) for k, d, c in zip(kept, deferred, here, strict=True)]
            return add_at(grads, reduce(stacked.add(parts)), i)

        numbers = range(length(grads))
        if saved.last is not None:
            first, deferred, last = deferred
            grads = add(grads, numbers[-1], saved.last, last)
            numbers = numbers[:-1]
            if saved.first is not None:
                grads = add(grads, 0, saved.first, first)
                numbers = numbers[1:]
        steps = (jnp.asarray(numbers), saved.parts, deferred)
        return lax.scan(lambda grads, inputs: (add(grads, *inputs), None), grads, steps)[0]

    def differentiable(self, layers: Tree, x: Any, context: Context) -> tuple[Any, Tree]:
        """`forward` that `jax.grad` may go through: y and aux, gradients by `backward`, in the dtype of `layers`."""

        @jax.custom_vjp
        def apply(layers: Tree, x: Any, context: Context) -> tuple[Any, Tree]:
            y, _, aux = self.forward(layers, x, context)
            return y, aux

        def forward(layers: Tree, x: Any, context: Context) -> Any:
            y, saved, aux = self.forward(layers, x, context)
            return (y, aux), (layers, saved)

        def backward(residuals: Any, cotangents: Any) -> Any:
            layers, saved = residuals
            dy, daux = cotangents
            floats = [d for d in jax.tree.leaves(daux) if d.dtype != jax.dtypes.float0]
            dx, grads = self.backward(layers, saved, dy, floats)
            return jax.tree.map(lambda g, w: collectives.vary_like(g.astype(w.dtype), w), grads, layers), dx, None

        apply.defvjp(forward, backward)
        return apply(layers, x, context)


def _cut_context(context: Context, parts: int) -> list[Context]:
    pieces = {name: stacked.cut(leaf, parts) for name, leaf in context.batch.items()}
    return [context._replace(batch={name: piece[n] for name, piece in pieces.items()}) for n in range(parts)]
