"""GPUs and the clusters they stand in, as data: configs/hardware/*.yaml.

    load       a name such as h100, or a path -> Hardware
    known      the names there are
    Hardware   what compiling for it needs (`target`), what it can do at best, and which part of that programs reach (`fractions`)

Bandwidths are bytes/s that one GPU sends in one direction, peaks are dense FLOP/s, times are seconds. Every value has a source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxpar import configfile

FOLDER = Path(__file__).parent.parent / "hardware"  # configs/hardware, which the wheel holds too

ALIASES = {"a100": "a100_80g", "h100": "h100_sxm", "h200": "h200_sxm"}


@dataclass(frozen=True, kw_only=True)
class Link:
    """How GPUs are joined: `bandwidth` of one GPU in one direction, bytes/s; `fraction` of it that large collectives reach;
    `latency` of one step of a ring, seconds."""

    bandwidth: float
    fraction: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Fractions:
    """Parts of the peaks that kernels reach: large bf16 matmuls, fused causal attention in each direction, memory-bound kernels."""

    matmul: float
    attention_forward: float
    attention_backward: float
    memory: float


SECTIONS: dict[str, Any] = {"node": Link, "network": Link, "fractions": Fractions}
# What XLA must be told of a GPU to compile for it, and the peaks that costs are computed from.
TARGET = (
    "threads_per_block_limit",
    "threads_per_warp",
    "shared_memory_per_block",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
    "threads_per_core_limit",
    "core_count",
    "fpus_per_core",
    "block_dim_limit_x",
    "block_dim_limit_y",
    "block_dim_limit_z",
    "l2_cache_size",
    "clock_rate_ghz",
    "cuda_compute_capability",
    "registers_per_core_limit",
    "registers_per_block_limit",
)
PEAKS = ("bfloat16", "float32")
WHOLE = ("memory", "gpus_per_node", *(f"target.{key}" for key in TARGET if key != "clock_rate_ghz"))
MAY_BE_0 = ("launch", "kernel", "latency", "minor")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of GPU and its usual cluster.

    name              the file's
    description       NVIDIA's name, as XLA knows it
    target            fields of XLA's GpuDeviceInfoProto; a nested section is a nested message
    memory            bytes that the device has
    memory_bandwidth  bytes/s
    peak_flops        dense, by dtype (numpy's name; tfloat32 is what float32 matmuls may use)
    gpus_per_node     GPUs that `node` joins
    node, network     links inside a host and between hosts
    launch            seconds that starting a collective costs whatever its size
    kernel            seconds between the starts of two kernels that do nothing
    """

    name: str
    description: str
    target: Mapping[str, Any]
    memory: int
    memory_bandwidth: float
    peak_flops: Mapping[str, float]
    gpus_per_node: int
    node: Link
    network: Link
    launch: float
    kernel: float
    fractions: Fractions
    sources: Mapping[str, str]

    def target_config(self) -> str:
        """The text proto that `jax.experimental.topologies.get_topology_desc` takes as `target_config`."""
        info = {**self.target, "memory_bandwidth": int(self.memory_bandwidth), "device_memory_size": self.memory}
        return (
            f"gpu_device_info {{ {_proto(info)} }}\n"
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 13 }\n'
            f'device_description_str: "{self.description}"'
        )


def _proto(section: Mapping[str, Any]) -> str:
    return " ".join(f"{key} {{ {_proto(value)} }}" if isinstance(value, Mapping) else f"{key}: {value}" for key, value in section.items())


def known() -> list[str]:
    """Names of the GPUs that have a file, and shorter ones."""
    return sorted([*(file.stem for file in FOLDER.glob("*.yaml")), *ALIASES])


def load(name: str) -> Hardware:
    """The hardware called `name` (`h100`, `h100_sxm`), or of a file (a path that ends in .yaml).

    Raises ValueError listing the known names for an unknown one, and naming file and key for a file that is wrong; OSError for a path
    that cannot be read.
    """
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{ALIASES.get(name.lower(), name.lower())}.yaml"
    if not name.endswith(".yaml") and not path.is_file():
        raise ValueError(f"--gpu: {name!r} is not one of {', '.join(known())}, nor a .yaml file such as those in configs/hardware")
    raw = configfile.read_mapping(path)
    try:
        return _hardware(path.stem, raw)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _hardware(name: str, raw: Mapping[str, Any]) -> Hardware:
    _needs("", raw, {each.name for each in fields(Hardware)} - {"name"})
    for section in ("target", "peak_flops", "node", "network", "fractions", "sources"):
        if not isinstance(raw[section], Mapping):
            raise ValueError(f"{section}: {raw[section]!r} is not a section of keys and values")
    description = raw["description"]
    if not isinstance(description, str) or not description or set(description) & set('"\\\n'):
        raise ValueError(f"description: {description!r} is not NVIDIA's name of a GPU")
    _needs("target: ", raw["target"], set(TARGET))
    if missing := [dtype for dtype in PEAKS if dtype not in raw["peak_flops"]]:
        raise ValueError(f"peak_flops: {', '.join(missing)} missing")
    if strange := [str(dtype) for dtype in raw["peak_flops"] if not _is_dtype(str(dtype))]:  # else "tf32" is never looked up
        raise ValueError(f"peak_flops: {', '.join(strange)} is not numpy's name of a dtype, such as float8_e4m3fn, nor tfloat32")
    for section, kind in SECTIONS.items():
        _needs(f"{section}: ", raw[section], {each.name for each in fields(kind)})
    _check_numbers({key: value for key, value in raw.items() if key not in ("description", "sources")})
    if missing := sorted(set(raw) - {"sources", "description"} - {key for key, source in raw["sources"].items() if source}):
        raise ValueError(f"sources: {', '.join(missing)} without a source")
    built: dict[str, Any] = {key: SECTIONS[key](**value) if key in SECTIONS else value for key, value in raw.items()}
    return Hardware(name=name, **built)


def _is_dtype(name: str) -> bool:
    try:
        return name == "tfloat32" or jnp.dtype(name).name == name
    except TypeError:
        return False


def _needs(where: str, section: Mapping[str, Any], wanted: set[str]) -> None:
    if wrong := sorted(map(str, set(section) ^ wanted)):
        raise ValueError(f"{where}needs the keys {', '.join(sorted(wanted))}; {', '.join(wrong)} missing or unknown")


def _check_numbers(values: Mapping[str, Any], where: str = "") -> None:
    """All but text is a finite number above 0, of those in `MAY_BE_0` of 0 or more; a fraction at most 1; bytes and counts whole."""
    for key, value in values.items():
        name = f"{where}{key}"
        if isinstance(value, Mapping):
            _check_numbers(value, f"{name}.")
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name}: {value!r} is not a number")
        if value < 0 or (value == 0 and key not in MAY_BE_0):
            raise ValueError(f"{name}: {value!r} must be {'0 or more' if key in MAY_BE_0 else 'above 0'}")
        if name in WHOLE and not isinstance(value, int):
            raise ValueError(f"{name}: {value!r} is not a whole number")
        if (key == "fraction" or where == "fractions.") and value > 1:
            raise ValueError(f"{name}: {value!r} is more than 1, all of the peak")
