"""FLOPs, custom calls, Pallas kernels and copies of programs with known answers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jaxpar.config import Config, DataConfig, ModelConfig, MoeConfig, TrainConfig
from jaxpar.plan import costs, hardware, kernels, work
from jaxpar.plan.hlo import parse


def program(*lines, computations=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule step\n\n{computations}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def attention(target, mask, window=0):
    shape = '"intermediate_tensor_shape":{"dimensions":["2","4","128","256"]}'
    config = f'"mask_type":"{mask}","sliding_window_length":{window},{shape}'
    return program(
        "%q = bf16[2,128,4,64]{3,2,1,0} parameter(0)",
        "%k = bf16[2,256,2,64]{3,2,1,0} parameter(1)",
        f'ROOT %o = (bf16[2,128,4,64]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), custom_call_target="{target}", '
        f'backend_config={{"cudnn_fmha_backend_config":{{{config}}}}}',
    )


@pytest.mark.parametrize(
    ("target", "mask", "window", "share"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 0, 1),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 0, 0.5),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 0, 1),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 256, 0.5),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 32, (32 - 32 * 32 / (2 * 128)) / 256),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 32, 2 * (32 - 32 * 32 / (2 * 128)) / 256),
    ],
)
def test_attention_is_counted_from_shapes(target, mask, window, share):
    """In a window of 32 keys a query sees 32, the first 32 queries fewer: as `model_flops` has it. The backward runs five products and
    counts as four."""
    text = attention(target, mask, window)
    done = work.measure(text)
    assert done.flops == done.attention == share * 4 * 2 * 4 * 128 * 256 * 64
    assert done.calls == {target: 1}
    (call,) = (each for each in parse(text).computations["main"].instructions.values() if each.opcode == "custom-call")
    assert costs.attention_flops_run(call)[0] == done.flops * (1.25 if "Backward" in target else 1)


BACKEND = 'debug = false, grid_x = 4 : i32, grid_y = 2 : i32, grid_z = 1 : i32, ir = "name = \\"no\\"", name = "tiled", num_warps = 4 : i32'
TRITON = f'%t = f32[8]{{0}} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", backend_config={{{BACKEND}}}'


def test_pallas_kernels_are_counted_by_their_grid():
    text = program("%p = f32[8]{0} parameter(0)", TRITON, TRITON.replace("%t", "ROOT %u").replace("grid_x = 4", "grid_x = 16"))
    assert kernels.launches(parse(text)) == [kernels.Launch("tiled", (4, 2, 1), 1), kernels.Launch("tiled", (16, 2, 1), 1)]
    assert work.measure(text, {"tiled": 100}).flops == 200 and work.measure(text).flops == 0


def test_flops_of_a_pallas_kernel_come_from_its_jaxpr():
    """A grid of 6, each program a loop of 5 products of 8 × 16 by 16 × 4."""

    def kernel(a_ref, b_ref, o_ref):
        def add(i, total):
            return total + a_ref[...] @ b_ref[...]

        o_ref[...] = jax.lax.fori_loop(0, 5, add, jnp.zeros((8, 4), jnp.float32))

    def step(a, b):
        blocks = [pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 4), lambda i: (0, 0))]
        shape = jax.ShapeDtypeStruct((48, 4), jnp.float32)
        out = pl.BlockSpec((8, 4), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(6,), in_specs=blocks, out_specs=out, out_shape=shape, name="loop")(a, b)

    jaxpr = jax.make_jaxpr(jax.jit(step))(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((48, 16), (16, 4))))
    assert kernels.kernel_flops(jaxpr) == {"loop": 6 * 5 * 2 * 8 * 16 * 4}


def test_large_copies_are_listed_and_small_or_fused_ones_are_not():
    moved = """%moves (a: f32[4096,8192]) -> f32[8192,4096] {
  %a = f32[4096,8192]{1,0} parameter(0)
  ROOT %b = f32[8192,4096]{1,0} transpose(%a), dimensions={1,0}
}

