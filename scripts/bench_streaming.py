"""What an import costs: a synthetic sharded Llama folder on 8 simulated devices, against pread and one copy of the same bytes.

    python scripts/bench_streaming.py [--gigabytes 4] [--rounds 5] [--folder FOLDER] [--mesh data=2,tensor=4] [--dtype bfloat16]

Prints resident memory above the arrays and the interpreter, and times of both, taken alternately, first one first and then the other: of
the wall, and of this process's threads together, which other work on the machine changes less. A ratio is the median of the rounds';
`ratios` lists them. Every byte of the files lands once: CPU devices that hold the same part share its memory.

The folder is removed afterwards.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

from jaxpar import configfile
from jaxpar.config import ModelConfig
from jaxpar.mesh import TENSOR, make_mesh
from jaxpar.models.decoder import Decoder
from jaxpar.params import padded_vocabulary, partition_specs, zero_placements, zero_specs
from jaxpar.rules import DENSE, Rules
from torch_bridge.convert import import_params, read_model
from torch_bridge.families.llama import LLAMA
from torch_bridge.formats.huggingface import write_json, write_tensors
from torch_bridge.mapping import bind, expected_shapes

WIDTH, MLP, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 32, 8, 32000
BLOCK = 2**24


class Noise:
    """A tensor of repeated random bytes: quick to write, and no hole in the file."""

    words = np.random.default_rng(0).integers(0, 2**16, BLOCK // 2, np.uint16)

    def __init__(self, shape: tuple[int, ...]) -> None:
        import ml_dtypes

        self.shape, self.dtype = shape, np.dtype(ml_dtypes.bfloat16)

    def read(self, index: object, out: np.ndarray) -> None:
        flat = out.reshape(-1).view(np.uint16)
        for start in range(0, flat.size, self.words.size):
            part = flat[start : start + self.words.size]
            part[...] = self.words[: part.size]


def make_folder(folder: Path, size: int) -> int:
    """A Llama of about `size` bytes in bfloat16, shards of 1 GB. Returns the bytes of its tensors."""
    layer = 2 * (WIDTH * WIDTH * 2 + 2 * WIDTH * KV_HEADS * (WIDTH // HEADS) + 3 * WIDTH * MLP)
    layers = max(1, (size - 2 * 2 * VOCABULARY * WIDTH) // layer)
    model = ModelConfig(vocabulary=VOCABULARY, width=WIDTH, layers=layers, heads=HEADS, kv_heads=KV_HEADS, mlp_width=MLP)
    shapes = expected_shapes(bind(LLAMA.rules, Decoder(model, VOCABULARY).specs))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {**LLAMA.write(model), "dtype": "bfloat16", "max_position_embeddings": 2048})
    write_tensors(folder, {key: Noise(shape) for key, shape in shapes.items()}, 10**9)
    return sum(2 * int(np.prod(shape)) for shape in shapes.values())


class Clock:
    """Seconds since it was made: of the wall, and of this process, its kernel time included."""

    def __init__(self) -> None:
        self.wall, self.process = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.wall, time.process_time() - self.process


def pread_and_copy(folder: Path) -> tuple[float, float]:
    """Time to read every file through one buffer into memory that is new, as an import's is."""
    files = sorted(folder.glob("*.safetensors"))
    clock = Clock()
    buffer = bytearray(BLOCK)
    held = []
    for path in files:
        whole = np.empty(path.stat().st_size, np.uint8)
        with path.open("rb", buffering=0) as file:
            done = 0
            while count := os.preadv(file.fileno(), [buffer], done):
                whole[done : done + count] = np.frombuffer(buffer, np.uint8, count)
                done += count
        held.append(whole)
    return clock.read()


def level(size: int) -> None:
    """Touch `size` bytes and free them. A virtual machine's host takes back memory that is free for seconds, and to touch it again then
    takes many times as long: whichever ran second would pay for the other. So each runs on memory that was in use a moment ago."""
    memory = np.empty(size, np.uint8)
    memory.fill(1)


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the most since `settle`)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def settle() -> None:
    """Give back what is free, and forget the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def import_once(folder: Path, mesh: jax.sharding.Mesh, dtype: str) -> tuple[tuple[float, float], int, int]:
    """(time, bytes of the arrays in memory, most resident bytes above those and what was there before)."""
    settle()
    before = resident("VmRSS")
    clock = Clock()
    source = read_model(folder)
    sizes = dict(mesh.shape)
    specs = Decoder(source.model, padded_vocabulary(source.model.vocabulary, sizes[TENSOR])).specs
    partitions = partition_specs(specs, Rules(sizes, DENSE))
    params = import_params(source, mesh, zero_specs(partitions, zero_placements(specs, partitions, sizes)), dtype)
    jax.block_until_ready(params)
    seconds = clock.read()
    peak = resident("VmHWM")
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
    }
    arrays = sum(buffers.values())
    return seconds, arrays, peak - before - arrays


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where the folder is made (default a temporary one)")
    parser.add_argument("--mesh", default="data=2,tensor=4")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(argv)
    base = Path(args.folder or tempfile.mkdtemp(prefix="streaming."))
    folder = base / "model"
    try:
        size = make_folder(folder, int(args.gigabytes * 10**9))
        shape = configfile.parse_mesh(args.mesh)
        mesh = make_mesh(shape, jax.devices()[: shape.devices])
        jax.block_until_ready(jax.device_put(np.zeros(8), jax.devices()[0]))
        plain, imports, above = [], [], []
        pread_and_copy(folder)  # the files are in the page cache from here on
        for number in range(args.rounds):
            for kind in ("plain", "import")[:: 1 if number % 2 else -1]:
                level(size)
                if kind == "plain":
                    plain.append(pread_and_copy(folder))
                else:
                    seconds, arrays, extra = import_once(folder, mesh, args.dtype)
                    imports.append(seconds)
                    above.append(extra)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    (wall, process), (plain_wall, plain_process) = (np.median(runs, axis=0) for runs in (imports, plain))
    ratios = np.array(imports) / np.array(plain)
    result = {
        "gigabytes": size / 1e9,
        "arrays_gigabytes": arrays / 1e9,
        "above_megabytes": max(above) / 1e6,
        "import_seconds": wall,
        "pread_and_copy_seconds": plain_wall,
        "ratio": np.median(ratios[:, 0]),
        "import_process_seconds": process,
        "pread_and_copy_process_seconds": plain_process,
        "process_ratio": np.median(ratios[:, 1]),
    }
    rounded = {name: round(float(value), 3) for name, value in result.items()}
    print(json.dumps({**rounded, "ratios": [round(float(ratio), 2) for ratio in ratios[:, 0]]}))
    return rounded


if __name__ == "__main__":
    main()
