"""Rerunning the command goes on: to the same bits on the same mesh, to rounding on another, after SIGTERM and after SIGKILL."""

import os
import signal

import pytest

from jaxpar.train.checkpoint import SavedCheckpoints
from jaxpar.train.progress import Progress
from tests.train import tiny

# Another tensor axis pads the vocabulary of 61 to 64 instead of 62; another accumulation reads the same sequences.
MESHES = (
    {},
    {"mesh.data": 2, "mesh.tensor": 4, "train.zero": 3, "train.accumulation": 2},
    {"mesh.data": 1, "mesh.seq": 4, "mesh.tensor": 1, "train.zero": 0},
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """The uninterrupted run: (metrics, leaves of its last checkpoint)."""
    folder = tmp_path_factory.mktemp("whole")
    run = tiny.config(folder, data)
    assert tiny.train(run) == 0
    return tiny.metrics(folder), tiny.leaves(run, tiny.STEPS)


def stop_after(monkeypatch, step):
    """SIGTERM to this process while step `step` is being shown, so that the run ends one step later."""
    update = Progress.update

    def updated(self, done, *arguments):
        update(self, done, *arguments)
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "update", updated)


def saved_steps(run):
    with SavedCheckpoints(run.checkpoint.folder) as checkpoints:
        return checkpoints.steps()


def test_same_mesh_bit_for_bit(tmp_path, data, whole, monkeypatch, capsys):
    run = tiny.config(tmp_path, data)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        assert tiny.train(run) == 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert "stopped after step 3; rerun the same command to go on\n" in capsys.readouterr().out
    assert saved_steps(run) == [3] and list(tiny.metrics(tmp_path)) == [1, 2, 3]
    stopped = tiny.leaves(run, 3)

    assert tiny.train(run) == 0
    assert "resuming after step 3\n" in capsys.readouterr().out
    assert saved_steps(run) == [4, 6], "the last two are kept"
    metrics, leaves = whole
    assert tiny.metrics(tmp_path) == metrics
    done = tiny.leaves(run, tiny.STEPS)
    assert tiny.bits(done) == tiny.bits(leaves)
    same = [name for name in done if done[name].tobytes() == stopped[name].tobytes()]
    assert same == ["['skipped']"], "the control: three more steps change every leaf but this counter"

    log = (tmp_path / "log" / "metrics.jsonl").read_bytes()
    assert tiny.train(run) == 0
    assert "all 6 steps are done already; nothing to do\n" in capsys.readouterr().out
    assert saved_steps(run) == [4, 6] and (tmp_path / "log" / "metrics.jsonl").read_bytes() == log


def test_other_mesh_and_zero_level_within_rounding(tmp_path, data, whole, monkeypatch):
    for changes, last in zip(MESHES, (2, 4, tiny.STEPS), strict=True):
        run = tiny.config(tmp_path, data, changes)
        with monkeypatch.context() as patched:
            if last < tiny.STEPS:
                stop_after(patched, last - 1)
            assert tiny.train(run) == 0
        assert saved_steps(run)[-1] == last
    metrics, leaves = whole
    gap, where = tiny.gap(tiny.leaves(run, tiny.STEPS), leaves)
    assert gap < 1e-12, (gap, where)
    for step, loss in tiny.losses(tmp_path).items():
        assert abs(loss - metrics[step]["loss"]) < 1e-12 * abs(loss), step
    broken = {name: leaf * (1 + 3e-12) for name, leaf in leaves.items()}
    assert tiny.gap(broken, leaves)[0] > 1e-12, "the control"


def test_another_data_seed_reads_other_tokens(tmp_path, data, whole):
    """The control of both tests above: what a resumed run reads matters, and it is refused when it would be something else."""
    run = tiny.config(tmp_path, data, {"data.seed": 4, "train.steps": 3})
    assert tiny.train(run) == 0
    assert all(abs(loss - whole[0][step]["loss"]) > 1e-3 for step, loss in tiny.losses(tmp_path).items())
    with pytest.raises(ValueError, match=r"^data\.seed: the checkpoint was written with 4, the run asks for 3, .*; set data\.seed=4, or"):
        tiny.train(tiny.config(tmp_path, data))


# The write of step 4 takes forever just before its folder gets its name.
STUCK = """
import time
from orbax.checkpoint._src.path import atomicity
finalize = atomicity.AtomicRenameTemporaryPath.finalize
async def stuck(self, *arguments, **named):
    if "/4" in str(self.get_final()):
        print("writing step 4", flush=True)
        time.sleep(600)
    return await finalize(self, *arguments, **named)
atomicity.AtomicRenameTemporaryPath.finalize = stuck
"""


def test_kill_during_a_save_then_sigterm_then_the_end(tmp_path, data):
    path = tiny.run_file(tmp_path, data, {"checkpoint.every": 2})
    killed = tiny.start(["train", path], STUCK)
    tiny.wait_for(killed, "writing step 4")
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    run = tiny.config(tmp_path, data)
    assert saved_steps(run) == [2]
    assert any(name.startswith("4.") for name in os.listdir(run.checkpoint.folder)), "the control: step 4 was being written"

    stopped = tiny.start(["train", path, "--set", "train.steps=100000"])
    tiny.wait_for(stopped, "step 3/100000")
    stopped.send_signal(signal.SIGTERM)
    code, out, err = tiny.finish(stopped)
    assert code == 0 and not err, (code, out, err)
    last = saved_steps(run)[-1]
    assert out.splitlines()[-1] == f"stopped after step {last}; rerun the same command to go on"
    assert not any(name.startswith("4.") for name in os.listdir(run.checkpoint.folder)), "what was unfinished is gone"

    steps = {"train.steps": last + 1}
    assert tiny.train(tiny.config(tmp_path, data, steps)) == 0
    uninterrupted = tiny.config(tmp_path / "whole", data, steps)
    assert tiny.train(uninterrupted) == 0
    assert tiny.metrics(tmp_path) == tiny.metrics(tmp_path / "whole")
    assert tiny.bits(tiny.leaves(run, last + 1)) == tiny.bits(tiny.leaves(uninterrupted, last + 1))
