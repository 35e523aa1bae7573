"""What a run measured, for files: metrics.jsonl, one JSON object a logged step, and TensorBoard events in the same folder."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import jax
import tensorboardX

from jaxpar.train.checkpoint import check_writable

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to `folder`/metrics.jsonl and to TensorBoard. Only process 0 writes; on the others every call does nothing.

    `resumed` is the step training continues from (0: from the start): lines of later steps, which a killed run wrote after its last
    checkpoint, are dropped, so each step is there once. A last line cut short by a kill goes too.
    Raises ValueError naming `log.folder` when it cannot be written.
    """

    def __init__(self, folder: str | Path, resumed: int = 0) -> None:
        self._file: TextIO | None = None
        if jax.process_index() != 0:
            return
        check_writable(folder, "log.folder")
        path = Path(folder) / FILE
        if path.exists():
            _keep(path, resumed)
        self._file = path.open("a", encoding="utf-8")
        self._events = tensorboardX.SummaryWriter(str(folder), purge_step=resumed + 1)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One line {"step", **values}, flushed, and one scalar a value. Numbers or arrays, whose numbers become lists; a number that is
        not finite becomes null. Of the counts of an array [L, E] TensorBoard gets each row's largest over its mean, as `name/row`."""
        if self._file is None:
            return
        numbers = {name: _numbers(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": int(step)} | numbers, allow_nan=False) + "\n")
        self._file.flush()
        for name, number in numbers.items():
            if isinstance(number, list):
                for row, counts in enumerate(values[name]):
                    self._events.add_scalar(f"{name}/{row}", float(counts.max() * counts.size / max(counts.sum(), 1)), int(step))
            elif number is not None:
                self._events.add_scalar(name, number, int(step))
        self._events.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._events.close()
        self._file = None


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of `folder`/metrics.jsonl, in order."""
    return [record for _, record in _lines(Path(folder) / FILE)]


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append((line, record))
    return found


def _keep(path: Path, resumed: int) -> None:
    """The lines up to step `resumed`. A run that starts afresh keeps none, and what was there stays beside it under a number."""
    if resumed == 0 and path.stat().st_size:
        taken = {file.name for file in path.parent.glob("metrics.*.jsonl")}
        path.rename(path.with_name(next(name for n in itertools.count(1) if (name := f"metrics.{n}.jsonl") not in taken)))
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    kept = [line + "\n" for line, record in _lines(path) if record["step"] <= resumed]
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def _numbers(value: Any) -> Any:
    return [_numbers(part) for part in value] if getattr(value, "ndim", 0) else _number(value)


def _number(value: Any) -> int | float | None:
    number = value if isinstance(value, int) else value.item() if hasattr(value, "item") else float(value)
    return number if math.isfinite(number) else None
