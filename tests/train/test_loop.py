"""What a run writes and says while it goes, on one device. Resuming and stopping: test_resume.py."""

import json
import math
import re
import threading

import jax
import pytest

from jaxpar.train import loop
from jaxpar.train.checkpoint import SavedCheckpoints
from tests.train import tiny

ONE = {"mesh.data": 1, "mesh.tensor": 1, "train.zero": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def done(tmp_path_factory, data):
    """A run of seven steps, logged every third, saved every second, two kept: (folder, configuration)."""
    folder = tmp_path_factory.mktemp("done")
    run = tiny.config(folder, data, ONE | {"train.steps": 7, "log.every": 3, "checkpoint.every": 2, "train.z_loss": 1e-3})
    assert tiny.train(run) == 0
    return folder, run


def test_metrics_have_one_line_a_logged_step_and_the_last(done):
    folder, _ = done
    lines = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6, 7]
    for line in lines:
        assert list(line) == ["step", "grad_norm", "learning_rate", "loss", "skipped", "tokens", "z_loss", "tokens_per_second"]
        assert abs(line["loss"] - math.log(tiny.VOCABULARY)) < 1 and line["grad_norm"] > 0
        assert line["skipped"] == 0 and 0 < line["tokens"] <= tiny.BATCH * tiny.SEQUENCE
        assert line["learning_rate"] == pytest.approx(1e-2), "past the two steps of warmup"
        assert 0 < line["z_loss"] < 1 and 0 < line["tokens_per_second"] < 1e7
    assert len(list((folder / "log").glob("events.out.tfevents.*"))) == 1


def test_the_last_checkpoints_stay_each_with_its_configuration(done):
    folder, run = done
    with SavedCheckpoints(run.checkpoint.folder) as checkpoints:
        assert checkpoints.steps() == [6, 7], "the last step is saved although 2 does not divide it"
        assert checkpoints.config(7)["optimizer"]["learning_rate"] == 1e-2
    assert sorted(entry.name for entry in folder.iterdir()) == ["checkpoints", "log"]


def test_until_leaves_and_stays_there(tmp_path, data, capsys):
    """The same command again does nothing, for the step it names is behind."""
    run = tiny.config(tmp_path, data, ONE | {"train.steps": 7, "log.every": 3, "checkpoint.every": 2, "train.z_loss": 1e-3})
    stopped = "stopped after step 3; rerun the same command to go on"
    for last in (stopped, "step 3 is behind already; nothing to do before --until is raised"):
        assert loop.train(run, jax.devices()[:1], until=3) == 0
        assert capsys.readouterr().out.splitlines()[-1] == last
        with SavedCheckpoints(run.checkpoint.folder) as checkpoints:
            assert checkpoints.steps() == [2, 3]
    with pytest.raises(ValueError, match="--until: 0 must be at least 1"):
        loop.train(run, jax.devices()[:1], until=0)


def test_plain_lines_and_nothing_on_disk_when_no_folder_is_named(tmp_path, data, capsys):
    run = tiny.config(tmp_path, data, ONE | {"checkpoint.folder": None, "log.folder": None, "train.steps": 3})
    codes = []
    thread = threading.Thread(target=lambda: codes.append(tiny.train(run)))
    thread.start()
    thread.join()
    assert codes == [0], "a run in a thread leaves signals alone"
    first, compiling, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"6,\d{3} parameters on one device \(cpu\), ZeRO-0, 128 tokens a step", first)
    assert compiling == "compiling the step"
    assert re.fullmatch(r"step 1/3  loss 4\.\d{4}  \? left", lines[0]), "the first step, which was compiled, has no rate"
    for number, line in enumerate(lines[1:], 2):
        assert re.fullmatch(rf"step {number}/3  loss 4\.\d{{4}}  [\d,]+ tokens/s  \d+:\d\d:\d\d left", line)
    assert len(lines) == 3 and list(tmp_path.iterdir()) == []
