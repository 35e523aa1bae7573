"""jaxpar against torch in float64 on hostile checkpoints of every family, on one device and on a mesh; verdict, table, JSON, command."""

import json
import math

import numpy as np
import pytest
from rich.console import Console

from jaxpar.config import MeshShape
from tests.bridge import hostile
from torch_bridge import reference
from torch_bridge.cli import main
from torch_bridge.convert import read_model
from torch_bridge.parity import forward, training
from torch_bridge.parity.ladder import run_parity, subject
from torch_bridge.parity.report import RUNGS, Report, Rung, compared, gap

ONE, MESH = MeshShape(), MeshShape(data=2, tensor=2)
QUICK = {("llama", ONE), *((name, MESH) for name in hostile.NAMES)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: hostile.save(tmp_path_factory.mktemp(name), name) for name in hostile.NAMES}


def check(report, torch_names):
    assert report.passed, {name: (rung.max_relative, rung.worst) for name, rung in report.rungs.items()}
    assert tuple(report.rungs) == RUNGS
    assert set(report.rungs["gradients"].leaves) == torch_names
    steps = {*torch_names, *(f"exp_avg {name}" for name in torch_names), *(f"exp_avg_sq {name}" for name in torch_names)}
    assert set(report.rungs["steps"].leaves) == {*steps, "loss of step 1", "loss of step 2", "loss of step 3"}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, id=f"{name}-{mesh.devices}", marks=[] if (name, mesh) in QUICK else pytest.mark.slow)
        for name in hostile.NAMES
        for mesh in (ONE, MESH)
    ],
)
def test_float64(name, mesh, folders):
    """Logits, loss, every gradient, three AdamW steps: within 1e-10."""
    report = run_parity(folders[name], mesh, "float64", 3, sequence=hostile.SEQUENCE)
    check(report, {key for key, _ in hostile.model(name).named_parameters()})
    assert report.tolerance == 1e-10 and not report.torch


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, id=f"{name}-{mesh.devices}", marks=[] if (name, mesh) == ("llama", MESH) else pytest.mark.slow)
        for name in hostile.NAMES
        for mesh in (ONE, MESH)
    ],
)
def test_float32(name, mesh, folders):
    """Within 1e-4 of torch's float64; torch's own float32 is told beside it."""
    report = run_parity(folders[name], mesh, "float32", 3, sequence=hostile.SEQUENCE)
    check(report, {key for key, _ in hostile.model(name).named_parameters()})
    assert report.tolerance == 1e-4
    for rung in RUNGS:
        assert 0 < report.torch[rung].max_relative < 1e-3
        assert report.rungs[rung].max_relative > 1e-9, "that was not float32"


def test_every_module_agrees(folders):
    one = subject(read_model(folders["qwen3"]), MESH, "float64", 1, hostile.SEQUENCE)
    (batch,) = training.batches(one.training.config, 1)
    found = forward.activations(one.training, one.params, training.step_batch(one.training.config, batch))
    wanted = reference.load(folders["qwen3"]).activations(batch["ids"])
    assert max(map(gap, found, wanted.values())) < 1e-12
    assert forward.first_gap(found, wanted, 1e-12) is None
    found[7] = found[7] + 1e-6
    assert forward.first_gap(found, wanted, 1e-12)[0] == list(wanted)[7] == "model.layers.1.self_attn"


def test_batches_are_uneven_and_the_same_for_all(folders):
    config = training.run_config(read_model(folders["llama"]).model, MESH, "float64", 2, 23)
    assert config.data.sequence == 24, "raised to what tensor divides"
    first, second = training.batches(config, 2)
    assert all(np.array_equal(first[name], again) for name, again in training.batches(config, 1)[0].items())
    assert not np.array_equal(first["ids"], second["ids"])
    counts = (first["labels"] >= 0).sum(1)
    assert len(set(counts)) > 1 and 0 < counts.sum() < first["labels"].size * 0.8
    assert (first["labels"][:, -1] == -1).all()
    stepped = training.step_batch(config, first)
    assert stepped["ids"].shape == (2, 2, 24) and stepped["rows"].shape == (2, 2)
    assert len({int((part >= 0).sum()) for part in stepped["labels"]}) == 2, "microbatches have as many labels each"


