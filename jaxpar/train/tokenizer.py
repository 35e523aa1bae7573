"""Text to token ids and back, through `tokenizers`.

    load_tokenizer     any Hugging Face tokenizer.json
    train_tokenizer    byte-level BPE of a given size, the same from the same documents
    save_tokenizer     tokenizer.json beside checkpoints and token folders
    encode             documents of text to documents of ids, each closed by the end-of-document token

Text is text: a document that spells a special token gets ordinary tokens.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

END = "<|end|>"
# How published tokenizers name the end of a document, most specific first.
KNOWN_ENDS = (END, "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
GROUP = 1024


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers.Tokenizer` and the id that closes a document. Text never produces a special token, however it is spelled."""

    backend: tokenizers.Tokenizer
    end: int

    @property
    def size(self) -> int:
        """Ids lie in 0..size-1."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        return self.encode_all([text])[0]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """ValueError for what this tokenizer has no token for, and for half characters."""
        try:
            return [encoded.ids for encoded in self.backend.encode_batch(texts, add_special_tokens=False)]
        except Exception as error:  # the library raises bare Exception, and TypeError for a str that is no UTF-8
            what = "no text in UTF-8" if isinstance(error, TypeError) else " ".join(str(error).split())
            raise ValueError(
                f"data.tokenizer: the text cannot be encoded ({what}): mend the text or give the tokenizer an unknown token"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens are left out."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=True)

    def text(self) -> str:
        """The contents of tokenizer.json."""
        return self.backend.to_str(pretty=False)


def _wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    end = next((token for name in KNOWN_ENDS if (token := backend.token_to_id(name)) is not None), None)
    if end is None:
        backend.add_special_tokens([END])
        end = backend.token_to_id(END)
        assert end is not None
        if end in backend.get_vocab(with_added_tokens=False).values():
            raise ValueError(f"data.tokenizer: its ids have gaps, so {END} cannot be added at the end: add it to the file")
    backend.encode_special_tokens = True
    backend.no_padding()
    backend.no_truncation()
    return Tokenizer(backend, end)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json. One without any end-of-document token known here gets `<|end|>` as a new last id.

    Raises ValueError naming `data.tokenizer` for a file that is missing or not a tokenizer.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data.tokenizer: {path} does not exist: name a tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"data.tokenizer: {path} is not a tokenizer.json: {' '.join(str(error).split())}") from None
    return _wrap(backend)


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE of at most `vocabulary` entries (fewer when the corpus has no more pairs); `<|end|>` is id 0.

    Raises ValueError when `data.vocabulary` cannot hold every byte and the end token.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if vocabulary < len(alphabet) + 1:
        raise ValueError(f"data.vocabulary: {vocabulary} must be at least {len(alphabet) + 1}, every byte and {END}")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(documents, trainer)
    return _wrap(backend)


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> Path:
    """Write `folder`/tokenizer.json, atomically. Returns its path."""
    path = Path(folder) / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(tokenizer.text(), encoding="utf-8")
    temporary.replace(path)
    return path


def encode(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[np.ndarray]:
    """Each document as uint32 ids, closed by the end token; tokenized in groups by all cores, never the whole corpus at once."""
    remaining = iter(documents)
    while group := list(itertools.islice(remaining, GROUP)):
        for ids in tokenizer.encode_all(group):
            yield np.asarray([*ids, tokenizer.end], np.uint32)
