"""Run files: strict YAML to `Config` and back.

    load          a run file and `--set a.b=c` overrides -> Config
    from_dict     nested dict -> Config; unknown keys and wrong types are errors that name the whole path
    dump          Config -> nested dict that JSON takes; from_dict(dump(config)) == config
    parse_mesh    "data=2,tensor=2" -> MeshShape

A file holds the sections of `jaxpar/config`. `model: {preset: llama3-8b, layers: 2}` starts from configs/models/llama3-8b.yaml (beside
the run file's folder, or in this clone), or from a path that ends in .yaml, relative to the run file; what else stands there wins.
There are no includes and no interpolation. Scalars are YAML 1.2's: 1e-3 is a number, yes and on are strings.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxpar.config import Config, ContextConfig, MeshShape, ModelConfig

PRESETS = Path(__file__).parent / "presets"  # configs/models, which the wheel holds too

Raw = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars and no key twice."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Raw:
        mapping: Raw = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a word", key_node.start_mark)
            if key in mapping:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands here a second time", key_node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping


_NUMBER = r"[-+]?\d[\d_]*"
for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"~|null|", ["~", "n", ""]),
    ("int", _NUMBER, "-+0123456789"),
    ("float", rf"{_NUMBER}\.[\d_]*(?:[eE][-+]?\d+)?|{_NUMBER}[eE][-+]?\d+|[-+]?\.\d[\d_]*(?:[eE][-+]?\d+)?", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node).replace("_", "")))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(loader.construct_scalar(node).replace("_", "")))
_Loader.add_constructor("tag:yaml.org,2002:map", lambda loader, node: loader.construct_mapping(node, deep=True))


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{origin}:{mark.line + 1}:{mark.column + 1}" if mark else origin
        raise ValueError(f"{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from None
    except (ValueError, KeyError, AttributeError) as error:  # a scalar that its tag cannot read, such as !!bool maybe, or a huge number
        raise ValueError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from None


def _read(path: Path) -> Raw:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file in UTF-8") from None
    raw = _parse(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: holds {_kind(raw)}, not sections such as model: and train:")
    return raw


def read_mapping(path: Path) -> Raw:
    """The keys of a YAML file, read as strictly as a run file. OSError where it cannot be read, ValueError where it is not YAML."""
    return _read(path)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run file, with `overrides` such as "train.steps=20" on top; values are YAML.

    Raises OSError where a file cannot be read, ValueError naming file and line, or the path of the key, for anything wrong in it.
    """
    path = Path(path)
    raw = _read(path)
    for override in overrides:
        _override(raw, override)
    model = raw.get("model")
    if isinstance(model, dict) and "preset" in model:
        raw["model"] = _merge(_preset(model["preset"], path.parent), {key: value for key, value in model.items() if key != "preset"})
    return from_dict(raw)


