"""Two processes of four devices each, joined as torchrun would, compute what one process of eight does, and stop together.

The losses agree to 1e-12 in float64, not to the bit: between processes Gloo adds in another order than XLA does inside one.
"""

import signal
import socket

import pytest

from jaxpar.train.checkpoint import SavedCheckpoints
from tests.train import tiny


def start_two(path, *arguments):
    """The command in two processes that share a host."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    return [tiny.start(["train", path, *arguments], RANK=str(rank), **launch) for rank in range(2)]


def agree(folder, run, other_folder, other, step):
    """Losses, norms and every leaf of the last checkpoint, of two runs that may add in another order."""
    got, want = tiny.metrics(folder), tiny.metrics(other_folder)
    assert list(got) == list(want) == list(range(1, step + 1))
    for number, record in want.items():
        assert got[number] == pytest.approx(record, rel=1e-12), number
    gap, where = tiny.gap(tiny.leaves(run, step), tiny.leaves(other, step))
    assert gap < 1e-12, (gap, where)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.tokens(tmp_path_factory.mktemp("data") / "tokens")


def test_sigterm_to_one_of_two_stops_both_and_one_process_goes_on(tmp_path, data):
    path = tiny.run_file(tmp_path, data)
    processes = start_two(path, "--set", "train.steps=100000")
    tiny.wait_for(processes[0], "step 3/100000")
    processes[1].send_signal(signal.SIGTERM)
    (code, out, err), (other_code, other_out, other_err) = map(tiny.finish, processes)
    assert (code, other_code) == (0, 0), (out, err, other_out, other_err)
    with SavedCheckpoints(tmp_path / "checkpoints") as checkpoints:
        last = checkpoints.steps()[-1]
    assert f"stopped after step {last}; rerun the same command to go on\n" in out
    assert "step" not in other_out, "only process 0 speaks"
    assert list(tiny.metrics(tmp_path)) == list(range(1, last + 1))

    steps = {"train.steps": last + 2}
    run, alone = tiny.config(tmp_path, data, steps), tiny.config(tmp_path / "alone", data, steps)
    assert tiny.train(run) == 0 and tiny.train(alone) == 0
    agree(tmp_path, run, tmp_path / "alone", alone, last + 2)


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped_on_another_mesh(tmp_path, data):
    alone = tiny.config(tmp_path / "alone", data)
    assert tiny.train(alone) == 0
    assert tiny.train(tiny.config(tmp_path, data, {"train.steps": 3})) == 0
    changes = {"mesh.data": 2, "mesh.tensor": 4, "train.zero": 3, "train.accumulation": 2}
    for process in start_two(tiny.run_file(tmp_path, data, changes)):
        code, out, err = tiny.finish(process)
        assert code == 0, (out, err)
    agree(tmp_path, tiny.config(tmp_path, data, changes), tmp_path / "alone", alone, tiny.STEPS)


@pytest.mark.slow
def test_both_processes_refuse_bad_input(tmp_path, data):
    for process in start_two(tiny.run_file(tmp_path, data), "--set", "mesh.data=3"):
        code, out, err = tiny.finish(process)
        assert code == 2, (out, err)
        assert err.endswith(
            "jaxpar: error: mesh: data 3 × tensor 2 makes 6 devices, but there are 8; set mesh.data=4, or run on 6 devices "
            "(simulated ones on CPU: train.cpu_devices=6)\n"
        )
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]
