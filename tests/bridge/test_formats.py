"""safetensors against the library of that name: what we accept it accepts, and reads the same; what it writes we read."""

import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.bridge.loading import raw
from torch_bridge.formats import safetensors as ours
from torch_bridge.formats.huggingface import INDEX, SINGLE, shards, whole_folder, write_tensors
from torch_bridge.formats.safetensors import read_header, strict_json, write_file
from torch_bridge.views import ArrayView, box_shape, read_all, slices

TENSORS = {
    "bf16": torch.randn(5, 7).to(torch.bfloat16),
    "f16": torch.randn(3, 4, 5).to(torch.float16),
    "f32": torch.randn(9),
    "f64": torch.randn(2, 2, dtype=torch.float64),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "i64": torch.arange(6).reshape(2, 3),
    "bool": torch.tensor([True, False]),
    "f8": torch.randn(4, 4).to(torch.float8_e4m3fn),
}


def file_of(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_library_writes(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    tensors, problems = read_header(path)
    assert problems == [] and tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].shape == tuple(tensor.shape)
        assert read_all(tensors[name]).tobytes() == raw(tensor).tobytes(), name


def test_the_library_reads_what_we_write(tmp_path):
    source, path = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(TENSORS, source)
    tensors, _ = read_header(source)
    write_file(path, tensors)
    again = load_file(path)
    assert list(read_header(path)[0]) == list(tensors)
    for name, tensor in TENSORS.items():
        assert again[name].dtype == tensor.dtype and raw(again[name]).tobytes() == raw(tensor).tobytes(), name


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    path = tmp_path_factory.mktemp("block") / "a.safetensors"
    array = np.arange(6 * 50 * 40, dtype=np.int32).reshape(6, 50, 40)
    safetensors.numpy.save_file({"first": np.zeros(3, np.uint8), "block": array}, path)
    return read_header(path)[0]["block"], array


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_box_of_a_file(block, monkeypatch, data):
    tensor, array = block
    monkeypatch.setattr(ours, "WINDOW", data.draw(st.sampled_from([64, 4096, 2**20])))
    monkeypatch.setattr(ours, "RUN", data.draw(st.sampled_from([0, 100, 2**18])))
    index = []
    for size in tensor.shape:
        start = data.draw(st.integers(0, size - 1))
        index.append((start, data.draw(st.integers(start + 1, size))))
    frame = np.zeros([2 * size for size in box_shape(index)], np.int32)
    outs = [np.empty(box_shape(index), np.int32), frame[tuple(slice(0, 2 * size, 2) for size in box_shape(index))]]
    for out in outs:
        tensor.read(tuple(index), out)
        assert np.array_equal(out, array[slices(index)])


def test_a_file_that_shrank_since_is_an_error(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.randn(100, 100)}, path)
    tensor = read_header(path)[0]["a"]
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(OSError, match="a: the file"):
        read_all(tensor)
    with pytest.raises(OSError, match="a: the file"):
        tensor.read(((0, 100), (10, 11)), np.empty((100, 1), np.float32))


