"""GPUs as data: every file loads, is plausible beside the others, and what a user gets wrong is named."""

import pytest

from jaxpar.plan import hardware

FILES = sorted(hardware.FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_loads_and_is_in_the_right_units(path):
    gpu = hardware.load(path.stem)
    assert gpu.name == path.stem
    assert 70e9 < gpu.memory < 300e9
    assert 1e12 < gpu.memory_bandwidth < 10e12
    assert 200e12 < gpu.peak_flops["bfloat16"] < 3e15
    assert gpu.peak_flops["bfloat16"] == pytest.approx(2 * gpu.peak_flops["tfloat32"], rel=0.03)
    assert gpu.network.bandwidth < gpu.node.bandwidth < gpu.memory_bandwidth
    assert gpu.node.latency < gpu.network.latency < 1e-3
    fractions = gpu.fractions
    assert all(0.25 < part < 1 for part in (fractions.matmul, fractions.attention_forward, fractions.attention_backward, fractions.memory))
    assert f"device_memory_size: {gpu.memory}" in gpu.target_config()


def test_short_names_and_paths():
    assert hardware.load("h100") == hardware.load("h100_sxm") == hardware.load(str(hardware.FOLDER / "h100_sxm.yaml"))
    assert {"a100", "h100", "h200", "b200"} <= set(hardware.known())


def test_unknown_gpu_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"--gpu: 'tpu' is not one of a100, a100_80g, b200, h100"):
        hardware.load("tpu")


def test_a_file_with_a_key_or_a_source_missing_is_refused(tmp_path):
    text = (hardware.FOLDER / "h100_sxm.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("gpus_per_node: 8\n", ""))
    with pytest.raises(ValueError, match="mine.yaml: needs the keys .*gpus_per_node missing"):
        hardware.load(str(path))
    path.write_text(text.replace("launch: 8.4e-6", "launch: 8 us"))
    with pytest.raises(ValueError, match=r"launch: '8 us' is not a number"):
        hardware.load(str(path))
    path.write_text(text.replace("  kernel: estimate", "  kernels: estimate"))
    with pytest.raises(ValueError, match="sources: kernel without a source"):
        hardware.load(str(path))
