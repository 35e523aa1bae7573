"""A block with everything that makes cutting hard: rematerialisation, an inner jit, a cast, a chunked MLP and a router with losses and
counts.

It runs on any mesh axes named data and tensor: attention heads and MLP columns are split over tensor, tokens too between blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxpar.parallel import collectives
from jaxpar.parallel.block_context import Context

D, F, B, S, N, L, E = 16, 32, 8, 8, 4, 3, 3
SHAPES = {
    "query": (D, D),
    "key": (D, D),
    "value": (D, D),
    "output": (D, D),
    "gate": (F, D),
    "up": (F, D),
    "down": (D, F),
    "router": (E, D),
    "norm": (D,),
    "norm2": (D,),
}
SPECS = {
    "query": P(None, "tensor", None),
    "key": P(None, "tensor", None),
    "value": P(None, "tensor", None),
    "output": P(None, None, "tensor"),
    "gate": P(None, "tensor", None),
    "up": P(None, "tensor", None),
    "down": P(None, None, "tensor"),
    "router": P(),
    "norm": P(),
    "norm2": P(),
}


def init(dtype=jnp.float64):
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {
        name: (jax.random.normal(key, (L, *shape), jnp.float64) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)).astype(dtype)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def context(batch=B):
    segments = np.random.default_rng(0).integers(0, 2, (batch, S)).cumsum(1) + 1
    return Context(
        {"segments": jnp.asarray(segments, jnp.int32)}, {"scale": jnp.asarray(0.5)}, {"window": jnp.asarray([2, 8, 3, 5, 4][:L], jnp.int32)}
    )


def rms(x, weight):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def gather(x):
    return collectives.all_gather(x, "tensor", 1)


def scatter(x):
    return collectives.reduce_scatter(x, "tensor", 1)


def attention(p, h, context):
    b, s, _ = h.shape
    q, k, v = ((h @ p[n].T).reshape(b, s, -1, D // N) for n in ("query", "key", "value"))
    seg, place = context.batch["segments"], jnp.arange(s)
    near = (place[:, None] - place[None] < context.layer["window"]) & (place[:, None] >= place[None])
    seen = near & (seg[:, :, None] == seg[:, None, :])
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * context.shared["scale"].astype(h.dtype)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1)
    out = checkpoint_name(jnp.einsum("bnqk,bknh->bqnh", weights, v), "attention_out")
    return out.reshape(b, s, -1) @ p["output"].T


def make_block(*, remat=False, inner_jit=False, cast=None, chunks=0, router=False):
    """block(layer, x [B, S/tensor, D], context) -> (y, aux), with the named difficulties."""

    def mlp(p, h):
        return (jax.nn.silu(h @ p["gate"].T) * (h @ p["up"].T)) @ p["down"].T

    attend = jax.jit(attention) if inner_jit else attention
    dense = jax.checkpoint(mlp) if remat else mlp
    attend = jax.checkpoint(attend) if remat else attend

    def block(p, x, context):
        if cast is not None:
            p = {name: w.astype(cast) for name, w in p.items()}
        x = x + scatter(attend(p, gather(rms(x, p["norm"])), context))
        local = rms(x, p["norm2"])
        h = gather(local)
        if chunks:
            pieces = jnp.moveaxis(h.reshape(h.shape[0], chunks, -1, D), 1, 0)
            _, out = lax.scan(lambda carry, piece: (carry, dense(p, piece)), None, pieces)
            y = jnp.moveaxis(out, 0, 1).reshape(h.shape)
        else:
            y = dense(p, h)
        y = scatter(y)
        if not router:
            return x + y, {}
        chances = jax.nn.softmax(local @ p["router"].T, -1)
        counts = jnp.sum(chances.argmax(-1)[..., None] == jnp.arange(E), (0, 1))
        return x + y * chances.max(-1, keepdims=True), {"chances": (chances**2).sum((0, 1)), "counts": counts}

    return block


VARIANTS = {
    "plain": {},
    "remat": {"remat": True},
    "jit": {"inner_jit": True},
    "chunked": {"chunks": 2},
    "router": {"router": True},
    "cast": {"cast": jnp.bfloat16},
    "everything": {"remat": True, "inner_jit": True, "chunks": 4, "router": True},
    # Apart from the above, because gradients of cast weights are rounded: sums over parts of a batch equal the whole's to 2^-9 only.
    "everything, cast": {"remat": True, "inner_jit": True, "chunks": 4, "router": True, "cast": jnp.bfloat16},
}


def gap(got, want):
    """The largest max|a−b| / max|b| over the leaves."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(abs(a - b).max() / (abs(b).max() + 1e-300)) for a, b in pairs)
