"""`jaxpar.parallel.context.attention` in a `shard_map` that is not ours, and the example of docs/context.md, as it is printed."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.compilation import without_cache
from jaxpar.config import ContextConfig
from jaxpar.parallel.context import attention
from jaxpar.parallel.context.layout import layout
from tests.parallel.context_cases import OPTIONS, TOLERANCE

LENGTH, WINDOW = 32, 13
TEXT = (Path(__file__).parents[2] / "docs" / "context.md").read_text()
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def dense(q_BSNH, k_BSKH, v_BSKH, window):
    """Causal softmax attention under a window, all scores at once."""
    k, v = (jnp.repeat(x, q_BSNH.shape[2] // x.shape[2], axis=2) for x in (k_BSKH, v_BSKH))
    distance = jnp.arange(q_BSNH.shape[1])[:, None] - jnp.arange(q_BSNH.shape[1])
    s = jnp.einsum("bqnh,btnh->bnqt", q_BSNH, k) / q_BSNH.shape[-1] ** 0.5
    s = jnp.where((distance >= 0) & (distance < window), s, -jnp.inf)
    return jnp.einsum("bnqt,btnh->bqnh", jax.nn.softmax(s), v)


def both(function, q, k, v, do):
    """Output and gradients of q, k, v."""
    o, pullback = jax.vjp(function, q, k, v)
    return (o, *pullback(do))


@pytest.mark.parametrize("method", ["ring", "ulysses", pytest.param("gather", marks=pytest.mark.slow), "usp"])
def test_axes_of_other_names(method):
    """Rows over one axis and tokens over another, neither of which jaxpar has a name for: output, dq, dk, dv equal dense attention."""
    context = ContextConfig(method=method)
    mesh, split = Mesh(np.array(jax.devices()).reshape(2, 4), ("rows", "other")), P("rows", "other")
    place = layout(context, 4, LENGTH).order(LENGTH)
    random = np.random.default_rng(5)
    arrays = [random.normal(size=(2, LENGTH, heads, 4)) for heads in (8, 4, 4, 8)]

    def local(q, k, v):
        return attention(q, k, v, context=context, window=WINDOW, axis="other")

    mapped = jax.shard_map(lambda *each: both(local, *each), mesh=mesh, in_specs=(split,) * 4, out_specs=(split,) * 4)
    laid = [x[:, place] for x in arrays]
    with without_cache():
        found = jax.jit(mapped).lower(*laid).compile(compiler_options=OPTIONS)(*laid)
    wanted = [np.asarray(x)[:, place] for x in both(lambda *each: dense(*each, WINDOW), *map(jnp.asarray, arrays))]
    gaps = [np.abs(np.asarray(a) - b).max() / np.abs(b).max() for a, b in zip(found, wanted, strict=True)]
    assert max(gaps) < TOLERANCE
    other = both(lambda *each: dense(*each, WINDOW + 1), *map(jnp.asarray, arrays))
    assert np.abs(np.asarray(found[0]) - np.asarray(other[0])[:, place]).max() > 1e-3, "control: one key more"


def test_the_example_of_the_documentation():
    """It gives the attention of the whole row, in the row's order."""
    assert len(EXAMPLE.splitlines()) <= 16
    names: dict = {}
    with without_cache():
        exec(compile(EXAMPLE, "docs/context.md", "exec"), names)
    wanted = np.asarray(dense(names["q"], names["k"], names["v"], 32))
    assert np.abs(np.asarray(names["o"]) - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert np.abs(np.asarray(names["o"]) - wanted[:, names["place"]]).max() > 1e-2, "control: in the devices' order"
