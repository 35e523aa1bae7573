"""Step time of a mixture of experts on one device against the dense model of as many active parameters.

    PYTHONPATH=. python scripts/bench_experts.py [--sequence 256] [--batch 8] [--rounds 9]

8 experts, 2 of them for each token, each half as wide as the dense model's MLP, so that a token meets as many weights. The mixture also has
a router, sorts tokens, and updates four times the MLP's parameters. Programs take turns, each round in another order, and the median of the
rounds' ratios is printed. Float32, AdamW, clipping, dropless.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable
from statistics import median

import jax
import numpy as np
from bench_ratio import MODEL, OPTIMIZER, documents, repeated

from jaxpar.config import Config, DataConfig, ModelConfig, MoeConfig, TrainConfig
from jaxpar.mesh import make_mesh
from jaxpar.train.step import build_training

EXPERTS = dataclasses.replace(MODEL, moe=MoeConfig(experts=8, per_token=2, width=MODEL.mlp_width // 2, balance_weight=0.01))
POLICIES = ("none", "matmuls", "block")
TARGET = 1.5


def stepper(model: ModelConfig, policy: str, batch: int, sequence: int) -> Callable[[], float]:
    """A function that runs one more step and returns its seconds."""
    config = Config(
        model=model,
        data=DataConfig(sequence=sequence),
        optimizer=OPTIMIZER,
        train=TrainConfig(batch=batch, zero=0, remat=policy, compute_dtype="float32"),
    )
    training = build_training(config, make_mesh(config.mesh, jax.devices()[:1]))
    host = {**documents(batch, sequence), "rows": np.arange(batch, dtype=np.int32)}
    placed = {name: jax.device_put(value[None], training.batch_shardings[name]) for name, value in host.items()}
    return repeated(lambda state: training.advance(state, placed), training.init())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"sequence": 256, "batch": 8, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    runs = [stepper(model, policy, args.batch, args.sequence) for policy in POLICIES for model in (MODEL, EXPERTS)]
    seconds = np.zeros((args.rounds + 2, len(runs)))
    for turn in range(len(seconds)):
        for n in np.roll(range(len(runs)), turn):
            seconds[turn, n] = runs[n]()
    seconds = seconds[2:]  # the first ones compile and warm up
    print(f"{os.cpu_count()} CPU cores, jax {jax.__version__}; {args.batch} × {args.sequence} tokens, float32")
    print("8 experts, 2 of them a token, beside the dense model of as many active parameters:")
    for n, policy in enumerate(POLICIES):
        dense, experts = seconds[:, 2 * n], seconds[:, 2 * n + 1]
        ratio = f"median ratio {median(experts / dense):.3f} of {args.rounds} (target ≤ {TARGET})"
        print(f"  remat {policy:9} dense {median(dense) * 1e3:6.0f} ms, experts {median(experts) * 1e3:6.0f} ms, {ratio}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
