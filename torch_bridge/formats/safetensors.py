"""The safetensors format: a strict reader of headers, tensors read box by box, and a writer.

    read_header     file -> tensors and everything wrong with it; reads no data
    FileTensor      a tensor in a file, as a view: reads just the bytes of a box
    write_file      views -> one file

A file is the header's length (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets), the data. Strict: data
must lie gapless, without overlap, up to the end of the file. Source: the format's README, huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from torch_bridge.report import Problem
from torch_bridge.views import Index, Shape, View, box_shape, read_all, whole

LONGEST_HEADER = 100_000_000
WINDOW = 16 * 2**20  # bytes of a file that are mapped at a time
RUN = 2**18  # bytes in a row from which on reading beats mapping
LONGEST_READ = 2**30

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
assert sys.byteorder == "little", "files are little-endian, and bytes are copied as they are"


@dataclass(frozen=True, eq=False)
class FileTensor:
    """`name` in the file `path`, its data from byte `offset` on. A view; the file is opened for each read."""

    path: Path
    name: str
    dtype: np.dtype
    shape: Shape
    offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: Index, out: np.ndarray) -> None:
        """Whole runs of 256 KiB and more are read into `out` itself, shorter ones copied from a mapped window."""
        shape, item = box_shape(index), self.dtype.itemsize
        assert out.shape == shape and out.dtype == self.dtype, f"{self.name}: {out.shape} {out.dtype} for {shape} {self.dtype}"
        if not out.size:
            return
        # The dims behind `inner` are whole, so that from `inner` on the box is one run of the file for every entry of the dims before.
        inner = max(len(shape) - 1, 0)
        while inner and shape[inner] == self.shape[inner]:
            inner -= 1
        outer, run = shape[:inner], math.prod(shape[inner:]) * item
        with self.path.open("rb", buffering=0) as file:
            if run >= RUN or math.prod(outer) == 1:
                for place in np.ndindex(*outer):
                    start = tuple(low + step for (low, _), step in zip(index, place)) + tuple(low for low, _ in index[inner:])
                    self._read_run(file, self._byte(start), out[(*place, ...)])
            else:
                self._read_windows(file, index, out)

    def _byte(self, entry: tuple[int, ...]) -> int:
        """Where an entry lies in the file."""
        flat = 0
        for place, size in zip(entry, self.shape):
            flat = flat * size + place
        return self.offset + flat * self.dtype.itemsize

    def _read_run(self, file: BinaryIO, begin: int, out: np.ndarray) -> None:
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        left: memoryview = target.reshape(-1).view(np.uint8).data
        while left:
            count = os.preadv(file.fileno(), [left[:LONGEST_READ]], begin)
            if not count:
                raise OSError(f"{self.path}: {self.name}: the file ended while it was read; it changed since its header was checked")
            left, begin = left[count:], begin + count
        if target is not out:
            out[...] = target

    def _read_windows(self, file: BinaryIO, index: Index, out: np.ndarray) -> None:
        """The box, cut along its first varying dim so that each part spans at most a window of the file."""
        first = tuple(start for start, _ in index)
        last = tuple(stop - 1 for _, stop in index)
        begin, end = self._byte(first), self._byte(last) + self.dtype.itemsize
        dim = next((place for place, (start, stop) in enumerate(index) if stop - start > 1), None)
        if end - begin > WINDOW and dim is not None:
            start, stop = index[dim]
            step = max(1, (stop - start) * WINDOW // (end - begin))
            for low in range(start, stop, step):
                high = min(stop, low + step)
                part = out[(slice(None),) * dim + (slice(low - start, high - start),)]
                self._read_windows(file, index[:dim] + ((low, high),) + index[dim + 1 :], part)
            return
        if os.fstat(file.fileno()).st_size < end:
            raise OSError(f"{self.path}: {self.name}: the file is shorter than when its header was checked")
        page = begin - begin % mmap.ALLOCATIONGRANULARITY
        strides = tuple(math.prod(self.shape[place + 1 :]) * self.dtype.itemsize for place in range(len(self.shape)))
        words = np.dtype(f"u{self.dtype.itemsize}")  # bits are copied, never numbers
        with mmap.mmap(file.fileno(), end - page, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED, offset=page) as window:
            box = np.ndarray(out.shape, words, window, begin - page, strides)
            np.copyto(out.view(words), box)
            del box


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key that stands twice")
    return found


def _constant(text: str) -> Any:
    raise ValueError(f"{text}, which is no JSON")


def strict_json(data: bytes) -> Any:
    """JSON in UTF-8: no key twice, no NaN, no nesting without end. ValueError says what it is instead."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise ValueError("bytes that are no UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    return value


