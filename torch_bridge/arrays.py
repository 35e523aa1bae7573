"""Views and global jax.Arrays.

ShardedView     a jax.Array (or a numpy array) as a view
global_array    a view -> a jax.Array on a sharding
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from torch_bridge.views import Index, Shape, View, box_shape, slices

ALIGNMENT = 64  # from which on a CPU device takes host memory as it is
PIECE = 2**22  # bytes that one thread reads at a time
MOST_READERS = 4  # each may hold a window of a file and what a cast needs beside its output


def aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Memory that a CPU device needs not copy."""
    return aligned_parts((shape,), dtype)[0]


def aligned_parts(shapes: Sequence[Shape], dtype: np.dtype) -> list[np.ndarray]:
    """Arrays that a CPU device needs not copy, in one block of memory, which lives as long as any of them: the kernel gives it in huge
    pages but for its two ends, and what an import takes is largely the first touch of its pages."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    block = np.empty(sum(steps) + ALIGNMENT, np.uint8)
    starts = itertools.accumulate(steps, initial=-block.ctypes.data % ALIGNMENT)
    return [block[start : start + size].view(dtype).reshape(shape) for start, size, shape in zip(starts, sizes, shapes)]


def _index(place: tuple[slice, ...], shape: Shape) -> Index:
    return tuple(part.indices(size)[:2] for part, size in zip(place, shape))


def _pieces(index: Index, itemsize: int) -> Iterator[Index]:
    """The boxes of at most about `PIECE` bytes that make up a box, cut along its first dims."""
    shape = box_shape(index)
    size = math.prod(shape) * itemsize
    dim = next((place for place, length in enumerate(shape) if length > 1), None)
    if size <= PIECE or dim is None:
        yield index
        return
    start, stop = index[dim]
    step = max(1, shape[dim] * PIECE // size)
    for low in range(start, stop, step):
        yield from _pieces(index[:dim] + ((low, min(stop, low + step)),) + index[dim + 1 :], itemsize)


def _read(readers: ThreadPoolExecutor, view: View, boxes: Iterable[tuple[Index, np.ndarray]]) -> None:
    """`view.read` of each box by several threads: reading and copying both leave Python's lock."""

    def read(piece: Index, out: np.ndarray, index: Index) -> None:
        view.read(piece, out[slices(tuple((low - start, high - start) for (low, high), (start, _) in zip(piece, index)))])

    jobs = [readers.submit(read, piece, out, index) for index, out in boxes if out.size for piece in _pieces(index, view.dtype.itemsize)]
    try:
        for job in jobs:
            job.result()
    except BaseException:
        readers.shutdown(cancel_futures=True)
        raise


def global_array(view: View, sharding: NamedSharding) -> jax.Array:
    """The view as an array on `sharding`. Devices of this process that hold the same part share one read of it."""
    places: dict[Index, list[Any]] = {}
    for device, place in sharding.addressable_devices_indices_map(view.shape).items():
        assert place is not None
        places.setdefault(_index(place, view.shape), []).append(device)
    hosted = all(device.platform == "cpu" for devices in places.values() for device in devices)
    shapes = [box_shape(index) for index in places]
    arrays = []
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_READERS)) as readers:
        if hosted:
            parts = aligned_parts(shapes, view.dtype)
            _read(readers, view, zip(places, parts))
            arrays = [jax.device_put(part, device) for part, devices in zip(parts, places.values()) for device in devices]
        else:
            for shape, (index, devices) in zip(shapes, places.items()):
                part = aligned(shape, view.dtype)
                _read(readers, view, [(index, part)])
                arrays += jax.block_until_ready([jax.device_put(part, device) for device in devices])  # one part at a time on the host
    return jax.make_array_from_single_device_arrays(view.shape, sharding, arrays)


@dataclass(frozen=True, eq=False)
class ShardedView:
    """A jax.Array or numpy array as a view: boxes are copied from the shards that they touch, none is gathered.

    Off the CPU a shard is copied to host memory at its first use and kept.
    """

    name: str
    array: Any
    _shards: list[tuple[Index, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.array, jax.Array):
            self._shards.append((tuple((0, size) for size in self.array.shape), self.array))
            return
        if not self.array.is_fully_addressable:
            raise ValueError(
                f"{self.name}: parts of it are on another process's devices; restore the checkpoint in one process to export it"
            )
        found: dict[Index, Any] = {}
        for shard in self.array.addressable_shards:
            found.setdefault(_index(shard.index, self.array.shape), shard)
        self._shards.extend(found.items())

    @property
    def shape(self) -> Shape:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    def read(self, index: Index, out: np.ndarray) -> None:
        for place, (box, shard) in enumerate(self._shards):
            low = [max(a[0], b[0]) for a, b in zip(index, box)]
            high = [min(a[1], b[1]) for a, b in zip(index, box)]
            if all(a < b for a, b in zip(low, high)):
                if not isinstance(shard, np.ndarray):
                    shard = np.asarray(shard.data)
                    self._shards[place] = (box, shard)
                source = tuple((a - b[0], c - b[0]) for a, b, c in zip(low, box, high))
                target = tuple((a - b[0], c - b[0]) for a, b, c in zip(low, index, high))
                out[slices(target)] = shard[slices(source)]
