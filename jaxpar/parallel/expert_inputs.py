"""What `expert.moe` refuses of its arguments, before anything is computed: one line naming the argument.

T tokens of a device, D model width, E experts in all, K experts of a token, n devices along the axes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpar.config.checks import divisors, one_of, require
from jaxpar.parallel.collectives import as_tuple, axis_size, varying


def check_dispatch(method: str, methods: tuple[str, ...], buffer: float, capacity: float, chunks: int) -> None:
    """Settings that mean something."""
    one_of("method", method, methods)
    require(buffer >= 1, f"buffer_factor: {buffer} must be at least 1, the balanced load")
    require(capacity > 0, f"capacity_factor: {capacity} must be positive")
    require(chunks >= 1, f"chunks: {chunks} must be at least 1")


def check_tokens(x_TD: jax.Array, experts: int, axes: tuple[str, ...], chunks: int) -> None:
    """Tokens that differ along the axes and divide in chunks, experts that divide over the devices."""
    require(x_TD.ndim == 2, f"x_TD: shape {x_TD.shape} is not [tokens, width]")
    require(jnp.issubdtype(x_TD.dtype, jnp.floating), f"x_TD: {x_TD.dtype} are not floating-point numbers")
    ways = axis_size(axes)
    works = ", ".join(map(str, divisors(experts))) if experts > 0 else "none"
    require(
        experts > 0 and experts % ways == 0, f"experts: {experts} do not divide over {ways} devices; numbers of devices that work: {works}"
    )
    require(x_TD.shape[0] % chunks == 0, f"chunks: {x_TD.shape[0]} tokens of a device do not divide in {chunks} chunks")
    same = [axis for axis in as_tuple(axes) if axis not in varying(x_TD)]
    if same:
        raise TypeError(
            f"x_TD: it does not vary over {same}, so every device there has the same tokens; split them over {same}, "
            "by a shard_map with check_vma=True"
        )


def check_routed(x_TD: jax.Array, weights_TK: jax.Array, chosen_TK: jax.Array) -> None:
    """A router's results for these tokens."""
    for name, a, kind, wanted in (
        ("weights_TK", weights_TK, jnp.floating, "floating-point numbers"),
        ("chosen_TK", chosen_TK, jnp.integer, "whole numbers"),
    ):
        tokens = x_TD.shape[0]
        right = a.ndim == 2 and a.shape[0] == tokens and a.shape[1] > 0
        require(right, f"router: {name} of shape {a.shape} is not [{tokens} tokens, experts of a token]")
        require(jnp.issubdtype(a.dtype, kind), f"router: {name}, {a.dtype}, are not {wanted}")
    require(weights_TK.shape == chosen_TK.shape, f"router: weights_TK {weights_TK.shape} and chosen_TK {chosen_TK.shape} differ in shape")
