"""A training run from its first step to its last: read `train` top to bottom.

Rerunning the same command resumes. Stopping (SIGTERM, SIGINT) saves and leaves; what a killed run leaves behind is complete checkpoints.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxpar import configfile, params, run_checks
from jaxpar.compilation import anew
from jaxpar.config import Config
from jaxpar.config.checks import require
from jaxpar.mesh import explain, make_mesh
from jaxpar.parallel import zero
from jaxpar.train import padding
from jaxpar.train.checkpoint import Checkpoints, check_writable, state_bytes, whole_or_absent
from jaxpar.train.corpus import Tokens
from jaxpar.train.data import Loader, Rows, local_sequences, open_data, place
from jaxpar.train.metrics import MetricsLog
from jaxpar.train.progress import Progress, describe_experts
from jaxpar.train.resume import check_data, check_same, check_tokenizer, save_data
from jaxpar.train.step import State, Training, build_training
from jaxpar.train.tokenizer import Tokenizer, save_tokenizer


def train(config: Config, devices: Sequence[jax.Device] | None = None, until: int | None = None) -> int:
    """Run `config` from its latest checkpoint, if there is one, on `devices` (default: all, of all processes). Returns the exit code, 0.

    `until`: save and leave after that step, as a job with a time limit does; the schedule is still that of `train.steps`. A run that is
    past it already does nothing.

    Raises ValueError or OSError, one line, for what a user can mend; a run refused before its first step leaves no folder behind.
    """
    require(until is None or until >= 1, f"--until: {until} must be at least 1 step")
    devices = jax.devices() if devices is None else devices
    run_checks.check_run(config, len(devices))
    mesh = make_mesh(config.mesh, devices)
    tokens, tokenizer = open_data(config.data)
    rows = Rows(tokens, config.data.sequence, config.model.vocabulary)
    training = build_training(config, mesh)
    loader = Loader(
        rows,
        batch=config.train.batch,
        accumulation=config.train.accumulation,
        seed=config.data.seed,
        shuffle=config.data.shuffle,
        order=training.order,
    )
    training.step.trace(training.abstract_state, training.abstract_batch)  # what only tracing finds wrong comes before any folder
    resolved = configfile.dump(config)

    with contextlib.ExitStack() as stack:
        stack.enter_context(anew(mesh, config.train))
        stack.enter_context(whole_or_absent(*(folder for folder in (config.checkpoint.folder, config.log.folder) if folder)))
        stopped = stack.enter_context(_stop_signals())  # until the last save is complete
        checkpoints = _open_checkpoints(stack, training)
        latest = checkpoints.latest() if checkpoints is not None else None
        if checkpoints is not None and latest is not None:
            _check_resumable(checkpoints, latest, resolved, tokens, tokenizer)
            state, first = _restored(training, checkpoints, latest), latest
        else:
            state, first = training.init(), 0
        log = stack.enter_context(MetricsLog(config.log.folder, resumed=first)) if config.log.folder else None
        progress = stack.enter_context(Progress(config.train.steps, first))
        for line in _describe(training, first):
            progress.note(line)

        if until is not None and first >= until:
            progress.note(f"step {until} is behind already; nothing to do before --until is raised")
            return 0
        if checkpoints is not None and jax.process_index() == 0:
            save_data(tokens, checkpoints.folder)
            if tokenizer is not None:
                save_tokenizer(tokenizer, checkpoints.folder)
        if first < config.train.steps:
            progress.note("compiling the step")
        token_sharding = training.batch_shardings["ids"]
        batches = loader.iterate(first, config.train.steps, local_sequences(token_sharding, loader.microbatch))
        stack.callback(batches.close)
        started, counted = time.perf_counter(), first
        skipped = int(jax.device_get(state["skipped"]))
        for step, batch in enumerate(batches, first + 1):
            state, metrics = training.advance(state, place(batch, token_sharding, loader.microbatch))
            if step == first + 1:
                jax.block_until_ready(metrics)  # compilation is not part of the rate
                started, counted = time.perf_counter(), step
                progress.compiled(step)
            stop = _agreed(stopped, step - first) or step == until
            if step % config.log.every == 0 or step == config.train.steps or stop:
                values = {name: value if value.ndim else value.item() for name, value in jax.device_get(metrics).items()}
                seconds = time.perf_counter() - started
                rate = (step - counted) * config.train.batch * config.data.sequence / seconds if step > counted else float("nan")
                started, counted = time.perf_counter(), step
                progress.update(step, values["loss"], rate, describe_experts(values))
                if values["skipped"] > skipped:
                    skipped = values["skipped"]
                    progress.note(
                        f"{skipped} steps skipped so far, their loss or gradients not finite; the parameters did not change in them"
                    )
                if log is not None:
                    log.write(step, {**values, "tokens_per_second": rate})
            if checkpoints is not None and (step % config.checkpoint.every == 0 or step == config.train.steps or stop):
                checkpoints.save(step, padding.trim(state, training.abstract_state, training.gradients.specs), resolved)
            if stop:
                progress.note(f"stopped after step {step}; rerun the same command to go on")
                break
    return 0


def _open_checkpoints(stack: contextlib.ExitStack, training: Training) -> Checkpoints | None:
    folder = training.config.checkpoint.folder
    if folder is None:
        return None
    check_writable(folder, needed=state_bytes(training.abstract_state))
    return stack.enter_context(Checkpoints(folder, training.config.checkpoint.keep))


def _check_resumable(checkpoints: Checkpoints, step: int, resolved: dict[str, Any], tokens: Tokens, tokenizer: Tokenizer | None) -> None:
    """Refuse to go on from `step` with a run whose configuration, tokenizer or data are others than those it began with.

    A field that did not exist when the checkpoint was written takes its default, which is what the run did then.
    """
    check_same(configfile.dump(checkpoints.run(step)[1]), resolved, step)
    check_tokenizer(checkpoints.folder, tokenizer)
    if step > 0:
        check_data(checkpoints.folder, tokens)


def _restored(training: Training, checkpoints: Checkpoints, step: int) -> State:
    """The state of a checkpoint, whatever mesh wrote it."""
    types = padding.trimmed_types(training.abstract_state, training.gradients.specs)
    return padding.pad(checkpoints.restore(step, types), training.abstract_state)


def _describe(training: Training, first: int) -> list[str]:
    """What a run says of itself before its first step."""
    config, mesh = training.config, training.mesh
    sizes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    links = ", ".join(f"{axis} {where}" for axis, where in explain(mesh).items())
    lines = [
        f"{params.count(training.gradients.specs):,} parameters on {sizes} ({mesh.devices.flat[0].device_kind}), ZeRO-{config.train.zero}, "
        f"{config.train.batch * config.data.sequence:,} tokens a step{'; ' + links if jax.process_count() > 1 else ''}"
    ]
    whole = zero.replicated(training.gradients.specs, training.gradients.places, dict(mesh.shape)) if config.train.zero else ()
    if whole:
        lines.append(f"whole on every replica, since no dim divides: {', '.join(whole)}")
    if first:
        lines.append(f"resuming after step {first}" if first < config.train.steps else f"all {first} steps are done already; nothing to do")
    return lines


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM (a preempted job) and SIGINT set. A second SIGINT interrupts at once.

    With several processes SIGTERM belongs to JAX's coordination service, see `_agreed`.
    """
    asked = threading.Event()

    def stop(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    mine = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ()
    if threading.current_thread() is not threading.main_thread():
        mine = ()  # Python lets only the main thread handle signals; whoever embeds a run in another one stops it in its own way
    before = {number: signal.signal(number, stop) for number in mine}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _agreed(stopped: threading.Event, taken: int) -> bool:
    """Whether to stop now, `taken` steps after the start. All processes of a run say the same, although one may have been asked a step
    before another.

    JAX agrees on the count after the highest that a process has reached, and counts 0 where it was asked before the first step: a count
    that started at a resumed run's step would never meet it.
    """
    if jax.process_count() == 1:
        return stopped.is_set()
    return bool(multihost_utils.reached_preemption_sync_point(taken))
