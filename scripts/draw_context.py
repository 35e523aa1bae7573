"""Draws docs/context.svg: who attends to what and when under each layout of context parallelism, from the schedule that programs run.

Run: PYTHONPATH=. python scripts/draw_context.py
"""

from pathlib import Path

from jaxpar.parallel.context.layout import Layout
from jaxpar.parallel.context.picture import schedule, svg

TOKENS, DEVICES = 16, 4
PANELS = [(f"{name}, causal", schedule(Layout(name, DEVICES), TOKENS)) for name in ("contiguous", "zigzag", "striped")]
PANELS += [(f"{name}, window 4", schedule(Layout(name, DEVICES), TOKENS, window=4)) for name in ("contiguous", "zigzag")]
TARGET = Path(__file__).parent.parent / "docs" / "context.svg"

if __name__ == "__main__":
    TARGET.write_text(svg(PANELS))
    print(TARGET)
