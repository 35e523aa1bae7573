"""Operations that only move elements, each with its inverse, each able to pull a slice of its output from slices of its input.

A `Transform` makes views (`views.py`) of views; nothing moves until somebody reads, and then just the bytes that the box needs.

    Transform                 what all operations share: `apply`, `inverse`
    Chain, Each               one after the other; the same for every view
    Split, Merge              one dim as several, and back (heads)
    Transpose                 dims in another order
    Permute                   entries of a dim in another order (rope layouts)
    Pad, Crop                 rows of zeros at the end of a dim, and without them (vocabulary)

Those of several arrays (layers, fused projections) are in `joining.py`, casts in `casting.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from torch_bridge.views import Index, Shape, View, Views, box_shape, boxes


class Transform:
    """Views in, views out. Subclasses are frozen dataclasses, so that rules compare and print."""

    def apply(self, views: Views) -> Views:
        """The outputs, unread. AssertionError for shapes that do not fit: those are checked before, against headers."""
        raise NotImplementedError

    @property
    def inverse(self) -> Transform:
        """What undoes it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Chain(Transform):
    """One after the other."""

    steps: tuple[Transform, ...]

    def apply(self, views: Views) -> Views:
        for step in self.steps:
            views = step.apply(views)
        return views

    @property
    def inverse(self) -> Transform:
        return Chain(tuple(step.inverse for step in reversed(self.steps)))


@dataclass(frozen=True)
class Each(Transform):
    """The same for every view: all layers alike."""

    step: Transform

    def apply(self, views: Views) -> Views:
        return tuple(output for view in views for output in self.step.apply((view,)))

    @property
    def inverse(self) -> Transform:
        return Each(self.step.inverse)


def _only(views: Views) -> View:
    (view,) = views
    return view


def _read_reshaped(view: View, index: Index, out: np.ndarray) -> None:
    """Read a box into `out`, which has its elements in the same order under another shape."""
    shape = box_shape(index)
    try:
        view.read(index, out.reshape(shape, copy=False))
    except ValueError:  # no view of that shape exists
        held = np.empty(shape, view.dtype)
        view.read(index, held)
        out[...] = held.reshape(out.shape)


@dataclass(frozen=True)
class Split(Transform):
    """Dim `dim`, of prod(sizes), as `sizes`."""

    dim: int
    sizes: Shape

    def apply(self, views: Views) -> Views:
        view = _only(views)
        assert view.shape[self.dim] == math.prod(self.sizes), f"{view.shape} dim {self.dim} is no {self.sizes}"
        return (_SplitView(view, self.dim, self.sizes),)

    @property
    def inverse(self) -> Transform:
        return Merge(self.dim, self.sizes)


@dataclass(frozen=True)
class Merge(Transform):
    """The dims from `dim` on, of `sizes`, as one."""

    dim: int
    sizes: Shape

    def apply(self, views: Views) -> Views:
        view = _only(views)
        assert view.shape[self.dim : self.dim + len(self.sizes)] == self.sizes, f"{view.shape} has no {self.sizes} at {self.dim}"
        return (_MergeView(view, self.dim, self.sizes),)

    @property
    def inverse(self) -> Transform:
        return Split(self.dim, self.sizes)


@dataclass(frozen=True, eq=False)
class _SplitView:
    base: View
    dim: int
    sizes: Shape

    @property
    def shape(self) -> Shape:
        return self.base.shape[: self.dim] + self.sizes + self.base.shape[self.dim + 1 :]

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    def read(self, index: Index, out: np.ndarray) -> None:
        dim, end = self.dim, self.dim + len(self.sizes)
        ranges = index[dim:end]
        varying = next((place for place, (start, stop) in enumerate(ranges) if stop - start > 1), len(ranges) - 1)
        if any(span != (0, size) for span, size in zip(ranges[varying + 1 :], self.sizes[varying + 1 :])):
            # Not one run of the merged dim: one entry of the outermost varying dim at a time.
            first, last = ranges[varying]
            for entry in range(first, last):
                box = index[: dim + varying] + ((entry, entry + 1),) + index[dim + varying + 1 :]
                self.read(box, out[(slice(None),) * (dim + varying) + (slice(entry - first, entry - first + 1),)])
            return
        start = sum(span[0] * math.prod(self.sizes[place + 1 :]) for place, span in enumerate(ranges))
        run = (start, start + math.prod(box_shape(ranges)))
        _read_reshaped(self.base, index[:dim] + (run,) + index[end:], out)


