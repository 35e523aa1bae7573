"""A folder of a torch model, checked: what it holds is known before the first byte of data is read.

Source        family, jaxpar's ModelConfig with the provenance of every field, tensors not yet read
read_model    folder -> Source, or one report of everything that is wrong
bindings      how a family names and lays out a model's parameters
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.config import ModelConfig
from jaxpar.models.decoder import Decoder
from torch_bridge.families import FAMILIES
from torch_bridge.families.decoder import EMBEDDING, HEAD, Family
from torch_bridge.formats.huggingface import CONFIG, Folder, carried, read_folder
from torch_bridge.formats.safetensors import NAMES, FileTensor
from torch_bridge.mapping import Binding, bind, expected_shapes
from torch_bridge.report import BridgeError, Problem

TORCH_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, eq=False)
class Source:
    """A checked folder. `tensors` are those that a leaf is made of; `ignored` maps the others to the reason; `provenance` says for each
    field of the model where its value is from; `dtype` is that of the tensors; `stacked` whether a layer's experts are in one tensor."""

    folder: Path
    family: Family
    model: ModelConfig
    raw: dict[str, Any]
    provenance: dict[str, str]
    dtype: str
    tensors: dict[str, FileTensor]
    ignored: dict[str, str]
    notes: tuple[str, ...]
    stacked: bool = False

    @property
    def carried(self) -> tuple[Path, ...]:
        """Tokenizer and generation files, for an export to take along."""
        return carried(self.folder)

    def bindings(self, vocabulary_padded: int | None = None) -> tuple[Binding, ...]:
        return bindings(self.family, self.model, vocabulary_padded, self.stacked)


def bindings(family: Family, model: ModelConfig, vocabulary_padded: int | None = None, stacked: bool = False) -> tuple[Binding, ...]:
    """How `family` names and lays out the parameters of `model`. Raises ValueError where it has no tensor for one."""
    return bind(family.table(model, stacked), Decoder(model, vocabulary_padded or model.vocabulary).specs)


def read_model(folder: str | Path, *, rope_length: int | None = None, ignore: Collection[str] = (), any_dtype: bool = False) -> Source:
    """Check a folder and say what it holds. Data is read in one case only: a tied model that has a head all the same, which must equal the
    embedding.

    `rope_length`: tokens that dynamic rope assumes. `ignore`: settings of config.json that are unknown here and change no number.
    `any_dtype` takes tensors of other dtypes than config.json says, as long as they are floating point.

    Raises BridgeError with everything that is wrong: files, settings, tensors.
    """
    folder = Path(folder)
    files = read_folder(folder)
    problems = files.problems
    family, model, provenance = _configuration(files, rope_length, frozenset(ignore))
    tensors, ignored, dtype, stacked = files.tensors, {}, "", False
    if family is not None:
        ignored = {key: reason for key in files.tensors for reason in [_reason(family, key)] if reason}
    if family is not None and model is not None:
        if model.tied and HEAD in tensors:
            ignored[HEAD] = "equal to the embedding that it is tied to"
        tensors = {key: tensor for key, tensor in tensors.items() if key not in ignored}
        stacked = _stacked({*tensors, *files.unreadable}, family, model)
        problems += _check_tensors(files, tensors, family, model, stacked)
        dtype, wrong = _dtype(files, tensors, any_dtype)
        problems += wrong
    if not problems and HEAD in ignored:
        problems += _check_tied(files.tensors[HEAD], files.tensors[EMBEDDING])
    if problems:
        raise BridgeError(folder, problems)
    assert family is not None and model is not None
    return Source(folder, family, model, files.config, provenance, dtype, tensors, ignored, tuple(files.notes), stacked)


def _configuration(
    files: Folder, rope_length: int | None, ignore: frozenset[str]
) -> tuple[Family | None, ModelConfig | None, dict[str, str]]:
    if not files.config:
        if not any(problem.file == CONFIG for problem in files.problems):
            files.refuse(CONFIG, "settings", "an empty object")
        return None, None, {}
    kind = files.config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        files.refuse(CONFIG, f"one of {', '.join(FAMILIES)}", repr(kind), "model_type")
        return None, None, {}
    architectures = files.config.get("architectures")
    if architectures not in (None, [FAMILIES[kind].architecture]):
        files.refuse(CONFIG, f"[{FAMILIES[kind].architecture!r}], a language model", repr(architectures), "architectures")
    model, settings = FAMILIES[kind].read(files.config, rope_length, ignore)
    files.problems += settings.problems
    return FAMILIES[kind], model, settings.provenance


def _reason(family: Family, key: str) -> str | None:
    return next((ignored.reason for ignored in family.ignored if re.fullmatch(ignored.pattern, key)), None)


LAYER, EXPERT = r"model\.layers\.([0-9]{1,9})\.", r"model\.layers\.[0-9]{1,9}\.\w+\.experts\.([0-9]{1,9})\."


def _number(pattern: str, key: str) -> int | None:
    found = re.match(pattern, key)
    return int(found[1]) if found else None


def _stacked(keys: Collection[str], family: Family, model: ModelConfig) -> bool:
    """Whether the files have a layer's experts in one tensor: the spelling of most keys."""
    if not family.stacked:
        return False
    own, stacked = (len(expected_shapes(bindings(family, model, stacked=way)).keys() & set(keys)) for way in (False, True))
    return stacked > own


