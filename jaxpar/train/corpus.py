"""Where documents come from: text to tokenize, or folders of tokens already made.

    documents          text documents of `embedded`, `text` and `jsonl`, one at a time
    Tokens             one stream of token ids with the offset where each document starts
    collect            documents of ids in memory
    read_tokens        a folder, memory-mapped: tokens.bin, documents.npy, meta.json, tokenizer.json if there is one
    write_tokens       that folder, whole or not at all
    check_ids          refuse an id outside the vocabulary, by position

T tokens of the whole stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import pydoc_data.topics
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxpar.config import DataConfig

STREAM, OFFSETS, META, TOKENIZER = "tokens.bin", "documents.npy", "meta.json", "tokenizer.json"
# Looking at every id of a file takes a second per 2 GiB; what lies beyond this many is checked row by row as it is read.
SCAN = 2**31
CHUNK = 2**24
SAMPLES, PIECE = 64, 2**14


@dataclass(frozen=True)
class Tokens:
    """`stream_T` of unsigned ids below `vocabulary`; document i is `stream_T[offsets[i]:offsets[i + 1]]`. `origin` names it in errors."""

    stream_T: np.ndarray
    offsets: np.ndarray
    vocabulary: int
    origin: str = "corpus"

    def joined(self) -> Tokens:
        """The same stream as a single document."""
        return replace(self, offsets=self.offsets[[0, -1]])

    def fingerprint(self) -> dict[str, int | str]:
        """What tells this stream from another: tokens, documents, vocabulary, and a SHA-256 of samples of ids and offsets.

        At most `SAMPLES` pieces of `PIECE` entries are read of either, evenly spaced, the ends among them, so that terabytes cost no more.
        """
        digest = hashlib.sha256()
        for array in (self.stream_T, self.offsets):
            last = max(len(array) - PIECE, 0)
            for start in sorted({last * n // (SAMPLES - 1) for n in range(SAMPLES)}):
                digest.update(np.asarray(array[start : start + PIECE], dtype="<i8").tobytes())
        return {
            "tokens": len(self.stream_T),
            "documents": len(self.offsets) - 1,
            "vocabulary": self.vocabulary,
            "sha256": digest.hexdigest(),
        }


def documents(data: DataConfig) -> Iterator[str]:
    """Text documents of `data.source`, in a fixed order; those of white space only are left out.

    Raises ValueError for a missing path, bytes that are not UTF-8, a JSON line without `data.field`, or a corpus without text.
    """
    assert data.source != "tokens", "a folder of tokens holds no text"
    found = False
    for text in _SOURCES[data.source](data):
        if text.strip():
            found = True
            yield text
    if not found:
        raise ValueError(f"data.path: {data.path} holds no text: name a file or folder with at least one document that is not blank")


def _embedded(data: DataConfig) -> Iterator[str]:
    for _, text in sorted(pydoc_data.topics.topics.items()):
        yield text


def _text(data: DataConfig) -> Iterator[str]:
    for file in _files(data, "*.txt"):
        try:
            yield file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"data.path: {file} is not UTF-8 at byte {error.start}: convert it") from None


def _jsonl(data: DataConfig) -> Iterator[str]:
    for file in _files(data, "*.jsonl"):
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"data.path: {file} line {number} is not JSON ({error}): mend or remove the line") from None
                text = record.get(data.field) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    held = f"it has {', '.join(sorted(record)) or 'nothing'}" if isinstance(record, dict) else "it is not an object"
                    raise ValueError(f"data.field: {file} line {number} has no text in {data.field!r} ({held}): name the field that has it")
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise ValueError(
                        f"data.path: {file} line {number} holds half a character, {text[error.start]!r}: mend or remove the line"
                    ) from None
                yield text


_SOURCES = {"embedded": _embedded, "text": _text, "jsonl": _jsonl}


def _files(data: DataConfig, pattern: str) -> list[Path]:
    assert data.path is not None
    path = Path(data.path)
    if path.is_dir():
        files = sorted(path.rglob(pattern))
        if not files:
            raise ValueError(f"data.path: folder {path} has no {pattern} file: name the folder that has, or a file")
        return files
    if not path.is_file():
        raise ValueError(f"data.path: {path} does not exist: name a file or a folder of {pattern}")
    return [path]


def collect(ids: Iterable[np.ndarray], vocabulary: int) -> Tokens:
    """Documents of ids joined in memory: one uint32 stream and int64 offsets [documents + 1]."""
    pieces = [np.asarray(document, np.uint32) for document in ids]
    offsets = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    stream_T = np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)
    return Tokens(stream_T, offsets, vocabulary)


def read_tokens(folder: str | Path) -> Tokens:
    """Open a folder of `write_tokens`; the stream stays on disk, memory-mapped.

    Raises ValueError naming the file for a folder that is missing, incomplete, empty, or whose sizes and offsets disagree.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"data.path: {folder} is not a folder: name one written by `jaxpar tokenize`")
    for name in (META, STREAM, OFFSETS):
        if not (folder / name).is_file():
            raise ValueError(f"data.path: {folder / name} is missing: write the folder again with `jaxpar tokenize`")
    try:
        meta = json.loads((folder / META).read_text())
        vocabulary, dtype = int(meta["vocabulary"]), np.dtype({"uint16": "<u2", "uint32": "<u4"}[meta["dtype"]])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f'data.path: {folder / META} needs "vocabulary" (a number) and "dtype" (uint16 or uint32): {error!r}') from None
    size = (folder / STREAM).stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise ValueError(
            f"data.path: {folder / STREAM} has {size} bytes, not a positive multiple of {dtype.itemsize} as {meta['dtype']} needs"
        )
    count = size // dtype.itemsize
    try:
        offsets = np.load(folder / OFFSETS, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"data.path: {folder / OFFSETS} is not a file of offsets ({error}): write the folder again") from None
    ordered = offsets.ndim == 1 and len(offsets) >= 2 and offsets.dtype.kind in "iu" and bool(np.all(offsets[1:] >= offsets[:-1]))
    if not ordered or offsets[0] != 0 or offsets[-1] != count:
        raise ValueError(f"data.path: {folder / OFFSETS} must rise from 0 to the {count} tokens of {STREAM}: write the folder again")
    return Tokens(np.memmap(folder / STREAM, dtype, mode="r"), offsets.astype(np.int64), vocabulary, str(folder / STREAM))


