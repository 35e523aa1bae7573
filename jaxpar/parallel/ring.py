"""Collective matmul: where a block begins and ends, activations travel around a ring over `tensor`, a chunk at a time, each behind the
products of another.

Dims: B batch, S sequence, D model width, t devices along `tensor`. Between blocks as under sequence parallelism, x[B, S_tensor, D]. Inside,
all tokens are t chunks [B, S/t, ...]; on each device number k is the tokens of the device k places further on.

    enter_with   x[B, S_tensor, D] -> products of all tokens [B, S, ...]; t-1 permutes of x, (t-1)/t B·S·D values, as one all-gather sends
    leave_with   all tokens [B, S, ...] -> their products summed on the way home, y[B, S_tensor, D]; t-1 permutes, as one reduce-scatter
    through      both, without putting the chunks in order between

The backward of the first sums gradients on their way home, that of the second sends chunks around. The result is that of `SequenceParallel`
but for the order of sums.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.mesh import TENSOR
from jaxpar.parallel.collectives import axis_index, axis_size, permute, vary_like
from jaxpar.parallel.sequence import Product, Products, SequenceParallel

Chunks = tuple[jax.Array, ...]


def _start(k: int, length: int) -> jax.Array:
    """The first token of chunk k, each of `length` tokens."""
    return (axis_index(TENSOR).astype(jnp.int32) + k) % axis_size(TENSOR) * length


def _sent_around(x_BSD: jax.Array) -> Chunks:
    """x[B, S_tensor, D] -> all tokens. Chunk k + 1 can travel while chunk k is multiplied."""
    size, found = axis_size(TENSOR), [x_BSD]
    for _ in range(size - 1):
        found.append(permute(found[-1], TENSOR, [(i, (i - 1) % size) for i in range(size)]))
    return tuple(found)


def _whole(chunks: Chunks) -> jax.Array:
    """[B, S/t, ...] each -> [B, S, ...] in the order of the sequence."""
    first = chunks[0]
    length = first.shape[1]
    found = vary_like(jnp.zeros((first.shape[0], length * len(chunks), *first.shape[2:]), first.dtype), first)
    for k, chunk in enumerate(chunks):
        found = lax.dynamic_update_slice_in_dim(found, chunk, _start(k, length), axis=1)
    return found


def _chunks(x: jax.Array) -> Chunks:
    """[B, S, ...] -> [B, S/t, ...] each."""
    parts = axis_size(TENSOR)
    length = x.shape[1] // parts
    return tuple(lax.dynamic_slice_in_dim(x, _start(k, length), length, axis=1) for k in range(parts))


def _summed(chunks: Chunks, product: Product) -> jax.Array:
    """Sum over `tensor` of product(chunk), each chunk's on the device it belongs to."""
    size = axis_size(TENSOR)
    total = product(chunks[-1])
    for chunk in chunks[-2::-1]:
        total = permute(total, TENSOR, [(i, (i + 1) % size) for i in range(size)]) + product(chunk)
    return total


@dataclass(frozen=True)
class Ring(SequenceParallel):
    """Sequence parallelism with a ring in place of the all-gather and the reduce-scatter around a block's matmuls."""

    def enter_with(self, x_BSD: jax.Array, products: Products) -> tuple[jax.Array, ...]:
        found = zip(*(products(chunk) for chunk in _sent_around(x_BSD)), strict=True)
        return tuple(_whole(chunks) for chunks in found)

    def leave_with(self, x: jax.Array, product: Product) -> jax.Array:
        return _summed(_chunks(x), product)

    def through(self, x_BSD: jax.Array, product: Product) -> jax.Array:
        return _summed(_sent_around(x_BSD), product)