@dataclass(frozen=True, eq=False)
class _MergeView:
    base: View
    dim: int
    sizes: Shape

    @property
    def shape(self) -> Shape:
        return self.base.shape[: self.dim] + (math.prod(self.sizes),) + self.base.shape[self.dim + len(self.sizes) :]

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    def read(self, index: Index, out: np.ndarray) -> None:
        dim, done = self.dim, 0
        for box in boxes(*index[dim], self.sizes):
            count = math.prod(box_shape(box))
            part = out[(slice(None),) * dim + (slice(done, done + count),)]
            _read_reshaped(self.base, index[:dim] + box + index[dim + 1 :], part)
            done += count


@dataclass(frozen=True)
class Transpose(Transform):
    """Output dim i is input dim `order[i]`, as `numpy.transpose`."""

    order: tuple[int, ...]

    def apply(self, views: Views) -> Views:
        return (_TransposeView(_only(views), self.order),)

    @property
    def inverse(self) -> Transform:
        return Transpose(tuple(int(dim) for dim in np.argsort(self.order)))


@dataclass(frozen=True, eq=False)
class _TransposeView:
    base: View
    order: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return tuple(self.base.shape[dim] for dim in self.order)

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    def read(self, index: Index, out: np.ndarray) -> None:
        back = np.argsort(self.order)
        self.base.read(tuple(index[dim] for dim in back), out.transpose(back))


@dataclass(frozen=True)
class Permute(Transform):
    """Entry i of dim `dim` of the output is entry `order[i]` of the input."""

    dim: int
    order: tuple[int, ...]

    def apply(self, views: Views) -> Views:
        view = _only(views)
        assert sorted(self.order) == list(range(view.shape[self.dim])), f"{self.order} is no order of {view.shape} dim {self.dim}"
        return (_PermuteView(view, self.dim, self.order),)

    @property
    def inverse(self) -> Transform:
        return Permute(self.dim, tuple(int(entry) for entry in np.argsort(self.order)))


@dataclass(frozen=True, eq=False)
class _PermuteView:
    base: View
    dim: int
    order: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    def read(self, index: Index, out: np.ndarray) -> None:
        first, last = index[self.dim]
        for place in range(first, last):
            entry = self.order[place]
            part = out[(slice(None),) * self.dim + (slice(place - first, place - first + 1),)]
            self.base.read(index[: self.dim] + ((entry, entry + 1),) + index[self.dim + 1 :], part)


@dataclass(frozen=True)
class Pad(Transform):
    """Zeros behind the `real` entries of dim `dim`, up to `padded`."""

    dim: int
    real: int
    padded: int

    def apply(self, views: Views) -> Views:
        view = _only(views)
        assert view.shape[self.dim] == self.real <= self.padded, f"{view.shape} dim {self.dim} is not {self.real}"
        return (_ResizedView(view, self.dim, self.padded),)

    @property
    def inverse(self) -> Transform:
        return Crop(self.dim, self.real, self.padded)


@dataclass(frozen=True)
class Crop(Transform):
    """The first `real` of the `padded` entries of dim `dim`."""

    dim: int
    real: int
    padded: int

    def apply(self, views: Views) -> Views:
        view = _only(views)
        assert view.shape[self.dim] == self.padded >= self.real, f"{view.shape} dim {self.dim} is not {self.padded}"
        return (_ResizedView(view, self.dim, self.real),)

    @property
    def inverse(self) -> Transform:
        return Pad(self.dim, self.real, self.padded)


@dataclass(frozen=True, eq=False)
class _ResizedView:
    base: View
    dim: int
    size: int

    @property
    def shape(self) -> Shape:
        return self.base.shape[: self.dim] + (self.size,) + self.base.shape[self.dim + 1 :]

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    def read(self, index: Index, out: np.ndarray) -> None:
        start, stop = index[self.dim]
        end = max(min(stop, self.base.shape[self.dim]), start)
        lead = (slice(None),) * self.dim
        if end > start:
            self.base.read(index[: self.dim] + ((start, end),) + index[self.dim + 1 :], out[(*lead, slice(0, end - start))])
        out[(*lead, slice(end - start, None))] = 0
