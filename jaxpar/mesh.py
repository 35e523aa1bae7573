"""The five named mesh axes, and which device goes where. The axis names are written here and nowhere else.

PIPE, DATA, EXPERT, SEQ, TENSOR   axis names; AXES in the order of the mesh, slowest links first
BATCH, REPLICA                    axes that split the batch; axes over which a dense parameter is replicated before ZeRO
order_devices                     devices as an array over AXES, neighbours on the fastest links innermost
make_mesh                         MeshShape -> jax.sharding.Mesh
stage_mesh                        one pipeline stage of a mesh, as a mesh of its own
hosts_of_processes                which processes share a machine
explain                           which axes stay inside a host
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import platform
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from jaxpar.config import MeshShape

PIPE = "pipe"
DATA = "data"
EXPERT = "expert"
SEQ = "seq"
TENSOR = "tensor"

AXES = (PIPE, DATA, EXPERT, SEQ, TENSOR)
BATCH = (DATA, EXPERT)
REPLICA = (DATA, EXPERT, SEQ)


@functools.cache
def hosts_of_processes() -> dict[int, int]:
    """The host of every process, as the first process on it; empty where there is one process. A collective of all processes, once.

    Processes on one machine, such as those of a launch with a process a GPU, share its boot id, in containers too; elsewhere the name.
    """
    if jax.process_count() == 1:
        return {}
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.is_file() else platform.node()
    mine = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], np.uint32)
    everyone = np.asarray(multihost_utils.process_allgather(mine)).reshape(jax.process_count(), -1).tolist()
    return {process: everyone.index(host) for process, host in enumerate(everyone)}


def host_of(device: Any) -> tuple[int, int]:
    """(slice, host): devices with the same pair share a host and its fast links. A platform without slices has only slice 0."""
    return getattr(device, "slice_index", None) or 0, hosts_of_processes().get(device.process_index, device.process_index)


def order_devices(devices: Iterable[Any], shape: MeshShape) -> np.ndarray:
    """Place devices so that the innermost axes lie on the fastest links.

    Devices are sorted by (slice, host, id) and every host first gives as many whole tensor groups as it holds; what is left over on the
    hosts is joined, in that order, into groups that span hosts. Only then a warning names the sizes.

    Returns an object array over AXES: [pipe, data, expert, seq, tensor].
    Raises ValueError when the sizes do not multiply to the number of devices.
    """
    ordered = sorted(devices, key=lambda device: (*host_of(device), device.id))
    if len(ordered) != shape.devices:
        sizes = " × ".join(f"{axis} {getattr(shape, axis)}" for axis in AXES)
        raise ValueError(
            f"mesh: {sizes} = {shape.devices} devices, but there are {len(ordered)}; make the sizes multiply to {len(ordered)}"
        )
    hosts = [list(group) for _, group in itertools.groupby(ordered, key=host_of)]
    groups: list[list[Any]] = []
    leftover: list[Any] = []
    for host in hosts:
        whole = len(host) - len(host) % shape.tensor
        groups += [host[start : start + shape.tensor] for start in range(0, whole, shape.tensor)]
        leftover += host[whole:]
    groups += [leftover[start : start + shape.tensor] for start in range(0, len(leftover), shape.tensor)]
    if leftover:
        counts = sorted({len(host) for host in hosts})
        warnings.warn(
            f"mesh.tensor: {shape.tensor} does not divide the {' or '.join(map(str, counts))} devices of each host, so "
            f"{len(leftover) // shape.tensor} of {len(groups)} tensor groups span hosts and will be slow",
            stacklevel=2,
        )
    groups.sort(key=lambda group: (*host_of(group[0]), group[0].id))
    placed = np.empty(len(ordered), dtype=object)
    placed[:] = list(itertools.chain.from_iterable(groups))
    return placed.reshape([getattr(shape, axis) for axis in AXES])


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a run, over all devices of all processes unless `devices` says which. All five axes are present, size 1 or not."""
    placed = order_devices(jax.devices() if devices is None else devices, shape)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def stage_mesh(mesh: Mesh, stage: int) -> Mesh:
    """The devices of one pipeline stage, a mesh with the same five axes of which `pipe` has size 1."""
    stages = mesh.shape[PIPE]
    if not 0 <= stage < stages:
        raise ValueError(f"stage: {stage} is not one of the {stages} of the mesh (0 to {stages - 1})")
    return Mesh(mesh.devices[stage : stage + 1], AXES, axis_types=(AxisType.Auto,) * len(AXES))


def explain(mesh: Mesh) -> dict[str, str]:
    """For each axis larger than 1, the slowest link that its groups cross: "inside a host", "between hosts" or "between slices".

    Where every host is a slice of its own, as XLA numbers GPUs without a common fabric, there are only hosts.
    """
    found = {}
    everywhere = {host_of(device) for device in mesh.devices.flat}
    sliced = len({slice_index for slice_index, _ in everywhere}) < len(everywhere)
    for dim, axis in enumerate(AXES):
        if mesh.shape[axis] == 1:
            continue
        lines = np.moveaxis(mesh.devices, dim, -1).reshape(-1, mesh.shape[axis])
        hosts = [{host_of(device) for device in line} for line in lines]
        slices = [{slice_index for slice_index, _ in line} for line in hosts]
        if sliced and max(map(len, slices)) > 1:
            found[axis] = "between slices"
        else:
            found[axis] = "between hosts" if max(map(len, hosts)) > 1 else "inside a host"
    return found