def _miscounted(keys: Collection[str], pattern: str, count: int, whole: bool) -> tuple[Problem | None, Callable[[str], bool]]:
    """The problem of a wrong number of layers or experts, one and not one a tensor, and whether a key's own problem is part of it."""
    there = {number for key in keys if (number := _number(pattern, key)) is not None}
    absent = {number for number in range(count) if number not in there} if whole else set()
    surplus = {number for number in there if number >= count}
    if not (absent or surplus):
        return None, lambda key: False
    listed = ", ".join(map(str, sorted(absent or surplus)[:8])) + (", …" if len(absent or surplus) > 8 else "")
    name, setting = ("layers", "num_hidden_layers") if pattern == LAYER else ("experts", "number of experts")
    prefix = "model.layers." if pattern == LAYER else "experts."
    found = f"{len(there)} in the files, {'without' if absent else 'and also'} {prefix}{listed}"
    return Problem(CONFIG, setting, f"{count} {name}", found), lambda key: _number(pattern, key) in absent | surplus


def _check_tensors(files: Folder, tensors: Mapping[str, FileTensor], family: Family, model: ModelConfig, stacked: bool) -> list[Problem]:
    """Missing, unknown and misshapen tensors. A wrong number of layers or experts is one problem, not one a tensor."""
    wanted = expected_shapes(bindings(family, model, stacked=stacked))
    keys = (*tensors, *files.unreadable)
    counts = [_miscounted(keys, LAYER, model.layers, files.whole)]
    if family.stacked and not stacked:
        counts.append(_miscounted(keys, EXPERT, model.moe.experts, files.whole))
    problems = [problem for problem, _ in counts if problem is not None]
    explained = lambda key: any(part(key) for _, part in counts)  # noqa: E731
    for key, shape in wanted.items():
        if key in tensors:
            if tensors[key].shape != shape:
                problems.append(Problem(tensors[key].path.name, key, f"shape {list(shape)}", f"{list(tensors[key].shape)}"))
        elif key not in files.unreadable and files.whole and not explained(key):
            missing = "none; only a tied model has no head" if key == HEAD else "none"
            problems.append(Problem(str(files.path), key, f"a tensor of shape {list(shape)}", missing))
    for key, tensor in tensors.items():
        if key not in wanted and not explained(key):
            problems.append(
                Problem(tensor.path.name, key, f"a tensor of a {family.name} with these settings", f"unknown, shape {list(tensor.shape)}")
            )
    return problems


def _dtype(files: Folder, tensors: Mapping[str, FileTensor], any_dtype: bool) -> tuple[str, list[Problem]]:
    """The dtype of the model: config.json's, or that of most tensors; and the tensors that have another."""
    problems: list[Problem] = []
    says = {key: files.config[key] for key in ("dtype", "torch_dtype") if files.config.get(key) is not None}
    for key, value in list(says.items()):
        if not isinstance(value, str) or value.removeprefix("torch.") not in TORCH_DTYPES:
            problems.append(Problem(CONFIG, key, f"one of {', '.join(TORCH_DTYPES)}", repr(value)))
            del says[key]
    names = {value.removeprefix("torch.") for value in says.values()}
    if len(names) > 1:
        problems.append(Problem(CONFIG, "torch_dtype", f"what dtype says, {says['dtype']!r}", repr(says["torch_dtype"])))
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        counts[NAMES[tensor.dtype]] = counts.get(NAMES[tensor.dtype], 0) + 1
    floats = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    usual = max((dtype for dtype in counts if dtype in floats), key=lambda dtype: counts[dtype], default="F32")
    wanted = TORCH_DTYPES[min(names)] if names and not any_dtype else usual
    allowed = set(floats) if any_dtype else {wanted}
    expected = f"dtype {wanted}" + (f", as {CONFIG} says" if names else ", as most tensors have") + " (--any-dtype takes every float)"
    for key, tensor in tensors.items():
        if NAMES[tensor.dtype] not in allowed:
            problems.append(Problem(tensor.path.name, key, "a floating point dtype" if any_dtype else expected, NAMES[tensor.dtype]))
    return floats[wanted], problems


def _check_tied(head: FileTensor, embedding: FileTensor) -> list[Problem]:
    """Reads both, 64 MiB at a time."""
    if head.shape != embedding.shape or head.dtype != embedding.dtype:
        found = f"{NAMES[head.dtype]} {list(head.shape)}"
        return [Problem(head.path.name, HEAD, f"{NAMES[embedding.dtype]} {list(embedding.shape)}, since it is tied", found)]
    rows, width = embedding.shape
    step = max(1, 2**26 // (width * embedding.dtype.itemsize))
    for start in range(0, rows, step):
        box = ((start, min(rows, start + step)), (0, width))
        one, other = (np.empty((box[0][1] - start, width), embedding.dtype) for _ in range(2))
        head.read(box, one)
        embedding.read(box, other)
        if one.tobytes() != other.tobytes():
            different = int((one.view(np.uint8) != other.view(np.uint8)).any(axis=1).argmax()) + start
            return [Problem(head.path.name, HEAD, "the embedding's values: config.json says tied", f"others, from row {different} on")]
    return []
