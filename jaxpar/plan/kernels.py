"""Kernels that XLA cannot look into: Pallas kernels compiled by Triton, counted by their grid.

    launches      compiled text -> every Triton call: name, grid, how often it runs
    kernel_flops  traced step -> FLOPs of one launch, by the kernel's name

A compiled program says of such a call its name and its grid, not what a program of the grid does; the jaxpr says that.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from jaxpar.plan.hlo import Instruction, Program
from jaxpar.plan.loops import executions

TARGET = "__gpu$xla.gpu.triton"


@dataclass(frozen=True)
class Launch:
    """A kernel of `grid` programs that runs `count` times in a step."""

    name: str
    grid: tuple[int, int, int]
    count: int


def launches(program: Program) -> list[Launch]:
    """Every Triton call of a compiled program, added up by name and grid."""
    totals: dict[tuple[str, tuple[int, int, int]], int] = defaultdict(int)
    for each, count in executions(program, lambda each: float(f'custom_call_target="{TARGET}"' in each.attributes)):
        totals[_name(each), _grid(each)] += count
    return [Launch(name, grid, count) for (name, grid), count in totals.items()]


def _name(call: Instruction) -> str:
    found = re.findall(r'\bname = "([^"]*)"', call.attributes)
    return found[-1] if found else call.name


def _grid(call: Instruction) -> tuple[int, int, int]:
    sizes = dict(re.findall(r"\bgrid_([xyz]) = (\d+)", call.attributes))
    return int(sizes.get("x", 1)), int(sizes.get("y", 1)), int(sizes.get("z", 1))


def kernel_flops(jaxpr: core.ClosedJaxpr) -> dict[str, int]:
    """FLOPs of the matrix products of one launch of each Pallas kernel in a traced program, by name: those of one program of its grid,
    times the grid. Of kernels with the same name the last counts. 0 for one whose products stand in a loop of unknown length."""
    found: dict[str, int] = {}

    def walk(inner: Any) -> None:
        for equation in inner.eqns:
            if equation.primitive.name == "pallas_call":
                grid = math.prod(int(size) for size in equation.params["grid_mapping"].grid)
                name = equation.params.get("name") or getattr(equation.params.get("name_and_src_info"), "name", "")
                found[str(name)] = grid * _flops(equation.params["jaxpr"])
            else:
                for body in bodies(equation.params):
                    walk(body)

    walk(jaxpr.jaxpr)
    return found


def _flops(jaxpr: Any) -> int:
    """2 M N K of every product of one program."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
        elif equation.primitive.name == "scan":
            total += equation.params["length"] * _flops(equation.params["jaxpr"].jaxpr)
        elif equation.primitive.name != "while":
            total += max((_flops(body) for body in bodies(equation.params)), default=0)
    return total


def total_flops(found: list[Launch], flops: Mapping[str, int]) -> int:
    """All launches together; a kernel that the trace does not have counts nothing."""
    return sum(each.count * flops.get(each.name, 0) for each in found)


def bodies(params: Mapping[str, Any]) -> list[Any]:
    """The jaxprs inside an equation, by its parameters."""
    values = [each for value in params.values() for each in (value if isinstance(value, tuple | list) else (value,))]
    return [
        each.jaxpr if isinstance(each, core.ClosedJaxpr) else each for each in values if isinstance(each, core.ClosedJaxpr | core.Jaxpr)
    ]