BROKEN = {
    "empty": b"",
    "short": b"\x01\x00",
    "header past the end": file_of({"a": entry()}, bytes(8), length=10_000),
    "huge header": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": file_of(b"{nonsense"),
    "a list": file_of(b"[]"),
    "no UTF-8": file_of(b'{"\xff": 1}'),
    "lone surrogate": file_of(b'{"\\ud800": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "NaN": file_of(b'{"a": {"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)),
    "nested": file_of(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "a key twice": file_of(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"
    ),
    "pickle": b"\x80\x04\x95" + bytes(100),
    "metadata no strings": file_of({"__metadata__": {"a": 1}}),
    "no entry": file_of({"a": 3}),
    "extra key": file_of({"a": {**entry(), "more": 1}}, bytes(8)),
    "dtype": file_of({"a": entry("F31")}, bytes(8)),
    "dtype no string": file_of({"a": entry(["F32"])}, bytes(8)),
    "negative size": file_of({"a": entry(shape=(-2,))}, bytes(8)),
    "float size": file_of({"a": entry(shape=(2.0,))}, bytes(8)),
    "boolean size": file_of({"a": entry(shape=(True, 2))}, bytes(8)),
    "overflow": file_of({"a": entry(shape=(2**62, 2**62), offsets=(0, 0))}),
    "offsets and shape disagree": file_of({"a": entry(shape=(3,))}, bytes(8)),
    "offsets reversed": file_of({"a": entry(shape=(0,), offsets=(8, 0))}, bytes(8)),
    "out of range": file_of({"a": entry(offsets=(4, 12))}, bytes(8)),
    "overlap": file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "gap": file_of({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "gap at the beginning": file_of({"a": entry(offsets=(4, 12))}, bytes(12)),
    "truncated": file_of({"a": entry()}, bytes(7)),
    "trailing": file_of({"a": entry()}, bytes(9)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_reported(tmp_path, name):
    path = tmp_path / "a.safetensors"
    path.write_bytes(BROKEN[name])
    _, problems = read_header(path)
    assert problems and all(problem.file == "a.safetensors" and str(problem).isprintable() for problem in problems)
    str(problems[0]).encode()


def test_what_is_no_file(tmp_path):
    import os

    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would wait for ever
    for name in ("folder.safetensors", "pipe.safetensors", "absent.safetensors"):
        assert len(read_header(tmp_path / name)[1]) == 1


def test_truncation_names_the_tensors(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_of({"a": entry(), "b": entry(offsets=(8, 16))}, bytes(12)))
    tensors, (problem,) = read_header(path)
    assert problem.found.endswith("which cut off b") and tensors.keys() == {"a", "b"}


VALID = file_of(
    {"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", (2, 3), (8, 20)), "c": entry("U8", (), (20, 21))}, bytes(range(21))
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 2**70) | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "BF16", "U8"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "Q4"]) | json_values,
        "shape": st.lists(st.integers(0, 3), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), entries | json_values, max_size=3)


@st.composite
def hostile_files(draw):
    kind = draw(st.sampled_from(["bytes", "flips", "cut", "header", "text"]))
    if kind == "bytes":
        return draw(st.binary(max_size=64))
    if kind == "flips":
        data = bytearray(VALID)
        for place, value in draw(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4)):
            data[place] = value
        return bytes(data)
    if kind == "cut":
        place = draw(st.integers(0, len(VALID)))
        return VALID[:place] + draw(st.binary(max_size=8)) + VALID[draw(st.integers(place, len(VALID))) :]
    if kind == "text":
        return file_of(draw(st.text(max_size=40)).encode("utf-8", "surrogatepass"), draw(st.binary(max_size=16)))
    return file_of(json.dumps(draw(headers)).encode(), draw(st.binary(max_size=24)))


def check_hostile(folder, data):
    """A report, or a file that the library reads too, and just as we do: no crash, no silent success."""
    path = folder / "fuzz.safetensors"
    path.write_bytes(data)
    tensors, problems = read_header(path)
    for problem in problems:
        assert str(problem).isprintable()
    if problems:
        return False
    library = safetensors.deserialize(data)
    assert {name: tuple(found["shape"]) for name, found in library} == {name: tensor.shape for name, tensor in tensors.items()}
    for name, found in library:
        assert found["dtype"] == ours.NAMES[tensors[name].dtype]
        assert read_all(tensors[name]).tobytes() == bytes(found["data"])
    return True


FUZZ = {"deadline": 5000, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@given(hostile_files())
@settings(max_examples=200, **FUZZ)
def test_hostile_headers(tmp_path, data):
    check_hostile(tmp_path, data)


@pytest.mark.slow
@given(hostile_files())
@settings(max_examples=2000, **FUZZ)
def test_hostile_headers_at_length(tmp_path, data):
    check_hostile(tmp_path, data)


def test_the_fuzz_can_tell(tmp_path, monkeypatch):
    """Sound files pass, and a reader that overlooks overlaps does not."""
    assert check_hostile(tmp_path, VALID)
    monkeypatch.setattr(ours, "_layout", lambda *arguments: [])
    with pytest.raises(safetensors.SafetensorError):
        check_hostile(tmp_path, BROKEN["overlap"])


def test_strict_json():
    assert strict_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    for text in (b'{"a": 1, "a": 2}', b'{"a": Infinity}', b"\xff", b"[" * 100_000, b"", b'"\\udc00"', b"1" * 5000):
        with pytest.raises(ValueError):
            strict_json(text)


def test_shards_by_size(tmp_path):
    views = {f"t{number}": ArrayView(np.full((10, 10), number, np.float32)) for number in range(5)}
    views["large"] = ArrayView(np.zeros((30, 10), np.float32))
    assert shards(views, 1000) == [["t0", "t1"], ["t2", "t3"], ["t4"], ["large"]]
    write_tensors(tmp_path, views, 1000)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 400 + 1200
    assert index["weight_map"]["t3"] == "model-00002-of-00004.safetensors"
    for name, file in index["weight_map"].items():
        assert np.array_equal(safetensors.numpy.load_file(tmp_path / file)[name], views[name].array)
    assert not (tmp_path / SINGLE).exists()


def test_a_folder_is_whole_or_absent(tmp_path):
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "deep" / "out") as temporary:
        (temporary / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with whole_folder(tmp_path / "deep" / "out") as temporary:
        (temporary / "all").write_text("x")
    assert [path.name for path in (tmp_path / "deep" / "out").iterdir()] == ["all"]
    with pytest.raises(ValueError, match="exists already"), whole_folder(tmp_path / "deep" / "out"):
        raise AssertionError