def write_tokens(folder: str | Path, ids: Iterable[np.ndarray], vocabulary: int, tokenizer: str | None = None) -> Tokens:
    """Write documents of ids as a folder: everything goes to a temporary folder beside it, which is renamed when complete.

    `ids` is consumed once, so a corpus larger than memory may be passed as a generator; `tokenizer` is the text of its tokenizer.json.
    Raises ValueError when the folder is already there, no document has a token, or an id is outside the vocabulary.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"tokens folder {folder} is already there: remove it or name another")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    offsets = [0]
    try:
        temporary.mkdir(parents=True)
        with (temporary / STREAM).open("wb") as stream:
            for document in ids:
                check_ids(np.asarray(document), vocabulary, f"tokens folder {folder}", first=offsets[-1])
                stream.write(np.asarray(document).astype(dtype).tobytes())
                offsets.append(offsets[-1] + len(document))
            _flush(stream)
        if offsets[-1] == 0:
            raise ValueError(f"tokens folder {folder}: the corpus has no tokens")
        np.save(temporary / OFFSETS, np.asarray(offsets, np.int64))
        meta = {
            "vocabulary": vocabulary,
            "dtype": "uint16" if dtype.itemsize == 2 else "uint32",
            "tokens": offsets[-1],
            "documents": len(offsets) - 1,
            "tokenizer": None if tokenizer is None else TOKENIZER,
        }
        (temporary / META).write_text(json.dumps(meta, indent=1) + "\n")
        if tokenizer is not None:
            (temporary / TOKENIZER).write_text(tokenizer, encoding="utf-8")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return read_tokens(folder)


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def check_ids(ids_T: np.ndarray, vocabulary: int, origin: str, first: int = 0) -> None:
    """Raise ValueError at the first id that is not in 0..vocabulary-1, naming its position (`first` is that of `ids_T[0]`)."""
    for start in range(0, len(ids_T), CHUNK):
        chunk = ids_T[start : start + CHUNK]
        if len(chunk) and (int(chunk.max()) >= vocabulary or int(chunk.min()) < 0):
            at = int(np.argmax((chunk >= vocabulary) | (chunk < 0)))
            raise ValueError(
                f"{origin}: id {int(chunk[at])} at position {first + start + at} is outside the vocabulary of {vocabulary}: "
                f"raise model.vocabulary or tokenize again"
            )


def check_tokens(tokens: Tokens, vocabulary: int) -> None:
    """Refuse a stream that a model of `vocabulary` entries cannot read: looks at its first `SCAN` ids. ValueError naming the position."""
    if not len(tokens.stream_T):
        raise ValueError(f"data.path: {tokens.origin} is empty: name a corpus with tokens")
    check_ids(tokens.stream_T[:SCAN], vocabulary, f"data: {tokens.origin}")
