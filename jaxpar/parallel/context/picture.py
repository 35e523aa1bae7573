"""Who attends to what and when, read off the schedule that programs run: for pictures, tables and tests.

meetings   for every (query, key) of a row, the step at which they meet
svg        a drawing of them: a square for each pair, coloured by device, numbered by step
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpar.ops.tiles import Masking
from jaxpar.parallel.context.layout import Layout
from jaxpar.parallel.context.schedule import Schedule, Span

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f")


def schedule(layout: Layout, length: int, window: int = 0, causal: bool = True) -> Schedule:
    """The schedule of one document of that length."""
    masking = Masking(scale=1.0, causal=causal, window=window)
    return Schedule(layout=layout, masking=masking, shard=length // layout.ring, ordered=causal, traced=False)


def meetings(of: Schedule) -> np.ndarray:
    """The step at which query i meets key j, -1 where they never do or do not see each other. [S, S] int.

    AssertionError where two meet twice: the softmax would count the key twice.
    """
    ring, length = of.layout.ring, of.layout.ring * of.shard
    found = np.full((length, length), -1)
    for group in range(ring):
        for step in range(of.steps + 1):
            span = next((span for span in of.spans() if span.first <= step <= span.last), Span(0, 0, ""))
            places = of.places(step, group)
            for call in of.first() if step == 0 else of.calls(span, step, group):
                for q_slot, k_slot in call.pairs:
                    valid = of.valid(step, group, q_slot) if step else None
                    if valid is not None and not valid:
                        continue
                    i = np.asarray(of.indices(group * of.slots + int(q_slot)))[:, None]
                    j = np.asarray(of.indices(places[int(k_slot)]))[None, :]
                    masking = of.block(call.kind, step)
                    seen = (j <= i) | (not masking.causal)
                    seen &= (i - j < masking.window) if masking.window else True
                    block = found[i, j]
                    assert not (seen & (block >= 0)).any(), f"group {group} meets the same keys again at step {step}"
                    found[i, j] = np.where(seen, step, block)
    return found


def work(of: Schedule) -> np.ndarray:
    """(query, key) pairs that each group computes and that see each other. [ring] int."""
    met = meetings(of) >= 0
    order = of.layout.order(len(met)).reshape(of.layout.ring, -1)
    return np.array([met[tokens].sum() for tokens in order])


def svg(panels: Sequence[tuple[str, Schedule]], cell: int = 15) -> str:
    """Panels side by side: rows are queries, columns keys, colour the device that holds the query, the number the step."""
    parts, left, height = [], 0, 0
    for title, of in panels:
        met = meetings(of)
        length = len(met)
        device = np.empty(length, int)
        device[of.layout.order(length)] = np.arange(length) // of.shard
        parts.append(f'<text x="{left}" y="14" font-size="13" font-weight="bold">{title}</text>')
        for i, j in np.ndindex(met.shape):
            x, y, seen = left + j * cell, 24 + i * cell, met[i, j] >= 0
            fill = COLOURS[device[i]] if seen else "#f4f4f4"
            parts.append(f'<rect x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill="{fill}"/>')
            if seen:
                parts.append(f'<text x="{x + cell / 2 - 0.5}" y="{y + cell - 4}" text-anchor="middle" fill="white">{met[i, j]}</text>')
        work_of = work(of)
        ratio = work_of.max() / work_of.mean()
        notes = (f"{of.steps} sends; work of devices, max/mean {ratio:.2f}", f"pairs of each: {', '.join(map(str, work_of))}")
        for line, note in enumerate(notes):
            parts.append(f'<text x="{left}" y="{40 + length * cell + 14 * line}" font-size="11">{note}</text>')
        left, height = left + length * cell + 40, max(height, 66 + length * cell)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left}" height="{height}" font-family="sans-serif" font-size="10">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])
