"""From a token stream to batches on devices, through Grain. What a step reads is a function of seed and global step only.

    open_data          the tokens of a configuration, and their tokenizer
    write_folder       the same tokens as a folder, to be read from disk by later runs
    Rows               fixed windows of the stream with segments, positions and labels
    Loader             batches by global step: `batch_at(step)`, or `iterate(first, last)` read ahead in the background
    local_sequences    which sequences of a microbatch this process's devices hold
    lay_out            rows in the order in which the devices of `seq` hold them
    place              a host batch as global jax arrays

B sequences of a microbatch, S sequence, T tokens of the whole stream.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.config import DataConfig
from jaxpar.train import corpus
from jaxpar.train.corpus import Tokens
from jaxpar.train.tokenizer import Tokenizer, encode, load_tokenizer, train_tokenizer

FIELDS = ("ids", "labels", "positions", "segments")
IGNORED = -1
AHEAD = 4

Batch = dict[str, np.ndarray]


def open_data(data: DataConfig) -> tuple[Tokens, Tokenizer | None]:
    """The token stream of `data.source` and the tokenizer that made it (None for a token folder that has none beside it).

    With `data.documents` "joined" the stream counts as one document.
    Text is tokenized here, whole, in memory; token folders stay on disk. Raises ValueError as `corpus` and `tokenizer` do.
    """
    tokens, tokenizer = _read(data)
    return (tokens.joined() if data.documents == "joined" else tokens), tokenizer


def _read(data: DataConfig) -> tuple[Tokens, Tokenizer | None]:
    if data.source == "tokens":
        assert data.path is not None
        tokens = corpus.read_tokens(data.path)
        beside = Path(data.path) / corpus.TOKENIZER
        named = data.tokenizer if data.tokenizer is not None else str(beside) if beside.is_file() else None
        return tokens, None if named is None else load_tokenizer(named)
    if data.source == "embedded" and data.tokenizer is None:
        return _embedded(data.vocabulary)
    return _tokenize(data)


@functools.lru_cache(maxsize=2)
def _embedded(vocabulary: int) -> tuple[Tokens, Tokenizer]:
    return _tokenize(DataConfig(vocabulary=vocabulary))


def _tokenize(data: DataConfig) -> tuple[Tokens, Tokenizer]:
    tokenizer = _tokenizer(data)
    return corpus.collect(encode(tokenizer, corpus.documents(data)), tokenizer.size), tokenizer


def _tokenizer(data: DataConfig) -> Tokenizer:
    """The one that `data.tokenizer` names, or one trained on the corpus."""
    if data.tokenizer is None:
        return train_tokenizer(corpus.documents(data), data.vocabulary)
    return load_tokenizer(data.tokenizer)


def write_folder(data: DataConfig, folder: str | Path) -> Tokens:
    """Tokenize the text of `data` into a new folder for `data.source: tokens`, its tokenizer beside it; documents pass one group at a time.

    Raises ValueError when `data` holds tokens already, or the folder is there; as `corpus` and `tokenizer` do else.
    """
    if data.source == "tokens":
        raise ValueError("data.source: tokens are tokens already; name embedded, text or jsonl")
    tokenizer = _tokenizer(data)
    return corpus.write_tokens(folder, encode(tokenizer, corpus.documents(data)), tokenizer.size, tokenizer.text())


@dataclass(frozen=True)
class Rows:
    """Row i reads tokens i S to i S + S of the stream, one more than it feeds in, so that every token is an input once and a label once.

    ids       S tokens; 0 where padded
    segments  1, 2, … for the pieces of documents in the row; 0, and only 0, is padding (the end of the last row)
    positions count from 0 in each piece; padding has its place in the row, behind every real token, so that causality alone hides it
    labels    the next token, −1 where that belongs to another document or is padding; a document's last token is a label too
    """

    tokens: Tokens
    sequence: int
    vocabulary: int

    def __post_init__(self) -> None:
        corpus.check_tokens(self.tokens, self.vocabulary)

    def __len__(self) -> int:
        return max(1, -(-(len(self.tokens.stream_T) - 1) // self.sequence))

    def __getitem__(self, index: int) -> Batch:
        """Four int32 arrays [S]. Raises ValueError naming the position of an id outside the vocabulary."""
        start = int(index) * self.sequence
        window = np.asarray(self.tokens.stream_T[start : start + self.sequence + 1]).astype(np.int64)
        corpus.check_ids(window, self.vocabulary, f"data: {self.tokens.origin}", first=start)
        place_T = np.arange(start, start + len(window))
        document_T = np.searchsorted(self.tokens.offsets, place_T, side="right")
        first_T = np.concatenate([[True], document_T[1:] != document_T[:-1]])
        piece_T = np.maximum.accumulate(np.where(first_T, place_T, start))
        fed = min(len(window), self.sequence)
        row = {name: np.zeros(self.sequence, np.int32) for name in FIELDS}
        row["labels"][:] = IGNORED
        row["positions"][:] = np.arange(self.sequence)
        row["ids"][:fed] = window[:fed]
        row["segments"][:fed] = np.cumsum(first_T)[:fed]
        row["positions"][:fed] = (place_T - piece_T)[:fed]
        row["labels"][: len(window) - 1] = np.where(first_T[1:], IGNORED, window[1:])
        return row


class Loader:
    """Batches of a run: sequence n of step s is element `s * batch + n` of the shuffled, repeated rows, whoever reads it.

    `accumulation` cuts a step's sequences 0..batch-1 in that many runs of neighbours, so it does not change what a step reads.
    `order` is where a row's tokens go, see `jaxpar/parallel/context/layout.py`; None leaves them as they are.
    Every epoch is a permutation of all rows, another one each time. Raises ValueError for a `data.seed` outside 0..2^32-1.
    """

    def __init__(self, rows: Rows, *, batch: int, accumulation: int, seed: int, shuffle: bool, order: np.ndarray | None = None) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"data.seed: {seed} must be between 0 and {2**32 - 1}")
        assert batch % accumulation == 0
        self.sequence, self.batch, self.accumulation, self.microbatch = rows.sequence, batch, accumulation, batch // accumulation
        self.order = order
        ordered = grain.MapDataset.source(rows)
        self._stream = (ordered.seed(seed).shuffle() if shuffle else ordered).repeat()

    def batch_at(self, step: int, sequences: slice | np.ndarray = slice(None)) -> Batch:
        """The batch of global step `step`; `sequences` picks which of a microbatch's sequences to read (sorted), default all.

        Returns int32 arrays, host memory: ids, labels, positions, segments [accumulation, B, S] and rows [accumulation, B],
        the sequence's number n in the step. Only the rows returned are read.
        """
        picked = np.arange(self.microbatch)[sequences]
        number = np.arange(self.accumulation)[:, None] * self.microbatch + picked
        read = [self._stream[step * self.batch + int(n)] for n in number.reshape(-1)]
        batch = {name: np.stack([row[name] for row in read]).reshape(*number.shape, self.sequence) for name in FIELDS}
        return lay_out(batch, self.order) | {"rows": number.astype(np.int32)}

    def iterate(self, first: int, last: int = sys.maxsize, sequences: slice | np.ndarray = slice(None)) -> Generator[Batch, None, None]:
        """Batches of steps `first`..`last`-1, as `batch_at` gives them, `AHEAD` of them read by a background thread."""
        steps = grain.MapDataset.source(_Steps(self, first, last, sequences))
        batches = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD)))
        try:
            yield from batches
        finally:
            batches.close()


def lay_out(batch: Batch, order: np.ndarray | None) -> Batch:
    """Rows [..., S] in the order that the devices of `seq` hold them, on the host; nothing is reordered on a device. `rows` is no row."""
    return batch if order is None else {name: value if name == "rows" else value[..., order] for name, value in batch.items()}


@dataclass(frozen=True)
class _Steps:
    loader: Loader
    first: int
    last: int
    sequences: slice | np.ndarray

    def __len__(self) -> int:
        return max(0, self.last - self.first)

    def __getitem__(self, index: int) -> Batch:
        return self.loader.batch_at(self.first + int(index), self.sequences)


def local_sequences(sharding: NamedSharding, microbatch: int) -> np.ndarray:
    """Sorted numbers of the sequences, out of a microbatch's 0..microbatch-1, that devices of this process hold.

    `sharding` is that of [accumulation, B, S]: P(None, ("data", "expert"), "seq").
    """
    held: set[int] = set()
    for index in _by_sequence(sharding).addressable_devices_indices_map((1, microbatch)).values():
        assert index is not None
        held.update(range(*index[1].indices(microbatch)))
    return np.asarray(sorted(held))


def _by_sequence(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[:2]))


def place(batch: Batch, sharding: NamedSharding, microbatch: int) -> dict[str, jax.Array]:
    """Global arrays [accumulation, microbatch, S] of a batch that holds at least the sequences of `local_sequences`.

    Each process supplies only its own devices' parts; nothing is sent between devices. `rows` [accumulation, microbatch] takes the
    first two entries of `sharding`.
    """
    held = batch["rows"][0]

    def put(value: np.ndarray, of: NamedSharding) -> jax.Array:
        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            wanted = np.arange(microbatch)[index[1]]
            local = np.minimum(np.searchsorted(held, wanted), len(held) - 1)
            assert np.array_equal(held[local], wanted), f"sequences {wanted} were not read, only {held}"
            return value[index[0]][:, local][(slice(None), slice(None), *index[2:])]

        return jax.make_array_from_callback((value.shape[0], microbatch, *value.shape[2:]), of, part)

    return {name: put(value, _by_sequence(sharding) if name == "rows" else sharding) for name, value in batch.items()}
