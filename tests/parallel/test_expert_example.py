"""Experts in a program of someone's own: what docs/experts.md shows."""

import re
from pathlib import Path

import jax
import numpy as np

TEXT = (Path(__file__).parents[2] / "docs" / "experts.md").read_text()
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def plain(route, x, router, gate, up, down):
    """Token by token, expert by expert."""
    weights, chosen = route(x, router)
    y = np.zeros_like(x)
    for t, (each, of) in enumerate(zip(np.asarray(weights), np.asarray(chosen), strict=True)):
        for weight, e in zip(each, of, strict=True):
            y[t] += weight * (down[e] @ (np.asarray(jax.nn.silu(gate[e] @ x[t])) * (up[e] @ x[t])))
    return y


def test_the_example_of_the_documentation():
    names: dict = {}
    exec(compile(EXAMPLE, "docs/experts.md", "exec"), names)
    x, *weights = (np.asarray(a) for a in names["arrays"])
    wanted = plain(names["route"], x, *weights)
    assert int(names["overflow"]) == 0
    assert np.abs(np.asarray(names["y"]) - wanted).max() < 1e-5 * np.abs(wanted).max()
    gate, up, down = weights[1:]
    other = plain(names["route"], x, weights[0], np.roll(gate, 1, 0), up, down)
    assert np.abs(np.asarray(names["y"]) - other).max() > 1e-2 * np.abs(wanted).max(), "control: other experts' gates"
