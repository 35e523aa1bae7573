"""Layer stacks one after another, where a model's layers are of several kinds: the functions of a stack, over trees with a branch for each.

`layers`, `context.layer`, `aux` and gradients are dicts by the name of the stack; everything else is as `LayerStack` has it. At a border
nothing travels ahead: the first weights of the next stack are gathered when it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.parallel import joint
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.stack import LayerStack, Saved

Tree = Any


def linked(stacks: Mapping[str, LayerStack]) -> LayerStack | Chain:
    """The stacks as one: a single one as it is, whose trees have no branches."""
    return Chain(stacks) if len(stacks) > 1 else next(iter(stacks.values()))


@dataclass(frozen=True, eq=False)
class Chain:
    """`stacks` in the order in which they run."""

    stacks: Mapping[str, LayerStack]

    def forward(self, layers: Tree, x: Any, context: Context) -> tuple[Any, dict[str, tuple[Saved, int]], Tree]:
        """x[B, S, D] -> y[B, S, D], what the backward needs, and aux of each stack. Bytes moved: each stack's."""
        saved, aux = {}, {}
        for name, stack in self.stacks.items():
            x, kept, aux[name] = stack.forward(layers[name], x, context._replace(layer=context.layer[name]))
            saved[name] = kept, sum(map(joint.is_differentiable, jax.tree.leaves(aux[name])))
        return x, saved, aux

    def backward(
        self, layers: Tree, saved: dict[str, tuple[Saved, int]], dy: Any, daux: list[Any], grads: Tree | None = None, before: Tree = ()
    ) -> tuple[Any, Tree]:
        """dy[B, S, D] -> dx[B, S, D] and the gradients of all stacks, added to `grads` when given. `daux` as JAX orders the leaves of
        `aux`; `before` is for the last stack, which runs first."""
        parts, done = {}, 0
        for name in sorted(self.stacks):
            parts[name] = daux[done : done + saved[name][1]]
            done += saved[name][1]
        found = {}
        for name, stack in reversed(list(self.stacks.items())):
            own = None if grads is None else grads[name]
            dy, found[name] = stack.backward(layers[name], saved[name][0], dy, parts[name], own, before)
            before = ()
        return dy, found
