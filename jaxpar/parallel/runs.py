"""Runs of layers: which layers a loop goes over, where the layers of a stack are of several kinds.

    fold      kinds of layers, one after another -> runs: (local, global, local, global, local) is two groups of a pair, and one layer
    walk      a body over every layer, a loop for each run
    stored    what a walk put out for one layer
    joined    what it put out for all of them, stacked over layers [L, ...]

A loop's body holds the layers of one group, each of a kind that is known while tracing. What it puts out is stacked over groups, for each
place in the group apart: as many arrays as kinds in a group, and none is ever copied into another order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.parallel.stacked import pick

Tree = Any


@dataclass(frozen=True)
class Run:
    """Groups of layers of the same kinds: the `number` of the run in its stack, the `first` layer of group 0, the `groups` meant."""

    number: int
    first: int
    kinds: tuple[int, ...]
    groups: range


class Place(NamedTuple):
    """A layer in a walk: its number in the stack, its kind, and where its outputs are. `layer` and `group` are arrays inside a loop."""

    layer: Any
    kind: int
    run: int
    position: int
    group: Any

    @property
    def in_loop(self) -> bool:
        return not isinstance(self.group, int)


def number(kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """Each kind as a number, in order of appearance."""
    distinct = list(dict.fromkeys(kinds))
    return tuple(distinct.index(kind) for kind in kinds)


@lru_cache(maxsize=64)
def fold(kinds: tuple[int, ...]) -> tuple[Run, ...]:
    """The runs of layers of these kinds, with the fewest bodies, then the fewest loops."""
    count = len(kinds)
    best: list[tuple[int, int, tuple[Run, ...]]] = [(0, 0, ())] * (count + 1)
    for end in range(1, count + 1):
        least: tuple[int, int, tuple[Run, ...]] = (count + 1, 0, ())
        for size in range(1, end + 1):
            if size > least[0]:  # longer groups have more bodies than were found
                break
            first, kinds_of = end - size, kinds[end - size : end]
            while first >= 0 and kinds[first : first + size] == kinds_of:
                bodies, loops, before = best[first]
                if (bodies + size, loops + 1) < least[:2]:
                    run = Run(len(before), first, kinds_of, range((end - first) // size))
                    least = (bodies + size, loops + 1, (*before, run))
                first -= size
        best[end] = least
    return best[count][2]


def without_first(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The first group alone, and the rest."""
    run, *rest = runs
    start = run.groups.start
    return (replace(run, groups=range(start, start + 1)),), _rest(replace(run, groups=run.groups[1:]), *rest)


def without_last(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The rest, and the last group alone."""
    *rest, run = runs
    end = run.groups.stop
    return _rest(*rest, replace(run, groups=run.groups[:-1])), (replace(run, groups=range(end - 1, end)),)


def places(run: Run) -> list[Place]:
    """The layers of a run, in order."""
    size = len(run.kinds)
    return [
        Place(run.first + group * size + position, kind, run.number, position, group)
        for group in run.groups
        for position, kind in enumerate(run.kinds)
    ]


def followed(runs: Sequence[Run], kind: int) -> tuple[Run, ...]:
    """The runs, and one more layer outside any loop."""
    end = max((run.first + len(run.kinds) * len(run.groups) for run in runs), default=0)
    return (*runs, Run(len(runs), end, (kind,), range(1)))


def _rest(*runs: Run) -> tuple[Run, ...]:
    return tuple(run for run in runs if run.groups)


def walk(runs: Sequence[Run], body: Callable[[Any, Place], tuple[Any, Tree]], carry: Any, *, reverse: bool = False) -> tuple[Any, Any]:
    """carry, out = body(carry, place) for layer after layer; outs[run][position] are stacked over groups. A run of one group is no loop."""
    found: dict[int, Any] = {}
    for run in reversed(runs) if reverse else runs:

        def one(carry: Any, group: Any, run: Run = run) -> tuple[Any, tuple[Tree, ...]]:
            outs: dict[int, Tree] = {}
            size = len(run.kinds)
            for position in reversed(range(size)) if reverse else range(size):
                place = Place(run.first + group * size + position, run.kinds[position], run.number, position, group)
                carry, outs[position] = body(carry, place)
            return carry, tuple(outs[position] for position in range(size))

        if len(run.groups) == 1:
            carry, outs = one(carry, run.groups.start)
            found[run.number] = jax.tree.map(lambda a: jnp.asarray(a)[None], outs)
        else:
            carry, found[run.number] = lax.scan(one, carry, jnp.arange(run.groups.start, run.groups.stop), reverse=reverse)
    return carry, tuple(found[number] for number in sorted(found))


def stored(outs: Any, place: Place) -> Tree:
    """The outputs of the layer at a place, by the walk that put them out."""
    return pick(outs[place.run][place.position], place.group)


def each(outs: Any, which: int) -> Any:
    """One of several things that a walk's body puts out, of every run and position."""
    return tuple(tuple(out[which] for out in of_run) for of_run in outs)


def joined(outs: Sequence[Sequence[Tree]]) -> Tree:
    """outs[run][position], stacked over groups -> stacked over layers. A copy, but for one run of one kind."""
    of_runs = [jax.tree.map(lambda *a: jnp.stack(a, 1).reshape(-1, *a[0].shape[1:]), *each) for each in outs]
    return jax.tree.map(lambda *a: jnp.concatenate(a), *of_runs)
