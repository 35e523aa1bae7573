"""Plain lines away from a terminal, a bar on one, nothing on other processes."""

import io

import jax
import pytest
from rich.console import Console

from jaxpar.train.progress import Progress, describe_experts, remaining


def shown(terminal):
    out = io.StringIO()
    with Progress(30, 10, Console(file=out, force_terminal=terminal, width=120)) as progress:
        progress.update(20, 3.25, 12345.6)
        progress.note("saved [20]")
    return out.getvalue()


def test_plain_lines():
    first, second = shown(False).splitlines()
    assert first.startswith("step 20/30  loss 3.2500  12,346 tokens/s  0:00:0") and second == "saved [20]"


def test_experts_beside_the_loss():
    metrics = {"expert_load_max": 1.3, "expert_dropped": 0, "expert_dropped_share": 0.0, "expert_overflow": 0}
    assert describe_experts(metrics) == "busiest expert 1.30× the mean"
    metrics |= {"expert_dropped": 5, "expert_dropped_share": 0.0125, "expert_overflow": 7}
    assert describe_experts(metrics) == "busiest expert 1.30× the mean, 1.2% dropped, repeated with room for all"
    assert describe_experts({"loss": 1.0}) == ""
    out = io.StringIO()
    with Progress(30, 10, Console(file=out, force_terminal=False, width=120)) as progress:
        progress.update(20, 3.25, 12345.6, "busiest expert 1.30× the mean")
    assert out.getvalue().startswith("step 20/30  loss 3.2500  busiest expert 1.30× the mean  12,346 tokens/s")


def test_bar_on_a_terminal():
    assert "step 20/30" in shown(True) and "loss 3.2500" in shown(True) and "\x1b[" in shown(True)


def test_other_processes_are_quiet(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert shown(False) == shown(True) == ""


@pytest.mark.parametrize(
    ("steps", "done", "seconds", "text"), [(10, 5, 10, "0:00:20"), (3600, 1, 1.5, "1:30:00"), (5, 0, 9, "?"), (0, 5, 9, "0:00:00")]
)
def test_remaining(steps, done, seconds, text):
    assert remaining(steps, done, seconds) == text


def test_time_left_does_not_count_compilation(monkeypatch):
    clock = iter([0.0, 600.0, 610.0])  # made, compiled, updated
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    out = io.StringIO()
    with Progress(30, 10, Console(file=out, force_terminal=False, width=120)) as progress:
        progress.compiled(11)
        progress.update(21, 3.25, 1.0)
    assert "0:00:09 left" in out.getvalue()
