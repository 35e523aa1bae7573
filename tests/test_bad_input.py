"""What a user gets wrong is one line that names the field or the file and the fix, exit code 2, and nothing on disk."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxpar import cli, configfile
from jaxpar.mesh import make_mesh
from jaxpar.train import checkpoint, corpus, padding
from jaxpar.train.checkpoint import Checkpoints
from jaxpar.train.step import build_training
from tests.train import tiny


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.tokens(tmp_path_factory.mktemp("data") / "tokens")


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def refused(folder, path, capsys, *sets):
    """The error of `jaxpar train`, without its prefix, having checked that it is one line and that the folder is as it was."""
    before = content(folder)
    code = cli.main(["train", str(path), *(part for override in sets for part in ("--set", override))])
    out, err = capsys.readouterr()
    assert code == 2 and out == "", (code, out, err)
    assert err.startswith("jaxpar: error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert content(folder) == before
    return err[len("jaxpar: error: ") : -1]


@pytest.mark.parametrize(
    "sets, message",
    [
        (["train.stpes=3"], "train.stpes: no such key; the nearest valid one is train.steps"),
        (["trian.steps=3"], "trian: no such key; the nearest valid one is train"),
        (["train.steps=soon"], "train.steps: "),
        (["mesh.data=3"], "mesh: data 3 × tensor 2 makes 6 devices, but there are 8; set mesh.data=4, or run on 6 devices"),
        (["mesh.data=16"], "mesh: data 16 × tensor 2 makes 32 devices, but there are 8; set mesh.data=4, or run on 32 devices"),
        (["mesh.data=1", "mesh.tensor=8"], "mesh.tensor: 8 does not divide model.heads 4; tensor sizes that work: 1, 2, 4"),
        (["mesh.data=1", "mesh.pipe=4"], "mesh.pipe: 4 is not supported"),
        (["model.moe.experts=4", "model.moe.per_token=5"], "model.moe.per_token: 5 experts of a token exceed model.moe.experts 4"),
        (
            ["model.moe.experts=6", "mesh.data=1", "mesh.expert=4"],
            "model.moe.experts: 6 do not divide over mesh.expert 4; numbers of devices that work: 1, 2, 3, 6",
        ),
        (
            ["model.moe.experts=4", "train.experts.dispatch=capacity", "train.experts.capacity_factor=0.375"],
            "of all choices would be dropped, and about 32 of a step's 128 tokens or more would pass no expert; use 1 or more",
        ),
        (["model.moe.experts=4", "model.moe.dense_layers=2"], "model.moe.dense_layers: 2 of model.layers 2 leave none with experts"),
        (["train.batch=6"], "train.batch: 6 sequences do not divide over mesh.data × mesh.expert 4"),
        (["train.accumulation=3"], "train.accumulation: 3 does not divide train.batch 8"),
        (["data.sequence=15"], "data.sequence: 15 tokens do not divide over mesh.seq × mesh.tensor 2; lengths that work: 14, 16"),
        (["model.width=18"], "train.zero: "),
        (["optimizer.warmup=6"], "optimizer.warmup: 6 does not fit in train.steps 6; at most 5"),
        (["model.vocabulary=60"], "is outside the vocabulary of 60: raise model.vocabulary or tokenize again"),
        (["data.path=/nowhere"], "data.path: /nowhere is not a folder: name one written by `jaxpar tokenize`"),
        (
            ["data.source=text", "data.path=/nowhere.txt", "model.vocabulary=300", "data.vocabulary=300"],
            "data.path: /nowhere.txt does not exist: name a file",
        ),
        (["data.source=text", "data.vocabulary=62"], "data.vocabulary: a tokenizer of 62 entries exceeds model.vocabulary 61"),
        (["data.source=text", "data.vocabulary=61"], "data.vocabulary: 61 must be at least 257"),
        (["data.seed=-1"], "data.seed: -1 must be in 0 to 2^32 - 1"),
        (["train.remat=foo"], "train.remat: 'foo' is not one of none, matmuls, outputs, attention, block"),
        (["train.attention=cudnn"], "train.attention"),
        (["model.rope.fraction=0.2"], "model.rope.fraction: 0.2 of head width"),
        (["model.rope.type=llama3", "model.rope.original_length=64"], "model.rope.factor: llama3 rope needs the factor it scales by"),
    ],
)
def test_a_wrong_value(tmp_path, data, capsys, sets, message):
    error = refused(tmp_path, tiny.run_file(tmp_path, data), capsys, *sets)
    assert message in error, error


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path, data, capsys):
    ids = np.asarray(corpus.read_tokens(data).stream_T)
    position = int(np.argmax(ids == tiny.VOCABULARY - 1))
    error = refused(tmp_path, tiny.run_file(tmp_path, data), capsys, f"model.vocabulary={tiny.VOCABULARY - 1}")
    assert error.startswith(f"data: {data}/tokens.bin: id 60 at position {position} ")


def test_an_empty_corpus(tmp_path, data, capsys):
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text(" \n\t\n")
    path = tiny.run_file(tmp_path, tmp_path / "blank", {"data.source": "text", "data.vocabulary": 300, "model.vocabulary": 300})
    assert f"data.path: {tmp_path}/blank holds no text" in refused(tmp_path, path, capsys)
    corpus.write_tokens(tmp_path / "tokens", [np.arange(5)], 61)
    (tmp_path / "tokens" / "tokens.bin").write_bytes(b"")
    path = tiny.run_file(tmp_path, tmp_path / "tokens")
    assert refused(tmp_path, path, capsys).startswith(f"data.path: {tmp_path}/tokens/tokens.bin has 0 bytes")


def test_a_run_file_that_is_missing_or_no_yaml(tmp_path, capsys):
    assert refused(tmp_path, tmp_path / "gone.yaml", capsys) == f"{tmp_path}/gone.yaml: No such file or directory"
    path = tmp_path / "bad.yaml"
    path.write_text("train:\n  steps: [1\n")
    assert refused(tmp_path, path, capsys).startswith(f"{path}:3:1: not valid YAML: ")
    path.write_bytes(b"\xff\xfe")
    assert refused(tmp_path, path, capsys) == f"{path}: not a text file in UTF-8"


@pytest.mark.parametrize("section", ["checkpoint", "log"])
def test_an_output_folder_that_cannot_be_written(tmp_path, data, capsys, section):
    """The other folder, which could be written, is not left behind either."""
    (tmp_path / "file").write_text("")
    path = tiny.run_file(tmp_path, data)
    error = refused(tmp_path, path, capsys, f"{section}.folder={tmp_path}/file/below")
    assert error.startswith(f"{section}.folder: cannot write in {tmp_path}/file/below (") and "choose another folder" in error


def test_a_full_output_folder(tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    error = refused(tmp_path, tiny.run_file(tmp_path, data), capsys, f"checkpoint.folder={tmp_path}/a/b/c")
    assert error.startswith(f"checkpoint.folder: {tmp_path}/a/b/c has 0.00 MiB free, a checkpoint takes ") and "free space" in error


def test_a_checkpoint_of_another_run(tmp_path, data, capsys):
    """Nothing is trained for this one: its first state is saved as step 5."""
    run = tiny.config(tmp_path, data)
    training = build_training(run, make_mesh(run.mesh))
    state = padding.trim(training.init(), training.abstract_state, training.gradients.specs)
    with Checkpoints(run.checkpoint.folder) as checkpoints:
        checkpoints.save(5, state, configfile.dump(run))
    path = tiny.run_file(tmp_path, data)
    folder = run.checkpoint.folder
    of_another = f"checkpoint.folder: step 5 in {folder} is of another model or optimizer: "

    error = refused(tmp_path, path, capsys, "model.width=32")
    assert error.startswith(of_another) and "params/embedding/table is (61, 16) float64 in the file, (61, 32) float64 wanted" in error
    error = refused(tmp_path, path, capsys, "model.tied=true")
    assert error.startswith(of_another) and "params/head/table (61, 16) float64 in the file is unexpected" in error
    error = refused(tmp_path, path, capsys, "model.qkv_bias=false", "optimizer.name=sgd")
    assert error.startswith(of_another) and error.endswith("choose another folder, or the configuration saved in it")
    for override, old, new in (("data.seed=9", "3", "9"), ("data.shuffle=false", "true", "false"), ("train.batch=16", "8", "16")):
        field = override.partition("=")[0]
        error = refused(tmp_path, path, capsys, override)
        assert (
            error.startswith(f"{field}: the checkpoint was written with {old}, the run asks for {new}, ")
            and f"set {field}={old}, or" in error
        )
    for override, old, new in (
        ("model.norm_one_plus=true", "false", "true"),
        ("model.activation=gelu_tanh", "silu", "gelu_tanh"),
        ("model.windows=[4]", "[0]", "[4]"),
    ):
        error = refused(tmp_path, path, capsys, override)
        assert f"written with {old}, the run asks for {new}, so its weights mean nothing; set model." in error


def test_the_script_in_a_process_of_its_own(tmp_path, data):
    path = tiny.run_file(tmp_path, data)
    command = [sys.executable, str(tiny.ROOT / "scripts" / "train.py"), str(path), "--set", "train.stpes=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "jaxpar: error: train.stpes: no such key; the nearest valid one is train.steps\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]


def test_jax_is_left_as_it_was():
    """`main` simulates devices only where nobody did before; the tests of this file rely on the eight of conftest.py."""
    assert len(jax.devices()) == 8
