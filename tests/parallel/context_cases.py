"""Cases of context-parallel attention, ours and dense: shared by the default and the slow tests."""

import functools
import itertools
import random
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar.compilation import without_cache
from jaxpar.config import ContextConfig, MeshShape
from jaxpar.mesh import make_mesh
from jaxpar.parallel.context import attention
from jaxpar.parallel.context.layout import layout
from tests.ops import dense

TOLERANCE = 1e-11
SCALE = 0.7
# Programs of a few tokens: XLA's fusion emitters (an option until jax 0.11) would take four times as long to compile them, and compute the
# same.
OPTIONS = {"xla_cpu_parallel_codegen_split_count": 1} | ({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {})


CHOICES = {
    "method": ("ring", "ulysses", "gather", "usp"),
    "layout": ("contiguous", "zigzag", "striped"),
    "ways": (2, 4, 8),
    "mask": ("causal", "full", "window 3", "window 13", "run-time window 6", "prefix", "prefix, window 6"),
    "packed": (False, True),
    "kv_heads": (8, 2, 1),
    "extra": ("plain", "softcap", "sinks", "wide values", "narrow values", "softcap, sinks, narrow values"),
    "block": (2, 64),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    method: str = "ring"
    layout: str = "zigzag"
    ways: int = 4
    mask: str = "causal"
    packed: bool = False
    kv_heads: int = 2
    extra: str = "plain"
    block: int = 64
    ulysses: int = 2
    length: int = 32
    batch: int = 2
    heads: int = 8
    width: int = 4
    segments: tuple[tuple[int, ...], ...] | None = None
    platform: str = "cpu"
    dtype: str = "float64"

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)) for name in CHOICES)

    @property
    def value_width(self) -> int:
        return {"wide": self.width + 2, "narrow": self.width - 2}.get(self.extra.split()[-2] if "values" in self.extra else "", self.width)

    @property
    def softcap(self) -> float | None:
        return 1.5 if "softcap" in self.extra else None

    @property
    def context(self) -> ContextConfig:
        return ContextConfig(method=self.method, layout=self.layout, ulysses=self.ulysses)

    @property
    def window(self) -> int:
        return int(self.mask.split()[-1]) if "window" in self.mask else 0

    @property
    def lay(self) -> np.ndarray:
        return layout(self.context, self.ways, self.length).order(self.length)


PAIRS = tuple(itertools.combinations(sorted(CHOICES), 2))
EVERYWHERE = tuple(("method", "layout", name) for name in CHOICES if name not in ("method", "layout"))


def drawn(count: int, groups: tuple[tuple[str, ...], ...] = PAIRS, seed: int = 0) -> list[Case]:
    """Cases in which the values of each group of choices meet in every combination, then more at random."""
    draw, cases = random.Random(seed), []
    met = lambda row: {tuple((name, row[name]) for name in group) for group in groups}  # noqa: E731
    wanted = {tuple(zip(group, values, strict=True)) for group in groups for values in itertools.product(*(CHOICES[n] for n in group))}
    while len(cases) < count:
        rows = [{name: draw.choice(values) for name, values in CHOICES.items()} for _ in range(60 if wanted else 1)]
        best = max(rows, key=lambda row: len(met(row) & wanted))
        wanted -= met(best)
        cases.append(Case(**best))
    assert not wanted, f"{len(wanted)} combinations are in none of {count} cases"
    return cases


