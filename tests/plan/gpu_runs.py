"""Small runs on 8 to 64 GPUs over meshes, ZeRO levels, boundaries, recomputation, accumulation and interleaving.

Five layers, so that both passes have a loop over them; fewer: `tests/train/test_traffic_of_step.py`, `test_gpu_context.py`.
"""

import dataclasses

from jaxpar.config import Config, DataConfig, MeshShape, ModelConfig, TrainConfig

MODEL = ModelConfig(vocabulary=2048, width=512, layers=5, heads=8, kv_heads=8, head_width=64, mlp_width=1024)

# (data, tensor), ZeRO, sequence parallel, accumulation, remat, interleave, reduce dtype
ROWS = [
    (8, 1, 0, True, 1, "none", 1, "float32"),
    (8, 1, 1, True, 2, "matmuls", 2, "bfloat16"),
    (8, 1, 2, True, 2, "block", 1, "float32"),
    (8, 1, 3, True, 1, "outputs", 1, "bfloat16"),
    (4, 2, 0, True, 2, "attention", 2, "float32"),
    (4, 2, 1, False, 1, "block", 1, "float32"),
    (4, 2, 2, True, 1, "matmuls", 1, "bfloat16"),
    (4, 2, 3, False, 2, "none", 1, "float32"),
    (2, 4, 0, False, 2, "outputs", 1, "bfloat16"),
    (2, 4, 1, True, 1, "none", 2, "float32"),
    (2, 4, 2, False, 2, "attention", 1, "float32"),
    (2, 4, 3, True, 2, "matmuls", 2, "float32"),
    (1, 8, 0, True, 1, "block", 2, "float32"),
    (16, 1, 3, True, 2, "block", 2, "bfloat16"),
    (4, 4, 3, True, 1, "attention", 1, "float32"),
    (2, 8, 1, True, 2, "outputs", 2, "float32"),
    (32, 1, 2, True, 1, "attention", 1, "bfloat16"),
    (16, 2, 3, True, 2, "outputs", 2, "float32"),
    (64, 1, 3, True, 1, "block", 1, "bfloat16"),
    (8, 8, 3, True, 1, "block", 2, "float32"),
    (32, 2, 3, True, 2, "none", 1, "float32"),
]


def run(data, tensor, zero, sequence_parallel, accumulation, remat, interleave, reduce_dtype):
    return Config(
        model=MODEL,
        mesh=MeshShape(data=data, tensor=tensor),
        data=DataConfig(sequence=512, documents="joined"),
        train=TrainConfig(
            batch=data * accumulation * 2,
            accumulation=accumulation,
            zero=zero,
            sequence_parallel=sequence_parallel,
            remat=remat,
            interleave=interleave,
            reduce_dtype=reduce_dtype,
            loss_chunk=256,
        ),
    )


RUNS = {"-".join(map(str, row)): run(*row) for row in ROWS}
for row in [(4, 2, 3, True, 2, "outputs", 1, "bfloat16"), (2, 4, 1, True, 1, "block", 1, "float32")]:
    config = run(*row)
    ring = dataclasses.replace(config.train, collective_matmul=True)
    RUNS["-".join(map(str, (*row, "ring")))] = dataclasses.replace(config, train=ring)
