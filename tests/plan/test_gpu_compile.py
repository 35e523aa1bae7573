"""Training steps compiled for GPUs, with no GPU: what they send, hold and compute is what the formulas say.

Needs JAX's CUDA plugin: `make test-gpu-compile`. GPU_COMPILE_REQUIRED=1 makes its absence a failure instead of a skip.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpar import cli, configfile, gpu
from jaxpar.config import GpuConfig
from jaxpar.plan import compile as compiling
from jaxpar.plan import hardware
from tests.plan.gpu_runs import RUNS

PRESENT = compiling.plugin_present()
if not PRESENT and os.environ.get("GPU_COMPILE_REQUIRED"):
    raise RuntimeError("JAX's CUDA plugin is not installed")
pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(not PRESENT, reason="JAX's CUDA plugin is not installed: make test-gpu-compile"),
]
FOLDER = Path(__file__).parent.parent.parent / "configs" / "runs"
BIG = sorted(path.stem for path in FOLDER.glob("*_h100x*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def as_users_run_it():
    """Without the 64-bit types of the other tests."""
    with jax.enable_x64(False):
        yield


@pytest.fixture(scope="module")
def h100():
    return hardware.load("h100")


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_xla_knows_every_gpu_and_every_flag(name):
    (device,) = compiling.devices(hardware.load(name), 1, 1)
    argument = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    lowered = jax.jit(lambda a: a @ a).lower(argument)
    assert lowered.compile(compiler_options={**gpu.compiler_options(GpuConfig()), **gpu.WITHOUT_GPU})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):  # negative control
        lowered.compile(compiler_options={"xla_gpu_no_such_flag": True})


@pytest.mark.parametrize("label", RUNS)
def test_small_runs_send_exactly_what_the_formulas_say(label, h100):
    report = compiling.report(compiling.compile_run(RUNS[label], h100))
    assert report["unexpected"] == []
    assert {(row["axis"], row["kind"]): row["bytes"] for row in report["collectives"]} == {
        (row["axis"], row["kind"]): row["expected_bytes"] for row in report["collectives"]
    }
    limit = 1.34 if RUNS[label].train.remat == "block" else 1.005 if RUNS[label].train.remat in ("none", "matmuls") else 1.30
    assert report["flops"]["program"] <= limit * report["flops"]["model"]


def test_the_formulas_of_another_run_do_not_match(h100):
    """Negative control: what the formulas do not have is listed with its source."""
    from jaxpar.plan import formulas, sent

    compiled = compiling.compile_run(RUNS["4-2-3-False-2-none-1-float32"], h100)
    rows, unexpected = sent.compare(compiled.text, compiled.mesh, formulas.step_traffic(RUNS["4-2-0-True-2-attention-2-float32"]))
    assert any(row["bytes"] != row["expected_bytes"] for row in rows)
    assert any("jaxpar/parallel/collectives.py:" in each["source"] for each in unexpected)


@pytest.mark.parametrize("run", BIG)
def test_runs_of_real_size_fit_and_are_predicted(run, h100):
    compiled = compiling.compile_run(configfile.load(FOLDER / f"{run}.yaml"), h100)
    report = compiling.report(compiled)
    memory = report["memory"]
    assert report["fits"] and report["unexpected"] == []
    assert sum(memory["parts"].values()) == memory["peak"]
    assert 0 <= memory["parts"]["rest"] < 0.02 * memory["peak"]
    assert memory["predicted_peak"] == pytest.approx(memory["peak"], rel=0.10)
    assert all(row["bytes"] == row["expected_bytes"] for row in report["collectives"])


MAXTEXT = ["train.remat=block", "train.batch=64", "train.accumulation=1", "train.reduce_dtype=bfloat16", "train.loss_chunk=256"]


@pytest.mark.parametrize(
    "mesh, peak, sent",
    [
        (["mesh.data=64", "mesh.tensor=1", "train.interleave=1"], 6.95, 43.4),
        (["train.interleave=1"], 9.72, 248),
    ],
    ids=["ZeRO-3 over 64", "data 8 × tensor 8"],
)
def test_less_memory_and_traffic_than_maxtext(mesh, peak, sent, h100):
    """Llama-3-8B, 64 × 8192 tokens, full recomputation, cuDNN: MaxText 0.2.5 compiled for the same 64 H100s holds and sends this much."""
    config = configfile.load(FOLDER / "llama3_8b_h100x64.yaml", [*MAXTEXT, *mesh])
    report = compiling.report(compiling.compile_run(config, h100))
    assert report["memory"]["peak"] <= peak * 2**30
    assert sum(row["bytes"] for row in report["collectives"]) <= sent * 1e9


def test_the_command_writes_its_report(tmp_path, capsys):
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {vocabulary: 512, width: 128, layers: 2, heads: 4, kv_heads: 4, mlp_width: 256}\n"
        "mesh: {data: 4, tensor: 2}\ndata: {sequence: 256, documents: joined}\ntrain: {batch: 8, zero: 3}\n"
    )
    assert cli.main(["compile", str(run), "--json", str(tmp_path / "a.json"), "--hlo", str(tmp_path / "a.hlo")]) == 0
    text = capsys.readouterr().out
    assert "fits" in text and "Sent by one GPU" in text
    report = json.loads((tmp_path / "a.json").read_text())
    assert {"memory", "collectives", "unexpected", "flops", "time", "compile_seconds", "fits"} <= set(report)
    assert {"arguments", "temporaries", "peak", "predicted_peak", "parts"} <= set(report["memory"])
    assert set(report["collectives"][0]) == {"axis", "kind", "asynchronous", "count", "bytes", "expected_bytes"}
    assert {"step_seconds", "tokens_per_second_per_gpu", "mfu", "exposed_seconds"} <= set(report["time"])
    assert (tmp_path / "a.hlo").read_text().startswith("HloModule")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gpu", "tpu"], "--gpu: 'tpu' is not one of a100"),
        (["--nodes", "3"], "mesh: "),
        (["--set", "mesh.tensor=3"], "mesh.tensor: 3 does not divide"),
        (["--set", "gpu.flags=[xla_gpu_no_such_flag=1]"], "gpu.flags: No such compile option"),
        (["--set", "gpu.flags=[oops]"], "gpu.flags: 'oops' is not of the form"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert cli.main(["compile", str(FOLDER / "llama3_8b_h100x8.yaml"), "--set", "model.layers=1", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"jaxpar: error: {message}") and err.count("\n") == 1, err


def test_out_of_memory_is_a_verdict(h100):
    """A model that no GPU holds compiles, does not fit, and what helps most is found by compiling."""
    config = configfile.load(
        FOLDER / "llama3_8b_h100x8.yaml", ["model.layers=2", "train.batch=1024", "train.accumulation=1", "train.zero=1"]
    )
    compiled = compiling.compile_run(config, h100)
    report = compiling.report(compiled)
    assert not report["fits"]
    peaks = compiling.compare_knobs(config, h100, None, None)
    assert peaks[0][1] < report["memory"]["peak"] and peaks == sorted(peaks, key=lambda each: each[1])
