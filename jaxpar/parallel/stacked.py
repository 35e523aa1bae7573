"""Trees of arrays stacked over layers [L, ...], and batches cut into parts.

length, pick, pick_after   of a stacked tree: its L, one layer's slice
add_at, put_at          adding to one layer's slice, writing one or more
in_turn, per_turn       a loop over layers, and how many one turn of it takes
unwritten, zeros        arrays for such a loop to write, or to add to
add                     the sum of trees
cut, join               a batch [B, ...] into equal parts along B, and back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel import collectives

Tree = Any

# Turns below which a loop of pairs is none: XLA unrolls one or two.
FEWEST_TURNS = 3


def length(layers: Tree) -> int:
    return jax.tree.leaves(layers)[0].shape[0]


def pick(tree: Tree, i: Any) -> Tree:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def pick_after(values: Tree, tree: Tree, i: Any, in_pairs: bool) -> tuple[Tree, Tree]:
    """(values, one layer's slice). Of two layers in one turn of a loop, the second's weights would be gathered with the first's: in pairs
    the slice is read when the values are there. What varies over fewer axes than they is not held back."""
    if not in_pairs:
        return values, pick(tree, i)
    axes = frozenset[str]().union(*map(collectives.varying, jax.tree.leaves(values)))
    values, late = collectives.barrier((values, collectives.vary(jnp.asarray(i, jnp.int32), tuple(sorted(axes)))))

    def read(a: Any) -> Any:
        return lax.dynamic_index_in_dim(a, late if collectives.varying(a) >= axes else i, keepdims=False)

    return values, jax.tree.map(read, tree)


def add_at(total: Tree, part: Tree, i: Any) -> Tree:
    """total[i] += part, in place inside a loop, in the dtype of `total`."""

    def add(t: Any, p: Any) -> Any:
        old = lax.dynamic_index_in_dim(t, i, keepdims=False)
        return lax.dynamic_update_index_in_dim(t, old + p.astype(t.dtype), i, 0)

    return jax.tree.map(add, total, part)


def put_at(total: Tree, parts: Sequence[Tree], i: Any) -> Tree:
    """total[i], total[i + 1], ... = parts, in place inside a loop. One write for all: of two in one turn XLA's estimate of memory, by which
    it decides to compute again, takes the first for another array as large as `total`."""

    def put(t: Any, *ps: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(t, jnp.stack(ps), i, 0)

    return jax.tree.map(put, total, *parts)


def zeros(types: Tree, layers: int) -> Tree:
    """Zeros [L, ...] for one layer's `types` (from `jax.eval_shape`)."""
    return jax.tree.map(lambda t: collectives.zeros(t.update(shape=(layers, *t.shape)), collectives.varying_of(t)), types)


def unwritten(step: Callable[[Any, Any], Any], carry: Any, numbers: range) -> Tree:
    """Arrays [len(numbers), ...] without values, for what `step` of `in_turn` puts out.

    The outputs of `lax.scan` begin as zeros, on a GPU a pass over the largest arrays of a step; and where two have one shape, XLA makes
    the zeros once and copies them.
    """

    def make(t: jax.ShapeDtypeStruct) -> jax.Array:
        return collectives.vary(lax.empty((len(numbers), *t.shape), t.dtype), tuple(sorted(collectives.varying_of(t))))

    return jax.tree.map(make, jax.eval_shape(lambda: step(carry, numbers.start)[1]))


def per_turn(count: int) -> int:
    """How many of `count` steps one turn of a loop takes: 2, so that what a step hands to the next, such as gathered weights, alternates
    between two buffers. With one step a turn the new value cannot be written where the old is still read, and XLA copies it whenever the
    loop turns. 1 where that would leave too few turns for a loop."""
    return 2 if count >= 2 * FEWEST_TURNS else 1


def in_turn(step: Callable[[Any, jax.Array], Any], carry: Any, numbers: range, each: int = 1, written: Tree = ()) -> Any:
    """(carry, out) = step(carry, i) for every i of `numbers` as one loop of `each` steps a turn -> carry, and `written`, whose slices in
    the order of the steps become what they put out."""
    assert len(numbers) % each == 0, f"{len(numbers)} steps do not make turns of {each}"
    if not numbers:
        return carry, written

    def turn(state: Any, i: Any) -> Any:
        carry, written = state
        outs = []
        for n in range(each):
            carry, out = step(carry, i + n * numbers.step)
            outs.append(out)
        return (carry, put_at(written, outs, i - numbers.start)), None

    return lax.scan(turn, (carry, written), jnp.asarray(numbers[::each], jnp.int32))[0]


def add(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *a: sum(a[1:], a[0]), *trees)


def cut(x: Any, parts: int) -> tuple[Any, ...]:
    assert x.shape[0] % parts == 0, f"batch {x.shape[0]} does not divide into {parts} parts"
    return (x,) if parts == 1 else tuple(jnp.split(x, parts))


def join(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