def _override(raw: Raw, override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ValueError(f"--set {override}: not of the form section.key=value")
    node: Any = raw
    for depth, key in enumerate(keys[:-1]):
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise ValueError(f"{'.'.join(keys[: depth + 1])}: holds {_kind(node)}, so --set {override} has no place")
    value, hint = _parse(text, f"--set {name.strip()}"), typing.cast(Any, Config)
    for key in keys:
        hint = typing.get_type_hints(hint).get(key) if dataclasses.is_dataclass(hint) else None
    if value is None and dataclasses.is_dataclass(hint):
        raise ValueError(f"{'.'.join(keys)}: null is not a section of keys; set its keys, or leave it out for the defaults")
    node[keys[-1]] = value


def _preset(name: Any, folder: Path) -> Raw:
    """The model section that a preset gives, checked on its own so that an error names its file."""
    if not isinstance(name, str):
        raise ValueError(f"model.preset: {name!r} is not the name of a file in configs/models")
    if name.endswith(".yaml"):
        path = folder / name
    else:
        folders = [folder.parent / "models", PRESETS]
        path = next((place / f"{name}.yaml" for place in folders if (place / f"{name}.yaml").is_file()), Path())
        if path == Path():
            known = sorted({file.stem for place in folders for file in place.glob("*.yaml")})
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"the nearest is {near[0]}" if near else f"there are {', '.join(known) or 'none'}"
            raise ValueError(f"model.preset: no {name}.yaml in {folders[0]}; {hint}")
    raw = _read(path)
    try:
        _build(ModelConfig, raw, "model")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return raw


def _merge(base: Raw, above: Raw) -> Raw:
    """`above` wins; sections are merged key by key."""
    merged = dict(base)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def from_dict(raw: Mapping[str, Any]) -> Config:
    """The configuration of a nested dict, such as `dump` gives; absent keys take their defaults.

    Raises ValueError: an unknown key (naming its whole path and the nearest valid one), a wrong type (naming path, value and the type
    wanted), or what a section itself refuses.
    """
    return _build(Config, raw, "")


def _build(section: type, raw: Any, prefix: str) -> Any:
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise ValueError(f"{prefix}: {raw!r} is {_kind(raw)}, not a section of keys")
    hints = typing.get_type_hints(section)
    for key in raw:
        if key not in hints:
            raise ValueError(_unknown(f"{prefix}.{key}" if prefix else str(key), prefix, hints))
    return section(**{key: _value(hints[key], value, f"{prefix}.{key}" if prefix else key) for key, value in raw.items()})


def _unknown(path: str, prefix: str, hints: Mapping[str, Any]) -> str:
    """The nearest key: one of the same word anywhere, this section's own first; else the most alike here, where one of a section in this
    one is also known as section_key; else by its last word anywhere."""
    word, names, here = path.rpartition(".")[2], _names(Config, ""), f"{prefix}." if prefix else ""
    same = sorted((name for name in names if name.rpartition(".")[2] == word), key=lambda name: not name.startswith(here))
    below = {name.removeprefix(here).replace(".", "_"): name for name in names if prefix and name.startswith(here)}
    around = {**below, **{key: here + key for key in hints}}
    near = difflib.get_close_matches(word, around, n=1, cutoff=0.6)
    everywhere = {name.rpartition(".")[2]: name for name in reversed(names)}
    far = difflib.get_close_matches(word, everywhere, n=1, cutoff=0.8)
    found = same[:1] or [around[key] for key in near] or [everywhere[key] for key in far]
    if found:
        return f"{path}: no such key; the nearest valid one is {found[0]}"
    return f"{path}: no such key; {prefix or 'a run file'} has {', '.join(hints)}"


def _names(section: type, prefix: str) -> list[str]:
    names = []
    for key, hint in typing.get_type_hints(section).items():
        names += _names(typing.cast(type, hint), f"{prefix}{key}.") if dataclasses.is_dataclass(hint) else [f"{prefix}{key}"]
    return names


WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _value(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, path)
    optional = isinstance(hint, types.UnionType)
    if optional:
        if value is None:
            return None
        (hint,) = (choice for choice in typing.get_args(hint) if choice is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path}: {value!r} is {_kind(value)}, not a list such as {'[a, b]' if element is str else '[1, 2]'}")
        return tuple(_value(element, item, f"{path}[{place}]") for place, item in enumerate(value))
    if hint is float and type(value) in (int, float):
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise ValueError(f"{path}: the number is too large; a float ends at {sys.float_info.max:.2e}")
        return float(value)
    if type(value) is not hint:
        absent = " or null" if optional else ""
        raise ValueError(f"{path}: {value!r} is {_kind(value)}, not {WANTED[hint]}{absent}")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, Mapping):
        return "a section"
    return "a list" if isinstance(value, list | tuple) else WANTED.get(type(value), type(value).__name__)


def dump(config: Any) -> Raw:
    """Nested dict of a configuration or a section, of nothing but dicts, lists, strings, numbers, booleans and None."""
    return {
        item.name: dump(value) if dataclasses.is_dataclass(value) else list(value) if isinstance(value, tuple) else value
        for item in dataclasses.fields(config)
        for value in [getattr(config, item.name)]
    }


def parse_mesh(text: str) -> MeshShape:
    """ "data=2,tensor=2" -> MeshShape; axes not named have size 1."""
    return _build(MeshShape, _parse_pairs(f"--mesh {text}", text, "data=2,tensor=2"), "mesh")


def parse_context(text: str) -> ContextConfig:
    """ "method=usp,ulysses=2" -> ContextConfig; fields not named take their defaults."""
    return _build(ContextConfig, _parse_pairs(f"--context {text}", text, "method=usp,layout=zigzag,ulysses=2"), "train.context")


def _parse_pairs(origin: str, text: str, form: str) -> Raw:
    raw: Raw = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name.strip() in raw:
            raise ValueError(f"{origin}: not of the form {form}")
        raw[name.strip()] = _parse(value, origin)
    return raw
