"""The parameters as one device computes with them, its tokens, and one collective of a formula: what `formulas.py` and `experts.py` add up.

    Weight, weights   every parameter: its shape there, what splits it, over which axes it is whole
    microbatch        (B, S) of one device
    replicas, token_shards
    send              a collective, or none where the axes are one device

Dims: B sequences and S tokens of a microbatch on one device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.mesh import AXES, REPLICA, TENSOR
from jaxpar.models.decoder import declared
from jaxpar.params import flatten
from jaxpar.plan.traffic import Collective, ring_bytes

# Logical axes that `tensor` splits; "kv_heads" only where there are enough.
SPLIT_BY_TENSOR = frozenset(("heads", "kv_heads", "mlp", "vocabulary"))


@dataclass(frozen=True)
class Weight:
    """One parameter on one device.

    shape     of one layer, split by `tensor`, not by ZeRO
    layers    how many of them are stacked; 0 outside the layers
    partial   its gradient is a partial sum over `tensor`
    split     ZeRO splits it over the replicas
    on_tensor `tensor` splits it
    columns   the embedding's table where its rows travel instead of it (ZeRO-3)
    copies    axes of REPLICA over which it is whole before ZeRO: all of them, but for experts those that experts are not split over
    ways      devices along `copies`
    axes      mesh axes that split it before ZeRO
    role      of its record in `params.py`
    """

    name: str
    shape: tuple[int, ...]
    layers: int
    partial: bool
    split: bool
    on_tensor: bool
    columns: bool
    role: str
    copies: tuple[str, ...]
    ways: int
    axes: tuple[str, ...]

    @property
    def elements(self) -> int:
        """Of one layer."""
        return math.prod(self.shape)

    @property
    def total(self) -> int:
        """Of all layers."""
        return self.elements * max(self.layers, 1)


def replicas(config: Config) -> int:
    return math.prod(getattr(config.mesh, axis) for axis in REPLICA)


def token_shards(config: Config) -> int:
    """Parts of a row between blocks: t under sequence parallelism."""
    return config.mesh.tensor if config.train.sequence_parallel else 1


def state_elements(config: Config) -> int:
    """Numbers of what a model holds and no gradient moves, whole on every device, without moments."""
    return sum(spec.real_size for _, spec in flatten(declared(config.model, config.mesh.tensor)) if spec.role == "state")


def weights(config: Config) -> list[Weight]:
    """Every parameter of the model on one device."""
    t, n = config.mesh.tensor, replicas(config)
    rows_travel = config.train.zero == 3 and n > 1 and not config.model.tied and config.model.width % n == 0
    found = []
    for name, spec in flatten(declared(config.model, t)):
        if spec.role == "state":  # moved by counts, not by gradients; whole everywhere
            continue
        shape, axes = [], set[str]()
        for size, axis in zip(spec.layer_shape, spec.layer_axes, strict=True):
            target = _target(config, axis, size)
            shape.append(size // math.prod(getattr(config.mesh, each) for each in target))
            axes |= set(target)
        inside = bool({"heads", "kv_heads", "head_dim", "mlp"} & set(spec.layer_axes))
        copies = tuple(axis for axis in REPLICA if axis not in axes)
        ways = math.prod(getattr(config.mesh, axis) for axis in copies)
        found.append(
            Weight(
                name=name,
                shape=tuple(shape),
                layers=spec.shape[0] if spec.stacked else 0,
                partial=t > 1 and TENSOR not in axes and (inside or token_shards(config) > 1),
                split=config.train.zero > 0 and ways > 1 and any(size % ways == 0 for size in shape),
                on_tensor=t > 1 and TENSOR in axes,
                columns=rows_travel and name == "embedding/table" and math.prod(microbatch(config)) // token_shards(config) <= shape[0],
                role=spec.role,
                copies=copies,
                ways=ways,
                axes=tuple(axis for axis in AXES if axis in axes),
            )
        )
    return found


def _target(config: Config, axis: str, size: int) -> tuple[str, ...]:
    """The mesh axes that split a dim of a parameter."""
    if axis == "experts":
        return config.train.experts.axes
    split = SPLIT_BY_TENSOR | ({"expert_mlp"} if config.train.experts.columns else set())
    fits = axis in split and not (axis == "kv_heads" and size < config.mesh.tensor)
    return (TENSOR,) if fits else ()


def microbatch(config: Config) -> tuple[int, int]:
    """(B, S) of one device."""
    mesh, train = config.mesh, config.train
    return train.batch // train.accumulation // (mesh.data * mesh.expert), config.data.sequence // mesh.seq


def send(config: Config, what: str, kind: str, axes: tuple[str, ...], count: int, elements: int, dtype: str) -> list[Collective]:
    """`count` collectives of `elements` each; none where the axes are one device."""
    axes = tuple(axis for axis in AXES if axis in axes and getattr(config.mesh, axis) > 1)
    group, payload = math.prod(getattr(config.mesh, axis) for axis in axes), count * elements * jnp.dtype(dtype).itemsize
    return [Collective(kind, axes, group, count, ring_bytes(kind, group, payload), payload, dtype, False, what)] if axes and count else []
