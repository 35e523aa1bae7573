"""Where parameters live: logical axis names to mesh axes, and which dim ZeRO splits further. Strict, nothing is replicated silently.

DENSE, table     the rules of a dense decoder: logical axis -> mesh axis, or None for whole
Rules            rules on a mesh; `spec` gives a parameter's PartitionSpec or says why there is none
varying_axes     axes over which a parameter's gradient is a partial sum
zero_placement   the dim that ZeRO splits over the axes that replicate a parameter
zero_spec        a spec with that split applied
unsharded        the parameters that ZeRO leaves replicated
nearest          sizes that would fit, for messages
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jax.sharding import PartitionSpec

from jaxpar.config import Config, TrainConfig
from jaxpar.mesh import EXPERT, REPLICA, TENSOR

Target = str | tuple[str, ...] | None
Placement = tuple[int, tuple[str, ...]]

DENSE: Mapping[str, Target] = {
    "layers": None,
    "vocabulary": TENSOR,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "embed": None,
    "head_dim": None,
    "experts": EXPERT,
    "expert_mlp": None,
    "router": None,
}


def table(train: TrainConfig) -> Mapping[str, Target]:
    """The rules of a run: DENSE with experts where `train.experts.axes` puts them, and their columns where `train.experts.columns` does."""
    return {**DENSE, "experts": train.experts.axes, "expert_mlp": TENSOR if train.experts.columns else None}


def experts_ways(config: Config) -> int:
    """Devices that the experts are split over."""
    return math.prod(getattr(config.mesh, axis) for axis in config.train.experts.axes)


# Logical axes of parameters that meet activations split over `tensor`: their gradient is a partial sum there even when they are whole.
TENSOR_COMPUTED = frozenset({"heads", "kv_heads", "head_dim", "mlp", "vocabulary"})


class Dims(Protocol):
    """What the rules read of a `params.Parameter`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def stacked(self) -> bool: ...
    @property
    def role(self) -> str: ...


