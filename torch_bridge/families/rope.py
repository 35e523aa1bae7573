"""Rotary embedding settings of config.json, in both spellings, and back.

    read_rope     -> RopeConfig
    write_rope    RopeConfig -> rope_theta and rope_scaling, which every version of transformers reads

Precedence: `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (earlier), whichever the file has. A value that both
give must be equal. The type is under `rope_type`, before that `type`. What a scaling needs and the file has not is an error, never a 1.
"""

from __future__ import annotations

from typing import Any

from jaxpar.config import RopeConfig
from torch_bridge.families.settings import CONFIG, REQUIRED, Settings

THETA = 10_000.0  # the default of most classes

# type -> {key: (RopeConfig field, kind, default)}; a default of REQUIRED: none.
TYPES: dict[str, dict[str, tuple[str, type, Any]]] = {
    "default": {},
    "linear": {"factor": ("factor", float, REQUIRED)},
    "dynamic": {"factor": ("factor", float, REQUIRED)},
    "llama3": {
        "factor": ("factor", float, REQUIRED),
        "low_freq_factor": ("low_frequency_factor", float, REQUIRED),
        "high_freq_factor": ("high_frequency_factor", float, REQUIRED),
    },
    "yarn": {
        "factor": ("factor", float, REQUIRED),
        "attention_factor": ("attention_factor", float, None),
        "beta_fast": ("beta_fast", float, 32.0),
        "beta_slow": ("beta_slow", float, 1.0),
        "mscale": ("mscale", float, None),
        "mscale_all_dim": ("mscale_all_dim", float, None),
        "truncate": ("truncate", bool, True),
    },
}
ORIGINAL = "original_max_position_embeddings"


