"""The section `train.context` of a run: how `seq` shares attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jaxpar.config.checks import divisors, one_of, require


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """How `mesh.seq` devices share the attention of a row; `jaxpar/parallel/context` says what each way sends.

    `method` ring and gather bring keys to queries, ulysses trades tokens for heads, usp trades among `ulysses` neighbours and rings over
    the rest. `layout` is which tokens a device holds: contiguous ones, an early and a late chunk (zigzag), or every n-th (striped).
    """

    method: str = "ring"
    layout: str = "zigzag"
    ulysses: int = 2

    def __post_init__(self) -> None:
        one_of("train.context.method", self.method, ("ring", "ulysses", "gather", "usp"))
        one_of("train.context.layout", self.layout, ("contiguous", "zigzag", "striped"))
        require(self.ulysses >= 1, f"train.context.ulysses: {self.ulysses} must be at least 1")

    def split(self, devices: int) -> tuple[int, int]:
        """(groups that keys travel over, neighbours of a group that trade heads) of that many devices; their product is `devices`."""
        if devices == 1:
            return 1, 1
        inner = {"ulysses": devices, "usp": self.ulysses}.get(self.method, 1)
        works = ", ".join(map(str, divisors(devices)))
        require(devices % inner == 0, f"train.context.ulysses: {inner} does not divide mesh.seq {devices}; sizes that work: {works}")
        return devices // inner, inner

    def check_heads(self, heads: int, kv_heads: int, devices: int) -> None:
        """Raise ValueError, listing the degrees that work, where neighbours cannot trade tokens for the heads that each of them has."""
        _, inner = self.split(devices)
        deals = lambda size: heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)  # noqa: E731
        if not deals(inner):
            field, sizes = ("mesh.seq", divisors(heads)) if self.method == "ulysses" else ("train.context.ulysses", divisors(devices))
            works = ", ".join(str(size) for size in sizes if deals(size))
            raise ValueError(
                f"{field}: {inner} devices cannot trade tokens for the {heads} query heads and {kv_heads} key/value heads that "
                f"each has; degrees that work: {works}"
            )

    def fitted(self, heads: int, kv_heads: int, devices: int) -> ContextConfig:
        """The nearest to this that so many devices and heads allow: usp among fewer neighbours, else a ring. The result of attention is the
        same, so what was trained in one way runs in another."""
        context = replace(self, ulysses=math.gcd(self.ulysses, devices)) if self.method == "usp" else self
        try:
            context.check_heads(heads, kv_heads, devices)
        except ValueError:
            return replace(self, method="ring")
        return context

    def unit(self, devices: int) -> int:
        """What a row's length must be a multiple of: a device holds whole tokens of both chunks of its group."""
        ring, _ = self.split(devices)
        return math.lcm(devices, 2 * ring if self.layout == "zigzag" and ring > 1 else ring)
