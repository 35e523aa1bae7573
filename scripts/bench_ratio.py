"""Step time of jaxpar on one device against the minimal program of the same mathematics (reference_llama.py).

    PYTHONPATH=. python scripts/bench_ratio.py [--sequence 256] [--batch 8] [--rounds 15]

Both start from the same parameters and batch; loss and every gradient are compared first. Then the programs take turns, each round in
another order, and the median of the rounds' ratios is printed. Float32, AdamW, clipping.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference_llama

from jaxpar.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jaxpar.mesh import make_mesh
from jaxpar.train.optimizer import decay_mask
from jaxpar.train.step import Training, build_training

MODEL = ModelConfig(vocabulary=2048, width=256, layers=4, heads=8, kv_heads=4, mlp_width=688)
OPTIMIZER = OptimizerConfig(schedule="constant", clip=1.0)
POLICIES = ("none", "matmuls")  # the reference recomputes nothing: "none" is like with like, "matmuls" the default
TARGET = 1.05

Batch = dict[str, Any]


def documents(batch: int, sequence: int) -> Batch:
    """Rows of four packed documents each, random tokens: int32 [B, S]."""
    ids = np.random.default_rng(0).integers(0, MODEL.vocabulary, (batch, sequence))
    index, length = np.broadcast_to(np.arange(sequence), ids.shape), sequence // 4
    labels = np.where(index % length == length - 1, -1, np.roll(ids, -1, 1))
    host = {"ids": ids, "labels": labels, "positions": index % length, "segments": index // length + 1}
    return {name: np.ascontiguousarray(value, np.int32) for name, value in host.items()}


def build(policy: str, batch: int, sequence: int) -> Training:
    config = Config(
        model=MODEL,
        data=DataConfig(sequence=sequence),
        optimizer=OPTIMIZER,
        train=TrainConfig(batch=batch, zero=0, remat=policy, compute_dtype="float32"),
    )
    return build_training(config, make_mesh(config.mesh, jax.devices()[:1]))


def agreement(training: Training, params: Any, mine: Batch, theirs: Batch) -> float:
    """The largest relative difference of loss and gradients. AssertionError above 1e-5."""
    metrics, grads = jax.jit(training.gradients)(params, mine, jnp.zeros((), jnp.int32))
    reference = jax.jit(jax.value_and_grad(reference_llama.loss), static_argnums=(2, 3))
    value, expected = reference(params, theirs, MODEL.rope.theta, MODEL.norm_eps)
    gaps = [float(abs(a - b).max() / abs(b).max()) for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True)]
    worst = max(*gaps, abs(float(metrics["loss"] - value)) / float(value))
    assert worst < 1e-5, f"the two programs compute different things: {worst:.1e}"
    return worst


def repeated(step: Callable[[Any], Any], state: Any) -> Callable[[], float]:
    """A function that runs `step(state) -> (state, report)` once more and returns its seconds."""

    def once() -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state))
        return time.perf_counter() - start

    return once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"sequence": 256, "batch": 8, "rounds": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    print(f"{os.cpu_count()} CPU cores, jax {jax.__version__}, one {jax.default_backend()} device", flush=True)

    host = documents(args.batch, args.sequence)
    theirs, runs = jax.device_put(host), []
    for policy in POLICIES:
        training = build(policy, args.batch, args.sequence)
        rows = np.arange(args.batch, dtype=np.int32)
        mine = {name: value[None] for name, value in {**host, "rows": rows}.items()}
        mine = {name: jax.device_put(value, training.batch_shardings[name]) for name, value in mine.items()}
        state = training.init()
        params = jax.tree.map(jnp.copy, state["params"])
        print(f"remat {policy}: loss and gradients of the reference within {agreement(training, params, mine, theirs):.1e}", flush=True)
        runs.append(repeated(lambda state, step=training.step, batch=mine: step(state, batch), state))

    mask = decay_mask(OPTIMIZER, training.gradients.specs)
    adamw = optax.adamw(OPTIMIZER.learning_rate, OPTIMIZER.b1, OPTIMIZER.b2, OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay, mask=mask)
    rule = optax.chain(optax.clip_by_global_norm(OPTIMIZER.clip), adamw)
    reference = reference_llama.build(rule, MODEL.rope.theta, MODEL.norm_eps)
    runs.append(repeated(lambda state: reference(state, theirs), (params, rule.init(params))))

    seconds = np.zeros((args.rounds + 3, len(runs)))
    for turn in range(len(seconds)):
        for n in np.roll(range(len(runs)), turn):
            seconds[turn, n] = runs[n]()
    seconds = seconds[3:]  # the first ones compile and warm up
    print(f"width {MODEL.width}, {MODEL.layers} layers, {args.batch} × {args.sequence} tokens, vocabulary {MODEL.vocabulary}, float32:")
    print(f"  reference       {median(seconds[:, -1]) * 1e3:6.0f} ms")
    for n, policy in enumerate(POLICIES):
        ratio = median(seconds[:, n] / seconds[:, -1])
        print(f"  remat {policy:9} {median(seconds[:, n]) * 1e3:6.0f} ms, median ratio {ratio:.3f} of {args.rounds} (target ≤ {TARGET})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
