"""scripts/gpu_check.py at a tiny size on the CPU, so that it works the day a GPU is at hand."""

import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxpar.plan import hardware
from scripts import gpu_check, gpu_check_kernels

TORCH_REPORT = gpu_check.torch_report


@pytest.fixture(autouse=True)
def as_users_run_it(monkeypatch):
    """Without the 64-bit types of the other tests; fewer steps; torch's side is tests/bridge/test_gpu_check_torch.py."""
    monkeypatch.setattr(gpu_check, "STEPS", 3)
    monkeypatch.setattr(gpu_check, "torch_report", lambda tiny, seconds: "left to another test")
    with jax.enable_x64(False):
        yield


def test_the_whole_check_runs_and_reports(tmp_path, capsys):
    assert gpu_check.main(["--tiny", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == json.loads(capsys.readouterr().out)
    assert {(each["name"], each["dtype"]) for each in report["kernels"]} >= {("attention, blockwise", "float32"), ("loss", "bfloat16")}
    assert all(0 < each["error"] < each["bound"] for each in report["kernels"])
    (step,) = report["steps"]
    assert step["steps"] == 3 and step["median_seconds"] > 0 and step["losses"][1] < step["losses"][0]
    assert step["tokens_per_second"] == pytest.approx(4 * 128 / step["median_seconds"])
    assert "stopped" not in report and report["seconds"] < 210
    assert report["ok"] and report["hardware"] is None and step["predicted_peak"]["formula"] > 0


TIMES = {"seconds": 60.0, "steps": 12, "median_seconds": 2.0}  # 15 steps of 2 s, and 30 s to compile


def test_a_model_is_begun_only_where_the_last_ones_time_says_that_it_ends(monkeypatch, capsys):
    """The second has its layers twice; the third is the second again. With 40 seconds there is no time for 30 of compiling and 5 steps."""
    sizes = {"one": gpu_check.TINY, "two": {**gpu_check.TINY, "layers": 4}, "same": {**gpu_check.TINY, "layers": 4}}
    first, second = (gpu_check.config_of(sizes[name], 128, 4, "matmuls") for name in ("one", "two"))
    more = gpu_check.work.model_flops(second) / gpu_check.work.model_flops(first)
    assert gpu_check.expected_seconds(TIMES, first, second) == pytest.approx(1.25 * (30 + 4 * 2 * more)) and 1.2 < more < 2
    monkeypatch.setattr(gpu_check, "models", lambda tiny: sizes)
    monkeypatch.setattr(gpu_check, "step", lambda name, *rest: {"model": name, **TIMES})
    monkeypatch.setattr(gpu_check_kernels, "check", lambda *rest: [])
    gpu_check.main(["--tiny", "--seconds", "40"])
    one, two, same = json.loads(capsys.readouterr().out)["steps"]
    assert one == {"model": "one", **TIMES} and "would take about 5" in two["left_out"] and "s of the 40 s left" in same["left_out"]
    gpu_check.main(["--tiny", "--seconds", "600"])
    assert not any("left_out" in each for each in json.loads(capsys.readouterr().out)["steps"]), "control"


def test_no_program_is_compiled_again_when_the_time_is_up():
    config = gpu_check.config_of(gpu_check.TINY, 128, 4, "matmuls")
    assert gpu_check.predicted(config, hardware.load("h100"), left=-1)["reason"] == "no time left to compile it once more"


HANGS = """
import sys, time
from scripts import gpu_check, gpu_check_kernels
gpu_check.torch_report = lambda tiny, seconds: "left to another test"
gpu_check_kernels.check = lambda *rest: [gpu_check_kernels.Kernel("attention", "float32", ("o",), 0.0, 1.0, True)]
gpu_check.step = lambda *rest: time.sleep(600)
sys.exit(gpu_check.main(["--tiny", "--seconds", sys.argv[1], "--json", sys.argv[2]]))
"""


def test_what_never_ends_is_left_standing(tmp_path):
    """A step that would take ten minutes: after two seconds the report is printed, with what was found before, and the process is gone."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", HANGS, "2", str(tmp_path / "report.json")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text()) and done.returncode == 0
    assert report["stopped"] == "after 2 s, with tiny not done" and 2 <= report["seconds"] < 4
    assert report["ok"] and len(report["kernels"]) == 1 and report["steps"] == []


def test_torch_is_stopped_with_all_that_it_started(tmp_path, monkeypatch):
    """Processes of torch's compiler hold the pipes; what was printed by then is kept."""
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"model": "one"}'\nsleep 600 &\nwait\n""")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: name)
    begun = time.monotonic()
    assert TORCH_REPORT(True, 1) == [{"model": "one"}, "stopped after 1 s"] and time.monotonic() - begun < 30


def test_a_wrong_kernel_is_noticed(monkeypatch):
    """Negative control: attention with another scale of its scores, on the device only."""
    right = gpu_check_kernels.attention
    calls = []

    def wrong(*arrays, **options):
        calls.append(arrays[0].dtype)
        return right(*arrays, **options, scale=0.1 if arrays[0].dtype == "float32" else None)

    monkeypatch.setattr(gpu_check_kernels, "attention", wrong)
    found = gpu_check_kernels._attention(jax.devices("cpu")[0], "blockwise", "float32", 128)
    assert calls == ["float32", "float64"] and not found.ok and found.error > 0.01


def test_what_does_not_fit_is_left_out():
    big, small = (gpu_check.first_that_fits(gpu_check.LLAMA_3B, 4096, room) for room in (80 * 2**30, 24 * 2**30))
    assert big is not None and small is None
    assert gpu_check.first_that_fits(gpu_check.LLAMA_1B, 4096, 40 * 2**30) is not None


def test_a_gpu_is_known_by_its_name():
    class Device:
        device_kind = "NVIDIA H100 80GB HBM3"

    assert gpu_check.described(Device()) == hardware.load("h100")
    Device.device_kind = "NVIDIA H200"
    assert gpu_check.described(Device()) == hardware.load("h200")
    Device.device_kind = "NVIDIA H"
    assert gpu_check.described(Device()) is None
