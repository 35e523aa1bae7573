"""Each step once in metrics.jsonl whatever was killed, the same numbers in TensorBoard's events."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxpar.train.metrics import MetricsLog, read_metrics


def write(folder, steps, resumed=0, scale=1.0):
    with MetricsLog(folder, resumed) as log:
        for step in steps:
            log.write(step, {"loss": jnp.float32(scale / step), "tokens": 128 * step, "skipped": np.int32(0)})


def events(folder):
    """(step, tag, value) of every scalar, read from the record format: length u64, its crc u32, data, crc u32."""
    found = []
    for file in sorted(folder.glob("events.*")):
        data = file.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_lines_and_events(tmp_path):
    folder = tmp_path / "new" / "log"
    write(folder, (10, 20))
    assert read_metrics(folder) == [
        {"step": 10, "loss": pytest.approx(0.1), "tokens": 1280, "skipped": 0},
        {"step": 20, "loss": pytest.approx(0.05), "tokens": 2560, "skipped": 0},
    ]
    assert (20, "loss", pytest.approx(0.05)) in events(folder) and len(events(folder)) == 6


def test_counts_of_experts(tmp_path):
    """All of them in the file; in TensorBoard each layer's busiest expert over the layer's mean."""
    with MetricsLog(tmp_path) as log:
        log.write(3, {"expert_load": np.array([[4, 8, 0], [2, 2, 2]], np.int32)})
    assert read_metrics(tmp_path) == [{"step": 3, "expert_load": [[4, 8, 0], [2, 2, 2]]}]
    assert events(tmp_path) == [(3, "expert_load/0", 2.0), (3, "expert_load/1", 1.0)]


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    write(tmp_path, (10, 20, 30))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
    write(tmp_path, (30, 40), resumed=20, scale=2.0)
    assert [line["step"] for line in read_metrics(tmp_path)] == [10, 20, 30, 40]
    assert read_metrics(tmp_path)[2]["loss"] == pytest.approx(2 / 30)
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    write(tmp_path, (10,))
    assert [line["step"] for line in read_metrics(tmp_path)] == [10], "a run from the start begins the file anew"


def test_each_line_is_on_disk_at_once_and_is_json(tmp_path):
    log = MetricsLog(tmp_path)
    log.write(1, {"loss": float("nan"), "grad_norm": jnp.float32(jnp.inf), "learning_rate": np.float64(1e-3)})
    assert '"loss": null' in (tmp_path / "metrics.jsonl").read_text()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "learning_rate": 1e-3}]
    log.close()


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write(tmp_path / "log", (1, 2))
    assert not (tmp_path / "log").exists()


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"log\.folder: cannot write in .*file"):
        MetricsLog(tmp_path / "file")


def test_a_run_that_starts_afresh_keeps_what_was_there_aside(tmp_path):
    for loss in (1.0, 2.0, 3.0):
        with MetricsLog(tmp_path) as log:
            log.write(1, {"loss": loss})
    assert [record["loss"] for record in read_metrics(tmp_path)] == [3.0]
    aside = {path.name: json.loads(path.read_text())["loss"] for path in tmp_path.glob("metrics.*.jsonl")}
    assert aside == {"metrics.1.jsonl": 1.0, "metrics.2.jsonl": 2.0}
