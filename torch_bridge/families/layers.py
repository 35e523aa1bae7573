"""Rules of a model some of whose layers have experts: the tables of a layer, where `jaxpar.models.pattern` stacks each kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxpar.config import ModelConfig
from jaxpar.models import pattern
from torch_bridge.mapping import Rule

LAYERS = "layers/"


def spread(rules: tuple[Rule, ...], dense: tuple[Rule, ...], model: ModelConfig) -> tuple[Rule, ...]:
    """`rules` are a family's, `dense` the same for a layer without experts. A model whose layers are alike has `rules`."""
    found = pattern.segments(model)
    if len(found) == 1 and found[0].size == 1:
        return rules
    names = [rule.leaf.startswith(LAYERS) for rule in rules]
    begin, end = names.index(True), len(names) - names[::-1].index(True)
    return rules[:begin] + tuple(_layers(rules, dense, found)) + rules[end:]


def _layers(rules: tuple[Rule, ...], dense: tuple[Rule, ...], found: tuple[pattern.Segment, ...]) -> Iterator[Rule]:
    for segment in found:
        for place in range(segment.size):
            has_experts = segment.name == pattern.REST and place == segment.size - 1
            parts = [segment.name] if len(found) > 1 else []
            if segment.size > 1:
                parts.append("sparse" if has_experts else f"dense{place}")
            prefix = LAYERS + "".join(f"{part}/" for part in parts)
            for rule in rules if has_experts else dense:
                if rule.leaf.startswith(LAYERS):
                    leaf, *joined = (prefix + path.removeprefix(LAYERS) for path in rule.leaves)
                    yield replace(rule, leaf=leaf, joined=tuple(joined), start=segment.start + place, step=segment.size)