@pytest.mark.parametrize(
    ("found", "wanted", "is_"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([0.0], [0.0], 0.0),
        ([1e-30], [0.0], math.inf),
        ([np.nan, 1.0], [1.0, 1.0], math.inf),
        ([1.0], [np.nan], math.inf),
        ([np.inf], [np.inf], math.inf),
        ([[1.0]], [1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_gap(found, wanted, is_):
    assert gap(found, wanted) == is_


def test_a_name_on_one_side_alone_fails():
    assert compared({"a": [1.0], "c": [1.0]}, {"a": [1.0], "b": [1.0]}) == {"a": 0.0, "b": math.inf, "c": math.inf}


def report(**leaves):
    rungs = {name: Rung({"loss": 0.0}) for name in RUNGS} | {name: Rung(found) for name, found in leaves.items()}
    return Report("float32", {"data": 2, "tensor": 2}, 1e-4, rungs, {name: Rung(rung.leaves) for name, rung in rungs.items()})


def test_verdict_and_json():
    good, bad, worse = report(), report(gradients={"a": 1e-5, "b": 2e-4}), report(steps={"w": math.inf})
    assert good.passed and not bad.passed and not worse.passed
    assert bad.failed == ("gradients",)
    assert bad.json == {
        "passed": False,
        "tolerance": 1e-4,
        "dtype": "float32",
        "mesh": {"data": 2, "tensor": 2},
        "rungs": {
            "logits": {"max_relative": 0.0, "worst": "loss"},
            "loss": {"max_relative": 0.0, "worst": "loss"},
            "gradients": {"max_relative": 2e-4, "worst": "b"},
            "steps": {"max_relative": 0.0, "worst": "loss"},
        },
    }
    assert worse.json["rungs"]["steps"] == {"max_relative": None, "worst": "w"}
    json.dumps(worse.json, allow_nan=False)


def test_table():
    console = Console(width=120, record=True)
    report(gradients={"a": 1e-5, "b": 2e-4, "c": 3e-6}).print(console, worst=2)
    text = console.export_text()
    assert "jaxpar float32 on data 2 × tensor 2 against torch float64" in text
    assert text.index("2.0e-04") < text.index("1.0e-05") and "3.0e-06" not in text
    assert "torch float32 itself differs from torch float64 by: logits 0.0e+00" in text
    assert "FAILED: gradients (tolerance 1e-04)" in text


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One layer, so that the command is quick."""
    return hostile.save(tmp_path_factory.mktemp("small"), "qwen3", num_hidden_layers=1)


def test_command(small, tmp_path, capsys):
    arguments = ["parity", str(small), "--steps", "1", "--sequence", "8", "--json", str(tmp_path / "verdict.json")]
    assert main(arguments) == 0
    assert "passed (tolerance 1e-10)" in capsys.readouterr().out
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["passed"] is True and tuple(verdict["rungs"]) == RUNGS
    assert set(verdict) == {"passed", "tolerance", "dtype", "mesh", "rungs"}
    assert main([*arguments, "--tolerance", "1e-18", "--bisect"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: logits" in out and "first module past 1e-18: model." in out
    assert json.loads((tmp_path / "verdict.json").read_text())["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dtype", "float16"], "dtype: 'float16' is not one of float64, float32"),
        (["--steps", "0"], "steps: 0 must be at least 1"),
        (["--tolerance", "0"], "tolerance: 0.0 must be positive"),
        (["--tolerance", "nan"], "tolerance: nan must be positive"),
        (["--sequence", "1"], "sequence: 1 must be at least 2"),
        (["--worst", "0"], "--worst: 0 must be at least 1"),
        (["--mesh", "data=16"], "mesh: 16 devices are asked for and there are 8"),
        (["--mesh", "tensor=3"], "mesh.tensor: 3 does not divide model.heads 4"),
        (["--mesh", "pipe=2"], "mesh.pipe: 2"),
        (["--mesh", "ring=2"], "ring"),
        (["--json", "/nowhere/at/all.json"], "--json: there is no folder /nowhere/at"),
    ],
)
def test_bad_input(arguments, says, folders, capsys):
    assert main(["parity", str(folders["llama"]), *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1, error


def test_no_folder(tmp_path, capsys):
    assert main(["parity", str(tmp_path / "absent")]) == 2
    assert "no such folder" in capsys.readouterr().err
