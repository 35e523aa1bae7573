"""The learning rate as a function of the step.

    learning_rate(config, steps)   warmup, then constant | cosine | linear | wsd

With peak p, w warmup steps, n steps in all (numbered 0 .. n-1) and final ratio r:

    step 0          p / (w + 1)    never 0: no step is spent on a zero update
    step w          p              warmup is linear, p (s + 1) / (w + 1); without warmup step 0 has the peak
    step n - 1      p r            the last step that runs, and every step past it (constant: p)

`decay_steps` d moves where the decay ends (cosine, linear: at step w + d, which may lie past n - 1) or starts (wsd: at step n - 1 - d).
"""

from __future__ import annotations

import jax.numpy as jnp
import optax

from jaxpar.config import OptimizerConfig
from jaxpar.config.checks import require


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The schedule that `config` names over a run of `steps` steps: step (int or int32 array) -> learning rate, in the default float type.

    constant    warmup, then the peak
    cosine      half a cosine from the peak to the final value (Loshchilov & Hutter, 2017, without restarts)
    linear      a straight line from the peak to the final value
    wsd         warmup, stable, decay: the peak, then a straight line over the last `decay_steps` (a tenth of the run when not given;
                Hu et al., "MiniCPM", 2024)

    A run with no step left after warmup keeps its peak. The optimizer counts the updates that it made, so a loop that skips steps logs
    `learning_rate(config, steps)(step - skipped)`.
    Raises ValueError when the warmup, or with wsd the decay, does not fit in the run.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_ratio
    last = steps - 1
    room = last - config.warmup
    require(room >= 0, f"optimizer.warmup: {config.warmup} does not fit in train.steps {steps}; at most {last}")
    require(config.final_ratio >= 0, f"optimizer.final_ratio: {config.final_ratio} must not be negative")
    require(config.decay_steps is None or config.decay_steps >= 1, f"optimizer.decay_steps: {config.decay_steps} must be at least 1")
    main = _stable_then_decay(config, steps, room) if config.schedule == "wsd" else _decay(config, peak, final, room)
    if config.warmup:
        main = optax.join_schedules([optax.linear_schedule(peak / (config.warmup + 1), peak, config.warmup), main], [config.warmup])
    # An int32 step divided by an int is float32 even with 64-bit types on.
    return lambda step: main(jnp.asarray(step, float))


def _decay(config: OptimizerConfig, peak: float, final: float, room: int) -> optax.Schedule:
    """From the end of warmup, counted from 0."""
    length = room if config.decay_steps is None else config.decay_steps
    if config.schedule == "constant" or length == 0:
        return optax.constant_schedule(peak)
    if config.schedule == "cosine":
        return optax.cosine_decay_schedule(peak, length, alpha=config.final_ratio)
    return optax.linear_schedule(peak, final, length)


def _stable_then_decay(config: OptimizerConfig, steps: int, room: int) -> optax.Schedule:
    """From the end of warmup, counted from 0."""
    peak = config.learning_rate
    length = min(max(steps // 10, 1), room) if config.decay_steps is None else config.decay_steps
    require(
        length <= room,
        f"optimizer.decay_steps: {length} after optimizer.warmup {config.warmup} does not fit in train.steps {steps}; at most {room}",
    )
    return optax.linear_schedule(peak, peak * config.final_ratio, length, transition_begin=room - length)