def documents(length: int) -> np.ndarray:
    """Two rows: documents that end inside and at the end of shards; and padding before, and behind for half of the row."""
    segments = np.zeros((2, length), np.int32)
    cuts = [0, 5, 14, 16, length]
    for number, (a, b) in enumerate(itertools.pairwise(cuts), 1):
        segments[0, a:b] = number
    segments[1, 2:9], segments[1, 9 : length // 2 - 1] = 1, 2
    return segments


def inputs(case: Case) -> dict[str, np.ndarray]:
    """Everything in the order of the row."""
    of, batch, length, wide = np.random.default_rng(case.length), case.batch, case.length, case.value_width
    sizes = {"q": (case.heads, case.width), "k": (case.kv_heads, case.width), "v": (case.kv_heads, wide), "do": (case.heads, wide)}
    made = {name: of.normal(size=(batch, length, *size)) for name, size in sizes.items()}
    if case.packed:
        made["segments_BS"] = documents(length) if case.segments is None else np.array(case.segments, np.int32)
    if "prefix" in case.mask:
        made["prefix_BS"] = np.full((batch, length), "whole" in case.mask)
        if case.mask in ("prefix", "prefix, window 6"):
            made["prefix_BS"][0, : length // 3], made["prefix_BS"][1:, 3 : length // 2] = True, True
    return made


@functools.lru_cache(maxsize=8)
def compiled(case: Case):
    """Inputs in the order of the row -> (o, dq, dk, dv, dsinks) likewise."""
    mesh = make_mesh(MeshShape(seq=case.ways), jax.devices()[: case.ways])
    given, sinks = inputs(case), sink_logits(case)
    split = P(None, "seq")

    def local(arrays, window, sinks):
        q, k, v, do = (arrays[name].astype(case.dtype) for name in ("q", "k", "v", "do"))
        marks = {name: arrays[name] for name in arrays if name.endswith("_BS")}

        def run(q, k, v, sinks):
            return attention(
                q,
                k,
                v,
                context=case.context,
                sinks_N=sinks,
                causal=case.mask != "full",
                window=window if case.mask.startswith("run-time") else case.window,
                scale=SCALE,
                softcap=case.softcap,
                block=case.block,
                platform=case.platform,
                **marks,
            )

        o, pullback = jax.vjp(run, q, k, v, sinks)
        return jax.tree.map(lambda x: x.astype(jnp.float64), (o, *pullback(do)))

    specs = (dict.fromkeys(given, split), P(), P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(*[split] * 4, P()), check_vma=True)
    laid, back = case.lay, np.argsort(case.lay)
    arguments = ({name: x[:, laid] for name, x in given.items()}, np.int32(case.window), sinks)
    with without_cache():
        program = jax.jit(mapped).lower(*arguments).compile(compiler_options=OPTIONS)

    def run(arrays, sinks):
        *tokens, dsinks = program({name: jnp.asarray(x[:, laid]) for name, x in arrays.items()}, np.int32(case.window), sinks)
        return [np.asarray(x)[:, back] for x in tokens] + [None if dsinks is None else np.asarray(dsinks)]

    return run


def sink_logits(case: Case) -> np.ndarray | None:
    return np.random.default_rng(7).normal(size=case.heads) if "sinks" in case.extra else None


def ours(case: Case) -> list[np.ndarray]:
    return compiled(case)(inputs(case), sink_logits(case))


def visible(case: Case, given: dict[str, np.ndarray]) -> np.ndarray:
    """[B, Q, T] from plain rules, in the order of the row."""
    i, j = np.mgrid[: case.length, : case.length]
    seen = np.full((case.batch, case.length, case.length), case.mask == "full") | (j <= i)
    if "prefix_BS" in given:
        seen |= given["prefix_BS"][:, None, :]
    if case.window:
        seen &= i - j < case.window
    if "segments_BS" in given:
        segments = given["segments_BS"]
        seen &= (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)
    return seen


def right(case: Case, given: dict[str, np.ndarray] | None = None) -> list[np.ndarray]:
    """(o, dq, dk, dv, dsinks) of dense attention in numpy; `test_reference` holds its derivatives against autodiff."""
    given = inputs(case) if given is None else given
    q, k, v, do, seen = given["q"], given["k"], given["v"], given["do"], visible(case, given)[:, None]
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    cap, sinks = case.softcap, sink_logits(case)
    raw = np.einsum("bqnh,btnh->bnqt", q, k) * SCALE
    s = np.where(seen, raw if cap is None else cap * np.tanh(raw / cap), -np.inf)
    sink = np.full(case.heads, -np.inf) if sinks is None else sinks
    top = np.maximum(np.maximum(s.max(-1), sink[:, None]), -1e9)[..., None]
    weights, sink_weight = np.exp(s - top), np.exp(sink[:, None] - top[..., 0])
    total = weights.sum(-1) + sink_weight
    p, p_sink = weights / np.where(total, total, 1)[..., None], sink_weight / np.where(total, total, 1)
    o = np.einsum("bnqt,btnw->bqnw", p, v)
    slope = np.einsum("bqnw,bqnw->bnq", do, o)
    ds = p * (np.einsum("bqnw,btnw->bnqt", do, v) - slope[..., None]) * SCALE
    ds = ds if cap is None else ds * (1 - np.tanh(raw / cap) ** 2)
    dk, dv = np.einsum("bnqt,bqnh->btnh", ds, q), np.einsum("bnqt,bqnw->btnw", p, do)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3) for x in (dk, dv))
    return [o, np.einsum("bnqt,btnh->bqnh", ds, k), dk, dv, None if sinks is None else -(p_sink * slope).sum((0, 2))]


def autodiff(case: Case) -> list[np.ndarray]:
    """The same by JAX, through `tests/ops/dense.py`."""
    given, sinks = inputs(case), sink_logits(case)

    def run(q, k, v, sinks):
        o, lse = dense.attention(q, k, v, visible(case, given), SCALE, case.softcap)
        return o if sinks is None else o * jnp.moveaxis(jnp.exp(lse - jnp.logaddexp(lse, sinks[:, None])), 1, 2)[..., None]

    o, pullback = jax.vjp(run, *(jnp.asarray(given[name]) for name in ("q", "k", "v")), sinks)
    return [np.asarray(x) if x is not None else None for x in (o, *pullback(jnp.asarray(given["do"])))]


def gap(found: list, wanted: list) -> float:
    """The largest max|a-b| / max|b| of output and gradients."""
    assert all(np.isfinite(a).all() for a in found if a is not None)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, wanted, strict=True) if b is not None)


def changed(case: Case, **values) -> Case:
    return replace(case, **values)


def holds(case: Case) -> None:
    """Equal to dense attention; what is zero there (all padding) in absolute terms."""
    found, wanted = ours(case), right(case)
    zero = [b is not None and np.abs(b).max() < 1e-6 for b in wanted]
    up = lambda arrays: [x + 1 if z else x for x, z in zip(arrays, zero, strict=True)]  # noqa: E731
    assert gap(up(found), up(wanted)) < TOLERANCE
