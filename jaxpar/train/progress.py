"""What a run shows while it goes: a live bar on a terminal, plain lines anywhere else. Process 0 only.

Progress           steps, loss, rate and time left
describe_experts   what to say of a mixture of experts beside them
"""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """Steps, loss, tokens/s and time left of a run of `total` steps that starts after step `first`.

    Call `compiled` once the first step is done and `update` once a logged step. Time left follows from the rate since `compiled`: the
    first step takes as long as its compilation.
    """

    def __init__(self, total: int, first: int = 0, console: Console | None = None) -> None:
        self.total, self.first = total, first
        self._started, self._counted = time.monotonic(), first
        self._console = console or Console()
        self._bar: Bar | None = None
        self._quiet = jax.process_index() != 0
        if not self._quiet and self._console.is_terminal:
            columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.fields[shown]}"))
            self._bar = Bar(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=total, completed=first, shown="compiling")
            self._bar.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def compiled(self, step: int) -> None:
        """Step `step`, the first, is done; time counts from here."""
        self._started, self._counted = time.monotonic(), step

    def update(self, step: int, loss: float, tokens_per_second: float, beside: str = "") -> None:
        """Show that `step` steps of the run are done, with `beside` next to the loss. The first step has no rate (NaN): it was spent
        compiling."""
        if self._quiet:
            return
        left = remaining(self.total - step, step - self._counted, time.monotonic() - self._started)
        rate = f"{float(tokens_per_second):,.0f} tokens/s  " if math.isfinite(tokens_per_second) else ""
        shown = f"loss {float(loss):.4f}  {beside}{'  ' if beside else ''}{rate}{left} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, shown=shown)
        else:
            print(f"step {step}/{self.total}  {shown}", file=self._console.file, flush=True)

    def note(self, message: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        else:
            print(message, file=self._console.file, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        sys.stdout.flush()


def describe_experts(metrics: dict[str, Any]) -> str:
    """How evenly tokens went to experts, and what was dropped or had to be repeated; nothing for a dense model."""
    if "expert_load_max" not in metrics:
        return ""
    parts = [f"busiest expert {metrics['expert_load_max']:.2f}× the mean"]
    if metrics["expert_dropped"]:
        parts.append(f"{metrics['expert_dropped_share']:.1%} dropped")
    if metrics["expert_overflow"]:
        parts.append("repeated with room for all")
    return ", ".join(parts)


def remaining(steps: int, done: int, seconds: float) -> str:
    """Hours:minutes:seconds that `steps` more take when `done` took `seconds`; "?" before the first is done."""
    if done <= 0:
        return "?"
    left = math.ceil(steps * seconds / done)
    return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