%more (a: f32[4096,8192]) -> f32[8192,4096] {
  %a = f32[4096,8192]{1,0} parameter(0)
  %b = f32[8192,4096]{1,0} transpose(%a), dimensions={1,0}
  ROOT %c = f32[8192,4096]{1,0} negate(%b)
}
"""
    found = work.measure(
        program(
            "%p = f32[4096,8192]{1,0} parameter(0)",
            "%small = f32[8]{0} parameter(1)",
            "%s = f32[8]{0} copy(%small)",
            '%c = f32[4096,8192]{1,0} copy(%p), metadata={op_name="jit(step)/add"}',
            "%broadcast.1 = f32[4096,8192]{1,0} fusion(%small), kind=kLoop, calls=%more",
            "%z = f32[4096,8192]{1,0} copy(%broadcast.1)",
            "%t = f32[8192,4096]{1,0} fusion(%p), kind=kInput, calls=%moves",
            "ROOT %n = f32[8192,4096]{1,0} fusion(%p), kind=kLoop, calls=%more",
            computations=moved,
        )
    ).copies
    size = 4 * 4096 * 8192
    assert found == {"float32[4096,8192] (jit(step)/add)": size, "zeros float32[4096,8192]": size, "float32[8192,4096]": size}


def model_flops(causal=True, **changes):
    model = ModelConfig(
        **{"vocabulary": 10, "width": 8, "layers": 3, "heads": 2, "kv_heads": 1, "head_width": 4, "mlp_width": 16, **changes}
    )
    return work.model_flops(Config(model=model, data=DataConfig(sequence=16, vocabulary=10), train=TrainConfig(batch=5)), causal)


def test_model_flops_by_hand():
    matrices = 3 * (8 * 2 * 4 * 2 + 2 * 8 * 4 + 3 * 8 * 16) + 10 * 8
    scores = 12 * 2 * 4 * 5 * 16  # a layer and key seen
    assert model_flops() == 6 * matrices * 80 + scores * 3 * 8
    assert model_flops(causal=False) - model_flops() == scores * 3 * 8
    assert model_flops(tied=True) == model_flops(), "a tied head multiplies as well"
    # Three of eight experts of width 8, and the router, in the place of the MLP.
    assert model_flops(moe=MoeConfig(experts=8, per_token=3, width=8)) - model_flops() == 6 * 80 * 3 * (3 * 3 * 8 * 8 + 8 * 8 - 3 * 8 * 16)
    assert model_flops(windows=(4, 0)) == pytest.approx(6 * matrices * 80 + scores * np.sum([4 - 16 / 32, 8, 4 - 16 / 32]))


@pytest.mark.parametrize(
    ("dtype", "precision", "peak"),
    [
        ("bfloat16", "default", "bfloat16"),
        ("float32", "default", "tfloat32"),
        ("float32", "highest", "float32"),
        ("float64", "default", "float64"),
    ],
)
def test_an_mfu_divides_by_the_peak_of_what_multiplies(dtype, precision, peak):
    h100 = hardware.load("h100")
    train = TrainConfig(compute_dtype=dtype, master_dtype="float64" if dtype == "float64" else "float32", matmul_precision=precision)
    config = Config(train=train)
    assert work.peak_dtype(config, h100) == peak
    without = dataclasses.replace(h100, peak_flops={"bfloat16": 2.0, "float32": 1.0})
    assert work.peak_dtype(config, without) == ("bfloat16" if dtype == "bfloat16" else "float32")


def test_a_matmul_of_float32_takes_as_long_as_its_precision():
    """TF32 unless the program asks for the highest."""
    times = {}
    for asked in ("", ", operand_precision={highest,highest}"):
        text = program(
            "%a = f32[4096,4096]{1,0} parameter(0)",
            f"ROOT %d = f32[4096,4096]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{asked}",
        )
        parsed = parse(text)
        done = costs.work(parsed, parsed.computations[parsed.entry].instructions["d"])
        times[asked] = costs.seconds(done, hardware.load("h100"))
    assert times[", operand_precision={highest,highest}"] > 6 * times[""]
