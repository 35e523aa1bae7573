"""What a run must satisfy across the sections of its configuration, before anything is built: `check_run`.

Each error is one line that names the field and sizes that work.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import jax

from jaxpar.config import Config
from jaxpar.config.checks import divisors
from jaxpar.mesh import AXES, BATCH, PIPE, TENSOR
from jaxpar.rules import experts_ways, fits_kv, nearest

# Axes that the mesh has and the train step does not use yet.
UNUSED_AXES = (PIPE,)


def check_run(config: Config, devices: int) -> None:
    """Refuse a run whose sections contradict one another or the number of devices, before anything is built.

    Each ValueError is one line that names the field and sizes that work. What merely looks unwise is a warning.
    """
    mesh, model = config.mesh, config.model
    for axis in UNUSED_AXES:
        size = getattr(mesh, axis)
        if size > 1:
            raise ValueError(
                f"mesh.{axis}: {size} is not supported by the train step yet; set mesh.{axis}=1 and use mesh.data, mesh.expert, mesh.seq "
                "or mesh.tensor"
            )
    _check_devices(config, devices)
    _check_tensor(config, devices)
    _check_batch(config)
    _check_sequence(config)
    heads = model.heads // mesh.tensor, max(model.kv_heads // mesh.tensor, 1)
    config.train.context.check_heads(*heads, mesh.seq)
    _check_precision(config)
    _check_experts(config)
    trained = config.data.tokenizer is None and config.data.source != "tokens"
    if trained and config.data.vocabulary > model.vocabulary:
        raise ValueError(
            f"data.vocabulary: a tokenizer of {config.data.vocabulary} entries exceeds model.vocabulary {model.vocabulary}; "
            f"set data.vocabulary={model.vocabulary} or less"
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
        f"model.kv_heads {model.kv_heads}": fits_kv(model.kv_heads),
        f"model.mlp_width {model.mlp_width}": lambda size: model.mlp_width % size == 0,
    }
    if model.moe.experts and model.moe.shared_width:
        needs[f"model.moe.shared_width {model.moe.shared_width}"] = lambda size: model.moe.shared_width % size == 0
    works = nearest(tensor, lambda size: size <= devices and all(fits(size) for fits in needs.values()))
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
    tokens = train.batch // (ways * train.accumulation) * config.data.sequence // mesh.seq
    if tokens >= 2**31:
        raise ValueError(
            f"train.batch: {tokens:,} tokens of a device in a microbatch are past 2^31, the most that XLA's indices reach; "
            f"use a smaller train.batch or a larger train.accumulation"
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
    experts = train.experts
    if count % ways:
        names = " × ".join(f"mesh.{axis}" for axis in experts.axes)
        works = ", ".join(map(str, divisors(count)))
        raise ValueError(f"model.moe.experts: {count} do not divide over {names} {ways}; numbers of devices that work: {works}")
    if TENSOR in experts.axes and mesh.tensor > 1 and not train.sequence_parallel:
        raise ValueError(
            "train.experts.axes: folding experts over tensor needs tokens that differ along it; set train.sequence_parallel=true, "
            "or leave tensor out"
        )
    if experts.columns and config.model.moe.width % mesh.tensor:
        works = nearest(mesh.tensor, lambda size: config.model.moe.width % size == 0)
        raise ValueError(
            f"train.experts.columns: mesh.tensor {mesh.tensor} does not divide model.moe.width {config.model.moe.width}; "
            f"sizes that work: {works}"
        )
    _check_chunks(config)
    k, factor = config.model.moe.per_token, experts.capacity_factor
    if experts.dispatch == "capacity" and factor < 1 / k:
        tokens = train.batch * config.data.sequence
        alone = math.ceil(tokens * (1 - k * factor))
        raise ValueError(
            f"train.experts.capacity_factor: {factor} is below 1/k = {1 / k:g}: at least {1 - factor:.0%} of all "
            f"choices would be dropped, and about {alone:,} of a step's {tokens:,} tokens or more would pass no expert; use 1 or more"
        )


def _check_chunks(config: Config) -> None:
    """The tokens that a device dispatches at once must divide into chunks."""
    mesh, train, experts = config.mesh, config.train, config.train.experts
    split = mesh.tensor if train.sequence_parallel and not experts.columns else 1
    parts = mesh.data * mesh.expert * train.accumulation * train.interleave
    tokens = train.batch // parts * (config.data.sequence // (mesh.seq * split))
    if tokens % experts.chunks:
        works = nearest(experts.chunks, lambda size: tokens % size == 0)
        raise ValueError(
            f"train.experts.chunks: {tokens} tokens of a device do not divide in {experts.chunks} chunks; numbers that work: {works}"
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
