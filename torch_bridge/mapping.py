"""Rules between jaxpar's leaves and torch's tensors; import and export are both read off them.

    Rule       one leaf of the parameter tree, the torch key it is, and torch's dims in words
    Ignored    torch keys that carry nothing, with the reason
    Binding    a rule applied to a model's sizes: keys, shapes, and the transform from torch tensors to the leaf
    bind       rules and records -> bindings; every leaf exactly once
    to_leaves, to_torch    views of torch tensors -> views of leaves, and back

A layout names the leaf's logical axes in torch's order, with merged ones in parentheses: "(heads head_dim) embed" is the [N*H, D] matrix
that becomes [N, H, D]. Without one the dims are the leaf's. `{layer}` in a key stands for each layer of a stacked leaf.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxpar.params import Parameter, Tree, flatten
from torch_bridge.joining import Stack
from torch_bridge.transforms import Chain, Each, Pad, Split, Transform, Transpose
from torch_bridge.views import Shape, View


@dataclass(frozen=True)
class Rule:
    """Leaf `leaf`, such as "layers/attention/query", is torch's `key`, such as "model.layers.{layer}.self_attn.q_proj.weight"."""

    leaf: str
    key: str
    layout: str = ""


@dataclass(frozen=True)
class Ignored:
    """Torch keys that match the whole of `pattern` hold nothing to convert, because `reason`."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class Binding:
    """A rule at a model's sizes. `transform` takes the tensors of `keys`, each of `torch_shape`, to the leaf; its inverse goes back."""

    path: str
    keys: tuple[str, ...]
    torch_shape: Shape
    transform: Transform
    parameter: Parameter


def bind(rules: Iterable[Rule], specs: Tree) -> tuple[Binding, ...]:
    """A binding for every leaf of `specs` (nested dict of `Parameter`), in the rules' order.

    Rules for leaves that this model has not (biases, an untied head) are left out. Raises ValueError naming a leaf without a rule.
    """
    rules = tuple(rules)
    records = dict(flatten(specs))
    leaves = [rule.leaf for rule in rules]
    assert len(set(leaves)) == len(leaves), "a leaf has two rules"
    for path in records:
        if path not in leaves:
            raise ValueError(f"{path}: this family has no tensor for it")
    bindings = tuple(_binding(rule, records[rule.leaf]) for rule in rules if rule.leaf in records)
    keys = [key for binding in bindings for key in binding.keys]
    assert len(set(keys)) == len(keys), "a torch key has two rules"
    return bindings


def _binding(rule: Rule, parameter: Parameter) -> Binding:
    axes = parameter.layer_axes
    sizes = dict(zip(axes, parameter.layer_shape))
    if parameter.rows:
        sizes[axes[0]] = parameter.rows
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
    one = Chain(tuple(steps))
    layers = parameter.shape[0] if parameter.stacked else 0
    assert ("{layer}" in rule.key) == parameter.stacked, f"{rule.leaf}: {rule.key} and the leaf disagree on layers"
    return Binding(
        path=rule.leaf,
        keys=tuple(rule.key.format(layer=layer) for layer in range(layers)) if layers else (rule.key,),
        torch_shape=tuple(math.prod(sizes[name] for name in group) for group in groups),
        transform=Chain((Each(one), Stack(layers))) if layers else one,
        parameter=parameter,
    )


def expected_shapes(bindings: Iterable[Binding]) -> dict[str, Shape]:
    """The shape of every torch tensor, in export order: what stands before the layers, each layer's, what stands after."""
    bindings = tuple(bindings)
    found: dict[str, Shape] = {}
    blocks: list[list[Binding]] = []
    for binding in bindings:
        if blocks and blocks[-1][0].parameter.stacked == binding.parameter.stacked:
            blocks[-1].append(binding)
        else:
            blocks.append([binding])
    for block in blocks:
        for layer in range(len(block[0].keys)):
            found |= {binding.keys[layer]: binding.torch_shape for binding in block}
    return found


def to_leaves(bindings: Iterable[Binding], tensors: Mapping[str, View]) -> dict[str, View]:
    """Views of the leaves, by path. Nothing is read."""
    leaves: dict[str, View] = {}
    for binding in bindings:
        views = tuple(tensors[key] for key in binding.keys)
        for key, view in zip(binding.keys, views):
            assert view.shape == binding.torch_shape, f"{key}: {view.shape} is not {binding.torch_shape}"
        (leaves[binding.path],) = binding.transform.apply(views)
        assert leaves[binding.path].shape == binding.parameter.shape, f"{binding.path}: {leaves[binding.path].shape}"
    return leaves


def to_torch(bindings: Iterable[Binding], leaves: Mapping[str, View]) -> dict[str, View]:
    """Views of the torch tensors, by key, in export order. Nothing is read."""
    bindings = tuple(bindings)
    tensors: dict[str, View] = {}
    for binding in bindings:
        leaf = leaves[binding.path]
        assert leaf.shape == binding.parameter.shape, f"{binding.path}: {leaf.shape} is not {binding.parameter.shape}"
        tensors |= zip(binding.keys, binding.transform.inverse.apply((leaf,)), strict=True)
    return {key: tensors[key] for key in expected_shapes(bindings)}
