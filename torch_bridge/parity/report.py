"""What parity found: the relative difference of every leaf of every rung, as a verdict, a table and JSON.

gap       max|a − b| / max|b| of two arrays
Rung      differences by name
Report    rungs, tolerance, verdict; `table` prints it, `json` is what --json writes
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

Arrays = dict[str, Any]
RUNGS = ("logits", "loss", "gradients", "steps")


def gap(found: Any, wanted: Any) -> float:
    """max|found − wanted| / max|wanted|, computed in float64. Infinite where shapes differ or anything is not finite, or where something
    was found of nothing."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if found.shape != wanted.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        difference, scale = float(np.abs(found - wanted).max(initial=0)), float(np.abs(wanted).max(initial=0))
    if not (math.isfinite(difference) and math.isfinite(scale)):
        return math.inf
    return 0.0 if difference == 0 else difference / scale if scale else math.inf


@dataclass(frozen=True)
class Rung:
    """Relative differences of one rung by leaf, torch names."""

    leaves: dict[str, float]

    @property
    def worst(self) -> str:
        return max(self.leaves, key=lambda name: self.leaves[name])

    @property
    def max_relative(self) -> float:
        return self.leaves[self.worst]

    @property
    def ranked(self) -> list[tuple[str, float]]:
        """Leaves, worst first."""
        return sorted(self.leaves.items(), key=lambda leaf: -leaf[1])


def compared(found: Arrays, wanted: Arrays, prefix: str = "") -> dict[str, float]:
    """`gap` of every leaf; a name on one side alone is infinitely wrong."""
    names = [*wanted, *(name for name in found if name not in wanted)]
    return {prefix + name: gap(found[name], wanted[name]) if name in found and name in wanted else math.inf for name in names}


@dataclass(frozen=True)
class Report:
    """`rungs`: jaxpar in `dtype` against torch in float64. `torch`: torch itself in `dtype` against float64, where that is another.
    `first`: see `forward.first_gap`; absent where it was not asked for or nothing differs."""

    dtype: str
    mesh: dict[str, int]
    tolerance: float
    rungs: dict[str, Rung]
    torch: dict[str, Rung] = field(default_factory=dict)
    first: tuple[str, float] | None = None

    def passes(self, rung: str) -> bool:
        return self.rungs[rung].max_relative <= self.tolerance

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(name for name in self.rungs if not self.passes(name))

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def json(self) -> dict[str, Any]:
        """Plain JSON; a difference that is not finite is null, and has not passed."""

        def number(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "passed": self.passed,
            "tolerance": self.tolerance,
            "dtype": self.dtype,
            "mesh": self.mesh,
            "rungs": {name: {"max_relative": number(rung.max_relative), "worst": rung.worst} for name, rung in self.rungs.items()},
        }

    def print(self, console: Console, worst: int = 3) -> None:
        """A table of the `worst` leaves of each rung, and the verdict."""
        sizes = " × ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one device"
        table = Table(title=f"jaxpar {self.dtype} on {sizes} against torch float64: max|a−b| / max|b|", title_justify="left")
        table.add_column("rung")
        table.add_column("worst leaves", overflow="fold")
        table.add_column("jaxpar", justify="right")
        if self.torch:
            table.add_column(f"torch {self.dtype}", justify="right")
        table.add_column("")
        for name, rung in self.rungs.items():
            for place, (leaf, difference) in enumerate(rung.ranked[:worst]):
                torch = [f"{self.torch[name].leaves[leaf]:.1e}"] if self.torch else []
                verdict = "" if place else "ok" if self.passes(name) else "FAILED"
                table.add_row("" if place else name, leaf, f"{difference:.1e}", *torch, verdict)
            table.add_section()
        console.print(table)
        if self.torch:
            highest = ", ".join(f"{name} {rung.max_relative:.1e}" for name, rung in self.torch.items())
            console.print(f"torch {self.dtype} itself differs from torch float64 by: {highest}", highlight=False, soft_wrap=True)
        if self.first:
            console.print(f"first module past {self.tolerance:.0e}: {self.first[0]} ({self.first[1]:.1e})", highlight=False, soft_wrap=True)
        verdict = "passed" if self.passed else f"FAILED: {', '.join(self.failed)}"
        console.print(f"{verdict} (tolerance {self.tolerance:.0e})", highlight=False)
