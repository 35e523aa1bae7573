"""The training step: gradients, clipping, optimizer, in one jitted program over global arrays.

    state = {"params": masters, "optimizer": optax state, "step": int32, "skipped": int32}

Everything a run, a compile-only report or a test needs hangs on `Training`: abstract state and batch with their shardings, `init`, and
the very `step` that training runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar import gpu
from jaxpar.config import Config
from jaxpar.initial import init_params
from jaxpar.parallel.context.layout import layout
from jaxpar.params import Tree, merge, separate
from jaxpar.rules import experts_ways
from jaxpar.train import optimizer as rule
from jaxpar.train.gradients import BATCH_SPECS, Gradients, Metrics, build_gradients
from jaxpar.train.schedules import learning_rate

State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Training:
    """A run's programs on its mesh. `gradients` and `optimizer` are its two halves.

    `repeat` is the step with room for every token at one expert, None where `step` has that room itself.
    """

    config: Config
    mesh: Mesh
    gradients: Gradients
    optimizer: optax.GradientTransformation
    abstract_state: State
    step: Any
    repeat: Any = None

    def advance(self, state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        """One step of training: `step`, and where its experts' buffers overflowed, which changed nothing, `repeat` in its place.

        Waits for the step where it may have to be repeated. The metric `expert_overflow` is the first attempt's.
        """
        state, metrics = self.step(state, batch)
        if self.repeat is None or not jax.device_get(metrics["expert_overflow"]):
            return state, metrics
        state, again = self.repeat(state, batch)
        return state, {**again, "expert_overflow": metrics["expert_overflow"]}

    @property
    def shardings(self) -> State:
        """Where every leaf of the state lives."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @property
    def order(self) -> np.ndarray | None:
        """The token that stands at each place of a row as the devices of `seq` hold it, None where that is the row's own order."""
        return row_order(self.config)

    @property
    def batch_shardings(self) -> dict[str, NamedSharding]:
        return {name: NamedSharding(self.mesh, spec) for name, spec in BATCH_SPECS.items()}

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The batch of a step: int32 [accumulation, batch / accumulation, sequence], rows without the last dim."""
        train = self.config.train
        shape = (train.accumulation, train.batch // train.accumulation, self.config.data.sequence)
        return {
            name: jax.ShapeDtypeStruct(shape[: len(spec)], jnp.int32, sharding=NamedSharding(self.mesh, spec))
            for name, spec in BATCH_SPECS.items()
        }

    def init(self) -> State:
        """The first state: parameters from `train.seed`, the same values on every mesh, each device making its own shard."""
        params = init_params(
            self.gradients.specs, self.config.train.seed, self.mesh, self.shardings["params"], jnp.dtype(self.config.train.master_dtype)
        )
        return self.first_state(params)

    def first_state(self, params: Tree) -> State:
        """The state of a run that begins with `params`, which lie where `shardings` says: a fresh optimizer, step 0."""
        rest = {name: sharding for name, sharding in self.shardings.items() if name != "params"}

        def others(params: Tree) -> State:
            zero = jnp.zeros((), jnp.int32)
            return {"optimizer": self.optimizer.init(self.gradients.trained(params)), "step": zero, "skipped": zero}

        return {"params": params, **jax.jit(others, out_shardings=rest)(params)}


def row_order(config: Config) -> np.ndarray | None:
    """`Training.order` of a configuration."""
    length, devices = config.data.sequence, config.mesh.seq
    return layout(config.train.context, devices, length).order(length) if devices > 1 else None


def build_training(config: Config, mesh: Mesh) -> Training:
    """The programs of `config` on `mesh`. ValueError where the model cannot be placed on it."""
    gradients = build_gradients(config, mesh)
    optimizer = rule.build(config.optimizer, gradients.trained(gradients.specs), config.train.steps)
    state = _abstract_state(config, mesh, gradients, optimizer)
    step = _program(config, mesh, gradients, optimizer, state)
    ways = experts_ways(config)
    repeat = None
    experts = config.train.experts
    if config.model.moe.experts and experts.dispatch != "capacity" and experts.buffer_factor < ways:
        room = dataclasses.replace(experts, buffer_factor=float(ways))
        roomy = dataclasses.replace(config, train=dataclasses.replace(config.train, experts=room))
        repeat = _program(roomy, mesh, build_gradients(roomy, mesh), optimizer, state)
    return Training(config, mesh, gradients, optimizer, state, step, repeat)


def _program(config: Config, mesh: Mesh, gradients: Gradients, optimizer: optax.GradientTransformation, abstract: State) -> Any:
    """The jitted step: state (donated), batch -> state, metrics. Where the loss or a gradient is not finite it changes only the counters;
    where a buffer of experts overflowed it changes nothing at all."""
    rate = learning_rate(config.optimizer, config.train.steps)

    def step(state: State, batch: dict[str, jax.Array]) -> tuple[State, Metrics]:
        metrics, grads = gradients(state["params"], batch, state["step"])
        norm = metrics["grad_norm"]
        if config.optimizer.clip is not None:
            grads = rule.clip(grads, norm, config.optimizer.clip)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
        complete = metrics["expert_overflow"] == 0 if "expert_overflow" in metrics else jnp.bool_(True)
        trained, held = separate(gradients.specs, state["params"])
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], trained)
        params = merge(optax.apply_updates(trained, updates), gradients.functions.advance(held, metrics))
        new = {"params": params, "optimizer": optimizer_state}
        kept = jax.tree.map(lambda a, b: jnp.where(finite & complete, a, b), new, {name: state[name] for name in new})
        skipped = state["skipped"] + (complete & ~finite).astype(jnp.int32)
        metrics = {
            **metrics,
            "learning_rate": jnp.asarray(rate(state["step"] - state["skipped"]), jnp.float32),
            "skipped": skipped,
        }
        return {**kept, "step": state["step"] + complete.astype(jnp.int32), "skipped": skipped}, metrics

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    batch = {name: NamedSharding(mesh, spec) for name, spec in BATCH_SPECS.items()}
    replicated = NamedSharding(mesh, PartitionSpec())
    options = gpu.compiler_options(config.gpu) if mesh.devices.flat[0].platform == "gpu" else None
    return jax.jit(step, in_shardings=(shardings, batch), out_shardings=(shardings, replicated), donate_argnums=0, compiler_options=options)


def _abstract_state(config: Config, mesh: Mesh, gradients: Gradients, optimizer: optax.GradientTransformation) -> State:
    """Shapes, dtypes and shardings of the state; nothing is allocated."""
    dtype = jnp.dtype(config.train.master_dtype)
    params = jax.tree.map(
        lambda spec, place: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=NamedSharding(mesh, place.home)),
        gradients.specs,
        gradients.places,
    )
    trained = gradients.trained(params)
    homes = jax.tree.map(lambda leaf: leaf.sharding, trained)
    places = rule.state_shardings(optimizer, homes, gradients.trained(gradients.specs), trained)
    moments = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(optimizer.init, trained),
        places,
    )
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return {"params": params, "optimizer": moments, "step": scalar, "skipped": scalar}
