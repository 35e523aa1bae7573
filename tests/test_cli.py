"""Errors are one line on stderr and exit code 2. Training and generation have their own tests."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jaxpar.cli import main

CONFIGS = Path(__file__).parent.parent / "configs"
DEMO = str(CONFIGS / "runs" / "demo.yaml")


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "the following arguments are required: COMMAND; see jaxpar --help"),
        (["tarin"], "argument COMMAND: invalid choice: 'tarin'"),
        (["train"], "the following arguments are required: RUN.yaml; see jaxpar train --help"),
        (["train", "gone.yaml"], "gone.yaml: No such file or directory"),
        (["train", str(CONFIGS)], "configs: Is a directory"),
        (["train", DEMO, "--set", "train.step=3"], "train.step: no such key; the nearest valid one is train.steps"),
        (["train", DEMO, "--set", "train.steps=-1"], "train.steps: -1 must be at least 1"),
        (["params", DEMO, "--set", "mesh.tensor=16"], "mesh.tensor: 16 does not divide model.heads 8"),
        (["params", DEMO, "--set", "mesh.data=5"], "train.batch: 16 sequences do not divide"),
        (["generate", "x"], "the following arguments are required: --prompt"),
        (["generate", "x", "--prompt", "a", "--mesh", "data"], "--mesh data: not of the form data=2,tensor=2"),
        (["generate", "x", "--prompt", "a", "--tokens", "0"], "--tokens: 0 must be at least 1"),
        (["generate", "x", "--prompt", "a", "--top-k", "many"], "argument --top-k: invalid int value: 'many'"),
        (["generate", "x", "--prompt", "a", "--temperature", "-1"], "--temperature: -1.0 must be finite and not negative"),
    ],
)
def test_mistakes(argv, message, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("jaxpar: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_traceback_only_when_asked(capsys):
    assert main(["train", "gone.yaml", "--traceback"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback") and error.endswith("jaxpar: error: gone.yaml: No such file or directory\n")


def test_a_bug_is_no_user_error(monkeypatch):
    monkeypatch.setattr("jaxpar.configfile.load", lambda *_: (_ for _ in ()).throw(AssertionError("ours")))
    with pytest.raises(AssertionError, match="ours"):
        main(["train", DEMO])


def test_params_lists_every_parameter_with_its_place(capsys):
    assert main(["params", DEMO, "--set", "mesh.tensor=1", "--set", "train.zero=0"]) == 0
    assert "whole" in capsys.readouterr().out
    assert main(["params", DEMO]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("layers/attention/query ")]
    assert len(lines) == 1
    assert [cell.strip() for cell in lines[0].split("  ") if cell] == [
        "layers/attention/query",
        "4 × 8 × 16 × 128",
        "layers heads/tensor head_dim embed",
        "heads/data",
        "65,536",
    ]
    assert out.endswith("total 1,250,432\n")


def test_the_module_runs_as_a_program():
    command = [sys.executable, "-m", "jaxpar", "train", "gone.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=CONFIGS.parent)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "jaxpar: error: gone.yaml: No such file or directory\n")


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m jaxpar params {DEMO} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, cwd=CONFIGS.parent)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxpar.configfile.load", interrupted)
    assert main(["train", DEMO]) == 130
    assert capsys.readouterr().err == "jaxpar: interrupted\n"


def test_a_warning_about_a_run_is_one_line(monkeypatch):
    """As of a row longer than the rotary embedding is scaled for; of other warnings the place is said, as by Python."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    assert main(["params", "no/such.yaml"]) == 2
    assert warnings.formatwarning("data.sequence:\n  too long", UserWarning, "rules.py", 9) == "jaxpar: warning: data.sequence: too long\n"
    assert warnings.formatwarning("old", DeprecationWarning, "rules.py", 9).startswith("rules.py:9: DeprecationWarning: old")
