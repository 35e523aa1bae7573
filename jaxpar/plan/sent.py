"""What a compiled program sends beside what its strategy should: one row for each axis and kind, and what nobody expected.

compare   text, mesh, formulas -> (rows, unexpected)
missing   rows of which the program sends less than the formulas say
sources   where instructions come from, files and lines, from the tables at the head of the text
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
    return rows, _unexpected(groups, wanted, sources(text), _asked(text))


def missing(rows: Iterable[Row]) -> list[Row]:
    """Those rows that fall short of their formula by more than a millionth."""
    return [row for row in rows if row["bytes"] < row["expected_bytes"] * (1 - 1e-6)]


def _unexpected(
    groups: dict[tuple[tuple[str, ...], str], list[Collective]], wanted: dict[Any, float], where: dict[str, str], asked: set[str]
) -> list[Row]:
    """What exceeds `wanted`: of a kind and axes that the formulas do not have all of it, a row for each source. Else what XLA added where
    no program `asked` (as for an optimizer that looks at whole matrices): likewise where that is all of the excess, in one row with every
    source where it is more, as for operations that XLA combined. And where the program asked for too much itself, the excess in one row
    with every source that sends some of it, the largest first, since nothing tells which of them is too much."""
    found = []
    for (axes, kind), group in groups.items():
        total, formula = sum(each.bytes for each in group), wanted.get((axes, kind), 0.0)
        if (excess := total - formula) <= 1e-6 * formula:
            continue
        added = [each for each in group if each.frame not in asked]
        extra = sum(each.bytes for each in added)
        if asked and extra >= excess * (1 - 1e-6):
            group = added
        places: dict[str, list[Collective]] = defaultdict(list)
        for each in group:
            places[f"{where[each.frame]} ({each.source})" if each.frame in where else each.source].append(each)
        ordered = sorted(places.items(), key=lambda item: -sum(each.bytes for each in item[1]))
        alone = sum(each.bytes for each in group) <= excess * (1 + 1e-6)
        if not alone:
            ordered = [(" or ".join(name for name, _ in ordered), group)]
        for source, here in ordered:
            size, count = sum(each.bytes for each in here) if alone else excess, sum(each.count for each in here)
            found.append({"axis": _axis(axes), "kind": kind, "count": count, "bytes": round(size), "source": source})
    return found


WRAPPERS = "jaxpar/parallel/collectives.py"  # every collective is called there, so that says nothing


def sources(text: str) -> dict[str, str]:
    """Number of a stack frame -> "file:line", the innermost outside of the collectives' wrappers; and where that is not a model's file,
    " in file:line" of the innermost of a model that called it."""
    found = {}
    for number, places in _stacks(text).items():
        outside = [place for place in places if place[0] != WRAPPERS] or places
        model = next((place for place in outside if place[0].startswith("jaxpar/models/")), outside[0])
        called = "" if model == outside[0] else f" in {':'.join(model)}"
        found[number] = f"{':'.join(outside[0])}{called}"
    return found


def _asked(text: str) -> set[str]:
    """The stack frames in which a program called for a collective, for it can by the wrappers alone; XLA adds others."""
    return {number for number, places in _stacks(text).items() if any(file == WRAPPERS for file, _ in places)}


def _stacks(text: str) -> dict[str, list[tuple[str, str]]]:
    """Number of a stack frame -> (file, line) of it and of what called it, the innermost first."""
    names = dict(re.findall(r'^(\d+) "([^"]*)"$', _table(text, "FileNames"), re.M))
    locations = {
        number: (_short(names.get(file, "?")), line)
        for number, file, line in re.findall(r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", _table(text, "FileLocations"), re.M)
    }
    frames = {
        int(number): (location, int(parent or 0))
        for number, location, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _table(text, "StackFrames"), re.M
        )
    }
    # XLA counts parents from one, with no parent as one, where frames themselves are numbered from one: then a frame seems its own parent.
    shift = int(any(number == parent for number, (_, parent) in frames.items()))
    found = {}
    for number in frames:
        places: list[tuple[str, str]] = []
        frame = number
        while frame in frames and len(places) < len(frames):
            location, parent = frames[frame]
            places.append(locations.get(location, ("?", "0")))
            frame = parent - shift
        found[str(number)] = places
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
