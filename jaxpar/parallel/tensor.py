"""Tensor parallelism of linear layers and of heads: what each device of the `tensor` axis multiplies.

Dims: B batch, S sequence, D model width, N query heads, K key/value heads, H head width, t devices along `tensor`. Weights keep torch's
orientation, [out..., in...]. A column-parallel layer splits its outputs and sends nothing; a row-parallel layer splits its inputs, so its
product is a partial sum that the block's boundary reduces:

    x[B, S, D]  ·  W[N_tensor, H, D]    ->  q[B, S, N_tensor, H]
    o[B, S, N_tensor, H] · W[D, N_tensor, H] ->  y[B, S, D] {U_tensor}  ->  boundary.leave

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import jax
from jax import lax

from jaxpar.mesh import TENSOR
from jaxpar.parallel.collectives import axis_index, axis_size
from jaxpar.parallel.sequence import Boundary


def _contract(x: jax.Array, weight: jax.Array, dims: int) -> jax.Array:
    """Sum over the last `dims` dims of both: x[..., in], weight[out..., in] -> [..., out]."""
    last = tuple(range(-dims, 0))
    contracted = tuple(x.ndim + d for d in last), tuple(weight.ndim + d for d in last)
    if axis_size(TENSOR) == 1 or x.ndim - dims < 2:
        return lax.dot_general(x, weight, (contracted, ((), ())))
    # Collectives over tokens leave them in memory as [S, B], while a matmul wants its tokens as they are written: written as [B, S], each
    # gather and scatter would be followed by a copy of the whole activation.
    return lax.dot_general(x.swapaxes(0, 1), weight, (contracted, ((), ()))).swapaxes(0, 1)


def column_linear(x_BSD: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Linear layer with outputs split over `tensor`: x[B, S, D], W[out_tensor..., D], b[out_tensor...] -> [B, S, out_tensor...].

    `x` must vary over `tensor` (it comes from `Boundary.enter`), so that its gradient, partial on each device, is reduced there. Sends
    nothing.
    """
    y = _contract(x_BSD, weight, dims=1)
    return y if bias is None else y + bias


def row_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x[B, S, in_tensor...], W[D, in_tensor...] -> y[B, S, D] {U_tensor}: what a row-parallel layer has before it leaves. Sends nothing."""
    return _contract(x, weight, dims=weight.ndim - 1)


def row_linear(x: jax.Array, weight: jax.Array, boundary: Boundary, bias: jax.Array | None = None) -> jax.Array:
    """Linear layer with inputs split over `tensor`: x[B, S, in_tensor...], W[D, in_tensor...], b[D] -> y as it lies between blocks.

    The bias is whole on each device and added after the reduction, hence once. Sends what `boundary.leave` sends.
    """
    y_BSD = boundary.leave_with(x, lambda x: row_product(x, weight))
    return y_BSD if bias is None else y_BSD + bias


def check_heads(heads: int, kv_heads: int, tensor: int) -> None:
    """Raise ValueError, listing the sizes that work, if heads cannot be dealt to `tensor` devices.

    Query heads must divide evenly. Key/value heads must too, or else the devices must divide evenly over them.
    """

    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(tensor):
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if fits(size))
        raise ValueError(f"mesh.tensor: {tensor} cannot share {heads} query heads and {kv_heads} key/value heads; sizes that work: {sizes}")


def own_kv_heads(parameter: jax.Array, kv_heads: int) -> jax.Array:
    """This device's key/value heads of a weight or bias whose first dim is K: [K_tensor, ...] as it is, or [K, ...] -> [1, ...] if K < t.

    With fewer key/value heads than devices the parameter is whole on each device and t/K neighbours share a head, the one their query
    heads belong to. Its gradient is then a partial sum over `tensor`: the parameter is marked varying there before the step and its
    gradient reduced after.
    """
    size = axis_size(TENSOR)
    if kv_heads >= size:
        assert parameter.shape[0] * size == kv_heads, f"{parameter.shape} is no shard of {kv_heads} key/value heads over {size} devices"
        return parameter
    assert parameter.shape[0] == kv_heads and size % kv_heads == 0, f"{parameter.shape} must hold all {kv_heads} key/value heads"
    return lax.dynamic_slice_in_dim(parameter, axis_index(TENSOR) // (size // kv_heads), 1, axis=0)
