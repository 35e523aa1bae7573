"""Rules between jaxpar's leaves and torch's tensors; import and export are both read off them.

    Rule       one leaf of the parameter tree, or several that torch joins, the torch key it is, and torch's dims in words
    Ignored    torch keys that carry nothing, with the reason
    Binding    a rule applied to a model's sizes: keys, shapes, and the transform from torch tensors to the leaf
    bind       rules and records -> bindings; every leaf exactly once
    to_leaves, to_torch    views of torch tensors -> views of leaves, and back

A layout names the leaf's logical axes in torch's order, with merged ones in parentheses: "(heads head_dim) embed" is the [N*H, D] matrix
that becomes [N, H, D]. Without one the dims are the leaf's. `{layer}` in a key stands for each layer of a stacked leaf, `{expert}` for each
expert, counted 0, 1, 2, ….
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxpar.params import Parameter, Tree, flatten
from torch_bridge.joining import Divide, Stack
from torch_bridge.transforms import Chain, Each, Pad, Split, Transform, Transpose
from torch_bridge.views import Shape, View


@dataclass(frozen=True)
class Rule:
    """Leaf `leaf`, such as "layers/attention/query", is torch's `key`, such as "model.layers.{layer}.self_attn.q_proj.weight".

    Torch may hold the leaves `joined` in the same tensor, behind `leaf` along the logical axis `along`. The layers of a stacked leaf are
    torch's `start`, `start + step`, ….
    """

    leaf: str
    key: str
    layout: str = ""
    joined: tuple[str, ...] = ()
    along: str = ""
    start: int = 0
    step: int = 1

    @property
    def leaves(self) -> tuple[str, ...]:
        return (self.leaf, *self.joined)


@dataclass(frozen=True)
class Ignored:
    """Torch keys that match the whole of `pattern` hold nothing to convert, because `reason`."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class Binding:
    """A rule at a model's sizes. `transform` takes the tensors of `keys`, each of `torch_shape`, to the leaves `paths`, which are all like
    `parameter`; its inverse goes back. A layer's keys stand together."""

    paths: tuple[str, ...]
    keys: tuple[str, ...]
    torch_shape: Shape
    transform: Transform
    parameter: Parameter
    layers: tuple[int, ...] = ()

    @property
    def key_range(self) -> str:
        """All keys in one, such as model.layers.{0..31}.mlp.experts.{0..7}.up_proj.weight."""
        parts = zip(self.keys[0].split("."), self.keys[-1].split("."))
        return ".".join(first if first == last else f"{{{first}..{last}}}" for first, last in parts)

    @property
    def by_layer(self) -> list[tuple[int, tuple[str, ...]]]:
        """The keys of each layer, with torch's number of it."""
        size = len(self.keys) // len(self.layers)
        return [(layer, self.keys[place * size : (place + 1) * size]) for place, layer in enumerate(self.layers)]


def bind(rules: Iterable[Rule], specs: Tree) -> tuple[Binding, ...]:
    """A binding for every leaf of `specs` (nested dict of `Parameter`), in the rules' order.

    Rules for leaves that this model has not (biases, an untied head) are left out. Raises ValueError naming a leaf without a rule.
    """
    rules = tuple(rules)
    records = dict(flatten(specs))
    leaves = [leaf for rule in rules for leaf in rule.leaves]
    assert len(set(leaves)) == len(leaves), "a leaf has two rules"
    for path in records:
        if path not in leaves:
            raise ValueError(f"{path}: this family has no tensor for it")
    bindings = tuple(_binding(rule, records) for rule in rules if rule.leaf in records)
    keys = [key for binding in bindings for key in binding.keys]
    assert len(set(keys)) == len(keys), "a torch key has two rules"
    return bindings


