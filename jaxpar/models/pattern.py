"""Which layers of a decoder have experts, and how its layers are stacked for that.

    all layers alike                    layers [L, ...]                       one stack of blocks
    experts in every n-th               layers [L / n, ...] of groups         one stack of groups: `dense0`, ..., then `sparse`
    dense layers before all others      layers {first [K, ...], rest}         two stacks; `rest` as one of the two above

    segments    the stacks of a model
    Group       n layers, the last of them with experts
    Layers      declares the parameters of two stacks
    flags       what a layer reads of itself, stacked alike

Dims: B batch, S sequence, D model width, L layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.config import ModelConfig
from jaxpar.models.block import Block
from jaxpar.models.options import Options
from jaxpar.models.parameter import stacked
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.sequence import Boundary, Replicated

FIRST, REST = "first", "rest"


class Segment(NamedTuple):
    """A stack: `units` of `size` layers each, from layer `start`. `windows`: the attention window of each unit's layer, 0 for none; where a
    unit is a group, those of its layers."""

    name: str
    start: int
    units: int
    size: int
    windows: tuple[int, ...] | tuple[tuple[int, ...], ...]


def segments(config: ModelConfig) -> tuple[Segment, ...]:
    """The stacks of a model, in the order in which they run; a model with one has no names in its tree."""
    dense, every = (config.moe.dense_layers, config.moe.every) if config.moe.experts else (0, 1)
    windows = tuple(config.layer_windows)
    own = windows[dense:] if every == 1 else tuple(windows[n : n + every] for n in range(dense, config.layers, every))
    rest = Segment(REST, dense, (config.layers - dense) // every, every, own)
    return (Segment(FIRST, 0, dense, 1, windows[:dense]), rest) if dense else (rest,)


class Group(nnx.Module):
    """`every` layers, the last of them with experts."""

    def __init__(self, config: ModelConfig, boundary: Boundary, options: Options):
        self.dense = config.moe.every - 1
        for n in range(self.dense):
            setattr(self, f"dense{n}", Block(config, boundary, options, experts=False))
        self.sparse = Block(config, boundary, options)

    def __call__(self, x_BSD: jax.Array, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x as it lies between blocks -> (y likewise, aux of the layer with experts). `context.layer` has a dim of layers in front."""
        aux: dict[str, jax.Array] = {}
        for block, own in self.blocks(context.layer):
            x_BSD, aux = block(x_BSD, context._replace(layer=own))
        return x_BSD, aux

    def blocks(self, flags: dict[str, Any]) -> list[tuple[Block, dict[str, Any]]]:
        """Its layers in order, each with its own flags."""
        blocks = [*(getattr(self, f"dense{n}") for n in range(self.dense)), self.sparse]
        return [(block, {name: leaf[n] for name, leaf in flags.items() if name != "held"}) for n, block in enumerate(blocks)]


def unit(config: ModelConfig, boundary: Boundary, options: Options, segment: Segment) -> nnx.Module:
    """What a stack repeats."""
    if segment.size > 1:
        return Group(config, boundary, options)
    return Block(config, boundary, options, experts=bool(config.moe.experts) and segment.name != FIRST)


class Layers(nnx.Module):
    """The parameters of dense layers and of those behind them."""

    def __init__(self, config: ModelConfig):
        first, rest = segments(config)
        self.first = stacked(unit(config, Replicated(), Options(), first), first.units)
        self.rest = stacked(unit(config, Replicated(), Options(), rest), rest.units)


def declared_layers(config: ModelConfig) -> nnx.Module:
    """The parameters of all layers."""
    first, *more = segments(config)
    return Layers(config) if more else stacked(unit(config, Replicated(), Options(), first), first.units)


def flags(config: ModelConfig, held: dict[str, Any]) -> dict[str, Any]:
    """`Context.layer` of a model: index and attention window of each layer, as its stacks want them, and their state, which is a tree like
    `layers` with what no gradient moves."""
    index, window = jnp.arange(config.layers, dtype=jnp.int32), jnp.asarray(config.layer_windows, jnp.int32)

    def of(segment: Segment, held: dict[str, Any]) -> dict[str, Any]:
        shape = (segment.units, segment.size) if segment.size > 1 else (segment.units,)
        end = segment.start + segment.units * segment.size
        found: dict[str, Any] = {name: a[segment.start : end].reshape(shape) for name, a in (("index", index), ("window", window))}
        return {**found, "held": held} if held else found

    found = segments(config)
    return of(found[0], held) if len(found) == 1 else {each.name: of(each, held.get(each.name, {})) for each in found}
