"""A Hugging Face model folder: config.json, safetensors in one file or several with an index, a tokenizer.

    read_folder     folder -> its tensors and everything wrong with its files; reads headers only
    write_tensors   safetensors in one file or several
    whole_folder    a folder written whole or not at all
    carried         the files beside the weights that an export takes along

The index is authoritative: a file that it does not name is left alone, with a note. Pickled weights are refused, since reading them
runs what they hold.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_bridge.formats.safetensors import FileTensor, instead, read_header, strict_json, write_file
from torch_bridge.report import BridgeError, Problem, shown
from torch_bridge.views import View

CONFIG = "config.json"
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
TOKENIZER = "tokenizer.json"
CARRIED = (
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
CARRIED_FOLDERS = ("additional_chat_templates",)


# What torch's wrappers put before names: DDP the first, in front of everything; compile, FSDP and activation checkpointing the others,
# anywhere.
OUTER = "module."
WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def unwrapped(key: str) -> str:
    """A tensor's name without the prefixes of torch's wrappers."""
    return WRAPPERS.sub("", key.removeprefix(OUTER))


@dataclass
class Folder:
    """What a folder's files say. `unreadable` are the tensors that an absent or broken file would hold."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, FileTensor] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    whole: bool = True  # every file that may hold a tensor was read
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, file: str, expected: str, found: str, tensor: str = "") -> None:
        self.problems.append(Problem(file, tensor, expected, found))


def read_folder(path: Path) -> Folder:
    """Everything but the data. Problems are collected; only a folder that is none raises BridgeError."""
    if not path.is_dir():
        found = "a file" if path.is_file() else "no such folder"
        raise BridgeError(path, [Problem(str(path), "", "a folder with config.json and safetensors", found)])
    folder = Folder(path)
    folder.config = _json(folder, CONFIG) or {}
    files = _files(folder)
    for name, keys in files.items():
        _read_file(folder, name, keys)
    _unwrap(folder)
    strays = [
        other.name for other in sorted(path.iterdir()) if other.suffix in (".safetensors", *PICKLED) and other.name not in files and files
    ]
    folder.notes += [f"{shown(stray)}: ignored, {INDEX if (path / INDEX).is_file() else SINGLE} says what the model is" for stray in strays]
    return folder


def _unwrap(folder: Folder) -> None:
    plain: dict[str, FileTensor] = {}
    for key, tensor in folder.tensors.items():
        if unwrapped(key) in plain:
            folder.refuse(tensor.path.name, f"one tensor {unwrapped(key)}", f"also {plain[unwrapped(key)].name}", key)
        plain.setdefault(unwrapped(key), tensor)
    wrapped = sum(key != unwrapped(key) for key in folder.tensors)
    if wrapped:
        folder.notes.append(f"{wrapped} tensors have names as torch's wrappers change them; read without {OUTER}, _orig_mod. and the like")
    folder.tensors = plain
    folder.unreadable = set(map(unwrapped, folder.unreadable))


def _json(folder: Folder, name: str) -> dict[str, Any] | None:
    path = folder.path / name
    try:
        if not path.is_file():
            folder.refuse(name, "a file", instead(path))
            return None
        value = strict_json(path.read_bytes())
    except (OSError, ValueError) as error:
        folder.refuse(name, "JSON", str(error))
        return None
    if not isinstance(value, dict):
        folder.refuse(name, "an object", type(value).__name__)
        return None
    return value


def _files(folder: Folder) -> dict[str, list[str] | None]:
    """Files to read, each with the tensors that the index wants in it; None where there is no index."""
    # a link to nothing, or a folder of that name, is no absent file
    single, index = os.path.lexists(folder.path / SINGLE), os.path.lexists(folder.path / INDEX)
    if index:
        files = _index(folder)
        if single and SINGLE not in files:
            folder.refuse(SINGLE, f"either {INDEX} or {SINGLE}", "both, and torch would read only this one")
        return files
    if single:
        return {SINGLE: None}
    folder.whole = False
    names = sorted(other.name for other in folder.path.iterdir())
    pickled = [name for name in names if name.endswith(PICKLED) or name.endswith(".bin.index.json")]
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        folder.refuse(INDEX, f"an index of {', '.join(others[:5])}{', …' if len(others) > 5 else ''}", "none")
    elif pickled:
        for name in pickled:
            folder.refuse(
                name, "safetensors", "pickled weights, refused: reading them runs code. Save the model with safe_serialization=True"
            )
    else:
        folder.refuse(SINGLE, f"{SINGLE}, or {INDEX} and its files", "neither")
    return {}


