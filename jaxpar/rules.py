"""Where parameters live: logical axis names to mesh axes, and which dim ZeRO splits further. Strict, nothing is replicated silently.

DENSE, table     the rules of a dense decoder: logical axis -> mesh axis, or None for whole
Rules            rules on a mesh; `spec` gives a parameter's PartitionSpec or says why there is none
varying_axes     axes over which a parameter's gradient is a partial sum
zero_placement   the dim that ZeRO splits over the axes that replicate a parameter
zero_spec        a spec with that split applied
unsharded        the parameters that ZeRO leaves replicated
check_run        everything that needs two sections of a configuration at once
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
from jax.sharding import PartitionSpec

from jaxpar.config import Config, TrainConfig
from jaxpar.config_checks import divisors
from jaxpar.mesh import AXES, BATCH, EXPERT, PIPE, REPLICA, TENSOR

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
    """The rules of a run: DENSE with experts where `train.expert_axes` puts them, and their columns where `train.expert_columns` does."""
    return {**DENSE, "experts": train.expert_axes, "expert_mlp": TENSOR if train.expert_columns else None}


def experts_ways(config: Config) -> int:
    """Devices that the experts are split over."""
    return math.prod(getattr(config.mesh, axis) for axis in config.train.expert_axes)


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
                fits = _fits_kv(size) if logical == "kv_heads" else lambda ways, size=size: size % ways == 0
                raise ValueError(
                    f"{where}: rule {logical} -> {target} cannot cut {size} in {devices}; sizes that work: {_nearest(devices, fits)}"
                )
        return PartitionSpec(*entries)

    def _mesh(self) -> str:
        return " × ".join(f"{axis} {size}" for axis, size in self.mesh_sizes.items() if size > 1) or "of one device"


def _fits_kv(kv_heads: int) -> Callable[[int], bool]:
    return lambda ways: kv_heads % ways == 0 or ways % kv_heads == 0


def _nearest(wanted: int, fits: Callable[[int], bool]) -> str:
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
    works = _nearest(ways, lambda count: any(size % count == 0 for size in local.values()))
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


# Axes that the mesh has and the train step does not use yet.
UNUSED_AXES = (PIPE,)


def check_run(config: Config, devices: int) -> None:
    """Refuse a run whose sections contradict one another or the number of devices, before anything is built.

    Each ValueError is one line that names the field and sizes that work. What merely looks unwise is a warning.
    """
    mesh, model = config.mesh, config.model
    _check_devices(config, devices)
    _check_tensor(config, devices)
    _check_batch(config)
    _check_sequence(config)
    heads = model.heads // mesh.tensor, max(model.kv_heads // mesh.tensor, 1)
    config.train.context.check_heads(*heads, mesh.seq)
    _check_precision(config)
    _check_experts(config)
    if mesh.pipe > model.layers:
        raise ValueError(f"mesh.pipe: {mesh.pipe} stages for model.layers {model.layers}; use at most {model.layers}")
    trained = config.data.tokenizer is None and config.data.source != "tokens"
    if trained and config.data.vocabulary > model.vocabulary:
        raise ValueError(
            f"data.vocabulary: a tokenizer of {config.data.vocabulary} entries exceeds model.vocabulary {model.vocabulary}; "
            f"set data.vocabulary={model.vocabulary} or less"
        )
    for axis in UNUSED_AXES:
        size = getattr(mesh, axis)
        if size > 1:
            raise ValueError(
                f"mesh.{axis}: {size} is not supported by the train step yet; set mesh.{axis}=1 and use mesh.data, mesh.seq or mesh.tensor"
            )


def _check_devices(config: Config, devices: int) -> None:
    mesh = config.mesh
    if mesh.devices == devices:
        return
    sizes = " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1) or "one device"
    others = mesh.devices // mesh.data
    fix = f"mesh.data={devices // others}" if devices % others == 0 else f"sizes that multiply to {devices}"
    raise ValueError(
        f"mesh: {sizes} makes {mesh.devices} devices, but there are {devices}; set {fix}, or run on {mesh.devices} devices "
        f"(simulated ones on CPU: train.cpu_devices={mesh.devices})"
    )


def _check_tensor(config: Config, devices: int) -> None:
    model, tensor = config.model, config.mesh.tensor
    needs: dict[str, Callable[[int], bool]] = {
        f"model.heads {model.heads}": lambda size: model.heads % size == 0,
        f"model.kv_heads {model.kv_heads}": _fits_kv(model.kv_heads),
        f"model.mlp_width {model.mlp_width}": lambda size: model.mlp_width % size == 0,
    }
    works = _nearest(tensor, lambda size: size <= devices and all(fits(size) for fits in needs.values()))
    for name, fits in needs.items():
        if not fits(tensor):
            raise ValueError(f"mesh.tensor: {tensor} does not divide {name}; tensor sizes that work: {works}")


def _check_batch(config: Config) -> None:
    mesh, train = config.mesh, config.train
    ways = math.prod(getattr(mesh, axis) for axis in BATCH)
    unit = ways * train.accumulation * train.interleave
    if train.batch % unit:
        raise ValueError(
            f"train.batch: {train.batch} sequences do not divide over mesh.data × mesh.expert {ways} × train.accumulation "
            f"{train.accumulation} × train.interleave {train.interleave} = {unit}; batches that work: {_multiples(train.batch, unit)}"
        )


def _check_sequence(config: Config) -> None:
    mesh, length, rope, context = config.mesh, config.data.sequence, config.model.rope, config.train.context
    unit, tensor = context.unit(mesh.seq), mesh.tensor if config.train.sequence_parallel else 1
    shards = math.lcm(unit, mesh.seq * tensor)
    if length % shards:
        axes = "mesh.seq × mesh.tensor" if tensor > 1 else "mesh.seq"
        chunks = f" in {unit} chunks (train.context.layout {context.layout})" if unit > mesh.seq else ""
        other = ", or train.sequence_parallel=false" if tensor > 1 and length % unit == 0 else ""
        raise ValueError(
            f"data.sequence: {length} tokens do not divide over {axes} {mesh.seq * tensor}{chunks}; "
            f"lengths that work: {_multiples(length, shards)}{other}"
        )
    if config.model.prefix >= length:
        raise ValueError(
            f"model.prefix: {config.model.prefix} tokens leave none to predict of rows of data.sequence {length}; use {length - 1} or less"
        )
    reach = rope.reach
    if reach is not None and length > reach:
        warnings.warn(f"data.sequence: {length} tokens reach past the {reach} that model.rope ({rope.type}) is scaled for", stacklevel=3)


def _check_experts(config: Config) -> None:
    """What a mixture of experts needs of the other sections."""
    if not config.model.moe.experts:
        return
    if config.optimizer.name in ("muon", "adafactor"):
        raise ValueError(
            f"optimizer.name: {config.optimizer.name} looks at matrices and would take all experts of a layer for one; use adamw or lion"
        )
    mesh, train, count, ways = config.mesh, config.train, config.model.moe.experts, experts_ways(config)
    if count % ways:
        names = " × ".join(f"mesh.{axis}" for axis in train.expert_axes)
        works = ", ".join(map(str, divisors(count)))
        raise ValueError(f"model.moe.experts: {count} do not divide over {names} {ways}; numbers of devices that work: {works}")
    if TENSOR in train.expert_axes and mesh.tensor > 1 and not train.sequence_parallel:
        raise ValueError(
            "train.expert_axes: folding experts over tensor needs tokens that differ along it; set train.sequence_parallel=true, "
            "or leave tensor out"
        )
    if train.expert_columns and config.model.moe.width % mesh.tensor:
        works = _nearest(mesh.tensor, lambda size: config.model.moe.width % size == 0)
        raise ValueError(
            f"train.expert_columns: mesh.tensor {mesh.tensor} does not divide model.moe.width {config.model.moe.width}; "
            f"sizes that work: {works}"
        )
    _check_chunks(config)
    k = config.model.moe.per_token
    if train.expert_dispatch == "capacity" and train.expert_capacity < 1 / k:
        tokens = train.batch * config.data.sequence
        alone = round(tokens * (1 - k * train.expert_capacity))
        raise ValueError(
            f"train.expert_capacity: {train.expert_capacity} is below 1/k = {1 / k:g}: at least {1 - train.expert_capacity:.0%} of all "
            f"choices would be dropped, and about {alone:,} of a step's {tokens:,} tokens or more would pass no expert; use 1 or more"
        )


def _check_chunks(config: Config) -> None:
    """The tokens that a device dispatches at once must divide into chunks."""
    mesh, train = config.mesh, config.train
    split = mesh.tensor if train.sequence_parallel and not train.expert_columns else 1
    parts = mesh.data * mesh.expert * train.accumulation * train.interleave
    tokens = train.batch // parts * (config.data.sequence // (mesh.seq * split))
    if tokens % train.expert_chunks:
        works = _nearest(train.expert_chunks, lambda size: tokens % size == 0)
        raise ValueError(
            f"train.expert_chunks: {tokens} tokens of a device do not divide in {train.expert_chunks} chunks; numbers that work: {works}"
        )


def _check_precision(config: Config) -> None:
    train = config.train
    if train.master_dtype == "bfloat16":
        raise ValueError("train.master_dtype: bfloat16 masters lose updates smaller than 1/256 of a weight; use float32")
    for name in ("compute_dtype", "master_dtype", "reduce_dtype"):
        if getattr(train, name) == "float64" and not jax.config.jax_enable_x64:
            raise ValueError(f"train.{name}: float64 needs 64-bit types; set the environment variable JAX_ENABLE_X64=1")


def _multiples(wanted: int, unit: int) -> str:
    """The multiples of `unit` on both sides of `wanted`."""
    below = wanted // unit * unit
    return ", ".join(str(size) for size in (below, below + unit) if size)
