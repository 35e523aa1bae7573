"""A run that takes seconds: a hostile two-layer model on a folder of tokens, in this process or as the command line in one of its own."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import yaml

from jaxpar import configfile
from jaxpar.mesh import make_mesh
from jaxpar.train import corpus, loop, padding
from jaxpar.train.checkpoint import SavedCheckpoints
from jaxpar.train.metrics import read_metrics
from jaxpar.train.step import build_training

ROOT = Path(__file__).parent.parent.parent
VOCABULARY, SEQUENCE, BATCH, STEPS = 61, 16, 8, 6
RAW = {
    "model": {
        "vocabulary": VOCABULARY,
        "width": 16,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_width": 6,
        "mlp_width": 24,
        "dropout": 0.1,
        "init_std": 0.2,
        "qkv_bias": True,
    },
    "mesh": {"data": 4, "tensor": 2},
    "data": {"source": "tokens", "sequence": SEQUENCE, "seed": 3},
    "optimizer": {"learning_rate": 1e-2, "schedule": "constant", "warmup": 2, "clip": 0.5},
    "train": {
        "steps": STEPS,
        "batch": BATCH,
        "zero": 1,
        "compute_dtype": "float64",
        "master_dtype": "float64",
        "reduce_dtype": "float64",
        "attention_block": 16,
        "cpu_devices": 8,
    },
    "checkpoint": {"every": 4, "keep": 2},
    "log": {"every": 1},
}


def tokens(folder):
    """A folder of tokens: documents of many lengths, so that labels are spread unevenly over sequences."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, VOCABULARY, length) for length in random.integers(2, 40, 60)]
    corpus.write_tokens(folder, documents, VOCABULARY)
    return folder


def raw(folder, data, changes=()):
    """The run file of a run in `folder`, as a dict; `changes` such as {"mesh.data": 2} on top."""
    run = {section: dict(values) for section, values in RAW.items()}
    run["data"]["path"] = str(data)
    run["checkpoint"]["folder"], run["log"]["folder"] = str(folder / "checkpoints"), str(folder / "log")
    for name, value in dict(changes).items():
        section, key = name.split(".")
        run[section][key] = value
    return run


def config(folder, data, changes=()):
    return configfile.from_dict(raw(folder, data, changes))


def run_file(folder, data, changes=()):
    path = folder / "run.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(raw(folder, data, changes)))
    return path


def train(run):
    """The run in this process, on as many devices as its mesh wants."""
    return loop.train(run, jax.devices()[: run.mesh.devices])


def start(arguments, code=None, **environment):
    """`jaxpar ARGUMENTS` in a process of its own; `code` runs before it, in the same process.

    It compiles as this process does, so that both compute the same bits, and takes the number of devices from `train.cpu_devices`.
    """
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    ours = {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **cache, **ours, **environment}
    program = ["-m", "jaxpar"] if code is None else ["-c", f"{code}\nimport sys\nfrom jaxpar.cli import main\nsys.exit(main(sys.argv[1:]))"]
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@contextlib.contextmanager
def _killed_after(process, seconds):
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def wait_for(process, text, seconds=120):
    """Read what the process prints until a line holds `text`; it fails when the process ends first, or is killed after `seconds`."""
    seen = []
    with _killed_after(process, seconds):
        for line in process.stdout:
            seen.append(line)
            if text in line:
                return
    raise AssertionError(f"{text!r} never came\n{''.join(seen)}\n{process.stderr.read()}")


def finish(process, seconds=120):
    """(exit code, the rest of stdout, stderr) of a process that ends by itself; one that does not is killed."""
    with _killed_after(process, seconds):
        out, err = process.stdout.read(), process.stderr.read()
        return process.wait(), out, err


def metrics(folder):
    """Step -> what metrics.jsonl says of it, but for the rate; a step that is there twice or out of order fails."""
    records = read_metrics(folder / "log")
    numbers = [record["step"] for record in records]
    assert numbers == sorted(set(numbers)), numbers
    return {record["step"]: {name: value for name, value in record.items() if name != "tokens_per_second"} for record in records}


def losses(folder):
    return {step: record["loss"] for step, record in metrics(folder).items()}


def leaves(run, step):
    """{path: numpy array} of a checkpoint of `run`, every leaf, without vocabulary padding."""
    training = build_training(run, make_mesh(run.mesh, jax.devices()[: run.mesh.devices]))
    types = padding.trimmed_types(training.abstract_state, training.gradients.specs)
    with SavedCheckpoints(run.checkpoint.folder) as checkpoints:
        state = checkpoints.restore(step, types)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def bits(arrays):
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def gap(got, want):
    """The largest max|a−b| / max|b| over the leaves, and its name."""
    assert got.keys() == want.keys()
    worst = (0.0, "")
    for name, b in want.items():
        a, b = got[name].astype(np.float64), b.astype(np.float64)
        worst = max(worst, (float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-300)), name))
    return worst