def _index(folder: Folder) -> dict[str, list[str] | None]:
    index = _json(folder, INDEX)
    table = index.get("weight_map") if index is not None else None
    if not isinstance(table, dict) or not table:
        folder.whole = False
        if index is not None:
            folder.refuse(INDEX, "weight_map, an object from tensors to files", repr(table))
        return {}
    files: dict[str, list[str] | None] = {}
    for key, name in table.items():
        if not isinstance(name, str) or not _file_name(name):
            folder.refuse(INDEX, "the name of a .safetensors file in this folder", repr(name), key)
            folder.unreadable.add(key)
            continue
        keys = files.setdefault(name, [])
        assert keys is not None
        keys.append(key)
    return files


def _file_name(name: str) -> bool:
    """Whether a name stays in the folder and may be a file's."""
    plain = name == os.path.basename(name) and "\\" not in name and "\0" not in name
    return plain and name.endswith(".safetensors") and len(name.encode()) <= 255


def _read_file(folder: Folder, name: str, wanted: list[str] | None) -> None:
    path = folder.path / name
    if wanted is not None and not path.exists():
        some = ", ".join(wanted[:3]) + (f" and {len(wanted) - 3} more" if len(wanted) > 3 else "")
        folder.refuse(name, f"a file with {some}, as {INDEX} says", instead(path) if path.is_symlink() else "no such file")
        folder.unreadable.update(wanted)
        return
    tensors, problems = read_header(path)
    folder.problems += problems
    if wanted is None:
        folder.whole = folder.whole and not problems
        folder.tensors |= tensors
        return
    if problems:
        folder.unreadable.update(wanted)
    for key in wanted:
        if key in tensors:
            folder.tensors[key] = tensors[key]
        elif not problems:
            folder.refuse(name, f"this tensor, as {INDEX} says", "none of that name", key)
            folder.unreadable.add(key)
    for key in tensors.keys() - set(wanted):
        folder.refuse(name, f"tensors that {INDEX} places in this file", "one that it does not", key)


def carried(folder: Path) -> tuple[Path, ...]:
    """Tokenizer and generation files of a folder, and folders of such."""
    files = [folder / name for name in CARRIED if (folder / name).is_file()]
    return (*files, *(folder / name for name in CARRIED_FOLDERS if (folder / name).is_dir()))


def copy_carried(paths: Iterable[Path], folder: Path) -> None:
    """Copies of `carried` in `folder`. What a link leads to is copied."""
    for path in paths:
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)


def check_free(path: Path) -> None:
    """ValueError where `path` cannot become a new folder: it is there and not empty (nothing is ever overwritten), or lies below a file."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: exists already and is {'not empty' if path.is_dir() else 'a file'}; choose another folder")
    above = next((parent for parent in path.absolute().parents if parent.exists()), path)
    if not above.is_dir():
        raise ValueError(f"{path}: {above} is a file, no folder can be made in it; choose another folder")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name when all went well. When not, it is removed, and what was made above it; only a
    process that is killed leaves it behind, `.NAME.PID.tmp`. ValueError as `check_free`."""
    check_free(path)
    path = Path(os.path.realpath(path))  # where a link leads, and "." by its name
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(temporary)
    try:
        temporary.mkdir()
        yield temporary
        if path.exists():
            path.rmdir()
        temporary.rename(path)
    except BaseException as error:
        _remove(temporary, absences=5)
        with contextlib.suppress(OSError):
            for parent in made:
                parent.rmdir()
        if isinstance(error, OSError) and error.errno in FULL:
            reason = f"{os.strerror(error.errno)}; free space or choose another folder, nothing was left there"
            raise OSError(error.errno, reason, str(path)) from None
        raise


def _remove(folder: Path, absences: int = 1) -> None:
    """Until it is gone `absences` times in a row: threads of a writer that failed make files, and the folder, for a moment more."""
    seen = 0
    for _ in range(50):
        seen = 0 if folder.exists() else seen + 1
        if seen == absences:
            return
        shutil.rmtree(folder, ignore_errors=True)
        if absences > 1 or folder.exists():
            time.sleep(0.1)


def shards(tensors: Mapping[str, View], most: int) -> list[list[str]]:
    """Names in groups of at most `most` bytes, in order; a larger tensor has a file of its own."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, view in tensors.items():
        size = math.prod(view.shape) * view.dtype.itemsize
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def write_tensors(folder: Path, tensors: Mapping[str, View], max_shard_bytes: int) -> None:
    """model.safetensors, or numbered files and their index."""
    groups = shards(tensors, max_shard_bytes)
    if len(groups) == 1:
        write_file(folder / SINGLE, tensors)
        return
    table: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(folder / file, {name: tensors[name] for name in names})
        table |= dict.fromkeys(names, file)
    total = sum(math.prod(view.shape) * view.dtype.itemsize for view in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": table})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
