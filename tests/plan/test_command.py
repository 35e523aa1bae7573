"""`jaxpar compile` refuses what it could not write before it compiles anything."""

from pathlib import Path

import pytest

from jaxpar import cli
from jaxpar.plan import compile as compiling

RUN = Path(__file__).parents[2] / "configs" / "runs" / "llama3_8b_h100x8.yaml"


class Compiles(Exception):
    pass


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    def compile_run(*arguments, **settings):
        raise Compiles

    monkeypatch.setattr(compiling, "compile_run", compile_run)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hlo", "-"], "--hlo: - (standard output) is for --json only; give a file's name"),
        (["--trace", "-"], "--trace: - (standard output) is for --json only; give a file's name"),
        (["--png", "-"], "--png: - (standard output) is for --json only; give a file's name"),
        (["--json", "FOLDER"], "FOLDER: is a folder, not a file to write"),
        (["--trace", "FOLDER/none/trace.json"], "FOLDER/none/trace.json: there is no folder FOLDER/none to write it in"),
        (["--hlo", "FOLDER/file/step.hlo"], "FOLDER/file/step.hlo: there is no folder FOLDER/file to write it in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_targets_that_cannot_be_written(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    there = [each.replace("FOLDER", str(tmp_path)) for each in arguments]
    assert cli.main(["compile", str(RUN), *there]) == 2
    assert capsys.readouterr().err == f"jaxpar: error: {message.replace('FOLDER', str(tmp_path))}\n"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("arguments", [[], ["--json", "-"], ["--hlo", "step.hlo", "--png", "layer.png"]], ids=" ".join)
def test_targets_that_can_be_written(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Compiles):
        cli.main(["compile", str(RUN), *arguments])
