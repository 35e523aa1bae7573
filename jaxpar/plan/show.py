"""The report of `jaxpar compile` as text: what was compiled, memory and verdict, traffic, work, time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxpar.config import Config
from jaxpar.mesh import TENSOR
from jaxpar.plan import formulas, knobs, sent, work, working
from jaxpar.plan.compile import Compiled
from jaxpar.plan.report import table

GIB, MIB = 2**30, 2**20
# Waiting for `tensor` longer than this part of a step is worth a recommendation.
EXPOSED = 0.1
# More FLOPs than the policy's, as part of the model's, that are worth a line.
EXCESS = 0.01


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def text(compiled: Compiled, report: dict[str, Any], tried: Sequence[knobs.Alternative] = ()) -> str:
    """The whole report; `tried` are alternatives that were compiled."""
    config, hardware, train = compiled.config, compiled.hardware, compiled.config.train
    mesh = " × ".join(f"{axis} {size}" for axis, size in compiled.mesh.shape.items() if size > 1) or "one GPU"
    head = (
        f"{config.mesh.devices} × {hardware.description}{_hosts(compiled, report)}, {mesh}, ZeRO-{train.zero}, remat {train.remat}, "
        f"{train.batch} × {config.data.sequence} tokens a step in {train.accumulation} microbatches"
        f"{f', interleaved in {train.interleave}' if train.interleave > 1 else ''}; "
        f"lowered in {compiled.lower_seconds:.1f} s, compiled in {compiled.compile_seconds:.1f} s"
    )
    return "\n".join(
        [head, _memory(config, report), verdict(compiled, report, tried), _traffic(report), _work(compiled, report), _time(report)]
    )


def _hosts(compiled: Compiled, report: dict[str, Any]) -> str:
    """How many hosts there are, where that is not as many as GPUs of this kind come in."""
    nodes, gpus = report["run"]["nodes"], compiled.config.mesh.devices
    return "" if nodes == gpus / math.gcd(gpus, compiled.hardware.gpus_per_node) else f" on {nodes} hosts of {gpus // nodes}"


def _memory(config: Config, report: dict[str, Any]) -> str:
    memory = report["memory"]
    if memory["peak"] < GIB:
        return f"\nMemory of one GPU at its fullest: {memory['peak'] / MIB:.1f} MiB, predicted {memory['predicted_peak'] / MIB:.1f}"
    sums = ("arguments", "outputs", "aliased", "temporaries", "predicted_peak", "peak")
    lines = [
        table("Memory of one GPU at its fullest, GiB", ("part", "GiB"), [(name, gib(size)) for name, size in memory["parts"].items()]),
        table("", ("sum", "GiB"), [(name.replace("_", " "), gib(memory[name])) for name in sums]).lstrip("\n"),
        state_line(config, memory),
        activations_line(config, memory),
    ]
    if memory["attention_workspace"]:
        lines.append(f"not in the peak, for XLA does not see it: {gib(memory['attention_workspace'])} of workspace for cuDNN's backward")
    return "\n".join(lines)


def state_line(config: Config, memory: dict[str, Any]) -> str:
    """16 bytes a parameter beside what is held, and where the difference lies."""
    train, rule, parts, formula = config.train, config.optimizer.name, memory["parts"], memory["formulas"]["state"]
    held = sum(parts[name] for name in ("parameters", "optimizer", "weights", "gradients"))
    size = jnp.dtype(train.master_dtype).itemsize
    bytes_each = {"adamw": 3 * size, "lion": 2 * size, "sgd": 2 * size}.get(rule)  # of the others it depends on the parameter
    theirs = (
        "12 of the 16"
        if bytes_each == 12
        else f"where AdamW's in float32 are 12 of the 16 and {rule}'s here {bytes_each or 'another number'}"
    )
    gradients = "a buffer in the masters' dtype" if train.accumulation > 1 else "of the only microbatch, without a buffer that adds up"
    return (
        f"16 bytes a parameter with ZeRO's share: {gib(formula)}; here {gib(held)} ({gib(held - formula)}): masters and moments take "
        f"{gib(parts['parameters'] + parts['optimizer'])}, {theirs}; for the other 4 there are {gib(parts['weights'])} of weights in the "
        f"compute dtype{', those in use' if train.zero == 3 else ''}, and {gib(parts['gradients'])} of gradients: {gradients}"
        f"{', and those being sent' if formulas.replicas(config) > 1 else ''}"
    )


def activations_line(config: Config, memory: dict[str, Any]) -> str:
    """Korthikanti's bytes beside what is held, and where the difference lies. Of few layers under remat "none" less may be held than is
    kept: XLA computes element-wise values of the layers outside the loop again."""
    korthikanti, kept, held = memory["formulas"]["activations"], memory["formulas"]["kept"], memory["parts"]["activations"]
    model, remat = config.model, config.train.remat
    masks = "masks of dropout drawn again" if model.dropout else "no dropout masks"
    rest = f"; the other {gib(held - kept)} are what one layer, or one chunk of logits, works with" if held >= kept else ""
    if rest and (turned := working.turned_bytes(config)):
        rest += f", and {gib(turned)} of kept values in a second order"
    return (
        f"Korthikanti's activations of {model.layers} layers: {gib(korthikanti)}; here {gib(held)} ({gib(held - korthikanti)}): "
        f"{gib(kept)} are kept for the backward, with a gated MLP, {model.kv_heads} key heads, {masks} and remat {remat}{rest}"
    )


def verdict(compiled: Compiled, report: dict[str, Any], tried: Sequence[knobs.Alternative] = ()) -> str:
    """Fits or not and by how much; what was tried, and which change helps most."""
    need, usable = report["memory"]["peak"] + report["memory"]["attention_workspace"], report["usable"]
    where = f"the {gib(usable)} GiB that JAX may take of the {gib(compiled.hardware.memory)} of a {compiled.hardware.name}"
    way = f"fits: {gib(usable - need)} GiB to spare of" if report["fits"] else f"does not fit: {gib(need - usable)} GiB over"
    lines = ["", f"{way} {where}"]
    if tried:
        now = report["time"]["step_seconds"]
        rows = [("as it is", gib(need), "yes" if report["fits"] else "no", f"{now:.3f}")]
        rows += [(each.change, gib(each.need), "yes" if each.fits else "no", f"{each.step_seconds:.3f}") for each in tried]
        lines.append(table("Compiled alternatives", ("change", "GiB", "fits", "s a step"), rows))
        best = knobs.best(list(tried), report)
        if best is None:
            lines.append("no change is faster")
        elif best.fits:
            lines.append(f"helps most: {best.change}: fits with {gib(usable - best.need)} GiB to spare, {best.step_seconds:.3f} s a step")
        else:
            lines.append(f"helps most: {best.change}: still {gib(best.need - usable)} GiB over; more GPUs, or shorter sequences")
    elif not report["fits"]:
        lines.append("nothing lighter is left to try on as many GPUs: more of them, shorter sequences, or a smaller model")
    return "\n".join(lines)


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
    if not rows:
        return "\nNothing is sent."
    total = sum(row["bytes"] for row in report["collectives"]) / 1e9
    lines = [table(f"Sent by one GPU in a step: {total:.3f} GB", ("axis", "kind", "", "count", "GB", "formula"), rows)]
    for each in report["unexpected"]:
        lines.append(f"unexpected: {each['axis']} {each['kind']} {each['bytes'] / 1e6:.3f} MB from {each['source']}")
    for row in sent.missing(report["collectives"]):
        less = (row["expected_bytes"] - row["bytes"]) / 1e6
        lines.append(f"missing: {row['axis']} {row['kind']} {less:.3f} MB that the formulas expect are not sent")
    return "\n".join(lines if len(lines) > 1 else [*lines, "nothing unexpected"])


def _work(compiled: Compiled, report: dict[str, Any]) -> str:
    config, program, model = compiled.config, report["flops"]["program"], report["flops"]["model"]
    calls = ", ".join(f"{name} × {count}" for name, count in sorted(report["custom_calls"].items())) or "none"
    unit, name = (1e12, "TFLOP") if model > 1e11 else (1e9, "GFLOP")
    lines = [
        f"\nWork of one GPU: {program / unit:.1f} {name} in matmuls and attention, {program / model:.3f} of the model's "
        f"{model / unit:.1f} (remat {config.train.remat}); custom calls: {calls}"
    ]
    loops, cudnn = report["counted_at_most"], any("fmha" in name for name in report["custom_calls"])
    if why := excess(config, program / model, loops > 0, cudnn, ".remat" in compiled.text):
        lines.append(why)
    if loops:
        lines.append(
            f"an upper bound, as is the time: {loops} loops end at run time, over tiles of attention where a layer's window does, over "
            "rows of experts with those that came, and are counted as if they did not"
        )
    for each in report["kernels"]:
        flops = f"{each['flops'] * each['count'] / 1e12:.3f} TFLOP" if each["flops"] else "no matmul"
        lines.append(f"kernel {each['name']}: {each['count']} launches of a grid of {' × '.join(map(str, each['grid']))}, {flops}")
    if copies := report["copies"]:
        most = ", ".join(f"{size / 1e9:.1f} of {what}" for what, size in list(copies.items())[:3])
        lines.append(f"copies of {work.LARGE_COPY >> 20} MiB and more: {sum(copies.values()) / 1e9:.1f} GB in a step; the largest {most}")
    return "\n".join(lines)


def excess(config: Config, ratio: float, at_most: bool, cudnn: bool, again: bool) -> str:
    """What may be the reason that a program has more FLOPs than the remat policy asks for; "" of one that has not. `at_most`: it has loops
    that are counted to their bound; `again`: XLA computes some values again by itself, whose instructions it then calls so."""
    train, model = config.train, config.model
    most = 4 / 3 if train.remat in ("attention", "block") or train.mlp_chunk else 1.0
    if ratio <= most + EXCESS:
        return ""
    block, tensor = train.attention_block, config.mesh.tensor
    b, s = formulas.microbatch(config)
    capacity = bool(model.moe.experts) and train.experts.dispatch == "capacity"
    reasons = {
        f"tiles of {block} × {block} scores are multiplied whole where a mask cuts them": not cudnn or any(model.layer_windows),
        "with train.context.layout=contiguous every GPU goes through as many tiles as the one whose tokens see most": config.mesh.seq > 1
        and train.context.layout == "contiguous",
        "rows of experts' capacity without a token are multiplied too": capacity,
        "loops that end early are counted whole": at_most,
        "XLA computes values again to save memory": again,
        "the last chunk of the loss is filled up": b * s % min(train.loss_chunk, b * s) != 0,
        f"the vocabulary is filled up for tensor {tensor}": model.vocabulary % tensor != 0,
    }
    named = "; ".join(reason for reason, holds in reasons.items() if holds)
    return f"more than the {most:.3g} that remat {train.remat} takes at most; what may add to it: {named or 'nothing that is known'}"


def _time(report: dict[str, Any]) -> str:
    time = report["time"]
    step = time["step_seconds"]
    exposed = ", ".join(f"{axis} {1e3 * seconds:.1f} ms ({seconds / step:.1%})" for axis, seconds in time["exposed_seconds"].items())
    lines = [
        f"Simulated: {step:.3f} s a step, {time['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, "
        f"MFU {time['mfu']:.1%} causal, {time['mfu_full']:.1%} full, of the peak in {time['peak_dtype']}; exposed: {exposed or 'nothing'}"
    ]
    if time["exposed_seconds"].get(TENSOR, 0) > EXPOSED * step:
        lines.append(
            f"more than {EXPOSED:.0%} of the step waits for {TENSOR}: --knobs compiles what may hide it: interleaved parts, a ring"
        )
    return "\n".join(lines)
