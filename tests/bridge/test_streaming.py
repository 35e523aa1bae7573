"""Imports hold no more than the arrays that they make. How long they take is printed by scripts/bench_streaming.py, not asserted here."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from torch_bridge.arrays import ShardedView, aligned, global_array
from torch_bridge.formats.safetensors import read_header
from torch_bridge.views import ArrayView, read_all, slices

ROOT = Path(__file__).parent.parent.parent
MOST_MEGABYTES = 300


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,tensor=4", "tensor=8"])
def test_memory(tmp_path, mesh):
    """The wanted time, 1.5 times pread and one copy, is not met dependably: on data 2 x tensor 4 the process took 1.2 to 1.9 times at 1 GB
    (tensor 8: 0.6 to 0.9), so nothing here claims it."""
    command = [
        sys.executable,
        str(ROOT / "scripts/bench_streaming.py"),
        "--gigabytes",
        "1",
        "--mesh",
        mesh,
        "--folder",
        str(tmp_path / "f"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    figures = json.loads(done.stdout)
    assert figures["above_megabytes"] <= MOST_MEGABYTES
    assert figures["arrays_gigabytes"] == pytest.approx(figures["gigabytes"], rel=1e-3)
    assert not (tmp_path / "f").exists()


def sharding_of(place):
    return jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",)), jax.sharding.PartitionSpec(*place))


def test_a_cpu_device_keeps_the_memory_that_was_read_into():
    array = aligned((64, 33), np.dtype(np.float32))
    array[...] = 1
    assert jax.device_put(array, jax.devices()[0]).unsafe_buffer_pointer() == array.ctypes.data


def test_donation_leaves_replicas_alone():
    """Replicas share the memory that was read; a program that may overwrite its input must not."""
    array = np.arange(4096, dtype=np.float32).reshape(64, 64)
    made = global_array(ArrayView(array), sharding_of(()))
    assert len({shard.data.unsafe_buffer_pointer() for shard in made.addressable_shards}) == 1
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    result = step(step(made))
    for shard in result.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), array[shard.index] * 4 + 3)


def test_global_array_from_a_file(tmp_path):
    array = np.arange(120, dtype=np.float32).reshape(12, 10)
    save_file({"a": array}, tmp_path / "a.safetensors")
    view = read_header(tmp_path / "a.safetensors")[0]["a"]
    for place in ((), ("x",), (None, "x")):
        made = global_array(view, sharding_of(place))
        assert np.array_equal(np.asarray(made), array)
        back = ShardedView("a", made)
        assert np.array_equal(read_all(back), array)
        out = np.empty((5, 7), np.float32)
        back.read(((4, 9), (2, 9)), out)
        assert np.array_equal(out, array[slices(((4, 9), (2, 9)))])
