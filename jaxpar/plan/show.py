"""The report of `jaxpar compile` as text."""

from __future__ import annotations

from typing import Any

from jaxpar.config import Config
from jaxpar.plan.compile import Compiled
from jaxpar.plan.report import table

GIB = 2**30


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def text(compiled: Compiled, report: dict[str, Any], knobs: list[tuple[str, int]]) -> str:
    """Everything of the report, and peaks of the alternatives where they were compiled."""
    config, hardware = compiled.config, compiled.hardware
    mesh = " × ".join(f"{axis} {size}" for axis, size in compiled.mesh.shape.items() if size > 1) or "one GPU"
    train = config.train
    head = (
        f"{config.mesh.devices} × {hardware.description}, {mesh}, ZeRO-{train.zero}, remat {train.remat}, "
        f"{train.batch} × {config.data.sequence} tokens a step in {train.accumulation} microbatches"
        f"{f', interleaved in {train.interleave}' if train.interleave > 1 else ''}; "
        f"lowered in {compiled.lower_seconds:.1f} s, compiled in {compiled.compile_seconds:.1f} s"
    )
    blocks = [head, _memory(config, report), verdict(compiled, report, knobs), _traffic(report), _work(config, report), _time(report)]
    return "\n".join(block for block in blocks if block)


def _memory(config: Config, report: dict[str, Any]) -> str:
    memory = report["memory"]
    rows = [(name, gib(size)) for name, size in memory["parts"].items()]
    sums = [(name.replace("_", " "), gib(memory[name])) for name in ("arguments", "outputs", "aliased", "temporaries", "predicted_peak", "peak")]
    state, saved = memory["formulas"]["state"], memory["formulas"]["activations"]
    masters = memory["parts"]["parameters"] + memory["parts"]["optimizer"]
    lines = [
        table("Memory of one GPU, GiB, at the fullest moment", ("part", "GiB"), rows),
        table("", ("sum", "GiB"), sums).strip("\n"),
        f"16 bytes a parameter, with its ZeRO share: {gib(state)}; masters and optimizer here: {gib(masters)}, for a gradient and a "
        "compute-dtype copy live only while they are used",
        f"Korthikanti's activations of {config.model.layers} layers: {gib(saved)}; here {gib(memory['parts']['activations'])}, with the "
        "working set of one layer or one chunk of logits",
    ]
    if memory["attention_workspace"]:
        lines.append(f"not in the peak: {gib(memory['attention_workspace'])} GiB that cuDNN's attention backward takes as workspace")
    return "\n".join(lines)


def verdict(compiled: Compiled, report: dict[str, Any], knobs: list[tuple[str, int]]) -> str:
    """Fits or not, by how much, and which change helps most."""
    need, usable = report["memory"]["peak"] + report["memory"]["attention_workspace"], report["usable"]
    name, memory = compiled.hardware.name, compiled.hardware.memory
    where = f"{gib(usable)} GiB that JAX may take of the {gib(memory)} of a {name}"
    line = f"fits: {gib(usable - need)} GiB to spare of the {where}" if report["fits"] else f"does not fit: {gib(need - usable)} GiB over the {where}"
    for label, peak in knobs:
        line += f"\n  {label}: peak {gib(peak)} GiB ({gib(peak - report['memory']['peak'])})"
    return f"\n{line}"


def _traffic(report: dict[str, Any]) -> str:
    rows = [
        (
            row["axis"],
            row["kind"],
            "async" if row["asynchronous"] else "sync",
            row["count"],
            f"{row['bytes'] / 1e9:.3f}",
            f"{row['expected_bytes'] / 1e9:.3f}",
        )
        for row in report["collectives"]
    ]
    total = sum(row["bytes"] for row in report["collectives"]) / 1e9
    header = ("axis", "kind", "", "count", "GB", "formula")
    lines = [table(f"Sent by one GPU in a step: {total:.3f} GB", header, rows) if rows else "\nNothing is sent."]
    lines += [f"unexpected: {each['axis']} {each['kind']} {each['bytes'] / 1e6:.3f} MB from {each['source']}" for each in report["unexpected"]]
    return "\n".join(lines)


def _work(config: Config, report: dict[str, Any]) -> str:
    program, model = report["flops"]["program"], report["flops"]["model"]
    calls = ", ".join(f"{name} × {count}" for name, count in sorted(report["custom_calls"].items())) or "none"
    return (
        f"\nWork of one GPU: {program / 1e12:.1f} TFLOP in matmuls and attention, {program / model:.2f} of the model's "
        f"{model / 1e12:.1f} (remat {config.train.remat}); custom calls: {calls}"
    )


def _time(report: dict[str, Any]) -> str:
    time = report["time"]
    if not time:
        return ""
    exposed = ", ".join(f"{axis} {1e3 * seconds:.1f} ms" for axis, seconds in time["exposed_seconds"].items()) or "nothing"
    return (
        f"Simulated: {time['step_seconds']:.3f} s a step, {time['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, "
        f"MFU {time['mfu']:.1%} causal, {time['mfu_full']:.1%} full; exposed: {exposed}"
    )
