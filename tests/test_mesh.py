"""Which device goes where: tensor groups inside hosts when the sizes allow, a warning when they do not."""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import pytest

from jaxpar.config import MeshShape
from jaxpar.mesh import AXES, explain, make_mesh, order_devices, stage_mesh


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int = 0


def cluster(*hosts: int, slices: int = 1) -> list[Device]:
    """Devices of hosts with so many each, given backwards: order must not depend on how they arrive."""
    owners = [host for host, count in enumerate(hosts) for _ in range(count)]
    return [Device(id, host, host * slices // len(hosts)) for id, host in enumerate(owners)][::-1]


def tensor_hosts(devices: list[Device], shape: MeshShape) -> list[set[int]]:
    placed = order_devices(devices, shape)
    assert sorted(device.id for device in placed.flat) == list(range(len(devices)))
    return [{device.process_index for device in group} for group in placed.reshape(-1, shape.tensor)]


@pytest.mark.parametrize(
    "hosts, shape",
    [
        ((4, 4), MeshShape(data=2, tensor=4)),
        ((4, 4), MeshShape(data=4, tensor=2)),
        ((4, 4), MeshShape(data=2, seq=2, tensor=2)),
        ((6, 2), MeshShape(data=4, tensor=2)),
        ((8, 4, 4), MeshShape(pipe=2, data=2, tensor=4)),
    ],
)
def test_tensor_groups_stay_inside_hosts(hosts, shape):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(len(group) == 1 for group in tensor_hosts(cluster(*hosts), shape))


@pytest.mark.parametrize(
    "hosts, shape, split",
    [
        ((4, 4, 4), MeshShape(data=4, tensor=3), 1),  # one left over on each host
        ((4, 4), MeshShape(tensor=8), 1),
        ((4, 2, 4, 2), MeshShape(data=3, tensor=4), 1),  # row by row would split two groups
        ((3, 5), MeshShape(data=2, tensor=4), 1),
    ],
)
def test_unavoidable_splits_are_fewest_and_said(hosts, shape, split):
    with pytest.warns(UserWarning, match=rf"mesh.tensor: {shape.tensor} does not divide the .* devices of each host, so {split} of"):
        groups = tensor_hosts(cluster(*hosts), shape)
    assert sum(len(group) > 1 for group in groups) == split


def test_slices_are_slower_than_hosts():
    devices = [Device(id, process_index=id // 2, slice_index=id % 4 // 2) for id in range(8)]
    placed = order_devices(devices, MeshShape(data=2, expert=2, tensor=2))
    assert [device.slice_index for device in placed.reshape(8)] == [0] * 4 + [1] * 4
    assert [device.id for device in placed.reshape(8)] == [0, 1, 4, 5, 2, 3, 6, 7]


def test_make_mesh_has_all_axes_and_tensor_innermost():
    mesh = make_mesh(MeshShape(data=4, tensor=2))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"pipe": 1, "data": 4, "expert": 1, "seq": 1, "tensor": 2}
    assert [device.id for device in mesh.devices.flat] == sorted(device.id for device in jax.devices())
    assert explain(mesh) == {"data": "inside a host", "tensor": "inside a host"}


def test_explain_names_the_slowest_link():
    devices = order_devices(cluster(2, 2, 2, 2, slices=2), MeshShape(data=2, expert=2, tensor=2))
    mesh = SimpleNamespace(devices=devices, shape=dict(zip(AXES, devices.shape)))
    assert explain(mesh) == {"data": "between slices", "expert": "between hosts", "tensor": "inside a host"}


def test_a_process_a_gpu(monkeypatch):
    """Eight processes on two machines: a tensor group of four is no group of four hosts."""
    devices = [Device(id, process_index=id) for id in range(8)]
    monkeypatch.setattr("jaxpar.mesh.hosts_of_processes", lambda: {process: process // 4 * 4 for process in range(8)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = order_devices(devices, MeshShape(data=2, tensor=4))
    mesh = SimpleNamespace(devices=placed, shape=dict(zip(AXES, placed.shape)))
    assert explain(mesh) == {"data": "between hosts", "tensor": "inside a host"}
    monkeypatch.setattr("jaxpar.mesh.hosts_of_processes", dict)  # the control: as if every process had a machine of its own
    with pytest.warns(UserWarning, match="2 of 2 tensor groups span hosts"):
        order_devices(devices, MeshShape(data=2, tensor=4))


def test_gpus_whose_hosts_are_slices_have_no_slices():
    devices = order_devices([Device(id, id // 4, id // 4) for id in range(8)], MeshShape(data=2, tensor=4))
    mesh = SimpleNamespace(devices=devices, shape=dict(zip(AXES, devices.shape)))
    assert explain(mesh) == {"data": "between hosts", "tensor": "inside a host"}


def test_sizes_must_multiply_to_the_devices():
    with pytest.raises(ValueError, match=r"mesh: .* = 6 devices, but there are 8"):
        make_mesh(MeshShape(data=3, tensor=2))


def test_stage_mesh():
    mesh = make_mesh(MeshShape(pipe=2, data=2, tensor=2))
    stages = [stage_mesh(mesh, stage) for stage in range(2)]
    assert all(dict(stage.shape) == {"pipe": 1, "data": 2, "expert": 1, "seq": 1, "tensor": 2} for stage in stages)
    assert [device for stage in stages for device in stage.devices.flat] == list(mesh.devices.flat)
    with pytest.raises(ValueError, match="stage: 2 is not one of the 2"):
        stage_mesh(mesh, 2)
