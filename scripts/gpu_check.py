"""What a CUDA GPU really does, in one run of under four minutes: kernels against float64, training steps against what was predicted.

    python scripts/gpu_check.py [--json FILE]            on a GPU
    JAX_PLATFORMS=cpu python scripts/gpu_check.py --tiny  the same on a CPU, at sizes that take seconds

kernels   attention (cuDNN's in bf16, blockwise in float32) and the loss with their gradients, against the same in float64 on the CPU
steps     a training step of a 1B and a 3B Llama, sequence 4096, bf16, compiled as `jaxpar train` does: median step, tokens/s, MFU with
          causal attention, peak memory beside what `jaxpar compile` says of this GPU and what the closed formula says
torch     the same models with torch.compile, where torch is installed (gpu_check_torch.py, a process of its own that ends before JAX
          starts: both would want the memory, and they bring different builds of cuDNN)

Prints one JSON object; exit code 1 where a kernel is off or none was tried. What there is no memory or no time for is left out, and the
report says why. It is over within --seconds whatever the GPU (the rest of the four minutes is for JAX's import): a model is begun only
where the time that the last one took says that it ends in time, and what is under way at the end is left standing (`gpu_check_report.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # so that peak_bytes_in_use is what the step needs

import jax
import numpy as np

from jaxpar import configfile
from jaxpar.config import Config
from jaxpar.mesh import make_mesh
from jaxpar.plan import compile as compiling
from jaxpar.plan import formulas, hardware, memory, peak, work
from jaxpar.train.step import Training, build_training
from scripts import gpu_check_kernels
from scripts.gpu_check_report import Report

LLAMA_1B = {"width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "mlp_width": 8192, "vocabulary": 128256, "tied": True}
LLAMA_3B = {"width": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "mlp_width": 8192, "vocabulary": 128256, "tied": True}
TINY = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 128, "vocabulary": 256, "tied": True}
# (sequences, recomputation), the fastest first; the first that fits is run.
WAYS = ((4, "matmuls"), (4, "outputs"), (2, "outputs"), (2, "attention"), (1, "block"))
STEPS, WARM = 12, 3
SLACK = 1.25  # on a time that is expected, from one that was measured


def models(tiny: bool) -> dict[str, dict[str, Any]]:
    return {"tiny": TINY} if tiny else {"llama-1b": LLAMA_1B, "llama-3b": LLAMA_3B}


def config_of(model: dict[str, Any], sequence: int, batch: int, remat: str) -> Config:
    return configfile.from_dict(
        {
            "model": {**model, "rope": {"theta": 500000.0}},
            "data": {"sequence": sequence, "documents": "joined"},
            "optimizer": {"name": "adamw", "learning_rate": 1e-4},
            "train": {"batch": batch, "zero": 0, "remat": remat},
        }
    )


def described(device: Any) -> hardware.Hardware | None:
    """The file of configs/hardware for this GPU, by NVIDIA's name for it, which may be the beginning of the file's."""
    known = [hardware.load(path.stem) for path in hardware.FOLDER.glob("*.yaml")]
    return next((each for each in known if f"{each.description} ".startswith(f"{device.device_kind} ")), None)


def random_batch(training: Training) -> dict[str, jax.Array]:
    """Token ids drawn evenly, each label the next id, one document a row."""
    shape = training.abstract_batch["ids"].shape
    ids = np.random.default_rng(0).integers(0, training.config.model.vocabulary, (*shape[:-1], shape[-1] + 1), dtype=np.int32)
    place = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    rows = np.arange(np.prod(shape[:-1]), dtype=np.int32).reshape(shape[:-1])
    values = {"ids": ids[..., :-1], "labels": ids[..., 1:], "positions": place, "segments": np.ones(shape, np.int32), "rows": rows}
    return {name: jax.device_put(values[name], like.sharding) for name, like in training.abstract_batch.items()}


def predicted(config: Config, gpus: hardware.Hardware | None, left: float = math.inf) -> dict[str, Any]:
    """Peak bytes: by formula, and of the program that `jaxpar compile` makes for this GPU, with the workspace of attention apart. `left`
    says how many seconds more than its compilation would take there are."""
    found: dict[str, Any] = {"formula": peak.predicted_peak(config)}
    if gpus is None:
        return found | {"compiled": None, "reason": "no file of configs/hardware has this device's name"}
    if left < 0:
        return found | {"compiled": None, "reason": "no time left to compile it once more"}
    try:
        compiled = compiling.compile_run(config, gpus)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return found | {"compiled": None, "reason": str(error).splitlines()[0]}
    workspace = memory.attention_workspace(compiled.text)
    return found | {"compiled": int(compiled.sizes.peak_memory_in_bytes), "attention_workspace": workspace}


def step(name: str, config: Config, device: Any, gpus: hardware.Hardware | None, until: float) -> dict[str, Any]:
    """One model trained for a few steps: times, rates, memory, losses. Fewer steps where the time is up."""
    begun = time.monotonic()
    training = build_training(config, make_mesh(config.mesh, [device]))
    start = time.perf_counter()
    program = training.step.lower(training.abstract_state, training.abstract_batch).compile()
    compile_seconds = time.perf_counter() - start
    before = (device.memory_stats() or {}).get("peak_bytes_in_use")
    state, batch, seconds, losses = training.init(), random_batch(training), [], []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        state, metrics = program(state, batch)
        losses.append(float(metrics["loss"]))  # waits for the step
        seconds.append(time.perf_counter() - start)
        if len(seconds) > WARM and time.monotonic() + seconds[-1] > until:
            break
    median, tokens = statistics.median(seconds[WARM:] or seconds), config.train.batch * config.data.sequence
    after = (device.memory_stats() or {}).get("peak_bytes_in_use")
    flops = gpus.peak_flops["bfloat16"] if gpus else None
    return {
        "model": name,
        "parameters": sum(weight.total for weight in formulas.weights(config)),
        "sequences": config.train.batch,
        "sequence": config.data.sequence,
        "remat": config.train.remat,
        "compile_seconds": compile_seconds,
        "steps": len(seconds) - WARM,
        "median_seconds": median,
        "tokens_per_second": tokens / median,
        "mfu_causal": work.model_flops(config) / median / flops if flops else None,
        "peak": after if after != before else None,  # the process's largest so far: none of this model's if it did not grow
        "program_peak": int(program.memory_analysis().peak_memory_in_bytes),
        "predicted_peak": predicted(config, gpus, until - time.monotonic() - SLACK * compile_seconds),
        "losses": [losses[0], losses[-1]],
        "seconds": time.monotonic() - begun,
    }


def expected_seconds(last: dict[str, Any], before: Config, config: Config) -> float:
    """What a model will take after `last`, measured of the configuration `before`: as long as that for all but its steps, which take longer
    as its FLOPs are more; of those the fewest that give a median."""
    ratio = work.model_flops(config) / work.model_flops(before)
    steps = last["median_seconds"] * (WARM + last["steps"])
    return SLACK * (max(last["seconds"] - steps, 0) + ratio * last["median_seconds"] * (WARM + 1))


def first_that_fits(model: dict[str, Any], sequence: int, room: int | None) -> Config | None:
    ways = [config_of(model, sequence, batch, remat) for batch, remat in WAYS]
    return next((config for config in ways if room is None or peak.predicted_peak(config) < 0.92 * room), None)


def torch_report(tiny: bool, seconds: float) -> Any:
    """What gpu_check_torch.py prints, or why there is nothing. It starts before JAX takes the GPU."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    sizes = {name: {**model, "sequence": 128 if tiny else 4096, "batch": WAYS[0][0]} for name, model in models(tiny).items()}
    script = [sys.executable, str(Path(__file__).parent / "gpu_check_torch.py"), json.dumps(sizes), *(["--cpu"] if tiny else [])]
    # A session of its own, for torch's compiler has processes that would keep the pipes open.
    child = subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, said = child.communicate(timeout=seconds)
        why = [] if child.returncode == 0 else [(said.strip().splitlines() or ["no message"])[-1]]
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        printed, why = child.communicate()[0], [f"stopped after {seconds:.0f} s"]
    return [*(json.loads(line) for line in printed.splitlines() if line.startswith("{")), *why]


