"""Loss and every gradient with `seq` in the mesh, by every method and layout, equal one device, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.compilation import without_cache
from jaxpar.config import ContextConfig
from jaxpar.mesh import SEQ
from jaxpar.parallel import collectives, context
from jaxpar.parallel.context import exchange
from tests.parallel.context_cases import OPTIONS
from tests.train import runs
from tests.train.test_gradients import check

# mesh of seq × tensor × data, then what it composes with
ROWS = {
    "ring zigzag, ZeRO-1": ("ring", "zigzag", {"seq": 2, "data": 2, "tensor": 2, "zero": 1}),
    "usp, ZeRO-3, interleaved": ("usp", "zigzag", {"seq": 4, "data": 2, "zero": 3, "interleave": 2}),
    "ulysses, no sequence parallelism": ("ulysses", "contiguous", {"seq": 2, "tensor": 2, "zero": 0, "sequence_parallel": False}),
}
MORE = {
    "gather striped, ZeRO-2, accumulation": ("gather", "striped", {"seq": 4, "tensor": 2, "zero": 2, "accumulation": 2}),
    "ring contiguous, remat block": ("ring", "contiguous", {"seq": 8, "zero": 1, "remat": "block"}),
    "collective matmul": ("ring", "zigzag", {"seq": 2, "data": 2, "tensor": 2, "zero": 1, "collective_matmul": True}),
    "remat none": ("ring", "zigzag", {"seq": 4, "tensor": 2, "zero": 1, "remat": "none"}),
    "remat outputs": ("usp", "striped", {"seq": 4, "tensor": 2, "zero": 3, "remat": "outputs"}),
    "remat attention": ("gather", "zigzag", {"seq": 4, "data": 2, "zero": 3, "remat": "attention"}),
    "ring striped": ("ring", "striped", {"seq": 8, "zero": 2, "accumulation": 2, "interleave": 2}),
    "ulysses over 4": ("ulysses", "striped", {"seq": 4, "data": 2, "zero": 3, "remat": "none"}),
    "everything at once": ("ring", "zigzag", {"seq": 2, "data": 2, "tensor": 2, "zero": 3, "accumulation": 2, "interleave": 2}),
    "everything at once, usp": ("usp", "striped", {"seq": 4, "data": 2, "zero": 3, "accumulation": 2, "interleave": 2, "remat": "block"}),
    "gather contiguous": ("gather", "contiguous", {"seq": 2, "data": 4, "zero": 0, "remat": "block"}),
}


# Attention sinks, values wider than keys, and a prefix of each document that all of it sees; with and without a window.
SINKS = dataclasses.replace(runs.MODEL, sinks=True, value_head_width=8)
PREFIX = dataclasses.replace(SINKS, prefix=3)
# every method on seq × tensor × data; Ulysses inside a ring needs four devices along seq
EVERY_AXIS = {
    "ring zigzag": ("ring", "zigzag", {"seq": 2, "data": 2, "tensor": 2, "zero": 3}),
    "gather striped": ("gather", "striped", {"seq": 2, "data": 2, "tensor": 2, "zero": 1}),
    "ulysses contiguous": ("ulysses", "contiguous", {"seq": 2, "data": 2, "tensor": 2, "zero": 2, "remat": "block"}),
    "usp zigzag": ("usp", "zigzag", {"seq": 4, "tensor": 2, "zero": 1}),
}


def of(row, model=runs.MODEL):
    method, layout, mesh = row
    return runs.config(model=model, context=ContextConfig(method=method, layout=layout), **mesh)


def gradients(run):
    """`runs.gradients`, compiled in a third of the time."""
    built = runs.training(run)
    arguments = runs.place_params(built), runs.place(built, runs.batch(run)), jnp.asarray(3, jnp.int32)
    with without_cache():
        return jax.device_get(jax.jit(built.gradients).lower(*arguments).compile(compiler_options=OPTIONS)(*arguments))


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_equals_one_device(row):
    check(gradients(of((ROWS | MORE)[row])), runs.gradients(runs.config()), runs.MODEL.vocabulary)


@pytest.mark.parametrize("row", EVERY_AXIS)
def test_sinks_and_a_prefix_on_every_axis(row):
    run = of(EVERY_AXIS[row], PREFIX)
    found, batch = gradients(run), runs.batch(run)
    check(found, runs.gradients(runs.config(model=PREFIX)), PREFIX.vocabulary)
    assert found[0]["tokens"] == ((batch["labels"] >= 0) & (batch["positions"] >= 2)).sum(), "the first two see what they would predict"
    assert np.abs(found[1]["layers"]["attention"]["sinks"]).min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", [runs.MODEL, SINKS], ids=["plain", "sinks without a prefix"])
@pytest.mark.parametrize("row", EVERY_AXIS)
def test_every_method_on_every_axis(row, model):
    check(gradients(of(EVERY_AXIS[row], model)), runs.gradients(runs.config(model=model)), model.vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(6,), (3,), (0,)], ids=str)
@pytest.mark.parametrize("documents", ["isolated", "joined"])
def test_static_windows_and_joined_documents(windows, documents):
    model = dataclasses.replace(runs.MODEL, windows=windows, score_softcap=3.0)
    mesh = {"seq": 4, "tensor": 2, "zero": 1, "context": ContextConfig()}
    got = gradients(runs.config(model=model, data_documents=documents, **mesh))
    check(got, runs.gradients(runs.config(model=model, data_documents=documents)), model.vocabulary)


# ---- negative controls


def forget_where_tokens_stand(patch):
    """Dropout masks by the place on the device instead of the place in the row."""
    patch.setattr(context, "row_tokens", lambda config, local, length: local)


def take_one_document_for_all(patch):
    """Every token of the row counts as the first one's document."""
    gather = collectives.all_gather

    def broken(x, axes, dim):
        whole = gather(x, axes, dim)
        return 0 * whole + whole[:, :1] if axes == SEQ else whole

    patch.setattr(collectives, "all_gather", broken)


def take_the_sinks_of_other_heads(patch):
    """Each device of Ulysses takes those of the first."""
    patch.setattr(exchange, "own_heads", lambda x_N, axis, inner: x_N[: x_N.shape[0] // inner])


def test_other_sinks_are_noticed(monkeypatch):
    take_the_sinks_of_other_heads(monkeypatch)
    got = gradients(of(EVERY_AXIS["ulysses contiguous"], PREFIX))
    with pytest.raises(AssertionError):
        check(got, runs.gradients(runs.config(model=PREFIX)), PREFIX.vocabulary)


@pytest.mark.parametrize("change", [forget_where_tokens_stand, take_one_document_for_all], ids=lambda change: change.__name__)
def test_a_wrong_program_is_noticed(change, monkeypatch):
    change(monkeypatch)
    run = runs.config(seq=2, context=ContextConfig(layout="contiguous"))
    got = gradients(run)
    with pytest.raises(AssertionError):
        check(got, runs.gradients(runs.config()), runs.MODEL.vocabulary)
