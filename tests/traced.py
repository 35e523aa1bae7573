"""What a program sends as it is written: the collectives of a jaxpr, to compare with those of the compiled program.

XLA may combine, remove or convert collectives; the jaxpr has them one by one, with the dtypes asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from jax.extend import core

from jaxpar.plan.kernels import bodies
from jaxpar.plan.traffic import Collective, ring_bytes

_KINDS = {
    "psum": "all_reduce",
    "psum2": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "permute",
}


def traced_collectives(jaxpr: core.ClosedJaxpr, sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective of a traced program (`jax.make_jaxpr(step)(...)`), scans multiplied by their length.

    `sizes` are the mesh's axis sizes in mesh order; axes of size 1 and what stays within a device are left out. Of a `cond` the branch that
    sends most counts. Raises ValueError for a `while_loop` around a collective: its length is not in the program.
    """
    return _walk(jaxpr.jaxpr, 1, sizes)


def _walk(jaxpr: Any, count: int, sizes: Mapping[str, int]) -> list[Collective]:
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _KINDS:
            found += _record(equation, count, sizes)
        elif name == "scan":
            found += _walk(equation.params["jaxpr"].jaxpr, count * equation.params["length"], sizes)
        elif name == "cond":
            branches = [_walk(branch.jaxpr, count, sizes) for branch in equation.params["branches"]]
            found += max(branches, key=lambda each: sum(collective.bytes for collective in each))
        else:
            inner = [each for body in bodies(equation.params) for each in _walk(body, count, sizes)]
            if name == "while" and inner:
                raise ValueError(f"while_loop around {inner[0].kind} over {inner[0].axes}: its length is unknown, use a scan")
            found += inner
    return found


def _record(equation: Any, count: int, sizes: Mapping[str, int]) -> list[Collective]:
    kind = _KINDS[equation.primitive.name]
    params = equation.params
    names = params.get("axes", params.get("axis_name"))
    names = names if isinstance(names, tuple | list) else (names,)
    axes = tuple(name for name in sizes if name in names and sizes[name] > 1)
    group = 1
    for name in axes:
        group *= sizes[name]
    if params.get("axis_index_groups"):
        group = len(params["axis_index_groups"][0])
    if kind == "permute":
        group = 2 if any(a != b for a, b in params["perm"]) else 1
    if group == 1 or not axes:
        return []
    payloads: dict[str, int] = defaultdict(int)
    avals = [variable.aval for variable in equation.invars]
    if kind == "ragged_all_to_all":  # see `traffic._sent`
        avals = [min(avals[:2], key=lambda aval: aval.size)]
    for aval in avals:
        payloads[aval.dtype.name] += aval.size * aval.dtype.itemsize * count * (group if kind == "all_gather" else 1)
    source = str(equation.source_info.name_stack)
    return [
        Collective(kind, axes, group, count, ring_bytes(kind, group, payload), payload, dtype, False, source)
        for dtype, payload in payloads.items()
    ]
