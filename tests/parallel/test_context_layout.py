"""Layouts, the schedule of a walk, what is refused, and the picture; no attention is computed here."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import ContextConfig, MeshShape
from jaxpar.mesh import make_mesh
from jaxpar.parallel import context as context_parallel
from jaxpar.parallel.context import attention, row_tokens
from jaxpar.parallel.context.layout import Layout, layout
from jaxpar.parallel.context.picture import meetings, schedule, work
from jaxpar.train.data import lay_out
from scripts import draw_context

LAYOUTS = ("contiguous", "zigzag", "striped")


def test_orders_of_12_tokens():
    assert layout(ContextConfig(layout="contiguous"), 3, 12).order(12).tolist() == list(range(12))
    assert layout(ContextConfig(layout="zigzag"), 3, 12).order(12).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert layout(ContextConfig(layout="striped"), 3, 12).order(12).tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("method", "devices"), [("ring", 4), ("ulysses", 4), ("usp", 4), ("usp", 2), ("gather", 1)])
def test_every_device_knows_its_tokens(name, method, devices):
    """`Layout.tokens` of each device is its part of `order`."""
    of, length = layout(ContextConfig(method=method, layout=name), devices, 16), 16 // devices
    found = [np.asarray(of.tokens(device, np.arange(length), length)) for device in range(devices)]
    np.testing.assert_array_equal(np.concatenate(found), of.order(16))


def test_a_program_knows_its_tokens():
    """Also a part of a device's tokens, as lies on a device of `tensor`."""
    mesh = make_mesh(MeshShape(seq=4), jax.devices()[:4])
    program = jax.shard_map(
        lambda local: row_tokens(ContextConfig(), local, 4)[None], mesh=mesh, in_specs=P(), out_specs=P("seq"), check_vma=True
    )
    found = np.asarray(jax.jit(program)(jnp.arange(2, 4, dtype=jnp.int32)))
    np.testing.assert_array_equal(found, Layout("zigzag", 4).order(16).reshape(4, 4)[:, 2:])


def test_rows_are_laid_out_on_the_host():
    batch = {"ids": np.arange(12).reshape(1, 1, 12), "rows": np.zeros((1, 1))}
    order = Layout("zigzag", 3).order(12)
    assert lay_out(batch, order)["ids"][0, 0].tolist() == order.tolist() and lay_out(batch, order)["rows"] is batch["rows"]
    assert lay_out(batch, None) is batch


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_visible_pair_meets_once(name, ring):
    """Queries meet every key that they see exactly once, and no other."""
    length = 2 * ring * 3
    i, j = np.mgrid[:length, :length]
    for window in (0, 1, 2, 5, 7, 13, length):
        met = meetings(schedule(Layout(name, ring), length, window)) >= 0
        np.testing.assert_array_equal(met, (j <= i) & ((i - j < window) if window else True))
    assert (meetings(schedule(Layout(name, ring), length, causal=False)) >= 0).all()


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_work_of_devices(ring):
    """max/mean of causal pairs: zigzag equal to the pair, striped within n - 1 pairs in S + 1, contiguous nearly twice the mean."""
    length = 64 * ring
    shares = {name: work(schedule(Layout(name, ring), length)) for name in LAYOUTS}
    ratio = {name: share.max() / share.mean() for name, share in shares.items()}
    assert ratio["zigzag"] == 1 and ratio["striped"] == pytest.approx(1 + (ring - 1) / (length + 1), rel=1e-12)
    assert ratio["contiguous"] == pytest.approx((2 * ring - 1) / ring, rel=0.02)


def test_windows_end_the_walk():
    """Steps of a ring of 8 over 128 tokens: as many as the window reaches, for zigzag in chunks of half a shard."""
    steps = lambda name, window: schedule(Layout(name, 8), 128, window).steps  # noqa: E731
    assert [steps("contiguous", w) for w in (0, 1, 2, 17, 18, 33, 34)] == [7, 0, 1, 1, 2, 2, 3]
    assert [steps("zigzag", w) for w in (0, 1, 2, 9, 10, 17, 57, 58)] == [7, 0, 1, 1, 2, 2, 7, 7]
    assert steps("striped", 2) == 7


