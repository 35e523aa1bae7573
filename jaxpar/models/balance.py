"""A decoder's loss on what its routers did: balancing and z-loss, the metrics beside them, and the correction of the next step's choice.

Dims: L layers with experts, E experts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import MoeConfig
from jaxpar.ops.router import load_balance
from jaxpar.parallel import collectives

SUMS = ("balance_loss", "router_z_loss", "router_entropy", "expert_overflow", "expert_dropped", "expert_load")
METRICS = (*SUMS, "expert_load_max", "expert_dropped_share")


def loss(moe: MoeConfig, aux: dict[str, jax.Array], sequences: int, accumulation: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(this device's and microbatch's share of the weighted losses, its share of each metric), to be added up over both.

    `aux` is `MoE.aux` stacked over layers. Balance is summed over layers; within a layer it is the mean over the step's sequences, whose
    values depend on each sequence alone (scope `sequence`), or the mean over its microbatches of the loss of all devices' tokens together
    (scope `microbatch`; sends L E counts, and depends on how the step is cut in microbatches). Scope `layers` is the latter of loads and
    shares averaged over layers, one loss instead of L, and k at balance: transformers' `load_balancing_loss_func` of a microbatch. z-loss
    and entropy are means over sequences of the means over a sequence's tokens. The metrics are unweighted, means over layers, balance 1
    where the load is even; `expert_overflow` and `expert_dropped` count choices (`parallel/expert.py`), `expert_load` [L, E] those of each
    expert, dropped ones among them.
    """
    layers, weight, seen_LE = aux["load"].shape[0], moe.balance_weight, aux["load"]
    if moe.balance == "sequence":
        balance = aux["balance"].sum() / sequences
    else:
        seen_LE = collectives.all_reduce(aux["load"], tuple(sorted(collectives.varying(aux["load"]))))
        load_LE = collectives.vary_like(seen_LE, aux["share"])
        if moe.balance == "layers":
            balance = load_balance(load_LE.sum(0), aux["share"].sum(0), moe.per_token) * layers / accumulation
            weight *= moe.per_token / layers
        else:
            balance = load_balance(load_LE, aux["share"], moe.per_token).sum() / accumulation
    z = aux["z"].sum() / sequences
    found = {"balance_loss": balance / layers, "router_z_loss": z / layers, "router_entropy": aux["entropy"].sum() / sequences / layers}
    lost = {f"expert_{name}": aux[name].sum(dtype=jnp.int32) for name in ("overflow", "dropped")}
    metrics = {name: lax.stop_gradient(each) for name, each in found.items()} | lost | {"expert_load": seen_LE}
    return weight * balance + moe.z_weight * z, metrics


def summary(moe: MoeConfig, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics of a step from their sums over its devices and microbatches: beside them `expert_load_max`, the load of the busiest expert in
    units of its layer's mean, the mean over layers (1 is balanced, E / k the worst), and `expert_dropped_share` of all choices."""
    load_LE = sums["expert_load"].astype(sums["loss"].dtype)
    choices = jnp.maximum(load_LE.sum(), 1)
    busiest_L = load_LE.max(1) * moe.experts / jnp.maximum(load_LE.sum(1), 1)
    return {**sums, "expert_load_max": busiest_L.mean(), "expert_dropped_share": sums["expert_dropped"] / choices}


def corrected(moe: MoeConfig, held: Any, load_LE: jax.Array) -> Any:
    """The correction bias after a step: up by the rate where an expert's load was below its layer's mean, down where above. Integers are
    compared, so that no rounding decides. Wang et al., "Auxiliary-loss-free load balancing" (2024), algorithm 1."""
    total_L1 = load_LE.sum(1, dtype=jnp.int32, keepdims=True)
    mean_L1, rest_L1 = total_L1 // moe.experts, total_L1 % moe.experts
    below_LE = (load_LE < mean_L1) | ((load_LE == mean_L1) & (rest_L1 > 0))
    up_LE = below_LE.astype(jnp.int32) - (load_LE > mean_L1).astype(jnp.int32)
    return jax.tree.map(lambda bias_LE: bias_LE + jnp.asarray(moe.correction_rate, bias_LE.dtype) * up_LE.astype(bias_LE.dtype), held)
