"""How a model lies on a mesh that generates.

parameter_places    where a generator wants its parameters
dropless            a run's configuration with experts reached as generation does
"""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from jaxpar.config import Config, ExpertsConfig
from jaxpar.config.checks import divisors, require
from jaxpar.mesh import BATCH, DATA, EXPERT, SEQ, TENSOR
from jaxpar.models.decoder import declared
from jaxpar.parallel.tensor import check_heads
from jaxpar.params import Tree, partition_specs
from jaxpar.rules import Rules, table


def parameter_places(config: Config, mesh: Mesh) -> tuple[Tree, Tree]:
    """(records, PartitionSpecs) of a model's parameters on a generation mesh: split over `tensor`, experts over `expert`, equal elsewhere.

    Raises ValueError for a mesh with other axes and for sizes that do not divide the model.
    """
    sizes, model = dict(mesh.shape), config.model
    for axis, size in sizes.items():
        axes = f"{DATA}, {EXPERT}, {SEQ} and {TENSOR}"
        require(size == 1 or axis in (*BATCH, SEQ, TENSOR), f"mesh.{axis}: {size} must be 1: generation splits over {axes} only")
    require(
        model.moe.router != "expert_choice", "model.moe.router: expert_choice looks at later tokens, so nothing can be generated with it"
    )
    experts = model.moe.experts
    works = ", ".join(map(str, divisors(experts)))
    require(
        experts % sizes[EXPERT] == 0,
        f"mesh.{EXPERT}: {sizes[EXPERT]} does not divide model.moe.experts {experts}; sizes that work: {works}",
    )
    check_heads(model.heads, model.kv_heads, sizes[TENSOR])
    specs = declared(model, sizes[TENSOR])
    return specs, partition_specs(specs, Rules(sizes, table(dropless(config, mesh).train)))


def dropless(config: Config, mesh: Mesh) -> Config:
    """Experts over `expert` alone, since tokens are equal along `tensor`, which splits an expert's columns where it divides them; all
    tokens gathered, with room for every choice."""
    tensor, room = mesh.shape[TENSOR], float(mesh.shape[EXPERT])
    columns = tensor > 1 and bool(config.model.moe.experts) and config.model.moe.width % tensor == 0
    experts = ExpertsConfig(axes=(EXPERT,), dispatch="gather", buffer_factor=room, columns=columns)
    return replace(config, train=replace(config.train, experts=experts))
