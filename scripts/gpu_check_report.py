"""The report of `gpu_check.py`, printed in time whatever is under way: a compiler cannot be interrupted, but its process can end."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from jaxpar import gpu
from jaxpar.config import Config


class Report:
    """What was found so far, in `found`. Printed once, and written to `file`: by `write`, or after `seconds` by a thread that says what was
    under way (`now`) and ends the process. While XLA compiles or waits for a GPU, Python's other threads run."""

    def __init__(self, file: str | None, seconds: float):
        self.found: dict[str, Any] = {"kernels": [], "steps": []}
        self.now = "torch"
        self.file, self.begun, self.until = file, time.monotonic(), time.monotonic() + seconds
        self._once = threading.Lock()
        self._watch = threading.Timer(seconds, self._stop)
        self._watch.daemon = True
        self._watch.start()

    def left(self) -> float:
        return self.until - time.monotonic()

    def forget(self) -> None:
        """Print nothing."""
        if not self._once.acquire(blocking=False):
            threading.Event().wait()  # the watch is about to end the process
        self._watch.cancel()

    def write(self) -> int:
        """The exit code."""
        self.forget()
        self._print()
        return 0 if self._ok() else 1

    def _stop(self) -> None:
        if self._once.acquire(blocking=False):
            self.found["stopped"] = f"after {time.monotonic() - self.begun:.0f} s, with {self.now} not done"
            try:
                self._print()
            finally:
                os._exit(0 if self._ok() else 1)

    def _print(self) -> None:
        found = self.found | {"flags": gpu.compiler_options(Config().gpu), "seconds": time.monotonic() - self.begun}
        text = json.dumps(found | {"ok": self._ok()}, indent=1)
        print(text, flush=True)
        if self.file:
            Path(self.file).write_text(text + "\n")

    def _ok(self) -> bool:
        return bool(self.found["kernels"]) and all(each["ok"] for each in self.found["kernels"])
