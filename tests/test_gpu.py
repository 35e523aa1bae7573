"""Compiler options for GPUs: every flag has its reason, a run file overrides, and what is wrong is one line."""

from pathlib import Path

import jax
import pytest

from jaxpar import cli, configfile, gpu
from jaxpar.config import GpuConfig
from jaxpar.plan import compile as compiling
from jaxpar.plan import hardware


def test_every_flag_is_named_once_and_has_a_reason():
    names = [flag.name for flag in gpu.FLAGS]
    assert len(set(names)) == len(names) and all(name.startswith("xla_gpu_") for name in names)
    assert all(len(flag.reason) > 30 for flag in gpu.FLAGS)


def test_a_run_file_overrides_and_adds():
    flags = ("xla_gpu_enable_latency_hiding_scheduler=false", "xla_gpu_all_gather_combine_threshold_bytes=1024", "xla_gpu_other=word")
    config = configfile.from_dict({"gpu": {"flags": list(flags)}})
    assert config.gpu.flags == flags and configfile.from_dict(configfile.dump(config)) == config
    options = gpu.compiler_options(config.gpu)
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is False
    assert options["xla_gpu_all_gather_combine_threshold_bytes"] == 1024
    assert options["xla_gpu_other"] == "word"
    untouched = gpu.compiler_options(GpuConfig())
    assert untouched["xla_gpu_enable_latency_hiding_scheduler"] is True and len(options) == len(untouched) + 1


def test_memory_is_reserved_unless_the_user_says():
    for before, after in (({}, str(gpu.MEMORY_FRACTION)), ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, ".5")):
        gpu.reserve(before)
        assert before["XLA_PYTHON_CLIENT_MEM_FRACTION"] == after


def test_without_the_plugin_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run.yaml"
    run.write_text("train: {batch: 8}\n")
    monkeypatch.setattr(compiling, "plugin_present", lambda: False)
    assert cli.main(["compile", str(run)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxpar: error: compiling for GPUs needs JAX's CUDA plugin") and 'pip install "jax[cuda13]==' in err
    assert err.count("\n") == 1


def test_a_plugin_of_another_version_is_one_line(monkeypatch):
    def without(*arguments, **settings):
        raise NotImplementedError("no topology for cuda")

    monkeypatch.setattr(compiling, "plugin_present", lambda: True)
    monkeypatch.setattr(compiling.topologies, "get_topology_desc", without)
    said = r'^JAX\'s CUDA plugin did not load \(another version than jax .*\): pip install "jax\[cuda13\]==[^\n]*$'
    with pytest.raises(ValueError, match=said):
        compiling.devices(hardware.load("h100"), 1, 8)


@pytest.mark.parametrize("sets, message", [(["mesh.tensor=3"], "mesh.tensor: 3 does not divide"), (["mesh.data=3"], "train.batch")])
def test_what_cannot_shard_is_refused_before_compiling(sets, message, tmp_path, monkeypatch, capsys):
    """The error of training, whether or not the plugin is there."""
    run = tmp_path / "run.yaml"
    run.write_text("train: {batch: 8}\n")
    monkeypatch.setattr(compiling, "plugin_present", lambda: False)
    assert cli.main(["compile", str(run), *(part for override in sets for part in ("--set", override))]) == 2
    assert capsys.readouterr().err.startswith(f"jaxpar: error: {message}")


def test_the_installed_xla_knows_every_flag():
    """Options of GPUs are XLA's whatever it compiles for; those of a GPU program are tried in tests/plan/test_gpu_traffic.py."""
    lowered = jax.jit(lambda a: a + 1).lower(jax.ShapeDtypeStruct((2,), "float32"))
    for name, value in {**gpu.compiler_options(GpuConfig()), **gpu.WITHOUT_GPU}.items():
        assert lowered.compile(compiler_options={name: value}), name
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):  # negative control
        lowered.compile(compiler_options={"xla_gpu_no_such_flag": True})


def test_the_environment_of_gpu_tests_is_the_default_one_and_the_plugin():
    root = Path(__file__).parent.parent
    plain, cuda = (
        {line for line in (root / name).read_text().splitlines() if "==" in line} for name in ("constraints.txt", "constraints-cuda.txt")
    )
    assert plain <= cuda and all(line.startswith(("jax-cuda13", "nvidia-")) for line in cuda - plain)
    (jax_version,) = [line for line in plain if line.startswith("jax==")]
    assert jax_version.replace("jax==", "jax-cuda13-plugin==") in cuda
