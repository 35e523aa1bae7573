"""A decoder's loss on what its routers did: balancing and z-loss, and the metrics beside them.

Dims: L layers, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.config import MoeConfig
from jaxpar.ops.router import load_balance
from jaxpar.parallel import collectives

METRICS = ("balance_loss", "router_z_loss", "router_entropy", "expert_overflow", "expert_dropped")


def loss(moe: MoeConfig, aux: dict[str, jax.Array], sequences: int, accumulation: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(this device's and microbatch's share of the weighted losses, its share of each metric), to be added up over both.

    `aux` is `MoE.aux` stacked over layers. Balance is summed over layers; within a layer it is the mean over the step's sequences, whose
    values depend on each sequence alone (scope `sequence`), or the mean over its microbatches of the loss of all devices' tokens together
    (scope `microbatch`; sends L E counts, and depends on how the step is cut in microbatches). Scope `layers` is the latter of loads and
    shares averaged over layers, one loss instead of L, and k at balance: transformers' `load_balancing_loss_func` of a microbatch. z-loss
    and entropy are means over sequences of the means over a sequence's tokens. The metrics are unweighted, means over layers, balance 1
    where the load is even; `expert_overflow` and
    `expert_dropped` count choices (`parallel/expert.py`).
    """
    layers, weight = aux["load"].shape[0], moe.balance_weight
    if moe.balance == "sequence":
        balance = aux["balance"].sum() / sequences
    else:
        load_LE = collectives.all_reduce(aux["load"], tuple(sorted(collectives.varying(aux["load"]))))
        load_LE = collectives.vary_like(load_LE, aux["share"])
        if moe.balance == "layers":
            balance = load_balance(load_LE.sum(0), aux["share"].sum(0), moe.per_token) * layers / accumulation
            weight *= moe.per_token / layers
        else:
            balance = load_balance(load_LE, aux["share"], moe.per_token).sum() / accumulation
    z = aux["z"].sum() / sequences
    found = {"balance_loss": balance / layers, "router_z_loss": z / layers, "router_entropy": aux["entropy"].sum() / sequences / layers}
    lost = {f"expert_{name}": aux[name].sum(dtype=jnp.int32) for name in ("overflow", "dropped")}
    metrics = {name: lax.stop_gradient(each) for name, each in found.items()} | lost
    return weight * balance + moe.z_weight * z, metrics