def read_rope(settings: Settings, static_length: int | None, usual: float = THETA) -> RopeConfig | None:
    """The rope of a configuration; None when a problem was noted. `static_length` is what the user declares for dynamic scaling,
    `usual` the class's default of theta."""
    before = len(settings.problems)
    section, name = _section(settings)
    kind = _type(settings, section, name)
    theta = _theta(settings, section, name, usual)
    fields: dict[str, Any] = {"theta": theta}
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind is not None:
        fields["type"] = kind
        table = TYPES[kind]
        known |= set(table)
        for key, (field, wanted, default) in table.items():
            value = section.get(key)
            where = f"model.rope.{field}"
            if value is None or (key in ("beta_fast", "beta_slow") and value == 0):  # torch: `value or default`
                if default is REQUIRED:
                    settings.refuse(f"{name}.{key}", f"a number, which {kind} scaling needs", "no such key")
                settings.provenance[where] = f"{settings.library}'s default ({name}.{key} is absent)"
                value = None if default is REQUIRED else default
            else:
                settings.provenance[where] = f"{CONFIG}: {name}.{key}"
                value = settings.typed(f"{name}.{key}", value, wanted, None)
            if value is not None:
                fields[field] = value
        if kind in ("dynamic", "llama3", "yarn"):
            known.add(ORIGINAL)
            fields["original_length"] = _original(settings, section, name, kind)
    settings.used.add(ORIGINAL)
    if kind == "dynamic":
        fields["static_length"] = static_length
        settings.provenance["model.rope.static_length"] = "declared (--rope-length)"
        if static_length is None:
            settings.refuse(f"{name}.rope_type", "a declared length for dynamic rope, --rope-length TOKENS", "none: torch lets it grow")
    partial = section.get("partial_rotary_factor", settings.raw.get("partial_rotary_factor"))
    settings.used.add("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        settings.refuse("partial_rotary_factor", "1: this family turns whole heads", repr(partial))
    for key in section:
        if key not in known and section[key] is not None:
            settings.refuse(f"{name}.{key}", f"a setting of {kind or 'a known'} rope", f"unknown {section[key]!r}")
    if len(settings.problems) > before:
        return None
    try:
        return RopeConfig(**fields)
    except ValueError as error:
        settings.refuse(name, "a rope that can be built", str(error))
        return None


def _section(settings: Settings) -> tuple[dict[str, Any], str]:
    new = settings.take("model.rope.type", "rope_parameters", dict, None)
    old = settings.take("model.rope.type", "rope_scaling", dict, None)
    if new and old:
        for key in new.keys() | old.keys():
            if new.get(key, old.get(key)) != old.get(key, new.get(key)):
                settings.refuse(f"rope_scaling.{key}", f"what rope_parameters says, {new[key]!r}", repr(old[key]))
        return {**old, **new}, "rope_parameters"
    return (new, "rope_parameters") if new else (old or {}, "rope_scaling" if old else "rope_parameters")


def _type(settings: Settings, section: dict[str, Any], name: str) -> str | None:
    new, old = section.get("rope_type"), section.get("type")
    if new is not None and old is not None and new != old:
        settings.refuse(f"{name}.type", f"what {name}.rope_type says, {new!r}", repr(old))
        return None
    key = "rope_type" if new is not None else "type"
    kind = new if new is not None else old
    if kind is None and section.keys() - {"rope_theta", "partial_rotary_factor"}:
        settings.refuse(f"{name}.rope_type", "one of " + ", ".join(TYPES), "no such key")
        return None
    settings.provenance["model.rope.type"] = f"{settings.library}'s default" if kind is None else f"{CONFIG}: {name}.{key}"
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in TYPES:
        settings.refuse(f"{name}.{key}", "one of " + ", ".join(TYPES), repr(kind))
        return None
    return kind


def _theta(settings: Settings, section: dict[str, Any], name: str, usual: float) -> float:
    outer = settings.take("model.rope.theta", "rope_theta", float, None)
    inner = section.get("rope_theta")
    if inner is None:
        if outer is None:
            settings.provenance["model.rope.theta"] = f"{settings.library}'s default (rope_theta is absent)"
        return usual if outer is None else outer
    settings.provenance["model.rope.theta"] = f"{CONFIG}: {name}.rope_theta"
    inner = settings.typed(f"{name}.rope_theta", inner, float, usual)
    if outer is not None and outer != inner:
        settings.refuse("rope_theta", f"what {name}.rope_theta says, {inner!r}", repr(outer))
    return inner


def _original(settings: Settings, section: dict[str, Any], name: str, kind: str) -> int | None:
    """Torch: dynamic scaling starts from max_position_embeddings; the others from a key of the section or of the file, then from that."""
    where = "model.rope.original_length"
    longest = settings.raw.get("max_position_embeddings")
    found = {}
    if kind != "dynamic":
        found = {f"{name}.{ORIGINAL}": section.get(ORIGINAL), ORIGINAL: settings.raw.get(ORIGINAL)}
        found = {key: value for key, value in found.items() if value is not None}
    elif section.get(ORIGINAL) not in (None, longest):
        settings.refuse(f"{name}.{ORIGINAL}", f"max_position_embeddings, {longest!r}, which torch uses", repr(section[ORIGINAL]))
    found = found or {"max_position_embeddings": longest}
    (key, value), *others = found.items()
    for other, second in others:
        if second != value:
            settings.refuse(other, f"what {key} says, {value!r}", repr(second))
    settings.provenance[where] = f"{CONFIG}: {key}"
    return settings.typed(key, value, int, None)


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of config.json. Raises ValueError for what these families cannot say."""
    if rope.fraction != 1:
        raise ValueError(f"model.rope.fraction: {rope.fraction} cannot be said, these families turn whole heads")
    theta: Any = int(rope.theta) if rope.theta == int(rope.theta) else rope.theta
    if rope.type == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    section: dict[str, Any] = {"rope_type": rope.type}
    for key, (field, _, default) in TYPES[rope.type].items():
        value = getattr(rope, field)
        if default is REQUIRED or value != default:
            section[key] = value
    if rope.type in ("llama3", "yarn"):
        section[ORIGINAL] = rope.original_length
    return {"rope_theta": theta, "rope_scaling": section}
