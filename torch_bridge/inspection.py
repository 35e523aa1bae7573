"""What a checked folder holds, in lines of text: `torch-bridge inspect`.

parameters    how many the model has
tokenizer_notes   where its tokenizer does not fit
summary       model, dtype, files, every setting and where its value is from, what is ignored
plan          every leaf, the torch tensors it is made of, and where these lie
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from jaxpar.models.decoder import Decoder
from jaxpar.params import count
from jaxpar.train.tokenizer import load_tokenizer
from torch_bridge.formats.huggingface import TOKENIZER
from torch_bridge.report import shown
from torch_bridge.source import Source


def parameters(source: Source) -> int:
    return count(Decoder(source.model, source.model.vocabulary).specs)


def summary(source: Source) -> Iterator[str]:
    """A paragraph, then a table of settings."""
    files = {tensor.path.name for tensor in source.tensors.values()}
    size = sum(tensor.bytes for tensor in source.tensors.values())
    count_of = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    yield f"{source.folder}: {source.family.name}, {parameters(source):,} parameters, {source.dtype}"
    yield f"{len(source.tensors)} tensors of {size / 1e9:.3f} GB in {count_of}"
    if source.carried:
        yield f"beside them: {', '.join(file.name for file in source.carried)}"
    yield ""
    settings = [
        (name, str(value), source.provenance[name]) for name, value in _settings(source.model, "model") if name in source.provenance
    ]
    yield from table(("setting", "value", "from"), settings)
    yield from (f"ignored {shown(key)}: {reason}" for key, reason in source.ignored.items())
    yield from (f"note: {note}" for note in (*source.notes, *tokenizer_notes(source)))


def tokenizer_notes(source: Source) -> Iterator[str]:
    """What jaxpar could not do with the folder's tokenizer. No error: the weights do not depend on it."""
    path = source.folder / TOKENIZER
    if not path.is_file():
        yield f"no {TOKENIZER}: a run on text would train one of its own, whose ids mean nothing to these weights; use token folders"
        return
    try:
        size = load_tokenizer(path).size
    except ValueError as error:
        yield shown(f"{TOKENIZER} cannot be used to train on text or to generate: {error}")
        return
    if size > source.model.vocabulary:
        yield f"{TOKENIZER} has ids up to {size - 1}, the model up to {source.model.vocabulary - 1}: texts with the ids beyond are refused"


def plan(source: Source) -> Iterator[str]:
    """A table: one line a leaf."""
    rows = []
    for binding in source.bindings():
        holders = sorted({source.tensors[key].path.name for key in binding.keys})
        place = holders[0] if len(holders) == 1 else f"{len(holders)} files"
        shape = binding.parameter.shape
        rows.append((" and ".join(binding.paths), _dims(shape), binding.key_range, _dims(binding.torch_shape), place))
    yield from table(("leaf", "shape", "torch key", "shape", "in"), rows)


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as their widest entry."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()


def _dims(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _settings(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for item in fields(section):
        value, name = getattr(section, item.name), f"{prefix}.{item.name}"
        if is_dataclass(value):
            yield from _settings(value, name)
        else:
            yield name, value
