"""scripts/gpu_check.py at a tiny size on the CPU, so that it works the day a GPU is at hand."""

import json

import jax
import pytest

from jaxpar.plan import hardware
from scripts import gpu_check, gpu_check_kernels


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
    assert report["ok"] and report["hardware"] is None and step["predicted_peak"]["formula"] > 0


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
