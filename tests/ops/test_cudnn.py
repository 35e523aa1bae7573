import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.ops.attention import attention
from jaxpar.ops.cudnn import cudnn_covers

GPU = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
POSITIONS = jnp.arange(16, dtype=jnp.int32)[None].repeat(2, 0)
PLACES = dict(q_positions_BS=POSITIONS, k_positions_BS=POSITIONS)
PACKED = dict(q_segments_BS=jnp.ones_like(POSITIONS), k_segments_BS=jnp.ones_like(POSITIONS))


def inputs(dtype=jnp.bfloat16, head: int = 16, value: int | None = None) -> tuple[jax.Array, ...]:
    draw = np.random.default_rng(0)
    widths = ((4, head), (2, head), (2, value or head))
    return tuple(jnp.array(draw.normal(size=(2, 16, heads, width)), dtype) for heads, width in widths)


COVERED = dict(causal=True, ordered=True, packed=False, window=0, softcap=None)


@pytest.mark.parametrize(
    ("change", "shape", "reason"),
    [
        ({}, {}, None),
        (dict(window=4), {}, None),
        (dict(window=np.int64(4)), {}, None),
        (dict(causal=False, ordered=False), {}, None),
        ({}, dict(dtype=jnp.float16, head=128), None),
        ({}, dict(dtype=jnp.float32), "dtype float32"),
        ({}, dict(head=12), "head width 12"),
        ({}, dict(head=256), "head width 256"),
        ({}, dict(head=24, value=16), "value width 16 beside head width 24"),
        (dict(softcap=30.0), {}, "soft-capped scores"),
        (dict(packed=True), {}, "packed documents"),
        (dict(window=jnp.int32(4)), {}, "only known at run time"),
        (dict(window=4, causal=False), {}, "a window without causal order"),
        (dict(ordered=False), {}, "causal order by position"),
    ],
)
def test_what_is_covered(change: dict, shape: dict, reason: str | None):
    answer = cudnn_covers(*inputs(**shape), **(COVERED | change))
    assert (answer is None) if reason is None else (answer is not None and reason in answer)


@pytest.fixture
def fused(monkeypatch) -> list[dict]:
    """`jax.nn.dot_product_attention` on the XLA implementation of JAX, with a record of its calls."""
    calls, real = [], jax.nn.dot_product_attention

    def stand_in(*arrays, implementation, **options):
        calls.append(options | {"implementation": implementation})
        return real(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return calls


@pytest.mark.parametrize("options", [{}, dict(window=4), dict(causal=False), dict(scale=0.1)], ids=str)
def test_auto_on_gpu_takes_cudnn_and_means_the_same(fused, options: dict):
    q, k, v = inputs()
    o = attention(q, k, v, **PLACES, **options, ordered=True, platform="gpu")
    assert [call["implementation"] for call in fused] == ["cudnn"]
    right = attention(q, k, v, **PLACES, **options, ordered=True, platform="gpu", implementation="blockwise")
    assert len(fused) == 1
    np.testing.assert_allclose(np.asarray(o, np.float32), np.asarray(right, np.float32), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "options", [dict(platform="cpu"), dict(platform="gpu", softcap=30.0), dict(platform="gpu", **PACKED)], ids=["cpu", "cap", "packed"]
)
def test_auto_elsewhere_is_blockwise(fused, options: dict):
    attention(*inputs(), **PLACES, **options, ordered=True)
    assert not fused


def test_asking_for_what_cudnn_cannot_do(fused):
    with pytest.raises(ValueError, match=r"train\.attention: cudnn does not cover packed documents .*; use auto or blockwise"):
        attention(*inputs(), **PLACES, **PACKED, ordered=True, implementation="cudnn", platform="gpu")
    with pytest.raises(ValueError, match=r"train\.attention: cudnn does not cover platform cpu; use auto or blockwise"):
        attention(*inputs(), **PLACES, ordered=True, implementation="cudnn", platform="cpu")
    with pytest.raises(ValueError, match=r"train\.attention: 'flash' is not one of"):
        attention(*inputs(), **PLACES, implementation="flash")


@pytest.mark.skipif(not GPU, reason="tracing cuDNN attention needs the CUDA plugin, no GPU")
def test_lowers_for_cuda_with_named_residuals():
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(head=64))

    def step(policy):
        run = jax.checkpoint(lambda *x: attention(*x, **PLACES, ordered=True, window=4, platform="gpu"), policy=policy)
        return jax.jit(jax.value_and_grad(lambda *x: run(*x).astype(jnp.float32).sum(), (0, 1, 2)))

    def forwards(policy) -> int:
        text = step(policy).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
        return text.count("@__cudnn$fmhaSoftmax(")

    assert [x.shape for x in jax.eval_shape(step(None), q, k, v)[1]] == [x.shape for x in (q, k, v)]
    assert forwards(jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")) == 1
    assert forwards(jax.checkpoint_policies.nothing_saveable) == 2
