"""Every operation, read whole, by boxes and through its inverse, against numpy; layouts that checkpoints really have."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_bridge.casting import Cast
from torch_bridge.joining import Concatenate, Divide, Stack, Unstack
from torch_bridge.transforms import Chain, Crop, Each, Merge, Pad, Permute, Split, Transpose
from torch_bridge.views import ArrayView, box_shape, boxes, read_all, slices

# transform, shapes of its inputs, what numpy makes of them
CASES = {
    "split": (Split(0, (3, 4)), [(12, 5)], lambda a: [a.reshape(3, 4, 5)]),
    "split in three": (Split(1, (2, 3, 2)), [(2, 12, 3)], lambda a: [a.reshape(2, 2, 3, 2, 3)]),
    "merge": (Merge(1, (3, 4)), [(5, 3, 4)], lambda a: [a.reshape(5, 12)]),
    "merge of three": (Merge(0, (2, 3, 4)), [(2, 3, 4, 2)], lambda a: [a.reshape(24, 2)]),
    "transpose": (Transpose((2, 0, 1)), [(2, 3, 4)], lambda a: [a.transpose(2, 0, 1)]),
    "permute": (Permute(1, (2, 0, 3, 1)), [(3, 4)], lambda a: [a[:, [2, 0, 3, 1]]]),
    "pad": (Pad(0, 5, 8), [(5, 3)], lambda a: [np.pad(a, ((0, 3), (0, 0)))]),
    "crop": (Crop(1, 2, 4), [(3, 4)], lambda a: [a[:, :2]]),
    "stack": (Stack(3), [(2, 4)] * 3, lambda *a: [np.stack(a)]),
    "unstack": (Unstack(2), [(2, 3, 4)], lambda a: list(a)),
    "concatenate": (Concatenate(1, (2, 1, 3)), [(4, 2), (4, 1), (4, 3)], lambda *a: [np.concatenate(a, 1)]),
    "divide": (Divide(0, (2, 4)), [(6, 3)], lambda a: [a[:2], a[2:]]),
    "cast": (Cast("int64", "float64"), [(3, 4)], lambda a: [a.astype(np.float64)]),
    "each": (Each(Split(0, (2, 3))), [(6, 2), (6, 2)], lambda *a: [part.reshape(2, 3, 2) for part in a]),
    "heads of stacked layers": (
        Chain((Each(Chain((Split(1, (2, 3)), Transpose((1, 2, 0))))), Stack(2))),
        [(4, 6)] * 2,
        lambda *a: [np.stack([part.reshape(4, 2, 3).transpose(1, 2, 0) for part in a])],
    ),
}


def inputs(shapes):
    """Arrays whose entries are all different."""
    starts = np.cumsum([0, *(math.prod(shape) for shape in shapes)])
    return [np.arange(start, start + math.prod(shape)).reshape(shape) for start, shape in zip(starts, shapes)]


def views(arrays):
    return tuple(map(ArrayView, arrays))


@pytest.mark.parametrize("name", CASES)
def test_read_whole(name):
    transform, shapes, expected = CASES[name]
    arrays = inputs(shapes)
    for view, wanted in zip(transform.apply(views(arrays)), expected(*arrays), strict=True):
        assert view.shape == wanted.shape
        assert np.array_equal(read_all(view), wanted)


@pytest.mark.parametrize("name", [name for name in CASES if name != "crop"])
def test_inverse_gives_back_the_inputs(name):
    transform, shapes, _ = CASES[name]
    arrays = inputs(shapes)
    back = transform.inverse.apply(transform.apply(views(arrays)))
    assert all(np.array_equal(read_all(view), array) for view, array in zip(back, arrays, strict=True))
    assert transform.inverse.inverse == transform


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_box(data):
    transform, shapes, expected = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    arrays = inputs(shapes)
    outputs = transform.apply(views(arrays))
    place = data.draw(st.integers(0, len(outputs) - 1))
    view, wanted = outputs[place], expected(*arrays)[place]
    index = []
    for size in view.shape:
        start = data.draw(st.integers(0, size - 1))
        index.append((start, data.draw(st.integers(start + 1, size))))
    # into a part of a larger array, so that reshaping makes copies
    frame = np.zeros([2 * size for size in box_shape(index)], view.dtype)
    out = frame[tuple(slice(0, 2 * size, 2) for size in box_shape(index))]
    view.read(tuple(index), out)
    assert np.array_equal(out, wanted[slices(index)])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_boxes_are_the_run_in_order(sizes, data):
    total = math.prod(sizes)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    labels = np.arange(total).reshape(sizes)
    found = np.concatenate([labels[slices(box)].ravel() for box in boxes(start, stop, tuple(sizes))])
    assert np.array_equal(found, np.arange(start, stop))


class Counting(ArrayView):
    """Counts the entries that are read."""

    count = 0

    def read(self, index, out):
        Counting.count += math.prod(box_shape(index))
        super().read(index, out)


@pytest.mark.parametrize("name", ["split", "merge", "transpose", "stack", "concatenate", "heads of stacked layers"])
def test_a_box_reads_no_more_than_it_holds(name):
    transform, shapes, _ = CASES[name]
    (view, *_) = transform.apply(tuple(map(Counting, inputs(shapes))))
    index = tuple((size // 2, size) for size in view.shape)
    Counting.count = 0
    view.read(index, np.empty(box_shape(index), np.int64))
    assert Counting.count == math.prod(box_shape(index))


def test_cast_rounds_to_even_and_back_is_exact_for_wider_types():
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    narrow = np.where(bits & 0x7F80 == 0x7F80, 0, bits).astype(np.uint16).view(ml_dtypes.bfloat16)
    wide = Cast("bfloat16", "float32")
    back = wide.inverse.apply(wide.apply((ArrayView(narrow),)))
    assert read_all(back[0]).tobytes() == narrow.tobytes()
    fine = np.array([1 + 2**-9, 1 + 3 * 2**-9], np.float32)
    (rounded,) = Cast("float32", "bfloat16").apply((ArrayView(fine),))
    assert read_all(rounded).astype(np.float32).tolist() == [1.0, 1 + 2 * 2**-8]  # control: the other way loses bits


def test_cast_in_chunks(monkeypatch):
    monkeypatch.setattr("torch_bridge.casting.CHUNK_BYTES", 64)
    array = np.arange(7 * 5 * 3, dtype=np.float32).reshape(7, 5, 3)
    (view,) = Cast("float32", "float64").apply((ArrayView(array),))
    assert np.array_equal(read_all(view), array)


def test_half_split_rope_from_interleaved():
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    labels = np.arange(16).reshape(2, 8)
    (view,) = Permute(1, order).apply((ArrayView(labels),))
    assert read_all(view)[0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    (back,) = Permute(1, order).inverse.apply((ArrayView(read_all(view)),))
    assert np.array_equal(read_all(back), labels)
    assert Permute(1, order).inverse != Permute(1, order)


def test_rope_tail_of_a_head_alone():
    (view,) = Permute(0, (0, 1, 2, 3, 4, 6, 5, 7)).apply((ArrayView(np.arange(8)),))
    assert read_all(view).tolist() == [0, 1, 2, 3, 4, 6, 5, 7]


def test_megatrons_grouped_fused_projection():
    """4 heads in 2 groups lie as q0 q1 k0 v0 q2 q3 k1 v1."""
    names = np.array(["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"])
    (grouped,) = Split(0, (2, 4)).apply((ArrayView(names),))
    query, key, value = Divide(1, (2, 1, 1)).apply((grouped,))
    (flat,) = Merge(0, (2, 2)).apply((query,))
    assert read_all(flat).tolist() == ["q0", "q1", "q2", "q3"]
    assert read_all(key)[:, 0].tolist() == ["k0", "k1"]
    assert read_all(value)[:, 0].tolist() == ["v0", "v1"]
    (again,) = Concatenate(1, (2, 1, 1)).apply((query, key, value))
    (back,) = Merge(0, (2, 4)).apply((again,))
    assert read_all(back).tolist() == names.tolist()


def test_square_matrix_of_a_conv1d_is_transposed():
    labels = np.arange(9).reshape(3, 3)  # [in, out]
    (view,) = Transpose((1, 0)).apply((ArrayView(labels),))
    assert read_all(view)[2, 1] == labels[1, 2] != labels[2, 1]
