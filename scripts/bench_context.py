"""Context parallelism in numbers: work of devices by layout, and the step time of a row on 8 simulated devices against one.

    PYTHONPATH=. XLA_FLAGS=--xla_force_host_platform_device_count=8 python scripts/bench_context.py [work] [ratio] [--rounds 7]

The devices share the machine's cores, so a program that repeated no work and lost no time would have ratio 1: one device computes the same
row, with the same tiles. Programs take turns, each round in another order; the median of the rounds' ratios is printed. Float32.
"""

from __future__ import annotations

import argparse
import os
from statistics import median

import jax
import numpy as np
from bench_ratio import repeated

from jaxpar.config import Config, ContextConfig, DataConfig, MeshShape, ModelConfig, OptimizerConfig, TrainConfig
from jaxpar.mesh import make_mesh
from jaxpar.parallel.context.layout import Layout
from jaxpar.parallel.context.picture import schedule, work
from jaxpar.train.data import lay_out
from jaxpar.train.step import build_training

SEQUENCE = 2048
MODEL = ModelConfig(vocabulary=256, width=128, layers=2, heads=8, kv_heads=8, head_width=32, mlp_width=256)
WAYS = [("ring", "contiguous"), ("ring", "zigzag"), ("ring", "striped"), ("gather", "zigzag"), ("ulysses", "contiguous"), ("usp", "zigzag")]


def print_work() -> None:
    """Visible (query, key) pairs a device, largest over mean: what a step waits for."""
    print("work of devices, largest / mean (4096 tokens; causal, and a window of 1024)")
    print(f"  {'layout':12}" + "".join(f"{f'{ring} devices':>14}" for ring in (2, 4, 8)))
    for name in ("contiguous", "zigzag", "striped"):
        cells = []
        for ring in (2, 4, 8):
            ratios = [share.max() / share.mean() for share in (work(schedule(Layout(name, ring), 4096, window)) for window in (0, 1024))]
            cells.append(f"{'  '.join(f'{ratio:.3f}' for ratio in ratios):>14}")
        print(f"  {name:12}" + "".join(cells))


def stepper(mesh: MeshShape, context: ContextConfig):
    """A function that runs one more step and returns its seconds."""
    config = Config(
        model=MODEL,
        mesh=mesh,
        data=DataConfig(sequence=SEQUENCE, documents="joined"),
        optimizer=OptimizerConfig(schedule="constant"),
        train=TrainConfig(batch=1, zero=0, compute_dtype="float32", context=context),
    )
    training = build_training(config, make_mesh(mesh, jax.devices()[: mesh.devices]))
    ids = np.random.default_rng(0).integers(0, MODEL.vocabulary, (1, 1, SEQUENCE)).astype(np.int32)
    batch = {"ids": ids, "labels": np.roll(ids, -1, 2), "positions": np.arange(SEQUENCE, dtype=np.int32)[None, None]}
    batch = lay_out(batch | {"segments": np.ones_like(ids), "rows": np.zeros((1, 1), np.int32)}, training.order)
    placed = {name: jax.device_put(value, training.batch_shardings[name]) for name, value in batch.items()}
    return repeated(lambda state: training.step(state, placed), training.init())


def print_ratio(rounds: int) -> None:
    print(f"{os.cpu_count()} CPU cores, jax {jax.__version__}; width {MODEL.width}, {MODEL.layers} layers, {SEQUENCE} tokens, float32")
    steps = [stepper(MeshShape(), ContextConfig())]
    steps += [stepper(MeshShape(seq=8), ContextConfig(method=method, layout=layout)) for method, layout in WAYS]
    seconds = np.zeros((rounds + 2, len(steps)))
    for turn in range(len(seconds)):
        for n in np.roll(range(len(steps)), turn):
            seconds[turn, n] = steps[n]()
    seconds = seconds[2:]  # the first ones compile and warm up
    print(f"  one device              {median(seconds[:, 0]) * 1e3:6.0f} ms")
    for n, way in enumerate(WAYS, 1):
        print(f"  {' '.join(way):22}  {median(seconds[:, n]) * 1e3:6.0f} ms, ratio {median(seconds[:, n] / seconds[:, 0]):.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="work, ratio; both without")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    chosen = args.sections or ["work", "ratio"]
    if wrong := set(chosen) - {"work", "ratio"}:
        parser.error(f"{', '.join(sorted(wrong))}: not one of work, ratio")
    if "work" in chosen:
        print_work()
    if "ratio" in chosen:
        print_ratio(args.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
