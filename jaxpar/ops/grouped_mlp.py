"""The gated MLP of experts on rows that lie in groups, without an array of R rows by F: for where gate and up are computed again anyway.

    grouped_mlp    x[R, D], weight[R], gate, up [G, F, D], down[G, D, F], sizes[G] -> y[R, D]
    in_sequence    the same and the experts once more, for the next rows

A block of rows goes through all three matmuls while it is there; the backward computes its gate and up again, then both of its gradients.
That is 11 matmuls where keeping gate and up takes 9 and computing them again in matmuls of their own takes 11. Work list and cost as in
`grouped_matmul`: a buffer with room to spare costs memory and no time. The layer stack leaves the backward's loop whole: cut into input and
weight gradients it would hand over R rows by F after all.

Dims: R rows, D model width, F MLP width, G groups, V visits.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.ops.grouped_matmul import Visits, add, default_block, over, own_rows, pick, put, slices, visits
from jaxpar.ops.mlp import gated, weighted
from jaxpar.ops.variation import same_variation

Three = tuple[jax.Array, jax.Array, jax.Array]


def grouped_mlp(
    x_RD: jax.Array,
    weight_R: jax.Array,
    gate_GFD: jax.Array,
    up_GFD: jax.Array,
    down_GDF: jax.Array,
    sizes_G: jax.Array,
    activation: str,
    block: int = 0,
) -> jax.Array:
    """weight * down(activation(gate x) * up x) of each row's group: [R, D] in x's dtype, zeros behind the last group. `block` 0 chooses.

    Local, no bytes moved. Gradients have their arrays' dtypes; sums over rows are in float32, or float64 if x or experts are.
    """
    return in_sequence(x_RD, weight_R, (gate_GFD, up_GFD, down_GDF), sizes_G, activation, block)[0]


def in_sequence(
    x_RD: jax.Array, weight_R: jax.Array, experts: Three, sizes_G: jax.Array, activation: str, block: int = 0
) -> tuple[jax.Array, Three]:
    """`grouped_mlp`'s y and the experts (gate, up, down) as they were, for rows that come after these. The backward then adds these rows'
    gradients of the experts to those rows' as it goes: one buffer for any number of chunks, which are served in reverse."""
    rows, groups = x_RD.shape[0], experts[0].shape[0]
    assert rows and sizes_G.shape == (groups,), (x_RD.shape, sizes_G.shape)
    block = min(block or default_block(rows, groups), rows)
    list_ = visits(sizes_G, rows, block)
    x_RD, weight_R, *wide = same_variation(x_RD, weight_R, *experts, beside=[list_.group])
    return _grouped(block, activation, x_RD, weight_R, (wide[0], wide[1], wide[2]), list_)


def _times(x: jax.Array, weight: jax.Array, dim: int) -> jax.Array:
    """x[block, in] times a weight whose dim `dim` is summed."""
    return lax.dot_general(x, weight, (((1,), (dim,)), ((), ())))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(block: int, activation: str, x_RD: jax.Array, weight_R: jax.Array, experts: Three, list_: Visits) -> tuple[jax.Array, Three]:
    def visit(y: jax.Array, here: Visits) -> jax.Array:
        (x, weight), (gate, up, down) = slices(block, here, x_RD, weight_R), pick(here, *experts)
        hidden = gated(_times(x, gate, 1), _times(x, up, 1), activation)
        return put(block, here, y, _times(weighted(hidden, weight), down, 1))

    return over(list_, visit, jnp.zeros_like(x_RD)), experts


def _forward(block: int, activation: str, x_RD: jax.Array, weight_R: jax.Array, experts: Three, list_: Visits) -> tuple[jax.Array, tuple]:
    return _grouped(block, activation, x_RD, weight_R, experts, list_), (x_RD, weight_R, experts, list_)


def _backward(block: int, activation: str, residuals: tuple, gradients: tuple[jax.Array, Three]) -> tuple:
    (x_RD, weight_R, experts, list_), (dy_RD, later) = residuals, gradients
    dtype = jnp.promote_types(jnp.promote_types(x_RD.dtype, experts[0].dtype), jnp.float32)

    def visit(carry: tuple[jax.Array, jax.Array, Three], here: Visits) -> tuple[jax.Array, jax.Array, Three]:
        dx, dweight, (dgates, dups, ddowns) = carry
        (x, weight, dy), (gate, up, down) = slices(block, here, x_RD, weight_R, dy_RD), pick(here, *experts)
        mine = own_rows(block, here)
        dy = jnp.where(mine, dy, 0)  # and so all of this visit's gradients
        hidden, transpose = jax.vjp(partial(gated, name=activation), _times(x, gate, 1), _times(x, up, 1))
        dhidden = _times(dy, down, 0)
        new = (dhidden.astype(dtype) * hidden.astype(dtype)).sum(1).astype(weight.dtype)
        dgate, dup = transpose(weighted(dhidden, weight))
        totals = add(here, dgates, dgate, x), add(here, dups, dup, x), add(here, ddowns, dy, weighted(hidden, weight))
        dx = put(block, here, dx, _times(dgate, gate, 0) + _times(dup, up, 0))
        return dx, put(block, here, dweight[:, None], new[:, None])[:, 0], totals

    dgates, dups, ddowns = (total.astype(dtype) for total in later)
    start = (jnp.zeros_like(x_RD), jnp.zeros_like(weight_R), (dgates, dups, ddowns))
    dx, dweight, totals = over(list_, visit, start)
    return dx, dweight, tuple(total.astype(each.dtype) for total, each in zip(totals, experts, strict=True)), None


_grouped.defvjp(_forward, _backward)
