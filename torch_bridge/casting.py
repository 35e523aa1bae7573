"""Another dtype, in the manner of `transforms.py`.

Cast    its inverse casts back, exact only where the first was
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from torch_bridge.transforms import Transform
from torch_bridge.views import Index, Shape, View, Views, box_shape

CHUNK_BYTES = 2**21  # what a cast holds beside its output: little enough to stay in a cache


@dataclass(frozen=True)
class Cast(Transform):
    """Another dtype, by numpy's rounding to nearest even. A cast to the dtype that is there already is no operation.

    ValueError from a read for a finite number beyond the range of the new dtype: an infinite weight is never made."""

    before: str
    after: str

    def apply(self, views: Views) -> Views:
        return tuple(_CastView(view, np.dtype(self.after)) if view.dtype != np.dtype(self.after) else view for view in views)

    @property
    def inverse(self) -> Transform:
        return Cast(self.after, self.before)


@dataclass(frozen=True, eq=False)
class _CastView:
    base: View
    dtype: np.dtype

    @property
    def shape(self) -> Shape:
        return self.base.shape

    def read(self, index: Index, out: np.ndarray) -> None:
        size = math.prod(box_shape(index)) * self.base.dtype.itemsize
        dim = next((place for place, (start, stop) in enumerate(index) if stop - start > 1), None)
        if size > CHUNK_BYTES and dim is not None:
            start, stop = index[dim]
            step = max(1, (stop - start) * CHUNK_BYTES // size)
            for low in range(start, stop, step):
                high = min(stop, low + step)
                part = out[(slice(None),) * dim + (slice(low - start, high - start),)]
                self.read(index[:dim] + ((low, high),) + index[dim + 1 :], part)
            return
        held = np.empty(box_shape(index), self.base.dtype)
        self.base.read(index, held)
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(out, held, casting="unsafe")
        if _reach(self.dtype) < _reach(held.dtype):
            lost = np.isinf(out) & np.isfinite(held)
            if lost.any():
                raise ValueError(f"dtype: {self.dtype} cannot hold the weight {held[lost][0]}; choose bfloat16 or float32")


def _reach(dtype: np.dtype) -> int:
    """The exponent of the largest number of a floating point dtype; 0 for others, which are of tests alone."""
    floating = dtype.kind == "f" or dtype == ml_dtypes.bfloat16
    return int(ml_dtypes.finfo(dtype).maxexp) if floating else 0
