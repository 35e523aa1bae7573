"""Kernels of `gpu_check.py`: attention and the loss on a device, with gradients, against the same arithmetic in float64 on the CPU.

Inputs are rounded to the kernel's dtype first, so that what is compared is the kernel's own error: max|a-b| / max|b| of each result.

Dims: B batch, S sequence, D model width, N query heads, K key/value heads, H head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpar.config import MeshShape
from jaxpar.mesh import TENSOR, make_mesh
from jaxpar.ops.attention import attention
from jaxpar.parallel import vocabulary
from jaxpar.parallel.collectives import vary

# bf16 keeps 8 bits and probabilities are rounded to it between two products; float32 results differ by the order of their sums.
BOUNDS = {"bfloat16": 2**-6, "float32": 1e-4}


@dataclass(frozen=True)
class Kernel:
    """One comparison: the largest relative error of any of `results`, and whether it is within `bound`."""

    name: str
    dtype: str
    results: tuple[str, ...]
    error: float
    bound: float
    ok: bool


def check(device: Any, tiny: bool) -> list[Kernel]:
    """cuDNN's attention where the device has it, blockwise attention in float32 and bf16, the loss in both."""
    length = 256 if tiny else 2048
    implementations = [("blockwise", "float32"), ("blockwise", "bfloat16")]
    if device.platform == "gpu":
        implementations.append(("cudnn", "bfloat16"))
    found = [_attention(device, implementation, dtype, length) for implementation, dtype in implementations]
    return found + [_loss(device, dtype, length, 512 if tiny else 32768) for dtype in ("float32", "bfloat16")]


def _attention(device: Any, implementation: str, dtype: str, length: int) -> Kernel:
    """Causal, grouped heads: o and the gradients of q, k, v under a random incoming gradient."""
    draw, heads = np.random.default_rng(1), {"q": 4, "k": 2, "v": 2, "do": 4}
    arrays = [draw.normal(size=(2, length, n, 64)) for n in heads.values()]
    places = np.broadcast_to(np.arange(length, dtype=np.int32), (2, length))

    def program(implementation: str, platform: str) -> Callable[..., Any]:
        def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> tuple[jax.Array, ...]:
            def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                marks = {"q_positions_BS": jnp.asarray(places), "k_positions_BS": jnp.asarray(places)}
                return attention(q, k, v, **marks, ordered=True, implementation=implementation, platform=platform)

            o, backward = jax.vjp(forward, q, k, v)
            return o, *backward(do)

        return run

    return _compare(
        f"attention, {implementation}",
        dtype,
        ("o", "dq", "dk", "dv"),
        device,
        program(implementation, device.platform),
        program("blockwise", "cpu"),
        arrays,
    )


def _loss(device: Any, dtype: str, tokens: int, entries: int) -> Kernel:
    """Head and cross entropy in chunks: the sum of losses, and the gradients of the activations and of the table."""
    draw = np.random.default_rng(2)
    arrays = [draw.normal(size=(tokens, 256)), draw.normal(size=(entries, 256)) * 0.1]
    labels = draw.integers(0, entries, tokens).astype(np.int32)
    settings = vocabulary.LossSettings(vocabulary=entries, chunk=max(tokens // 4, 1))

    def program(mesh: jax.sharding.Mesh) -> Callable[..., Any]:
        def local(x_TD: jax.Array, table_VD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            def total(x_TD: jax.Array, table_VD: jax.Array) -> jax.Array:
                return vocabulary.loss(vary(x_TD, TENSOR), table_VD, jnp.asarray(labels), settings)[0]

            value, (dx, dtable) = jax.value_and_grad(total, argnums=(0, 1))(x_TD, table_VD)
            return value, dx, dtable

        whole, split = PartitionSpec(), PartitionSpec(TENSOR)
        return jax.shard_map(local, mesh=mesh, in_specs=(whole, split), out_specs=(whole, whole, split))

    meshes = [make_mesh(MeshShape(), [where]) for where in (device, jax.devices("cpu")[0])]
    return _compare("loss", dtype, ("loss", "dx", "dtable"), device, program(meshes[0]), program(meshes[1]), arrays)


def _compare(
    name: str,
    dtype: str,
    results: tuple[str, ...],
    device: Any,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    arrays: Sequence[np.ndarray],
) -> Kernel:
    inputs = [np.asarray(jnp.asarray(a, jnp.dtype(dtype))) for a in arrays]
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        got = jax.jit(kernel)(*(jax.device_put(a, device) for a in inputs))
    with jax.enable_x64(True):
        cpu = jax.devices("cpu")[0]
        wanted = jax.jit(reference)(*(jax.device_put(a.astype(np.float64), cpu) for a in inputs))
        pairs = [(np.asarray(a).astype(np.float64), np.asarray(b)) for a, b in zip(got, wanted, strict=True)]
    error = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    return Kernel(name, dtype, results, error, BOUNDS[dtype], bool(error <= BOUNDS[dtype]))
