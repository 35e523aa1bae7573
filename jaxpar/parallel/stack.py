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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.parallel import collectives, remat, runs, split, stacked
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.joint import Block
from jaxpar.parallel.runs import Place, Run
from jaxpar.parallel.saved import Saved
from jaxpar.parallel.stacked import add_at, length, pick, pick_after

Tree = Any


@dataclass(frozen=True, eq=False)
class LayerStack:
    """A stack of `block(layer, x, context) -> (y, aux)`.

    block:   one for all layers, or a tuple with that of each. Layers with the same function are alike; where they alternate, an
             iteration of the loop holds one of each, so that what differs (an attention window) is known while tracing.
    keep:    remat policy.
    gather:  shards of one layer -> whole local weights (ZeRO-3); None: `layers` are whole.
    reduce:  local gradients of one layer -> what the accumulation buffer holds (ZeRO-2, -3); None: they are added as they are.
    parts:   how many parts of the batch run interleaved inside a layer body.
    again:   names in a layer whose weights are not held from the last layer's forward to its backward, with `gather`.
    in_pairs: with `gather` or `reduce`, a turn of a loop takes two layers (`runs.in_pairs`).
    """

    block: Block | tuple[Block, ...]
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
        xs, contexts = stacked.cut(x, self.parts), context.cut(self.parts)
        layer_types = jax.eval_shape(lambda: self._whole(pick(layers, 0)))
        blocks = self.block if isinstance(self.block, tuple) else (self.block,) * length(layers)
        assert len(blocks) == length(layers), f"{len(blocks)} blocks for {length(layers)} layers"
        kinds, first = runs.number(blocks), contexts[0].of_layer(0)
        cut = partial(split.cut, params=layer_types, x=xs[0], context=first, keep=self.keep, fused_loops=self.fused_loops)
        cuts = tuple(map(cut, dict.fromkeys(blocks)))

        def layer(kind: int, weights: Tree, xs: tuple[Any, ...], i: Any, due: Tree = None) -> tuple[tuple[Any, ...], tuple[Any, Any], Tree]:
            here = [c.of_layer(i) for c in contexts]
            results, due = cuts[kind].forward_parts(weights, xs, here, due)
            return tuple(r[0] for r in results), (stacked.add([r[1] for r in results]), tuple(r[2] for r in results)), due

        if self.gather is None:
            order = self._order(kinds)
            ys, outs = runs.walk(order, lambda xs, at: layer(at.kind, pick(layers, at.layer), xs, at.layer)[:2], xs)
            return stacked.join(ys), Saved(runs.each(outs, 1), contexts, cuts, order), runs.joined(runs.each(outs, 0))

        def body(carry: Any, at: Place) -> tuple[Any, Any]:
            xs, weights = carry
            xs, shards = _ahead(order, at, xs, layers, at.layer + 1)
            ys, out, following = layer(at.kind, weights, xs, at.layer, due=self._whole(shards))
            return (ys, following), out

        end, order = length(layers) - 1, self._order(kinds[:-1])
        (xs, weights), outs = runs.walk(order, body, (xs, self._whole(pick(layers, 0))))
        ys, (last_aux, last), _ = layer(kinds[end], weights, xs, end)
        aux = runs.joined([*runs.each(outs, 0), [jax.tree.map(lambda a: a[None], last_aux)]])
        held = {name: weight for name, weight in weights.items() if name not in self.again}
        return stacked.join(ys), Saved(runs.each(outs, 1), contexts, cuts, runs.followed(order, kinds[end]), last, held), aux

    def _order(self, kinds: tuple[int, ...]) -> tuple[Run, ...]:
        one_by_one = self.gather is not None or self.reduce is not None
        return runs.in_pairs(runs.fold(kinds)) if self.in_pairs and one_by_one else runs.fold(kinds)

    def _shards_again(self, layers: Tree) -> Tree:
        return {name: pick(layers[name], length(layers) - 1) for name in self.again}  # of the last layer

    def _whole(self, shards: Tree) -> Tree:
        return self.gather(shards) if self.gather is not None else shards

    def backward(
        self, layers: Tree, saved: Saved, dy: Any, daux: list[Any], grads: Tree | None = None, before: Tree = ()
    ) -> tuple[Any, Tree]:
        """dy [B, S, D] -> dx [B, S, D] and the gradients of all layers, added to `grads` (in its dtype) when given.

        `before`, used where layers are gathered or reduced one by one: what shall be there before the last layer begins, such as the head's
        gradient in a narrow dtype; the float32 one would else wait in memory beside a layer's working set.

        Bytes moved: the block's collectives, with `gather` each layer's weights once more, with `reduce` each layer's gradients once.
        """
        if self.gather is not None or self.reduce is not None:
            return self._backward_one_by_one(layers, saved, dy, daux, grads, before)
        apart = grads is None and len(saved.runs) == len(saved.cuts) == 1  # each layer's gradients are put out, in order

        def body(carry: Any, at: Place) -> tuple[Any, Any]:
            dys, total = carry
            dys, kept = saved.of(at, dys)
            dys, dparams, _ = saved.backward(at, pick(layers, at.layer), kept, dys, daux)
            return ((dys, None), dparams) if apart else ((dys, add_at(total, dparams, at.layer)), None)

        if grads is None and not apart:
            grads = jax.tree.map(lambda w: collectives.zeros(w, collectives.varying_of(w)), jax.eval_shape(lambda: layers))
        (dxs, total), separate = runs.walk(saved.runs, body, (stacked.cut(dy, self.parts), grads), reverse=True)
        return stacked.join(dxs), runs.joined(separate) if apart else total

    def _backward_one_by_one(
        self, layers: Tree, saved: Saved, dy: Any, daux: list[Any], grads: Tree | None, before: Tree
    ) -> tuple[Any, Tree]:
        """`backward` where layers are gathered or reduced one by one: behind the compute of layer i travel the weights of layer i - 1 and
        the gradients of layer i + 1.

        The last layer, which has nobody's gradients to reduce, and under ZeRO-3 the first, which has nobody's weights to gather, stand
        outside the loops, with the rest of their group: inside they would send a layer of zeros and a layer of weights for nothing.
        """
        end, gathered, reduce = length(layers) - 1, self.gather is not None, self.reduce or (lambda tree: tree)

        def step(at: Place, kept: Any, dys: Any, weights: Tree, ahead: bool) -> tuple[Any, Tree, Tree]:
            """dx of a layer, its gradients, and the weights of the layer before."""
            dys, shards = _ahead(saved.runs, at, dys, layers, at.layer - 1, again=True) if ahead else (dys, None)
            following = self._whole(shards) if ahead else None
            return saved.backward(at, weights if gathered else pick(layers, at.layer), kept, dys, daux, following)

        def body(carry: Any, at: Place, ahead: bool = gathered) -> tuple[Any, None]:
            dys, weights, waiting, grads = carry
            grads = add_at(grads, reduce(waiting), at.layer + 1)
            dys, kept = saved.of(at, dys)
            dys, dparams, following = step(at, kept, dys, weights, ahead)
            return (dys, following, dparams, grads), None

        between, (last_group,) = runs.without_last(saved.runs)
        *others, at = runs.places(last_group)
        dys = stacked.cut(dy, self.parts)
        kept = saved.last if saved.last is not None else runs.stored(saved.parts, at)
        # Behind a barrier, or what the forward did not keep would be kept after all.
        again = collectives.distinct((kept, self._shards_again(layers) if gathered else {}))
        dys, (kept, shards), _ = collectives.barrier((dys, again, before))
        weights = {**saved.weights, **self._whole(shards)} if saved.weights is not None else None
        dys, waiting, weights = step(at, kept, dys, weights, gathered and end > 0)
        if grads is None:
            grads = stacked.zeros(jax.eval_shape(reduce, waiting), end + 1)
        carry = (dys, weights, waiting, grads)
        for at in reversed(others):
            carry, _ = body(carry, at)
        first, between = runs.without_first(between) if gathered and between else ((), between)
        carry, _ = runs.walk(between, body, carry, reverse=True)
        for at in reversed([at for run in first for at in runs.places(run)]):
            carry, _ = body(carry, at, ahead=at.layer > 0)
        dys, _, waiting, grads = carry
        return stacked.join(dys), add_at(grads, reduce(waiting), 0)

    def backward_input(self, layers: Tree, saved: Saved, dy: Any, daux: list[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The part of `backward` that dx needs. `deferred` is what `backward_weight` needs besides `saved`, stacked over layers as `saved`
        is: with the last layer apart where weights are gathered.

        Bytes moved: the block's collectives, with `gather` each layer's weights once. AssertionError where the block cannot be split, see
        `Cut.check_split`, unless its loops were declared fused.
        """
        for cut in () if self.fused_loops else saved.cuts:
            cut.check_split()

        def layer(weights: Tree, dys: Any, at: Place, kept: Any) -> tuple[Any, Any]:
            results = [
                saved.cuts[at.kind].backward_input(weights, k, c, dy, pick(daux, at.layer))
                for k, c, dy in zip(kept, saved.here(at), dys, strict=True)
            ]
            return tuple(r[0] for r in results), tuple(r[1] for r in results)

        def body(carry: Any, at: Place) -> tuple[Any, Any]:
            dys, weights = carry
            following = self._whole(pick(layers, jnp.maximum(at.layer - 1, 0))) if gathered else None
            dys, kept = saved.of(at, dys)
            dys, deferred = layer(weights if gathered else pick(layers, at.layer), dys, at, kept)
            return (dys, following), deferred

        order: Sequence[Run] = saved.runs
        gathered, dys, weights = saved.last is not None, stacked.cut(dy, self.parts), None
        if gathered:
            *order, alone = saved.runs
            whole = {**(saved.weights or {}), **self._whole(self._shards_again(layers))}
            dys, last = layer(whole, dys, runs.places(alone)[0], saved.last)
            weights = self._whole(pick(layers, max(length(layers) - 2, 0)))
        (dxs, _), deferred = runs.walk(order, body, (dys, weights), reverse=True)
        return stacked.join(dxs), (deferred, last) if gathered else deferred

    def backward_weight(self, saved: Saved, deferred: tuple[Any, ...], grads: Tree) -> Tree:
        """The rest of `backward`: adds every layer's gradients to `grads`. Reads no weight.

        Bytes moved: with `reduce` each layer's gradients once, right behind the matmuls that made them.
        """
        reduce = self.reduce or (lambda tree: tree)

        def add(grads: Tree, at: Place, kept: Any, deferred: Any) -> Tree:
            parts = [saved.cuts[at.kind].backward_weight(k, d, c) for k, d, c in zip(kept, deferred, saved.here(at), strict=True)]
            return add_at(grads, reduce(stacked.add(parts)), at.layer)

        order: Sequence[Run] = saved.runs
        if saved.last is not None:
            (deferred, last), (*order, alone) = deferred, saved.runs
            grads = add(grads, runs.places(alone)[0], saved.last, last)

        def body(grads: Tree, at: Place) -> tuple[Tree, None]:
            return add(grads, at, runs.stored(saved.parts, at), runs.stored(deferred, at)), None

        return runs.walk(order, body, grads)[0]

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


def _ahead(order: Sequence[Run], at: Place, values: Any, layers: Tree, i: Any, again: bool = False) -> tuple[Any, Tree]:
    """(values, shards of layer i), to be gathered behind what is at `at`: not before the values are there, where it would be. In a group of
    several layers all would be gathered with the first's; outside a loop, the forward's gather would be taken and kept until the backward,
    which gathers `again`."""
    if at.in_loop:
        return pick_after(values, layers, i) if len(order[at.run].kinds) > 1 else (values, pick(layers, i))
    short = (run for run in order if len(run.groups) < runs.FEWEST_TURNS)  # no loops of the forward, or such as XLA unrolls
    alone = {0, *(at.layer + 1 for run in short for at in runs.places(run))}
    shards = pick(layers, i)
    if i in alone and again:  # what varies over fewer axes than the values does not wait for them, and both barriers would be one
        shards = collectives.distinct(shards)
    return collectives.barrier((values, shards)) if i in alone else (values, shards)
