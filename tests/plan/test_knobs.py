"""Which alternatives are tried, and which is called best."""

import dataclasses
import types

from jaxpar.config import Config, DataConfig, MeshShape, ModelConfig, MoeConfig, TrainConfig
from jaxpar.plan import hardware, knobs, peak, show
from jaxpar.plan.knobs import Alternative

MODEL = ModelConfig(vocabulary=1024, width=64, layers=2, heads=8, kv_heads=4, mlp_width=128)


def config(data=2, tensor=2, seq=1, **train):
    mesh = MeshShape(data=data, tensor=tensor, seq=seq)
    return Config(model=MODEL, mesh=mesh, data=DataConfig(sequence=64, vocabulary=1024), train=TrainConfig(**{"batch": 16, **train}))


def test_every_memory_knob_that_is_left_is_tried():
    changes = knobs.lighter(config(sequence_parallel=False, interleave=2))
    assert list(changes) == [
        "train.remat=outputs",
        "train.remat=block",
        "train.zero=3",
        "train.accumulation=2",
        "train.interleave=1 train.accumulation=2",
        "train.loss_chunk=512",
        "train.reduce_dtype=bfloat16",
        "train.sequence_parallel=true",
        "train.zero=3 train.accumulation=4 train.remat=block",
    ]
    assert changes["train.zero=3"].train.zero == 3 and changes["train.zero=3"].train.interleave == 2


def test_what_is_set_already_is_not_tried_again():
    least = config(zero=3, accumulation=8, remat="block", loss_chunk=512, reduce_dtype="bfloat16")
    assert list(knobs.lighter(least)) == ["mesh.data=1 mesh.tensor=4 train.accumulation=16"]
    alone = config(data=1, tensor=1, zero=3, accumulation=16, remat="block", loss_chunk=512)
    assert knobs.lighter(alone) == {}, "one device reduces nothing, in whatever dtype"
    assert "train.zero=3" not in knobs.lighter(config(data=1))


def test_as_many_microbatches_as_are_predicted_to_fit():
    """Of 2, 4 and 8, the first that is within what there is; the next number is tried whatever is predicted."""
    run = config(batch=16)
    sizes = [peak.predicted_peak(config(batch=16, accumulation=n)) for n in (2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3

    def tried(usable):
        return [change for change in knobs.lighter(run, usable) if change.startswith("train.accumulation")]

    assert tried(sizes[1]) == ["train.accumulation=2", "train.accumulation=4"]
    assert tried(sizes[2]) == ["train.accumulation=2", "train.accumulation=8"]
    assert tried(sizes[0]) == tried(0) == ["train.accumulation=2"]


def test_one_gpu_has_nothing_to_share():
    assert not any("zero" in change for change in knobs.lighter(config(data=1, tensor=1)))


def test_zero_shares_among_the_devices_of_a_row():
    """And among those along `expert`; control: along `tensor` a parameter is split already."""
    assert {"train.zero=3", "train.zero=3 train.accumulation=16 train.remat=block"} <= set(knobs.lighter(config(data=1, seq=2, zero=1)))
    mixture = dataclasses.replace(MODEL, moe=MoeConfig(experts=8, per_token=2, width=64))
    run = dataclasses.replace(config(data=1, zero=1), model=mixture, mesh=MeshShape(expert=4))
    assert knobs.lighter(run)["train.zero=3"].train.zero == 3
    assert not any("zero" in change for change in knobs.lighter(config(data=1, tensor=4, zero=1)))


def test_an_alternative_that_does_not_compile_is_left_out(monkeypatch, capsys):
    def compile_run(run, *cluster):
        raise ValueError("no plan\nfor it")

    monkeypatch.setattr(knobs.compiling, "compile_run", compile_run)
    assert knobs.compare({"train.remat=block": config(remat="block")}, None, None, None) == []
    assert capsys.readouterr().err == "jaxpar: train.remat=block was not tried: no plan for it\n"


def test_speed_knobs():
    assert list(knobs.faster(config())) == [
        "train.interleave=2",
        "train.collective_matmul=true",
        "train.remat=none",
        "mesh.data=4 mesh.tensor=1",
    ]
    assert list(knobs.faster(config(tensor=1))) == ["train.remat=none"], "nothing to hide"
    changes = knobs.faster(config(zero=3, accumulation=4, interleave=2, remat="none", batch=32))
    assert list(changes) == [
        "train.interleave=1 train.collective_matmul=true",
        "train.interleave=1",
        "train.accumulation=2",
        "mesh.data=4 mesh.tensor=1",
        "mesh.data=4 mesh.tensor=1 train.accumulation=2",
    ]
    assert changes["mesh.data=4 mesh.tensor=1"].mesh.devices == 4


def alternative(change, need, fits, seconds):
    return Alternative(change, need, need, fits, seconds)


def test_the_best_of_a_run_that_does_not_fit_is_the_fastest_that_does():
    report = {"fits": False, "time": {"step_seconds": 1.0}}
    small, quick, large = alternative("a", 1, True, 3.0), alternative("b", 2, True, 2.0), alternative("c", 3, False, 1.0)
    assert knobs.best([small, quick, large], report) == quick
    assert knobs.best([large, alternative("d", 4, False, 0.5)], report) == large, "where none fits, the smallest"
    assert knobs.best([], report) is None


def test_the_best_of_a_run_that_fits_must_be_faster():
    report = {"fits": True, "time": {"step_seconds": 2.0}}
    slow, quick, large = alternative("a", 1, True, 3.0), alternative("b", 2, True, 1.5), alternative("c", 3, False, 1.0)
    assert knobs.best([slow, quick, large], report) == quick
    assert knobs.best([slow, large], report) is None


def test_from_the_ring_to_interleaved_parts():
    """The two exclude each other: the ring goes before the parts come."""
    changes = knobs.faster(config(collective_matmul=True))
    both = changes["train.collective_matmul=false train.interleave=2"].train
    assert both.interleave == 2 and not both.collective_matmul and "train.collective_matmul=false" in changes


def test_the_verdict_says_so_where_nothing_is_left_to_try():
    compiled = types.SimpleNamespace(hardware=hardware.load("h100"))
    full = {"memory": {"peak": 90 << 30, "attention_workspace": 0}, "usable": 75 << 30, "fits": False, "time": {"step_seconds": 1.0}}
    assert "does not fit: 15.00 GiB over" in (said := show.verdict(compiled, full)) and "nothing lighter is left to try" in said
    least = Alternative("train.remat=block", 80 << 30, 80 << 30, False, 1.2)
    assert "helps most: train.remat=block: still 5.00 GiB over; more GPUs" in show.verdict(compiled, full, [least])
    assert "nothing lighter" not in show.verdict(compiled, {**full, "fits": True})
