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


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("gpus_per_node: 8\n", "", "needs the keys .*; gpus_per_node missing or unknown"),
        ("launch: 8.4e-6", "launch: 8 us", "launch: '8 us' is not a number"),
        ("  kernel: estimate", "  kernels: estimate", "sources: kernel without a source"),
        ("  core_count: 132", "  coer_count: 132", "target: needs the keys .*; coer_count, core_count missing or unknown"),
        ("  core_count: 132\n", "", "target: needs the keys .*; core_count missing or unknown"),
        ("  core_count: 132", "  core_count: 0", "target.core_count: 0 must be above 0"),
        ("  core_count: 132", "  core_count: 132.5", "target.core_count: 132.5 is not a whole number"),
        ("  bfloat16: 989.4e12\n", "", "peak_flops: bfloat16 missing"),
        ("  float32: 66.9e12\n", "", "peak_flops: float32 missing"),
        ("  tfloat32: 494", "  tf32: 494", "peak_flops: tf32 is not numpy's name of a dtype"),
        ("\nmemory: 84942979072", "\nmemory: 0", "memory: 0 must be above 0"),
        ("\nmemory: 84942979072", "\nmemory: 80e9", "memory: 80000000000.0 is not a whole number"),
        ("gpus_per_node: 8", "gpus_per_node: true", "gpus_per_node: True is not a number"),
        ("memory_bandwidth: 3.35232e12", "memory_bandwidth: .inf", "memory_bandwidth: '.inf' is not a number"),
        ("bandwidth: 450e9", "bandwidth: -1", "node.bandwidth: -1 must be above 0"),
        ("fraction: 0.8", "fraction: 80", "node.fraction: 80 is more than 1"),
        ("  matmul: 0.75", "  matmul: 75", "fractions.matmul: 75 is more than 1"),
        (
            "{ bandwidth: 450e9, fraction: 0.8, latency: 3.4e-6 }",
            "{ bandwidth: 450e9 }",
            "node: needs the keys .*; fraction, latency missing",
        ),
        ("{ bandwidth: 450e9, fraction: 0.8, latency: 3.4e-6 }", "450e9", "node: 450.*is not a section"),
        ("description: NVIDIA H100 80GB HBM3", "description: 5", "description: 5 is not NVIDIA's name"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(old, new, message, tmp_path):
    text, path = (hardware.FOLDER / "h100_sxm.yaml").read_text(), tmp_path / "mine.yaml"
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=f"mine.yaml: {message}") as raised:
        hardware.load(str(path))
    assert "\n" not in str(raised.value)


def test_a_section_must_be_one(tmp_path):
    path = tmp_path / "mine.yaml"
    for name in ("target", "peak_flops", "sources"):
        kept, inside = [], False
        for line in (hardware.FOLDER / "h100_sxm.yaml").read_text().splitlines():
            inside = (line.startswith(" ") and inside) or line == f"{name}:"
            kept += [] if inside else [line]
        path.write_text("\n".join([*kept, f"{name}: 5"]))
        with pytest.raises(ValueError, match=f"mine.yaml: {name}: 5 is not a section"):
            hardware.load(str(path))


def test_what_costs_nothing_may_take_no_time(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text((hardware.FOLDER / "h100_sxm.yaml").read_text().replace("launch: 8.4e-6", "launch: 0"))
    assert hardware.load(str(path)).launch == 0
