"""Layers of several kinds in one stack: which loops they make, and that the stack computes what a loop over the layers does."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import make_mesh
from jaxpar.parallel import collectives, remat, runs
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.stack import LayerStack
from tests.parallel.blocks import gap

B, D = 4, 6  # batch, width
MESH = make_mesh(MeshShape(data=2), jax.devices()[:2])
SPLIT = P(None, "data")


def shape(kinds):
    """(kinds of a group, groups) of each run."""
    return [(run.kinds, len(run.groups)) for run in runs.fold(tuple(kinds))]


def test_loops_of_common_models():
    assert shape([0] * 32) == [((0,), 32)]  # one window, or none
    assert shape([0, 1] * 13) == [((0, 1), 13)]  # Gemma 2, gpt-oss
    assert shape(([0] * 5 + [1]) * 4 + [0, 0]) == [((0, 0, 0, 0, 0, 1), 4), ((0,), 2)]  # Gemma 3
    assert shape([0] * 28 + [1] * 8) == [((0,), 28), ((1,), 8)]  # a window from some layer on
    assert shape([0, 1] * 13 + [0]) == [((0, 1), 13), ((0,), 1)]
    assert shape([]) == []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from("abc"), max_size=14), st.booleans())
def test_a_walk_visits_every_layer_once_in_order(kinds, reverse):
    numbers = runs.number(kinds)
    order = runs.fold(numbers)
    visited = [at for run in order for at in runs.places(run)]
    assert [at.layer for at in visited] == list(range(len(kinds))) and tuple(at.kind for at in visited) == numbers
    assert sum(len(run.kinds) for run in order) <= sum(1 for _ in itertools.groupby(kinds))
    if order:
        (first,), after = runs.without_first(order)
        before, (last,) = runs.without_last(order)
        places = [at for part in (*before, last) for at in runs.places(part)]
        assert places == [at for part in (first, *after) for at in runs.places(part)] == visited


@pytest.mark.parametrize("reverse", [False, True])
def test_outputs_of_a_walk(reverse):
    order = runs.fold((0, 1, 0, 1, 0, 0))
    total, outs = runs.walk(order, lambda carry, at: (carry * 2 + at.layer, {"layer": at.layer + 0.5}), jnp.zeros(()), reverse=reverse)
    layers = range(6)[::-1] if reverse else range(6)
    assert total == functools.reduce(lambda carry, layer: carry * 2 + layer, layers, 0)
    assert runs.joined(outs)["layer"].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert [float(runs.stored(outs, at)["layer"]) for run in order for at in runs.places(run)] == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]


@pytest.mark.parametrize(("layers", "loops"), [(5, [((0,), 5)]), (6, [((0, 0), 3)]), (31, [((0,), 1), ((0, 0), 15)])])
def test_loops_of_two_layers(layers, loops):
    order = runs.in_pairs(runs.fold((0,) * layers))
    assert [(run.kinds, len(run.groups)) for run in order] == loops and [run.number for run in order] == list(range(len(order)))
    assert [at.layer for run in order for at in runs.places(run)] == list(range(layers))
    assert runs.in_pairs(runs.fold((0, 1) * 9)) == runs.fold((0, 1) * 9), "groups of several have it already"


# ---- the stack


def block(layer, x, context):
    """A matmul, a loss of its own, and a number of the layer that matters to both."""
    h = collectives.all_gather(x, "data", 1) @ layer["w"].T * context.layer["window"]
    return x + collectives.reduce_scatter(jnp.sin(h), "data", 1) + layer["b"], {"sizes": (h**2).sum((0, 1)) / 32}


def known(window):
    def of_layer(layer, x, context):
        return block(layer, x, context._replace(layer={"window": window}))

    return of_layer


def stack(windows, zero, **settings):
    of = {window: known(window) for window in windows}
    mark = lambda layer: {name: collectives.vary(w, "data") for name, w in layer.items()}  # noqa: E731
    whole = lambda name, w: collectives.all_gather(w, "data", 0) if name == "w" else w  # noqa: E731
    gather = lambda layer: mark({name: whole(name, w) for name, w in layer.items()})  # noqa: E731
    reduce = lambda grads: grads | {"w": collectives.reduce_scatter(grads["w"], "data", 0)}  # noqa: E731
    blocks = tuple(of[window] for window in windows)
    return LayerStack(blocks, remat.policy("block"), gather if zero == 3 else None, reduce if zero >= 2 else None, **settings), mark


def objective(x, aux):
    return jnp.cos(x).sum() + (aux["sizes"] ** 2).sum()


def run(windows, form, zero, repeat=1, **settings):
    """(y, dx, dlayers, sizes), by the stack or a Python loop."""
    made, mark = stack(windows, zero, **settings)
    seed = np.random.default_rng(len(windows))
    layers = {"w": seed.normal(size=(len(windows), D, D)) / 3, "b": seed.normal(size=(len(windows), D))}
    x, context = seed.normal(size=(B, 8, D)), Context({}, {}, {"window": jnp.asarray(windows, jnp.int32)})

    def local(layers, x):
        layers = layers if zero == 3 else mark(layers)
        grads = None
        if form == "loop":

            def total(layers, x):
                sizes = []
                for i, window in enumerate(windows):
                    x, aux = known(window)(jax.tree.map(lambda w: w[i], layers), x, context)
                    sizes.append(aux["sizes"])
                aux = {"sizes": jnp.stack(sizes)}
                return objective(x, aux), (x, aux)

            (_, (y, aux)), (grads, dx) = jax.value_and_grad(total, (0, 1), has_aux=True)(layers, x)
        for _ in range(0 if form == "loop" else repeat):
            y, saved, aux = made.forward(layers, x, context)
            dy, daux = -jnp.sin(y), [2 * aux["sizes"]]
            if form == "fused":
                dx, grads = made.backward(layers, saved, dy, daux, grads)
                continue
            dx, deferred = made.backward_input(layers, saved, dy, daux)
            if grads is None:
                like = jax.eval_shape(lambda *a: made.backward(*a)[1], layers, saved, dy, daux)
                grads = jax.tree.map(lambda t: collectives.zeros(t, collectives.varying_of(t)), like)
            grads = made.backward_weight(saved, deferred, grads)
        whole = {name: g if name == "w" and zero >= 2 else collectives.all_reduce(g, "data") for name, g in grads.items()}
        return y, dx, whole, aux["sizes"]

    homes = {"w": P(None, "data"), "b": P()}
    specs = (homes if zero == 3 else P(), SPLIT)
    out = (SPLIT, SPLIT, homes if zero >= 2 else P(), P(None, "data"))
    program = jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=out)
    return jax.device_get(jax.jit(program)(layers, x))


@functools.cache
def expected(windows):
    return run(windows, "loop", 0)


WINDOWS = {"pairs and one": (2, 3, 2, 3, 2, 3, 2), "two loops": (2, 2, 2, 3, 3), "all apart": (2, 3, 4), "one": (2,), "a pair": (2, 3)}
FORMS = [("fused", 0, 1), ("fused", 2, 1), ("fused", 3, 1), ("split", 0, 1), ("split", 3, 1), ("fused", 3, 2)]


QUICK = [("pairs and one", 0), ("pairs and one", 2), ("pairs and one", 4), ("two loops", 1), ("two loops", 5), ("one", 2), ("a pair", 0)]


@pytest.mark.parametrize(
    ("name", "form", "zero", "parts"),
    [pytest.param(name, *form, marks=[] if (name, n) in QUICK else pytest.mark.slow) for name in WINDOWS for n, form in enumerate(FORMS)],
)
def test_equals_a_loop_over_layers(name, form, zero, parts):
    assert gap(run(WINDOWS[name], form, zero, parts=parts), expected(WINDOWS[name])) < 1e-12


@pytest.mark.parametrize(("form", "zero"), [("fused", 0), pytest.param("fused", 3, marks=pytest.mark.slow)])
def test_accumulation_adds(form, zero):
    windows = WINDOWS["pairs and one"]
    y, dx, grads, sizes = run(windows, form, zero, repeat=2)
    assert gap((y, dx, jax.tree.map(lambda g: g / 2, grads), sizes), expected(windows)) < 1e-12


def test_layers_in_another_order_are_noticed(monkeypatch):
    """Negative control: values kept of the neighbour of the same kind."""
    stored = runs.stored
    monkeypatch.setattr(
        runs, "stored", lambda outs, at: stored(outs, at._replace(group=jnp.maximum(at.group - 1, 0) if at.in_loop else at.group))
    )
    windows = WINDOWS["pairs and one"]
    assert gap(run(windows, "fused", 0), expected(windows)) > 1e-3
