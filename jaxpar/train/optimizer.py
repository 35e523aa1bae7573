"""The update rule, assembled from optax's pieces and the parameters' records.

    build             OptimizerConfig -> optax.GradientTransformation
    decay_mask        which parameters weight decay touches
    clip              what the step does with the gradients first
    state_shardings   where the optimizer's state lives

All of it runs outside shard_map, inside the jitted step, on global arrays with NamedShardings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.config import OptimizerConfig
from jaxpar.params import Tree, map_leaves
from jaxpar.train.perlayer import per_matrix
from jaxpar.train.schedules import learning_rate

DECAYED_ROLES = ("matrix", "embedding", "head")

# Muon's updates scaled to the root mean square of AdamW's, so that both groups take one learning rate (Liu et al., "Muon is Scalable for
# LLM Training", 2025, section 2.2).
MUON_RMS = 0.2


def build(config: OptimizerConfig, specs: Tree, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run: rule, then decoupled weight decay, then minus the learning rate.

        parameter ← parameter − rate(t) · (rule(gradient) + weight_decay · parameter)

    which is torch.optim.AdamW's decay (multiplied by the rate) for every rule. Rules, and the fields that they read:

    adamw       b1, b2, eps. Epsilon outside the root, bias-corrected (Kingma & Ba, 2015; Loshchilov & Hutter, 2019)
    lion        b1, b2 (Chen et al., 2023)
    sgd         momentum, as torch.optim.SGD without dampening
    adafactor   none; the rate is relative to the root mean square of the parameter (Shazeer & Stern, 2018). Per layer and matrix;
                statistics are factored when both sides are at least 128
    muon        momentum, eps: five Newton–Schulz steps on every layer's matrix of role "matrix" (Jordan et al., 2024); b1, b2, eps:
                all other parameters by adamw, same rate

    `specs`: records of the parameters. `steps`: of the run, for the schedule. Clipping is not in here: the step clips, and logs the norm.
    adamw, lion and sgd send nothing; adafactor and muon let XLA gather what crosses a matrix. Gradients come in the masters'
    dtype; state and updates have the dtype of the parameters; `update` needs `params`.
    Raises ValueError when the schedule does not fit in `steps`.
    """
    return optax.chain(
        RULES[config.name](config, specs),
        optax.add_decayed_weights(config.weight_decay, decay_mask(config, specs)),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
    )


def _adamw(config: OptimizerConfig, specs: Tree) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)


def _lion(config: OptimizerConfig, specs: Tree) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=config.b1, b2=config.b2)


def _sgd(config: OptimizerConfig, specs: Tree) -> optax.GradientTransformation:
    return optax.trace(decay=config.momentum)


def _adafactor(config: OptimizerConfig, specs: Tree) -> optax.GradientTransformation:
    pieces = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())
    return per_matrix(pieces, specs)


def _muon(config: OptimizerConfig, specs: Tree) -> optax.GradientTransformation:
    pieces = optax.chain(
        optax.contrib.scale_by_muon(beta=config.momentum, eps=config.eps),
        optax.stateless_with_tree_map(lambda update, param: update * (MUON_RMS * math.sqrt(max(update.shape)))),
    )
    groups = map_leaves(lambda path, parameter: "muon" if parameter.role == "matrix" else "adamw", specs)
    return optax.partition({"muon": per_matrix(pieces, specs), "adamw": _adamw(config, specs)}, groups)


RULES: dict[str, Callable[[OptimizerConfig, Tree], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lion": _lion,
    "sgd": _sgd,
    "adafactor": _adafactor,
    "muon": _muon,
}


def decay_mask(config: OptimizerConfig, specs: Tree) -> Tree:
    """True where weight decay applies: everywhere, or with `decay` "matrices" on matrices, embedding and head, never a norm or a bias."""
    return map_leaves(lambda path, parameter: config.decay == "all" or parameter.role in DECAYED_ROLES, specs)


def clip(grads: Any, norm: jax.Array, limit: float) -> Any:
    """Gradients of global norm `norm` scaled down to norm `limit` when above it. Dtypes and shardings stay.

    A NaN or infinite norm leaves NaN in the gradients; the step looks at the norm and skips.
    """
    scale = jnp.where(norm > limit, limit / norm, jnp.ones_like(norm))
    return jax.tree.map(lambda x: (x * scale).astype(x.dtype), grads)


def state_shardings(optimizer: optax.GradientTransformation, params_shardings: Tree, specs: Tree, abstract_params: Tree) -> Any:
    """NamedShardings of the optimizer's state, to be given as `out_shardings` to the jitted init and to the step.

    A leaf that mirrors a parameter (its path ends in the parameter's path, and it has its shape: moments, momentum, unfactored statistics)
    lives where `params_shardings` puts the parameter, so ZeRO's split of the masters is the split of the state. All others are replicated:
    counters, and adafactor's row and column statistics, which are O + I numbers for a matrix of O·I.

    `abstract_params`: arrays or ShapeDtypeStructs, global shapes. Looks through chain, masked, partition and `per_matrix`.
    """

    def check(path: str, parameter: Any, leaf: Any) -> None:
        assert leaf.shape == parameter.shape, f"{path}: {leaf.shape} is not the {parameter.shape} of its record"

    map_leaves(check, specs, abstract_params)
    shardings = jax.tree.leaves(params_shardings)
    replicated = NamedSharding(shardings[0].mesh, PartitionSpec())
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params)
    places = {path: (leaf.shape, sharding) for (path, leaf), sharding in zip(leaves, shardings, strict=True)}

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        suffixes = (path[start:] for start in range(len(path)))
        shape, sharding = next((places[suffix] for suffix in suffixes if suffix in places), (None, replicated))
        return sharding if leaf.shape == shape else replicated

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, abstract_params))
