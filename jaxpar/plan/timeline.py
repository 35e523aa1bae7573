"""A simulated step to look at: a Chrome trace (chrome://tracing, ui.perfetto.dev) and a picture of one layer.

    chrome_trace   events -> the JSON of a trace
    layer          the events of one turn of the loop over layers
    picture        events -> a PNG: one row a stream, time to the right

The PNG is written here, byte by byte, so that nothing needs to be installed for it; names are in the trace.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

from jaxpar.plan.walk import COMPUTE, Event

COLOURS = {
    "matmul": (66, 114, 196),
    "attention": (112, 72, 160),
    "memory": (140, 160, 180),
    "wait": (214, 60, 52),
    "repeat": (235, 235, 235),
    "copy": (120, 120, 60),
}
COLLECTIVE = (80, 160, 90)
WHITE = (255, 255, 255)
WIDTH, ROW, GAP = 1600, 48, 16


def streams(events: Sequence[Event]) -> list[str]:
    """Compute first, then links in order of first use."""
    return list(dict.fromkeys([COMPUTE, *(event.stream for event in events)]))


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """{"traceEvents": [...]}, times in microseconds, one thread a stream."""
    rows = {stream: place for place, stream in enumerate(streams(events))}
    names = [{"ph": "M", "pid": 0, "tid": place, "name": "thread_name", "args": {"name": stream}} for stream, place in rows.items()]
    spans = [
        {
            "ph": "X",
            "pid": 0,
            "tid": rows[event.stream],
            "name": event.name,
            "cat": event.kind,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {"kind": event.kind, "axes": "+".join(event.axes), "source": event.source},
        }
        for event in events
    ]
    return {"traceEvents": [*names, *spans], "displayTimeUnit": "ms"}


def layer(events: Sequence[Event]) -> list[Event]:
    """The last walked iteration of the loop over layers that takes longest, the backward: the innermost loop that sends something, for
    inside a layer there are loops too, over experts' rows or attention's tiles. Where none does, the innermost of all; all events where no
    loop was repeated."""
    repeats = [event for event in events if event.kind == "repeat"]

    def begin(repeat: Event) -> float:
        """When the iteration before the repeated ones began."""
        return repeat.start - (repeat.end - repeat.start) / int(repeat.name.split()[0])

    def last(repeat: Event) -> list[Event]:
        """The events of that iteration."""
        return [event for event in events if event.kind != "repeat" and event.end > begin(repeat) and event.start < repeat.start]

    sending = [each for each in repeats if any(event.stream != COMPUTE for event in last(each))] or repeats
    innermost = [each for each in sending if not any(begin(each) <= other.start < each.start for other in sending if other is not each)]
    return last(max(innermost, key=lambda event: event.end - event.start)) if innermost else list(events)


def picture(events: Sequence[Event]) -> bytes:
    """A PNG of `events`, one row a stream: matmuls blue, attention violet, memory-bound kernels grey, collectives green, waiting red."""
    rows = streams(events)
    begin, end = min(event.start for event in events), max(event.end for event in events)
    height = GAP + len(rows) * (ROW + GAP)
    pixels = [bytearray(bytes(WHITE) * WIDTH) for _ in range(height)]
    for event in events:
        left, right = (round((t - begin) / (end - begin) * (WIDTH - 1)) for t in (event.start, event.end))
        top = GAP + rows.index(event.stream) * (ROW + GAP)
        width = max(right - left, 1)
        colour = COLOURS.get(event.kind, COLLECTIVE)
        for line in pixels[top : top + ROW]:
            line[3 * left : 3 * (left + width)] = bytes(colour) * width
            line[3 * left : 3 * left + 3] = bytes(WHITE) if width > 3 else bytes(colour)
    return _png(pixels)


def _png(pixels: Sequence[bytearray]) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(pixels[0]) // 3, len(pixels), 8, 2, 0, 0, 0)
    raw = b"".join(b"\0" + bytes(line) for line in pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
