"""Views and global jax.Arrays.

ShardedView     a jax.Array (or a numpy array) as a view
global_array    a view -> a jax.Array on a sharding
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from torch_bridge.views import Index, Shape, View, box_shape, slices

ALIGNMENT = 64  # from which on a CPU device takes host memory as it is


def aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Memory that a CPU device needs not copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _index(place: tuple[slice, ...], shape: Shape) -> Index:
    return tuple(part.indices(size)[:2] for part, size in zip(place, shape))


def global_array(view: View, sharding: NamedSharding) -> jax.Array:
    """The view as an array on `sharding`. Devices of this process that hold the same part share one read of it."""
    places: dict[Index, list[Any]] = {}
    for device, place in sharding.addressable_devices_indices_map(view.shape).items():
        assert place is not None
        places.setdefault(_index(place, view.shape), []).append(device)
    arrays = []
    for index, devices in places.items():
        part = aligned(box_shape(index), view.dtype)
        if part.size:
            view.read(index, part)
        arrays += [jax.device_put(part, device) for device in devices]
        if any(device.platform != "cpu" for device in devices):
            jax.block_until_ready(arrays[-len(devices) :])  # so that one part at a time waits in host memory
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
