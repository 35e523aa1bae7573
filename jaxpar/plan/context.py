"""What a step sends over `seq` for attention, from its configuration alone; `formulas.py` adds it to the rest of a step.

    context_traffic    every collective of context parallelism
    walk               how far keys travel: steps, and whether early and late chunks travel apart

As in `formulas.py`, sizes and counts are written down once more rather than asked of `jaxpar/parallel/context`.

Dims: B sequences and S tokens of a microbatch on one device, N query heads, K key/value heads and H head width (values have their own) of
one device, n devices along `seq` = r groups × u neighbours that trade heads. Forward of a layer, values that a device sends (backward in
brackets):

    gather    2 (n-1) B S K H                                (the same for gradients, and the keys again unless they are kept)
    ring      2 s B S max(K, u) H, s = r - 1 steps           (twice that: keys again, and gradients)
    ulysses   (u-1)/u B S (2 N + 2 max(K, u)) H              (the same, and what the policy did not keep again)

Under a window contiguous and zigzag rings stop after the s steps that it reaches: each layer under its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.mesh import SEQ
from jaxpar.plan.traffic import Collective, ring_bytes

# How often a backward trades heads again for values that the policy did not keep: (each of q, k, v; output).
TRADED_AGAIN = {"none": (0, 0), "matmuls": (1, 0), "outputs": (1, 1), "attention": (1, 1), "block": (1, 1)}


@dataclass(frozen=True)
class Walk:
    """`steps` sends of keys; `apart` when the two chunks of a zigzag shard go opposite ways, as halves."""

    steps: int
    apart: bool

    @property
    def halves(self) -> int:
        return 2 if self.apart else 1


def walk(config: Config, window: int) -> Walk:
    """How keys travel in this run's layers of that window, 0 for none."""
    context = config.train.context
    ring, _ = context.split(config.mesh.seq)
    if not window or config.model.prefix or context.layout == "striped":  # a prefix is seen from anywhere
        return Walk(ring - 1, False)
    slots = 2 if context.layout == "zigzag" and ring > 1 else 1
    chunk = config.data.sequence // (ring * slots)
    reach = -(-(window - 1) // chunk)
    return Walk(min(reach, ring - 1), slots == 2 and reach < ring)


def context_traffic(config: Config) -> list[Collective]:
    """Every collective over `seq` that attention needs in one step; none where the axis has one device."""
    mesh, model, train = config.mesh, config.model, config.train
    if mesh.seq == 1:
        return []
    ring, inner = train.context.split(mesh.seq)
    rows, tokens = train.batch // train.accumulation // (mesh.data * mesh.expert), config.data.sequence // mesh.seq
    part, widths = rows // train.interleave * tokens, (model.head_width, model.value_head_width)
    heads, kv_heads = model.heads // mesh.tensor, max(model.kv_heads // mesh.tensor, 1, inner)
    each = train.accumulation * train.interleave

    def send(what: str, kind: str, group: int, count: int, elements: int, dtype: str = train.compute_dtype) -> list[Collective]:
        payload = count * elements * jnp.dtype(dtype).itemsize
        record = Collective(kind, (SEQ,), group, count, ring_bytes(kind, group, payload), payload, dtype, False, f"context, {what}")
        return [record] if group > 1 and count else []

    found = []
    if config.data.documents == "isolated":
        found += send("segments", "all_gather", mesh.seq, train.accumulation, rows * config.data.sequence, "int32")
    if model.prefix:
        found += send("prefix", "all_gather", mesh.seq, train.accumulation, rows * config.data.sequence, "bool")
    again, output_again = TRADED_AGAIN[train.remat]
    keys = [part * kv_heads * width for width in widths]  # and values
    queries, output = (part * heads * width for width in widths)
    for what, size, more in (("queries", queries, again), *[("keys", size, again) for size in keys], ("output", output, output_again)):
        for _ in range(2 + more):
            found += send(f"heads of {what}", "all_to_all", inner, model.layers * each, size)
    for window, layers in Counter(model.layer_windows).items():
        way, times = walk(config, window), layers * each
        if train.context.method == "gather":
            gathers = 1 if train.remat == "none" else 2
            for size in keys if way.steps else ():
                found += [one for _ in range(gathers) for one in send("keys", "all_gather", ring, times, ring * size)]
                found += send("gradients of keys", "reduce_scatter", ring, times, ring * size)
            continue
        moves = _moves(way, 3 if train.remat == "block" else 2)
        for size in keys:
            found += [one for _ in range(moves) for one in send("keys and their gradients", "permute", 2, times, size // way.halves)]
    return found


def _moves(way: Walk, passes: int) -> int:
    """Sends of a layer's keys, in `passes` walks, of the gradients that travel with the last of them, and of these on their way home."""
    home = 2 * way.halves if way.apart and way.steps > 1 else way.halves  # both chunks of a group may return to either chunk of two others
    return way.halves * (way.steps * passes + max(way.steps - 1, 0)) + (home if way.steps else 0)