def test_the_picture_is_of_this_schedule():
    assert Path(__file__).parents[2] / "docs" / "context.svg" == draw_context.TARGET
    assert draw_context.TARGET.read_text() == draw_context.svg(draw_context.PANELS)


# ---- what is refused, before compilation


def traced(method="ring", devices=4, length=16, heads=8, kv_heads=2, q=(), k=(), v=(), dtype=jnp.float32, **options):
    """The output's type. `q`, `k` and `v` are their shapes where these do not follow from the others."""
    mesh = make_mesh(MeshShape(seq=devices), jax.devices()[:devices])
    context = ContextConfig(method=method, **{name: options.pop(name) for name in ("layout", "ulysses") if name in options})

    def local(q, k, v, marks):
        return attention(q, k, v, context=context, **marks, **options)

    marks = {name: options.pop(name) for name in ("segments_BS", "prefix_BS", "sinks_N") if name in options}
    split = P(None, "seq")
    program = jax.shard_map(local, mesh=mesh, in_specs=(split, split, split, P()), out_specs=split)
    array = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    usual = (1, length, kv_heads, 4)
    return jax.eval_shape(program, array(q or (1, length, heads, 4)), array(k or usual), array(v or k or usual), marks)


BAD = [
    (
        {"length": 12, "layout": "zigzag"},
        r"data\.sequence: 12 tokens do not divide .* zigzag .* over 4 devices; multiples of 8 work, such as 8, 16",
    ),
    ({"method": "usp", "ulysses": 3}, r"train\.context\.ulysses: 3 does not divide mesh\.seq 4; sizes that work: 1, 2, 4"),
    ({"method": "ulysses", "heads": 6}, r"mesh\.seq: 4 devices cannot trade .* 6 query heads .*; degrees that work: 1, 2, 6"),
    ({"method": "usp", "ulysses": 4, "heads": 6}, r"train\.context\.ulysses: 4 devices cannot trade .*; degrees that work: 1, 2\b"),
    ({"method": "ulysses", "heads": 12, "kv_heads": 3}, r"cannot trade .* 3 key/value heads .*; degrees that work: 1, 3, 6, 12"),
    ({"causal": False, "window": 4}, r"window: 4 is given with causal=False; a window needs causal order"),
    ({"causal": False, "prefix_BS": jnp.ones((1, 16), bool)}, r"prefix: every key is seen with causal=False"),
    (
        {"segments_BS": jnp.ones((1, 5), jnp.int32)},
        r"segments_BS: shape \(1, 5\) is neither this device's \(1, 4\) nor the whole row's \(1, 16\)",
    ),
    ({"implementation": "cudnn"}, r"train\.attention: cudnn does not cover .*; use auto or blockwise"),
    ({"implementation": "flash"}, r"train\.attention: 'flash' is not one of auto, blockwise, cudnn"),
    ({"devices": 1, "segments_BS": jnp.ones((1, 5), jnp.int32)}, r"segments_BS: shape \(1, 5\) is not \(1, 16\)"),
    ({"segments_BS": jnp.ones((1, 16))}, r"segments_BS: float\d+ are not whole numbers"),
    ({"prefix_BS": jnp.ones((1, 16), jnp.int32)}, r"prefix_BS: int32 are not booleans"),
    ({"sinks_N": jnp.ones(2)}, r"sinks_N: shape \(2,\) is not \(8,\)"),
    ({"kv_heads": 3}, r"k_BSKH: 3 key/value heads do not divide q_BSNH's 8 heads"),
    ({"devices": 1, "kv_heads": 3}, r"k_BSKH: 3 key/value heads do not divide"),
    ({"k": (1, 32, 2, 4)}, r"k_BSKH: 1 rows of 8 tokens beside 1 of 4 in q_BSNH"),
    ({"k": (1, 16, 2, 8)}, r"k_BSKH: width 8 is not q_BSNH's 4"),
    ({"v": (1, 16, 4, 4)}, r"v_BSKW: shape \(1, 4, 4, 4\) does not have k_BSKH's rows, tokens and heads"),
    ({"k": (1, 16, 8)}, r"k_BSKH: shape \(1, 4, 8\) is not \[batch, tokens, heads, width\]"),
    ({"v": (1, 16, 2, 0)}, r"v_BSKW: shape \(1, 4, 2, 0\) has no elements"),
    ({"q": (1, 0, 8, 4), "k": (1, 0, 2, 4), "v": (1, 0, 2, 4)}, r"q_BSNH: shape \(1, 0, 8, 4\) has no elements"),
    ({"dtype": jnp.int32}, r"q_BSNH: int32 are not floating-point numbers"),
    ({"sinks_N": jnp.zeros(8, jnp.int32)}, r"sinks_N: int32 are not floating-point numbers"),
    ({"axis": ("seq",)}, r"axis: \('seq',\) is not the name of one mesh axis"),
    ({"block": 0}, r"block: 0 must be at least 1 token"),
    ({"window": -1}, r"window: -1 must not be negative"),
    ({"window": 2.5}, r"window: float\d+\[\] is not one whole number"),
    ({"softcap": 0.0}, r"softcap: 0.0 must be positive"),
]


