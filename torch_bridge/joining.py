"""Operations of several arrays, in the manner of `transforms.py`.

Stack, Unstack            several arrays as one with a new first dim, and back (layers)
Concatenate, Divide       several arrays along a dim, and back (fused projections)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from torch_bridge.transforms import Transform
from torch_bridge.views import Index, Shape, View, Views


@dataclass(frozen=True)
class Stack(Transform):
    """`count` arrays of one shape as one, along a new first dim."""

    count: int

    def apply(self, views: Views) -> Views:
        assert len(views) == self.count and len({view.shape for view in views}) == 1, f"{len(views)} views do not stack to {self.count}"
        return (_StackView(views),)

    @property
    def inverse(self) -> Transform:
        return Unstack(self.count)


@dataclass(frozen=True)
class Unstack(Transform):
    """The `count` entries of the first dim as arrays."""

    count: int

    def apply(self, views: Views) -> Views:
        (view,) = views
        assert view.shape[0] == self.count, f"{view.shape} does not unstack to {self.count}"
        return tuple(_EntryView(view, entry) for entry in range(self.count))

    @property
    def inverse(self) -> Transform:
        return Stack(self.count)


@dataclass(frozen=True, eq=False)
class _StackView:
    entries: Views

    @property
    def shape(self) -> Shape:
        return (len(self.entries), *self.entries[0].shape)

    @property
    def dtype(self) -> np.dtype:
        return self.entries[0].dtype

    def read(self, index: Index, out: np.ndarray) -> None:
        for place, entry in enumerate(range(*index[0])):
            self.entries[entry].read(index[1:], out[place])


@dataclass(frozen=True, eq=False)
class _EntryView:
    base: View
    entry: int

    @property
    def shape(self) -> Shape:
        return self.base.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    def read(self, index: Index, out: np.ndarray) -> None:
        self.base.read(((self.entry, self.entry + 1), *index), out[None])


@dataclass(frozen=True)
class Concatenate(Transform):
    """Arrays whose dim `dim` has `sizes`, behind one another."""

    dim: int
    sizes: Shape

    def apply(self, views: Views) -> Views:
        assert tuple(view.shape[self.dim] for view in views) == self.sizes, f"dims {self.dim} are not {self.sizes}"
        return (_ConcatenateView(views, self.dim),)

    @property
    def inverse(self) -> Transform:
        return Divide(self.dim, self.sizes)


@dataclass(frozen=True)
class Divide(Transform):
    """Dim `dim` cut into pieces of `sizes`."""

    dim: int
    sizes: Shape

    def apply(self, views: Views) -> Views:
        (view,) = views
        assert view.shape[self.dim] == sum(self.sizes), f"{view.shape} dim {self.dim} does not divide into {self.sizes}"
        ends = tuple(itertools.accumulate(self.sizes))
        return tuple(_PieceView(view, self.dim, end - size, end) for size, end in zip(self.sizes, ends))

    @property
    def inverse(self) -> Transform:
        return Concatenate(self.dim, self.sizes)


@dataclass(frozen=True, eq=False)
class _ConcatenateView:
    pieces: Views
    dim: int

    @property
    def shape(self) -> Shape:
        first = self.pieces[0].shape
        return first[: self.dim] + (sum(piece.shape[self.dim] for piece in self.pieces),) + first[self.dim + 1 :]

    @property
    def dtype(self) -> np.dtype:
        return self.pieces[0].dtype

    def read(self, index: Index, out: np.ndarray) -> None:
        (start, stop), begin = index[self.dim], 0
        for piece in self.pieces:
            low, high = max(start, begin), min(stop, begin + piece.shape[self.dim])
            if low < high:
                part = out[(slice(None),) * self.dim + (slice(low - start, high - start),)]
                piece.read(index[: self.dim] + ((low - begin, high - begin),) + index[self.dim + 1 :], part)
            begin += piece.shape[self.dim]


@dataclass(frozen=True, eq=False)
class _PieceView:
    base: View
    dim: int
    begin: int
    end: int

    @property
    def shape(self) -> Shape:
        return self.base.shape[: self.dim] + (self.end - self.begin,) + self.base.shape[self.dim + 1 :]

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    def read(self, index: Index, out: np.ndarray) -> None:
        start, stop = index[self.dim]
        self.base.read(index[: self.dim] + ((start + self.begin, stop + self.begin),) + index[self.dim + 1 :], out)
