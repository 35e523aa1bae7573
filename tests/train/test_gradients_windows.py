"""Layers with windows of their own, alternating or in runs, on meshes with and without `seq`: loss and gradients equal one device, float64.

One device computes every layer under a window that is known at run time, in one loop over layers: the reference shares neither the
grouping of layers nor the walk over blocks with what it is held against.
"""

import dataclasses

import pytest

from jaxpar.config import ContextConfig
from jaxpar.models.decoder import DecoderFunctions
from tests.train import runs
from tests.train.test_gradients import check
from tests.train.test_gradients_context import gradients

PAIRS = dataclasses.replace(runs.MODEL, layers=5, windows=(5, 0), dropout=0.0)
LATE = dataclasses.replace(PAIRS, layers=4, windows=(0, 0, 3, 3))

ROWS = {
    "pairs, ring contiguous, ZeRO-3": (PAIRS, ("ring", "contiguous"), {"seq": 4, "data": 2, "zero": 3}),
}
MORE = {
    "pairs, ring zigzag, accumulated": (PAIRS, ("ring", "zigzag"), {"seq": 2, "tensor": 2, "zero": 1, "accumulation": 2}),
    "pairs, usp, ZeRO-2, interleaved": (PAIRS, ("usp", "zigzag"), {"seq": 4, "zero": 2, "interleave": 2}),
    "pairs, gather striped, remat none": (PAIRS, ("gather", "striped"), {"seq": 2, "tensor": 2, "zero": 0, "remat": "none"}),
    "late, ring zigzag, remat block": (LATE, ("ring", "zigzag"), {"seq": 4, "data": 2, "zero": 3, "remat": "block"}),
    "late, ulysses": (LATE, ("ulysses", "contiguous"), {"seq": 4, "zero": 2, "accumulation": 2}),
    "pairs, no seq, ZeRO-3": (PAIRS, ("ring", "zigzag"), {"data": 4, "tensor": 2, "zero": 3, "interleave": 2, "remat": "block"}),
}


def reference(model, monkeypatch):
    """One device with one function for all layers."""
    monkeypatch.setattr(DecoderFunctions, "blocks", lambda self, segment: (self.block,) * segment.units)
    return gradients(runs.config(model=model))


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_equals_one_device(row, monkeypatch):
    model, (method, layout), mesh = (ROWS | MORE)[row]
    found = gradients(runs.config(model=model, context=ContextConfig(method=method, layout=layout), **mesh))
    check(found, reference(model, monkeypatch), model.vocabulary)


def test_windows_of_other_layers_are_noticed(monkeypatch):
    """Negative control: the layers of a group exchanged."""
    blocks = DecoderFunctions.blocks
    monkeypatch.setattr(DecoderFunctions, "blocks", lambda self, segment: (*blocks(self, segment)[1:], blocks(self, segment)[0]))
    found = gradients(runs.config(model=PAIRS))
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check(found, reference(PAIRS, monkeypatch), PAIRS.vocabulary)