def main(argv: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    arguments.add_argument("--json", metavar="FILE", help="write the report there as well")
    arguments.add_argument("--seconds", type=float, default=210.0, help="after which it is over (default %(default)s)")
    args = arguments.parse_args(argv)
    report = Report(args.json, args.seconds)
    found = report.found
    found["torch"] = torch_report(args.tiny, 0.4 * args.seconds)
    report.now = "the search for a GPU"
    device = jax.devices("cpu" if args.tiny else None)[0]
    if device.platform != "gpu" and not args.tiny:
        report.forget()
        print("gpu_check: JAX sees no GPU; --tiny runs the check on a CPU", file=sys.stderr)
        return 2
    gpus = described(device)
    found |= {"device": device.device_kind, "jax": jax.__version__, "hardware": gpus.name if gpus else None}
    report.now = "kernels"
    found["kernels"] += [dataclasses.asdict(each) for each in gpu_check_kernels.check(device, args.tiny)]
    room = (device.memory_stats() or {}).get("bytes_limit")
    last: tuple[dict[str, Any], Config] | None = None
    for name, model in models(args.tiny).items():
        report.now = name
        config = first_that_fits(model, 128 if args.tiny else 4096, room)
        if config is None:
            found["steps"].append({"model": name, "left_out": f"needs more than the {room} bytes of this GPU"})
        elif last and (needs := expected_seconds(*last, config)) > report.left():
            found["steps"].append({"model": name, "left_out": f"would take about {needs:.0f} s of the {max(report.left(), 0):.0f} s left"})
        else:
            last = step(name, config, device, gpus, report.until), config
            found["steps"].append(last[0])
    return report.write()


if __name__ == "__main__":
    sys.exit(main())
