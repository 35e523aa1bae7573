"""What a compiled program sends beside what its strategy should: one row for each axis and kind, and what nobody expected.

compare   text, mesh, formulas -> (rows, unexpected)
sources   where instructions come from, file and line, from the tables at the head of the text
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from jax.sharding import Mesh

from jaxpar.plan.traffic import Collective, collectives

Row = dict[str, Any]


def _axis(axes: tuple[str, ...]) -> str:
    return "+".join(axes)


def compare(text: str, mesh: Mesh, expected: Iterable[Collective]) -> tuple[list[Row], list[Row]]:
    """Rows {axis, kind, asynchronous, count, bytes, expected_bytes}, bytes sent by one GPU over a ring, and the unexpected ones
    {axis, kind, count, bytes, source}: kinds and axes that the formulas do not have at all, and what exceeds them by more than a
    millionth. `asynchronous` is true where most of the bytes are."""
    found = collectives(text, mesh)
    wanted: dict[tuple[tuple[str, ...], str], float] = defaultdict(float)
    for each in expected:
        wanted[each.axes, each.kind] += each.bytes
    groups: dict[tuple[tuple[str, ...], str], list[Collective]] = defaultdict(list)
    for each in found:
        groups[each.axes, each.kind].append(each)
    rows = []
    for axes, kind in sorted({*groups, *wanted}):
        group = groups[axes, kind]
        total, apart = sum(each.bytes for each in group), sum(each.bytes for each in group if each.asynchronous)
        rows.append(
            {
                "axis": _axis(axes),
                "kind": kind,
                "asynchronous": apart > total / 2,
                "count": sum(each.count for each in group),
                "bytes": round(total),
                "expected_bytes": round(wanted[axes, kind]),
            }
        )
    return rows, _unexpected(groups, wanted, sources(text))


def _unexpected(groups: dict[tuple[tuple[str, ...], str], list[Collective]], wanted: dict[Any, float], where: dict[str, str]) -> list[Row]:
    """What exceeds `wanted`: all of a kind and axes that the formulas do not have, added up by source; else the excess, at the source that
    sends most."""
    found = []
    for (axes, kind), group in groups.items():
        total, formula = sum(each.bytes for each in group), wanted.get((axes, kind), 0.0)
        if total <= formula * (1 + 1e-6):
            continue
        places: dict[str, list[Collective]] = defaultdict(list)
        for each in group:
            places[where.get(each.source, each.source)].append(each)
        ordered = sorted(places.items(), key=lambda item: -sum(each.bytes for each in item[1]))
        for source, here in ordered[: 1 if formula else None]:
            size = total - formula if formula else sum(each.bytes for each in here)
            count = sum(each.count for each in here)
            found.append({"axis": _axis(axes), "kind": kind, "count": count, "bytes": round(size), "source": source})
    return found


def sources(text: str) -> dict[str, str]:
    """JAX's name of an operation -> "file:line (name)", for every name that the text gives a stack frame."""
    names = dict(re.findall(r'^(\d+) "([^"]*)"$', _table(text, "FileNames"), re.M))
    locations = {
        number: (names.get(file, "?"), line)
        for number, file, line in re.findall(r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", _table(text, "FileLocations"), re.M)
    }
    frames = dict(re.findall(r"^(\d+) \{file_location_id=(\d+)", _table(text, "StackFrames"), re.M))
    found = {}
    for name, frame in re.findall(r'op_name="([^"]+)"[^\n]*?stack_frame_id=(\d+)', text):
        if frame in frames and frames[frame] in locations:
            file, line = locations[frames[frame]]
            found[name] = f"{_short(file)}:{line} ({name})"
    return found


def _table(text: str, name: str) -> str:
    found = re.search(rf"^{name}\n(.*?)\n\n", text, re.M | re.S)
    return found.group(1) if found else ""


def _short(path: str) -> str:
    """From the package on."""
    for start in ("site-packages/", "jaxpar/"):
        if start in path:
            path = path[path.rindex(start) :].removeprefix("site-packages/")
    return path
