"""Tables of what a compiled step sends, holds and computes, beside the formulas. Needs 8 devices.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python scripts/bench_step.py traffic memory flops
"""

from __future__ import annotations

import sys
from typing import Any

import jax

from jaxpar.config import Config, DataConfig, MeshShape, ModelConfig, OptimizerConfig, TrainConfig
from jaxpar.mesh import make_mesh
from jaxpar.parallel.remat import POLICIES
from jaxpar.plan import formulas
from jaxpar.plan.report import block_facts, facts_row, kept_bytes, measure, memory_row, table, traffic_rows
from jaxpar.train.step import Training, build_training

WEIGHTY = ModelConfig(vocabulary=256, width=64, layers=6, heads=4, kv_heads=2, mlp_width=192)
DEEP = ModelConfig(vocabulary=64, width=64, layers=8, heads=4, kv_heads=2, mlp_width=160)
WIDE = ModelConfig(vocabulary=2048, width=256, layers=4, heads=8, kv_heads=4, mlp_width=688)


def run(model: ModelConfig, sequence: int, mesh: MeshShape | None = None, **train: Any) -> Training:
    config = Config(
        model=model,
        mesh=mesh or MeshShape(),
        data=DataConfig(sequence=sequence, vocabulary=model.vocabulary),
        optimizer=OptimizerConfig(schedule="constant"),
        train=TrainConfig(**{"batch": 8, "compute_dtype": "float32", **train}),
    )
    return build_training(config, make_mesh(config.mesh, jax.devices()[: config.mesh.devices]))


def by_level(level: int) -> Training:
    """Of two microbatches."""
    return run(WEIGHTY, 16, MeshShape(data=4, tensor=2), zero=level, accumulation=2, remat="block")


def traffic() -> None:
    header = ("kind", "axes", "dtype", "operations", "kB", "compiled", "kB", "kB sent", "equal")
    for level in range(4):
        training = by_level(level)
        rows = traffic_rows(formulas.step_traffic(training.config), measure(training).sent)
        several = f"accumulation {training.config.train.accumulation}"
        print(table(f"Collectives of a step, formula and compiled: ZeRO-{level}, data 4 × tensor 2, {several}, float32", header, rows))
    print("kB: whole arrays. kB sent: by one device over a ring. XLA combines all-reduces, hence fewer operations.")


def memory() -> None:
    header = ("", "state", "measured", "weights", "gradients", "kept", "sum", "temporary, measured")
    rows = []
    for level in range(4):
        training = by_level(level)
        rows.append(memory_row(f"ZeRO-{level}", training.config, measure(training), kept_bytes(block_facts(training))))
    print(table("Memory of a device in MB by ZeRO level: data 4 × tensor 2, float32, remat block", header, rows))
    rows = []
    for policy in POLICIES:
        training = run(DEEP, 128, zero=0, remat=policy, attention_block=64, loss_chunk=128)
        rows.append(memory_row(policy, training.config, measure(training), kept_bytes(block_facts(training))))
    print(table("Memory in MB by remat policy: one device, 8 layers, 1024 tokens, float32", header, rows))
    print("state: masters, moments and batch, formula and measured. sum: of weights, gradients and kept values, by formula.")
    print("temporary: all that XLA allocates beside the state, a layer's working space included.")


def flops() -> None:
    rows = []
    for policy in POLICIES:
        rows.append(facts_row(policy, block_facts(run(WIDE, 256, remat=policy, compute_dtype="bfloat16")), 8 * 256))
    header = ("remat", "F", "B", "W", "BW", "B + W = BW", "bytes kept a token")
    print(table("Matmuls of one Llama block in MFLOP: width 256, 2048 tokens, bfloat16", header, rows))


if __name__ == "__main__":
    for section in sys.argv[1:]:
        {"traffic": traffic, "memory": memory, "flops": flops}[section]()