def as_axes(target: Target) -> tuple[str, ...]:
    """A spec entry as a tuple of mesh axes: None is (), "x" is ("x",)."""
    if target is None:
        return ()
    return (target,) if isinstance(target, str) else tuple(target)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Every mesh axis that a spec names."""
    return tuple(axis for entry in spec for axis in as_axes(entry))


def _from_axes(axes: tuple[str, ...]) -> Target:
    return None if not axes else axes[0] if len(axes) == 1 else axes


@dataclass(frozen=True)
class Rules:
    """`table` on a mesh of `mesh_sizes` (axis name -> devices, such as `dict(mesh.shape)`)."""

    mesh_sizes: Mapping[str, int]
    table: Mapping[str, Target]

    def spec(self, name: str, parameter: Dims) -> PartitionSpec:
        """The PartitionSpec of a parameter, one entry a dim.

        Key/value heads fewer than the tensor axis stay whole where the axis is a multiple of them: each device picks its head.
        Raises ValueError naming parameter, shape, rule and mesh: unknown logical axis, a mesh axis used twice or absent, a dim that
        does not divide.
        """
        where = f"{name} {parameter.shape} {parameter.axes} on mesh {self._mesh()}"
        entries: list[Target] = []
        used: set[str] = set()
        for size, logical in zip(parameter.shape, parameter.axes, strict=True):
            if logical not in self.table:
                raise ValueError(f"{where}: no rule for logical axis {logical!r}; rules exist for {', '.join(self.table)}")
            target = self.table[logical]
            axes = as_axes(target)
            for axis in axes:
                if axis not in self.mesh_sizes:
                    raise ValueError(f"{where}: rule {logical} -> {target} names a mesh axis that does not exist")
                if axis in used:
                    raise ValueError(f"{where}: rule {logical} -> {target} uses mesh axis {axis!r} a second time")
                used.add(axis)
            devices = math.prod(self.mesh_sizes[axis] for axis in axes)
            if size % devices == 0:
                entries.append(_from_axes(axes))
            elif logical == "kv_heads" and size < devices and devices % size == 0:
                used.difference_update(axes)
                entries.append(None)
            else:
                fits = fits_kv(size) if logical == "kv_heads" else lambda ways, size=size: size % ways == 0
                raise ValueError(
                    f"{where}: rule {logical} -> {target} cannot cut {size} in {devices}; sizes that work: {nearest(devices, fits)}"
                )
        return PartitionSpec(*entries)

    def _mesh(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self.mesh_sizes.items() if size > 1) or "of one device"


def fits_kv(kv_heads: int) -> Callable[[int], bool]:
    """Whether key/value heads go on so many devices: each has some, or each head is on several."""
    return lambda ways: kv_heads % ways == 0 or ways % kv_heads == 0


def nearest(wanted: int, fits: Callable[[int], bool]) -> str:
    """Sizes that fit, all below `wanted` (at most the last four) and the first above it when it is within four times."""
    below = [size for size in range(1, wanted) if fits(size)][-4:]
    above = [size for size in range(wanted, 4 * wanted + 1) if fits(size)][:1]
    return ", ".join(map(str, below + above)) or "none"


def varying_axes(parameter: Dims, spec: PartitionSpec, sequence_parallel: bool) -> tuple[str, ...]:
    """Axes over which a parameter is whole but its gradient a partial sum: mark it varying before the microbatch loop, reduce once after.

    All of REPLICA that `spec` does not name, and TENSOR when it is not named but the parameter meets values that differ along it: token
    shards under sequence parallelism, or heads, MLP columns, vocabulary rows.
    """
    named = spec_axes(spec)
    axes = [axis for axis in REPLICA if axis not in named]
    if TENSOR not in named and (sequence_parallel or TENSOR_COMPUTED.intersection(parameter.axes)):
        axes.append(TENSOR)
    return tuple(axes)


def zero_placement(parameter: Dims, spec: PartitionSpec, sizes: Mapping[str, int]) -> Placement | None:
    """The dim that ZeRO splits, and the axes it splits it over: all of REPLICA that `spec` does not name.

    Best is a dim before which all are of size 1 on a device: a gather then puts blocks of memory one after another, and nothing is
    transposed. Next a dim that no axis splits yet, the largest of them; else one that is split already. The table of an embedding prefers
    its columns, which a lookup can read without the rest. Never the layer dim of a stacked leaf: layers must stay gatherable one by one.
    None when a single device holds it anyway, for state, or for a norm or bias that no dim divides.
    Raises ValueError for a matrix that does not divide, naming it, the devices and the numbers that work.
    """
    named = spec_axes(spec)
    axes = tuple(axis for axis in REPLICA if axis not in named)
    ways = math.prod(sizes[axis] for axis in axes)
    if ways == 1 or parameter.role == "state":
        return None
    dims = list(range(1 if parameter.stacked else 0, len(parameter.shape)))
    local = {dim: parameter.shape[dim] // math.prod(sizes[axis] for axis in as_axes(spec[dim])) for dim in dims}
    outermost = {dim for dim in dims if all(local[before] == 1 for before in dims if before < dim)}
    if parameter.role == "embedding":
        outermost = {dims[-1]}
    for dim in sorted(dims, key=lambda dim: (dim not in outermost, spec[dim] is not None, -parameter.shape[dim], dim)):
        if local[dim] % ways == 0:
            return dim, axes
    if parameter.role in ("norm", "bias"):
        return None
    works = nearest(ways, lambda count: any(size % count == 0 for size in local.values()))
    raise ValueError(
        f"train.zero: {parameter.role} of shape {parameter.shape} {parameter.axes}, split as {spec}, has no dim that {ways} devices "
        f"({' × '.join(axes)}) divide; numbers that work: {works}; or use train.zero 0"
    )


def zero_spec(spec: PartitionSpec, placement: Placement | None) -> PartitionSpec:
    """`spec` with ZeRO's split: the dim's own axes first, so that a gather over the new ones gives back the contiguous local part."""
    if placement is None:
        return spec
    dim, axes = placement
    entries = list(spec)
    entries[dim] = _from_axes(as_axes(entries[dim]) + axes)
    return PartitionSpec(*entries)


def unsharded(parameters: Mapping[str, Dims], specs: Mapping[str, PartitionSpec], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the parameters that ZeRO would split and cannot: vectors that no dim divides, replicated instead. For a run's log."""
    replicated = []
    for name, parameter in parameters.items():
        named = spec_axes(specs[name])
        ways = math.prod(sizes[axis] for axis in REPLICA if axis not in named)
        if ways > 1 and parameter.role != "state" and zero_placement(parameter, specs[name], sizes) is None:
            replicated.append(name)
    return tuple(replicated)
