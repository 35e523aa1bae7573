"""Small training steps compiled for 8 to 64 GPUs: what they send is what the formulas say, to the byte, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxpar import gpu
from jaxpar.config import GpuConfig
from jaxpar.plan import compile as compiling
from jaxpar.plan import formulas, hardware, kernels, sent, traffic, work
from tests.plan.gpu import MARKS
from tests.plan.gpu_runs import RUNS

pytestmark = MARKS


@pytest.fixture(scope="module")
def h100():
    return hardware.load("h100")


@pytest.mark.parametrize("label", RUNS)
def test_bytes_by_axis_and_kind_are_those_of_the_formulas(label, h100):
    config = RUNS[label]
    compiled = compiling.compile_run(config, h100)
    rows, unexpected = sent.compare(compiled.text, compiled.mesh, formulas.step_traffic(config))
    assert unexpected == []
    assert {(row["axis"], row["kind"]): row["bytes"] for row in rows} == {(row["axis"], row["kind"]): row["expected_bytes"] for row in rows}
    assert sum(row["bytes"] for row in rows) > 0
    limit = {"none": 1.005, "matmuls": 1.005, "block": 1.34}.get(config.train.remat, 1.30)
    assert work.measure(compiled.text).flops <= limit * work.model_flops(config) / config.mesh.devices


@pytest.fixture(scope="module")
def small(h100):
    """A layer's weights and gradients are a few MiB."""
    return compiling.compile_run(RUNS["4-2-3-False-2-none-1-float32"], h100)


def test_small_collectives_are_combined_as_the_flags_say(small, h100):
    """A layer's gathers travel as one, and its gradients; with thresholds of a byte each goes alone. The bytes are the same."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    apart = GpuConfig(flags=tuple(f"xla_gpu_{kind}_combine_threshold_bytes=1" for kind in kinds))
    alone = compiling.compile_run(dataclasses.replace(small.config, gpu=apart), h100)
    counts, sizes = ([dict.fromkeys(kinds, 0) for _ in range(2)] for _ in range(2))
    for number, compiled in enumerate((small, alone)):
        for each in traffic.collectives(compiled.text, compiled.mesh):
            if each.kind in kinds:
                counts[number][each.kind] += each.count
                sizes[number][each.kind] += each.bytes
    assert sizes[0] == sizes[1]
    assert counts[1]["all_gather"] >= 7 * counts[0]["all_gather"] and counts[1]["reduce_scatter"] >= 7 * counts[0]["reduce_scatter"]
    assert counts[1]["all_reduce"] > counts[0]["all_reduce"]


def test_the_formulas_of_another_run_do_not_match(small):
    """Negative control: what the formulas do not have is listed with its source."""
    compiled = small
    rows, unexpected = sent.compare(compiled.text, compiled.mesh, formulas.step_traffic(RUNS["4-2-0-True-2-attention-2-float32"]))
    assert any(row["bytes"] != row["expected_bytes"] for row in rows)
    assert not any("jaxpar/parallel/collectives.py:" in each["source"] for each in unexpected)
    assert any(" in jaxpar/models/" in each["source"] for each in unexpected)


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_xla_knows_every_gpu_and_every_flag(name):
    (device,) = compiling.devices(hardware.load(name), 1, 1)
    argument = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    lowered = jax.jit(lambda a: a @ a).lower(argument)
    assert lowered.compile(compiler_options={**gpu.compiler_options(GpuConfig()), **gpu.WITHOUT_GPU})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):  # negative control
        lowered.compile(compiler_options={"xla_gpu_no_such_flag": True})


def test_a_pallas_kernel_is_counted_by_its_grid(h100):
    """256 × 64 times 64 × 128 in tiles of 64, three times in a loop: XLA sees a call and no product."""

    def tile(a_ref, b_ref, o_ref):
        o_ref[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    def product(a, b):
        blocks = [pl.BlockSpec((64, 64), lambda i, j: (i, 0)), pl.BlockSpec((64, 64), lambda i, j: (0, j))]
        return pl.pallas_call(
            tile,
            grid=(4, 2),
            in_specs=blocks,
            out_specs=pl.BlockSpec((64, 64), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((256, 128), jnp.float32),
            compiler_params=triton.CompilerParams(num_warps=4),
            name="tiled",
        )(a, b)

    def step(a, b):
        return jax.lax.scan(lambda total, _: (total + product(a, b).sum(), None), jnp.float32(0), None, length=3)[0]

    (device,) = compiling.devices(h100, 1, 1)
    where = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape in ((256, 64), (64, 128))]
    traced = jax.jit(step).trace(*shapes)
    text = traced.lower().compile(compiler_options=gpu.WITHOUT_GPU).as_text()
    flops = kernels.kernel_flops(traced.jaxpr)
    done = work.measure(text, flops)
    assert done.launches == [kernels.Launch("tiled", (4, 2, 1), 3)] and flops == {"tiled": 2 * 256 * 64 * 128}
    assert done.flops == done.kernels == 3 * 2 * 256 * 64 * 128 and work.measure(text).flops == 0
