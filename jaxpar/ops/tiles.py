"""The tiles of blockwise attention: which there are, how arrays are laid out for them, which keys each query sees.

    Masking, Marks   what is known while tracing, what only the arrays know
    Tiles            of one call

B batch, S sequence (of q or of k), N query heads, K key/value heads, G = N/K heads of a group, H head width,
Q and T the queries and keys of one tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True, kw_only=True)
class Masking:
    """What is static. `window` 0 means no window known while tracing.

    `ordered` promises that there are as many keys as queries and that, within a segment, query i stands (i - j) `stride` + `offset` behind
    key j, give or take less than a stride: tiles that causality or the window hides need no computing. The same contiguous tokens have
    stride 1 and offset 0; keys of a block further back in the sequence an offset; every n-th token a stride of n.
    """

    scale: float
    softcap: float | None = None
    causal: bool = True
    window: int = 0
    ordered: bool = False
    stride: int = 1
    offset: int = 0
    block: int = 512


class Marks(NamedTuple):
    """Where each token stands. Segment 0 sees nothing and is not seen; segments None: one document, no padding. `window` is an int32
    scalar, 0 for all. `k_prefix` marks keys that earlier queries see too."""

    q_positions_BS: jax.Array
    k_positions_BS: jax.Array
    q_segments_BS: jax.Array | None = None
    k_segments_BS: jax.Array | None = None
    window: jax.Array | None = None
    k_prefix_BS: jax.Array | None = None


def tile_pairs(q_tiles: int, k_tiles: int, q_tile: int, k_tile: int, masking: Masking) -> list[tuple[int, int]]:
    """(query tile, key tile) to compute, nearest the diagonal first, so that any window needs a prefix of the list."""
    pairs = [(i, j) for i in range(q_tiles) for j in range(k_tiles)]
    if not masking.ordered:
        return pairs
    assert (q_tiles, q_tile) == (k_tiles, k_tile), "ordered attention has as many keys as queries"
    if masking.causal:
        pairs = [(i, j) for i, j in pairs if (i - j + 1) * q_tile * masking.stride + masking.offset > 0]
    if masking.window:
        pairs = [(i, j) for i, j in pairs if nearest(i - j, q_tile, masking) < masking.window]
    return sorted(pairs, key=lambda pair: pair[0] - pair[1])


def nearest(tiles_apart: int | np.ndarray, tile: int, masking: Masking) -> int | np.ndarray:
    """Smallest q position minus k position of two tiles of `ordered` attention that many apart."""
    return (tiles_apart - 1) * tile * masking.stride + 1 + masking.offset


class Tiles:
    """Tiles of one call: heads before tokens ([B, K, G, S, H] and [B, K, S, H]), the sequence padded to whole tiles with segment 0."""

    def __init__(self, masking: Masking, q_BSNH: jax.Array, k_BSKH: jax.Array, marks: Marks) -> None:
        (_, self.q_length, heads, _), (_, self.k_length, self.kv_heads, _) = q_BSNH.shape, k_BSKH.shape
        assert heads % self.kv_heads == 0, (heads, self.kv_heads)
        self.masking, self.group = masking, heads // self.kv_heads
        q_tiles, k_tiles = math.ceil(self.q_length / masking.block), math.ceil(self.k_length / masking.block)
        self.q_tile, self.k_tile = math.ceil(self.q_length / q_tiles), math.ceil(self.k_length / k_tiles)
        self.q_padding, self.k_padding = q_tiles * self.q_tile - self.q_length, k_tiles * self.k_tile - self.k_length
        self.pairs = tile_pairs(q_tiles, k_tiles, self.q_tile, self.k_tile, masking)
        self.single = q_tiles == k_tiles == 1
        self.marks = self._pad_marks(marks)

    def _pad_marks(self, marks: Marks) -> Marks:
        q_positions, k_positions, q_segments, k_segments, window, k_prefix = marks
        assert (q_segments is None) == (k_segments is None), "segments of both queries and keys, or of neither"
        if q_segments is None and (self.q_padding or self.k_padding):
            q_segments, k_segments = jnp.ones_like(q_positions), jnp.ones_like(k_positions)
        q_positions, k_positions = self._pad(q_positions, 1, self.q_padding), self._pad(k_positions, 1, self.k_padding)
        if q_segments is not None and k_segments is not None:
            q_segments, k_segments = self._pad(q_segments, 1, self.q_padding), self._pad(k_segments, 1, self.k_padding)
        k_prefix = None if k_prefix is None else self._pad(k_prefix, 1, self.k_padding)
        return Marks(q_positions, k_positions, q_segments, k_segments, window, k_prefix)

    def mask(self, i: int | jax.Array, j: int | jax.Array) -> jax.Array | None:
        """Which keys of tile j the queries of tile i see: [B, Q, T], None for all."""
        marks, terms = self.marks, []
        distance = self._of_queries(marks.q_positions_BS, i) - self._of_keys(marks.k_positions_BS, j)
        if self.masking.causal:
            behind = distance >= 0
            terms.append(behind if marks.k_prefix_BS is None else behind | self._of_keys(marks.k_prefix_BS, j))
        if self.masking.window:
            terms.append(distance < self.masking.window)
        if marks.window is not None:
            terms.append((distance < marks.window) | (marks.window == 0))
        if marks.q_segments_BS is not None and marks.k_segments_BS is not None:
            q_segments, k_segments = self._of_queries(marks.q_segments_BS, i), self._of_keys(marks.k_segments_BS, j)
            terms.append((q_segments == k_segments) & (q_segments != 0))
        return reduce(jnp.logical_and, terms) if terms else None

    def _of_queries(self, x_BS: jax.Array, i: int | jax.Array) -> jax.Array:
        return (x_BS if self.single else lax.dynamic_slice_in_dim(x_BS, i * self.q_tile, self.q_tile, 1))[:, :, None]

    def _of_keys(self, x_BS: jax.Array, j: int | jax.Array) -> jax.Array:
        return (x_BS if self.single else lax.dynamic_slice_in_dim(x_BS, j * self.k_tile, self.k_tile, 1))[:, None, :]

    def pair(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        i, j = jnp.asarray(np.array(self.pairs, np.int32))[step]
        return i, j

    def count(self) -> int | jax.Array:
        """Tiles to compute; with a window that is an array, as many as it reaches."""
        if not (self.masking.ordered and self.marks.window is not None):
            return len(self.pairs)
        apart = np.array([i - j for i, j in self.pairs])
        reached = jnp.asarray(nearest(apart, self.q_tile, self.masking)) < self.marks.window
        return jnp.where(self.marks.window == 0, len(self.pairs), reached.sum(dtype=jnp.int32))

    def queries(self, x_BSNH: jax.Array) -> jax.Array:
        b, s, _, h = x_BSNH.shape
        return self._pad(x_BSNH.reshape(b, s, self.kv_heads, self.group, h).transpose(0, 2, 3, 1, 4), 3, self.q_padding)

    def keys(self, x_BSKH: jax.Array) -> jax.Array:
        return self._pad(x_BSKH.transpose(0, 2, 1, 3), 2, self.k_padding)

    def rows(self, x_BNS: jax.Array) -> jax.Array:
        b, _, s = x_BNS.shape
        return self._pad(x_BNS.reshape(b, self.kv_heads, self.group, s), 3, self.q_padding)

    def from_queries(self, x_BKGSH: jax.Array) -> jax.Array:
        x = x_BKGSH[:, :, :, : self.q_length].transpose(0, 3, 1, 2, 4)
        return x.reshape(*x.shape[:2], self.kv_heads * self.group, x.shape[-1])

    def from_keys(self, x_BKSH: jax.Array) -> jax.Array:
        return x_BKSH[:, :, : self.k_length].transpose(0, 2, 1, 3)

    def from_rows(self, x_BKGS: jax.Array) -> jax.Array:
        return x_BKGS[..., : self.q_length].reshape(x_BKGS.shape[0], self.kv_heads * self.group, self.q_length)

    @staticmethod
    def _pad(x: jax.Array, dim: int, padding: int) -> jax.Array:
        return jnp.pad(x, [(0, padding if d == dim else 0) for d in range(x.ndim)]) if padding else x

    def q_slice(self, x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, i * self.q_tile, self.q_tile, 3)

    def k_slice(self, x: jax.Array, j: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, j * self.k_tile, self.k_tile, 2)

    def q_update(self, x: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, part, i * self.q_tile, 3)

    def k_update(self, x: jax.Array, part: jax.Array, j: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, part, j * self.k_tile, 2)