def _binding(rule: Rule, records: Mapping[str, Parameter]) -> Binding:
    parameter, each = records[rule.leaf], "{expert}" in rule.key
    axes = parameter.layer_axes[each:]
    sizes = dict(zip(axes, parameter.layer_shape[each:]))
    assert not each or parameter.layer_axes[0] == "experts", f"{rule.leaf}: {rule.key} and the leaf disagree on experts"
    assert all(records[leaf].shape == parameter.shape for leaf in rule.joined), f"{rule.leaves}: of several shapes"
    if parameter.rows:
        sizes[axes[0]] = parameter.rows
    if rule.joined:
        sizes[rule.along] *= len(rule.leaves)
    groups = [tuple(group.strip("()").split()) for group in re.findall(r"\([^()]*\)|\S+", rule.layout)] or [(name,) for name in axes]
    order = [name for group in groups for name in group]
    assert sorted(order) == sorted(axes), f"{rule.leaf}: layout {rule.layout!r} is not made of {axes}"
    steps: list[Transform] = []
    for dim, group in reversed(list(enumerate(groups))):
        if len(group) > 1:
            steps.append(Split(dim, tuple(sizes[name] for name in group)))
    if order != list(axes):
        steps.append(Transpose(tuple(order.index(name) for name in axes)))
    if parameter.rows and parameter.rows < parameter.layer_shape[0]:
        steps.append(Pad(0, parameter.rows, parameter.layer_shape[0]))
    outer = parameter.shape[: parameter.stacked + each]  # layers and experts: dims of the leaf that torch has a tensor for each of
    assert ("{layer}" in rule.key) == parameter.stacked, f"{rule.leaf}: {rule.key} and the leaf disagree on layers"
    whole: list[Transform] = [Chain(tuple(steps))]
    if outer:
        whole = [Each(whole[0]), Stack(math.prod(outer)), *([Split(0, outer)] if len(outer) > 1 else [])]
    if rule.joined:
        dim = len(outer) + axes.index(rule.along)
        whole.append(Divide(dim, (parameter.shape[dim],) * len(rule.leaves)))
    layers = tuple(rule.start + rule.step * place for place in range(parameter.shape[0])) if parameter.stacked else ()
    names, places = (
        ("layer",) * parameter.stacked + ("expert",) * each,
        ([layers] if layers else []) + [range(size) for size in outer[-1:] * each],
    )
    return Binding(
        paths=rule.leaves,
        keys=tuple(rule.key.format(**dict(zip(names, place))) for place in itertools.product(*places)),
        torch_shape=tuple(math.prod(sizes[name] for name in group) for group in groups),
        transform=Chain(tuple(whole)),
        parameter=parameter,
        layers=layers,
    )


def expected_shapes(bindings: Iterable[Binding]) -> dict[str, Shape]:
    """The shape of every torch tensor, in export order: what stands before the layers, each layer's, what stands after."""
    found: dict[str, Shape] = {}
    for stacked, block in itertools.groupby(bindings, lambda binding: binding.parameter.stacked):
        if not stacked:
            found |= {key: binding.torch_shape for binding in block for key in binding.keys}
            continue
        parts = [(layer, keys, binding.torch_shape) for binding in block for layer, keys in binding.by_layer]
        found |= {key: shape for _, keys, shape in sorted(parts, key=lambda part: part[0]) for key in keys}
    return found


def to_leaves(bindings: Iterable[Binding], tensors: Mapping[str, View]) -> dict[str, View]:
    """Views of the leaves, by path. Nothing is read."""
    leaves: dict[str, View] = {}
    for binding in bindings:
        views = tuple(tensors[key] for key in binding.keys)
        for key, view in zip(binding.keys, views):
            assert view.shape == binding.torch_shape, f"{key}: {view.shape} is not {binding.torch_shape}"
        for path, leaf in zip(binding.paths, binding.transform.apply(views), strict=True):
            assert leaf.shape == binding.parameter.shape, f"{path}: {leaf.shape} is not {binding.parameter.shape}"
            leaves[path] = leaf
    return leaves


def to_torch(bindings: Iterable[Binding], leaves: Mapping[str, View]) -> dict[str, View]:
    """Views of the torch tensors, by key, in export order. Nothing is read."""
    bindings = tuple(bindings)
    tensors: dict[str, View] = {}
    for binding in bindings:
        views = tuple(leaves[path] for path in binding.paths)
        for path, view in zip(binding.paths, views):
            assert view.shape == binding.parameter.shape, f"{path}: {view.shape} is not {binding.parameter.shape}"
        tensors |= zip(binding.keys, binding.transform.inverse.apply(views), strict=True)
    return {key: tensors[key] for key in expected_shapes(bindings)}
