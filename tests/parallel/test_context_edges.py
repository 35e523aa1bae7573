"""Context-parallel attention at the edges: sizes of one, windows and prefixes of nothing and of everything, odd sizes, bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.parallel.context_cases import CHOICES, Case, changed, compiled, gap, holds, inputs, right, sink_logits

ONE = Case(length=8, block=1)
ODD = Case(ways=3, length=42, heads=3, kv_heads=3, width=5, extra="wide values", block=4)
EMPTY = ((0,) * 32,)

EDGES = {
    "one token a device": changed(ONE, ways=8, layout="contiguous"),
    "one token a device, striped, a window": changed(ONE, ways=8, layout="striped", mask="window 3"),
    "one token a chunk, a window": changed(ONE, mask="window 2"),
    "one token a device, gather": changed(ONE, ways=8, layout="contiguous", method="gather", mask="prefix whole"),
    "one token a device, ulysses": changed(ONE, ways=8, method="ulysses", layout="contiguous", kv_heads=1),
    "one document on eight devices": Case(ways=8, packed=True, segments=((1,) * 32, (7,) * 32)),
    "a window of one": Case(mask="window 1"),
    "a window of one, packed, gather": Case(mask="window 1", method="gather", packed=True, layout="striped"),
    "a window of one, sinks": Case(mask="window 1", layout="contiguous", extra="sinks"),
    "a window of all but one": Case(mask="window 31", layout="contiguous"),
    "a window beyond the row": Case(mask="window 37"),
    "a window beyond the row, at run time": Case(mask="run-time window 37", layout="contiguous"),
    "a window of one, at run time": Case(mask="run-time window 1"),
    "no window, at run time": Case(mask="run-time window 0", layout="striped"),
    "a prefix of nothing": Case(mask="prefix none"),
    "a prefix of everything": Case(mask="prefix whole", packed=True),
    "a prefix of everything, a window": Case(mask="prefix whole, window 6", layout="striped", method="gather"),
    "one head": Case(heads=1, kv_heads=1, batch=1),
    "one head, usp": Case(heads=2, kv_heads=1, batch=1, method="usp"),
    "one row of padding": Case(batch=1, packed=True, segments=EMPTY),
    "one row of padding, sinks, usp": Case(batch=1, packed=True, segments=EMPTY, extra="sinks", method="usp"),
    "padding between documents of one token": Case(batch=1, packed=True, segments=((0, 1) * 16,), layout="striped"),
    "documents of any numbers": Case(batch=1, packed=True, segments=((-3,) * 9 + (2**31 - 1,) * 12 + (-1,) * 11,)),
    "documents that are no runs": Case(batch=1, packed=True, segments=((1, 2) * 8 + (1,) * 16,), layout="striped"),
    "an odd head width, one device": Case(ways=1, width=5, extra="sinks", mask="prefix", method="usp"),
    "three devices": ODD,
    "three devices, usp of three": changed(ODD, method="usp", ulysses=3, layout="contiguous", length=39),
    "five devices": changed(ODD, ways=5, length=35, layout="striped", mask="window 9", heads=5, kv_heads=1),
    "seven devices": changed(
        ODD, ways=7, length=14, mask="window 3", extra="narrow values", packed=True, segments=((1,) * 9 + (0,) * 5,) * 2
    ),
    "everything at once": Case(
        mask="prefix, window 6", packed=True, extra="softcap, sinks, narrow values", kv_heads=1, block=2, method="usp"
    ),
}
QUICK = [
    *(
        "one token a device, striped, a window",
        "one token a chunk, a window",
        "a window of one, sinks",
        "a window beyond the row, at run time",
    ),
    *("a prefix of everything, a window", "one row of padding, sinks, usp", "seven devices"),
]


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EDGES])
def test_equals_dense(name):
    holds(EDGES[name])


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        pytest.param(method, layout, marks=[] if (method, layout) in (("gather", "striped"), ("usp", "zigzag")) else pytest.mark.slow)
        for method in CHOICES["method"]
        for layout in CHOICES["layout"]
    ],
)
def test_bfloat16(method, layout):
    """Every method rounds as one device does: root mean square errors against float64 of the same inputs below 2^-7, packed documents,
    a window and sinks included; rows that see nothing are zero."""
    case = Case(method=method, layout=layout, dtype="bfloat16", packed=True, mask="window 13", extra="sinks")
    given = {name: x if name.endswith("_BS") else np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for name, x in inputs(case).items()}
    found, wanted = compiled.__wrapped__(case)(given, sink_logits(case)), right(case, given)
    errors = [float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean())) for a, b in zip(found, wanted, strict=True)]
    assert max(errors) < 2**-7 and all((x[given["segments_BS"] == 0] == 0).all() for x in found[:4])


def test_another_window_is_noticed():
    """Negative control: one key more."""
    case = EDGES["a window of one, sinks"]
    assert gap(compiled(case)(inputs(case), sink_logits(case)), right(changed(case, mask="window 2"))) > 1e-2
