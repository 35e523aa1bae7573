"""Compiling takes as long for 4096 GPUs or 126 layers as for 8 or 32: the program is one device's, and layers are a loop.

The processor's seconds are compared, ptxas's included, which other work on the machine stretches little.
"""

import os

from jaxpar.plan import compile as compiling
from jaxpar.plan import hardware
from tests.plan import gpu

pytestmark = gpu.MARKS
# (data, tensor, layers)
SIZES = [(1, 8, 32), (8, 8, 32), (64, 8, 32), (512, 8, 32), (8, 8, 80), (8, 8, 126)]


def seconds(data, tensor, layers):
    settings = (f"mesh.data={data}", f"mesh.tensor={tensor}", f"model.layers={layers}", f"train.batch={8 * data}")
    config, h100 = gpu.load("llama3_8b_h100x64", *settings, "train.interleave=1", "train.accumulation=4"), hardware.load("h100")
    start = sum(os.times()[:4])
    compiling.compile_run(config, h100)
    return sum(os.times()[:4]) - start


def test_compile_time_depends_neither_on_gpus_nor_on_layers():
    taken = {size: seconds(*size) for size in SIZES}
    for _ in range(2):  # the least of a few is the program's own; a busy machine only adds to it
        slowest = max(taken, key=taken.__getitem__)
        if taken[slowest] >= 2 * min(taken.values()):
            taken[slowest] = min(taken[slowest], seconds(*slowest))
    assert max(taken.values()) < 2 * min(taken.values()), taken