@pytest.mark.parametrize(("case", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input(case, message):
    with pytest.raises(ValueError, match=message) as error:
        traced(**case)
    assert "\n" not in str(error.value)
    assert traced().shape == (1, 16, 8, 4)


def test_a_window_of_any_integer_type():
    assert traced(causal=False, window=np.int64(0)).shape == traced(window=np.int32(3)).shape == (1, 16, 8, 4)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_window_as_long_as_the_row_is_none(layout, monkeypatch):
    """It hides nothing, and must not keep cuDNN from any block."""
    taken = []
    monkeypatch.setattr(context_parallel, "attend", lambda settings, q, *rest: taken.append(settings) or q)
    monkeypatch.setattr(context_parallel, "cudnn_covers", lambda *_, **__: None)
    for window in (0, 16, np.int64(17), 15):
        traced(layout=layout, window=window, platform="gpu")
    assert taken[0] == taken[1] == taken[2] != taken[3] and taken[0].cudnn


def test_degrees_of_many_heads_are_found_at_once():
    with pytest.raises(ValueError, match=r"degrees that work: 1, 2, 4, .*1000000000000$"):
        ContextConfig(method="ulysses").check_heads(10**12, 10**12, 3)


@pytest.mark.parametrize("name", ["q_BSNH", "k_BSKH", "v_BSKW"])
def test_a_value_that_the_axis_does_not_split(name):
    """Whole rows are no shards: they would be attended to once for each device."""
    mesh = make_mesh(MeshShape(seq=2), jax.devices()[:2])
    specs = [P() if name.startswith(which) else P(None, "seq") for which in "qkv"]
    whole = jax.shard_map(attention, mesh=mesh, in_specs=tuple(specs), out_specs=P(None, "seq"))
    x = jnp.zeros((1, 8, 2, 4))
    shapes = [x if spec == P() else jnp.zeros((1, 16, 2, 4)) for spec in specs]
    with pytest.raises(TypeError, match=f"^{name}: it does not vary over 'seq'"):
        jax.eval_shape(whole, *shapes)
    unchecked = jax.shard_map(attention, mesh=mesh, in_specs=(P(None, "seq"),) * 3, out_specs=P(None, "seq"), check_vma=False)
    with pytest.raises(TypeError, match=r"shard_map with check_vma=True"):
        jax.eval_shape(unchecked, *[jnp.zeros((1, 16, 2, 4))] * 3)
