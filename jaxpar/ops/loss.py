"""Cross entropy of a chunk of tokens against one shard of the vocabulary: the arithmetic between the collectives of
`parallel/vocabulary.py`.

Dims: C tokens of a chunk, V vocabulary entries of this shard, D model width. Statistics are float32, or float64 where x is. With logits
l, label y:

    top = max l     total = sum exp(l - top)     log Z = top + log total     loss = log Z - l_y + z (log Z)^2
    d loss / d l = softmax(l) (1 + 2 z log Z) - onehot(y)         and, through the soft cap l = c tanh(r / c),  d l / d r = 1 - (l / c)^2
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Statistics(NamedTuple):
    """Per token over the whole vocabulary, [C]: all that the devices of a tensor group tell each other."""

    top_C: jax.Array
    total_C: jax.Array
    label_C: jax.Array

    @property
    def log_z_C(self) -> jax.Array:
        return self.top_C + jnp.log(self.total_C)


def accumulation_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """float64 for float64, float32 for everything narrower."""
    return jnp.dtype(jnp.float64) if jnp.dtype(dtype) == jnp.float64 else jnp.dtype(jnp.float32)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap), or x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def capped_logits(x_CD: jax.Array, table_VD: jax.Array, cap: float | None) -> jax.Array:
    """Logits [C, V], float32 or wider, soft cap applied. x may have any leading dims."""
    dims = (((x_CD.ndim - 1,), (1,)), ((), ()))
    return soft_cap(lax.dot_general(x_CD, table_VD, dims, preferred_element_type=accumulation_dtype(x_CD.dtype)), cap)


def mask_padding(logits_CV: jax.Array, first: jax.Array | int, vocabulary: int) -> jax.Array:
    """-inf at entries that only pad the vocabulary: this shard holds ids `first`, `first` + 1, ..., real ones are below `vocabulary`."""
    ids_V = first + jnp.arange(logits_CV.shape[-1], dtype=jnp.int32)
    return jnp.where(ids_V < vocabulary, logits_CV, -jnp.inf)


def local_sums(logits_CV: jax.Array, top_C: jax.Array, columns_C: jax.Array) -> tuple[jax.Array, jax.Array]:
    """This shard's part of (total, label logit), each [C]. `columns` is the label's column in this shard, outside 0..V-1 if another has
    it."""
    total_C = jnp.exp(logits_CV - top_C[:, None]).sum(-1)
    mine_C = (columns_C >= 0) & (columns_C < logits_CV.shape[-1])
    hit_C1 = jnp.take_along_axis(logits_CV, jnp.where(mine_C, columns_C, 0)[:, None], axis=-1)
    return total_C, jnp.where(mine_C, hit_C1[:, 0], 0)


def token_losses(statistics: Statistics, valid_C: jax.Array, z_loss: float) -> tuple[jax.Array, jax.Array]:
    """(cross entropy, z-loss) of each token, [C], zero where not valid."""
    log_z_C = statistics.log_z_C
    zero = jnp.zeros((), log_z_C.dtype)
    return jnp.where(valid_C, log_z_C - statistics.label_C, zero), jnp.where(valid_C, z_loss * log_z_C**2, zero)


def logit_gradient(
    logits_CV: jax.Array, statistics: Statistics, columns_C: jax.Array, valid_C: jax.Array, z_loss: float, cap: float | None
) -> jax.Array:
    """d (sum of token losses) / d (logits before the cap), [C, V]. Zero at padding entries (logits -inf) and at tokens that are not
    valid."""
    log_z_C1 = statistics.log_z_C[:, None]
    softmax_CV = jnp.exp(logits_CV - log_z_C1)
    label_CV = columns_C[:, None] == jnp.arange(logits_CV.shape[-1], dtype=columns_C.dtype)
    gradient_CV = softmax_CV * (1 + 2 * z_loss * log_z_C1) - label_CV.astype(softmax_CV.dtype)
    if cap is not None:
        gradient_CV *= jnp.where(jnp.isfinite(logits_CV), 1 - (logits_CV / cap) ** 2, 0)
    return jnp.where(valid_C[:, None], gradient_CV, 0)
