"""Two sets of torch tensors, tensor by tensor.

Difference    of one tensor: the largest absolute and relative difference
compare       views by key, twice -> differences, and what only one side has
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from torch_bridge.views import Index, View, box_shape, whole

CHUNK = 2**22  # elements compared at a time


@dataclass(frozen=True)
class Difference:
    """`absolute` is max |a - b|, `relative` that over max |b|, both infinite where just one side is not finite; `note` says why two
    tensors cannot be compared."""

    key: str
    absolute: float
    relative: float
    note: str = ""

    @property
    def equal(self) -> bool:
        return self.absolute == 0 and not self.note


def compare(first: Mapping[str, View], second: Mapping[str, View]) -> Iterator[Difference]:
    """Every key of either side, in the order of the first. NaNs in the same places are equal; dtypes may differ."""
    for key in [*first, *(key for key in second if key not in first)]:
        if key not in first or key not in second:
            yield Difference(key, math.inf, math.inf, f"only in {'A' if key in first else 'B'}")
        elif first[key].shape != second[key].shape:
            yield Difference(key, math.inf, math.inf, f"{list(first[key].shape)} and {list(second[key].shape)}")
        else:
            yield _difference(key, first[key], second[key])


def _difference(key: str, first: View, second: View) -> Difference:
    absolute = largest = 0.0
    for box in _boxes(first.shape):
        a, b = (np.empty(box_shape(box), view.dtype) for view in (first, second))
        first.read(box, a)
        second.read(box, b)
        a, b = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(a) & np.isfinite(b)
        same = finite | (a == b) | (np.isnan(a) & np.isnan(b))
        if not same.all():
            absolute = math.inf
        absolute = max(absolute, float(np.max(np.abs(a - b), where=finite, initial=0.0)))
        largest = max(largest, float(np.max(np.abs(b), where=np.isfinite(b), initial=0.0)))
    if absolute == 0:
        return Difference(key, 0.0, 0.0)
    return Difference(key, absolute, absolute / largest if largest else math.inf)


def _boxes(shape: tuple[int, ...]) -> Iterator[Index]:
    if not shape or not math.prod(shape):
        if math.prod(shape):
            yield ()
        return
    step = max(1, CHUNK // math.prod(shape[1:]))
    for start in range(0, shape[0], step):
        yield ((start, min(shape[0], start + step)), *whole(shape[1:]))