def instead(path: Path) -> str:
    """What is there where a file should be, or cannot be read."""
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, which is not there"
    return "a folder" if path.is_dir() else "something else" if path.exists() else "none"


def read_header(path: Path) -> tuple[dict[str, FileTensor], list[Problem]]:
    """The tensors of a file by name, and what is wrong with it. Reads the header and the file's size, no data.

    A tensor whose own entry is sound is returned although others are not, so that it is not reported as missing too.
    """

    def fault(expected: str, found: str, tensor: str = "") -> Problem:
        return Problem(path.name, tensor, expected, found)

    try:
        if not path.exists() or not stat.S_ISREG(path.stat().st_mode):
            return {}, [fault("a file", instead(path))]
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                return {}, [fault("a header, at least 8 bytes", f"{size} bytes")]
            length = int.from_bytes(prefix, "little")
            if length > LONGEST_HEADER or length > size - 8:
                return {}, [fault(f"a header within the file's {size} bytes and {LONGEST_HEADER:,}", f"a header of {length} bytes")]
            text = file.read(length)
    except OSError as error:
        return {}, [fault("a readable file", error.strerror or type(error).__name__)]
    if len(text) < length:
        return {}, [fault(f"a header of {length} bytes", f"{len(text)} bytes")]
    if not text.startswith(b"{"):
        return {}, [fault("a header that begins with {", repr(text[:8]))]
    try:
        header = strict_json(text)
    except ValueError as error:
        return {}, [fault("a header of JSON", str(error))]
    tensors, problems = _entries(path, header, 8 + length)
    if not problems:
        problems = _layout(path, tensors, 8 + length, size)
    return tensors, problems


def _entries(path: Path, header: Mapping[str, Any], begin: int) -> tuple[dict[str, FileTensor], list[Problem]]:
    tensors: dict[str, FileTensor] = {}
    problems: list[Problem] = []
    for name, entry in header.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
                problems.append(Problem(path.name, name, "an object of strings", repr(entry)))
            continue
        wrong = _entry_fault(entry)
        if wrong:
            problems.append(Problem(path.name, name, *wrong))
        else:
            start = entry["data_offsets"][0]
            tensors[name] = FileTensor(path, name, DTYPES[entry["dtype"]], tuple(entry["shape"]), begin + start)
    return tensors, problems


def _entry_fault(entry: Any) -> tuple[str, str] | None:
    """(expected, found) of the first thing wrong with an entry of a header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "an object of dtype, shape and data_offsets", repr(entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"a dtype among {', '.join(DTYPES)}", repr(dtype)
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**63 for size in shape) or len(shape) > 32:
        return "a shape of whole numbers", repr(shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(place) is int and 0 <= place < 2**63 for place in offsets):
        return "two data_offsets", repr(offsets)
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        return f"data_offsets {needed} bytes apart for {dtype} {shape}", repr(offsets)
    return None


def _layout(path: Path, tensors: Mapping[str, FileTensor], begin: int, size: int) -> list[Problem]:
    """Data gapless from the header's end to the file's."""
    problems, end = [], begin
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset < end:
            problems.append(Problem(path.name, tensor.name, f"data from offset {end - begin} on", f"an overlap at {tensor.offset - begin}"))
        elif tensor.offset > end:
            problems.append(Problem(path.name, tensor.name, f"data at offset {end - begin}", f"a gap before {tensor.offset - begin}"))
        end = max(end, tensor.offset + tensor.bytes)
    if end > size:
        cut = [tensor.name for tensor in tensors.values() if tensor.offset + tensor.bytes > size]
        names = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
        problems.append(Problem(path.name, "", f"{end} bytes", f"{size} bytes, which cut off {names}"))
    elif end < size:
        problems.append(Problem(path.name, "", f"{end} bytes", f"{size} bytes: {size - end} behind the last tensor"))
    return problems


def write_file(path: Path, tensors: Mapping[str, View]) -> None:
    """One file of `tensors`, in their order, flushed to disk. Holds one tensor at a time, or one slice of 64 MiB of its first dim."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, view in tensors.items():
        size = math.prod(view.shape) * view.dtype.itemsize
        header[name] = {"dtype": NAMES[view.dtype], "shape": list(view.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for view in tensors.values():
            for part in _parts(view):
                file.write(part.reshape(-1).view(np.uint8))
        file.flush()
        os.fsync(file.fileno())


def _parts(view: View) -> Any:
    if not view.shape or not math.prod(view.shape):
        yield read_all(view)
        return
    rows, row = view.shape[0], math.prod(view.shape[1:]) * view.dtype.itemsize
    step = max(1, 64 * 2**20 // row)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        out = np.empty((stop - start, *view.shape[1:]), view.dtype)
        view.read(((start, stop), *whole(view.shape[1:])), out)
        yield out
