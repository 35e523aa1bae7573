"""The boundary of a block: how activations lie between blocks, and what is sent where a block begins and ends.

Dims: B batch, S sequence, D model width, t devices along `tensor`. Inside a block every device of a tensor group sees all S tokens and
computes its share of heads or MLP columns; its output is a partial sum. Between blocks there are two ways, chosen once by `boundary`:

                    between blocks          enter                      leave
    Replicated      x[B, S, D], equal       marks varying, no bytes    all-reduce       2 (t-1)/t B·S·D values a device
    SequenceParallel x[B, S_tensor, D]      all-gather  (t-1)/t B·S·D  reduce-scatter   (t-1)/t B·S·D

Both move the same bytes, for an all-reduce is a reduce-scatter and an all-gather; under sequence parallelism norms, residuals and dropout
work on, and keep, S/t tokens instead of S. The transposes are each other's: the backward of `enter` is `leave` of the gradient, and the
reverse. A third way, `ring.py`, sends the bytes of the second a chunk at a time, each behind the products of another: what a block does
with tokens as they enter, and before they leave, it hands to the boundary.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2; Shoeybi et al.,
"Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxpar.mesh import TENSOR
from jaxpar.parallel.collectives import all_gather, all_reduce, axis_index, reduce_scatter, vary

Product = Callable[[jax.Array], jax.Array]  # of tokens [B, any, ...]
Products = Callable[[jax.Array], tuple[jax.Array, ...]]


class Boundary(Protocol):
    """What a block needs to know of how activations lie between blocks."""

    def enter(self, x_BSD: jax.Array) -> jax.Array:
        """Activations between blocks -> all tokens on every device, varying over `tensor`."""
        ...

    def leave(self, y_BSD: jax.Array) -> jax.Array:
        """Partial sums over `tensor`, all tokens -> activations between blocks."""
        ...

    def enter_with(self, x_BSD: jax.Array, products: Products) -> tuple[jax.Array, ...]:
        """What `products` makes of all tokens, which enter for it."""
        ...

    def leave_with(self, x: jax.Array, product: Product) -> jax.Array:
        """What `product`, a partial sum, makes of all tokens of x[B, S, ...], and leaves."""
        ...

    def through(self, x_BSD: jax.Array, product: Product) -> jax.Array:
        """Tokens enter, `product` makes of each a partial sum, which leaves."""
        ...

    def tokens(self, length: int) -> jax.Array:
        """Index within its row of each of the `length` tokens that this device holds between blocks. [length] int32."""
        ...


class _AtOnce:
    """Products of all tokens at once, after they have entered and before they leave."""

    def enter_with(self: Boundary, x_BSD: jax.Array, products: Products) -> tuple[jax.Array, ...]:
        return products(self.enter(x_BSD))

    def leave_with(self: Boundary, x: jax.Array, product: Product) -> jax.Array:
        return self.leave(product(x))

    def through(self: Boundary, x_BSD: jax.Array, product: Product) -> jax.Array:
        return self.leave(product(self.enter(x_BSD)))


@dataclass(frozen=True)
class SequenceParallel(_AtOnce):
    """Tokens are split over `tensor` between blocks: x[B, S_tensor, D]. S must divide by the axis."""

    def enter(self, x_BSD: jax.Array) -> jax.Array:
        return all_gather(x_BSD, TENSOR, dim=1)

    def leave(self, y_BSD: jax.Array) -> jax.Array:
        return reduce_scatter(y_BSD, TENSOR, dim=1)

    def tokens(self, length: int) -> jax.Array:
        return axis_index(TENSOR).astype(jnp.int32) * length + jnp.arange(length, dtype=jnp.int32)


@dataclass(frozen=True)
class Replicated(_AtOnce):
    """Every device of a tensor group holds all tokens between blocks: x[B, S, D], equal over `tensor`."""

    def enter(self, x_BSD: jax.Array) -> jax.Array:
        return vary(x_BSD, TENSOR)

    def leave(self, y_BSD: jax.Array) -> jax.Array:
        return all_reduce(y_BSD, TENSOR)

    def tokens(self, length: int) -> jax.Array:
        return jnp.arange(length, dtype=jnp.int32)


def boundary(sequence_parallel: bool) -> Boundary:
    """The boundary that `train.sequence_parallel` asks for."""
    return SequenceParallel() if sequence_parallel else Replicated()
