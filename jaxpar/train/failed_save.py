"""A save that fails is one line, whatever its other writers do afterwards.

FailedSave    a context: what the storage library raises in it becomes one OSError
one_line      an exception's message
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a folder that Orbax writes in
WRITERS_SECONDS = 10.0  # that a failed save waits for its other writers


def _not_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """False for an exception that nobody was left to take: it passed through Orbax's code, or names a file that Orbax was writing (that of
    a storage future has no frames)."""
    trace = record.exc_info[2] if record.exc_info else None
    through = any(f"{os.sep}orbax{os.sep}" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    return not through and UNFINISHED not in record.getMessage()


# A failed write is raised to whoever saved; Orbax logs it too, from each of its threads, with as many tracebacks, and so does
# asyncio for each of the other writes that fail after the first.
logging.getLogger("absl").addFilter(_not_orbax)
logging.getLogger("asyncio").addFilter(_not_from_orbax)


class FailedSave:
    """Turns what a failed write raises (the storage library uses several types) into one OSError naming the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        _pass_over_late_writers()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, (AssertionError, TypeError)):
            _join_writers()
            raise OSError(
                f"checkpoint.folder: saving in {self.folder} failed, complete steps are untouched: "
                f"free space or choose another folder ({one_line(error)})"
            ) from error


def _join_writers() -> None:
    """Let the threads of a failed save end, so that whoever removes its folder does not see it made again."""
    deadline = time.monotonic() + WRITERS_SECONDS
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax.") and thread is not threading.current_thread():
            threading.Thread.join(thread, max(0.0, deadline - time.monotonic()))


def _pass_over_late_writers() -> None:
    """Keep sys.unraisablehook from printing what threads of a failed save report to its event loop, which is closed by then."""
    before = sys.unraisablehook
    if getattr(before, "passes_over_late_writers", False):
        return

    def hook(failure: sys.UnraisableHookArgs) -> None:
        if failure.exc_type is not RuntimeError or "Event loop is closed" not in str(failure.exc_value):
            before(failure)

    hook.passes_over_late_writers = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
