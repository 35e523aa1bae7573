"""What the forward of a layer stack (`stack.py`) leaves for its backward, and one layer's backward from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxpar.parallel import collectives, runs, split, stacked
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.runs import Place, Run
from jaxpar.parallel.stacked import pick

Tree = Any


@partial(jax.tree_util.register_dataclass, data_fields=["parts", "context", "last", "weights"], meta_fields=["cuts", "runs"])
@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward. `parts[run][position]`: for each part of the batch, the kept values of the layers there,
    stacked over groups (`runs.py`); where all layers are alike, of all layers. `cuts`: the programs of each kind of layer.

    Where weights are gathered layer by layer, the last layer stands outside the loops: `parts` then lacks it, `last` are the kept values
    of the last, `weights` its gathered weights but those gathered `again`, with which the backward begins at once.
    """

    parts: tuple[tuple[Any, ...], ...]
    context: tuple[Context, ...]
    cuts: tuple[split.Cut, ...]
    runs: tuple[Run, ...]
    last: tuple[tuple[Any, ...], ...] | None = None
    weights: Tree | None = None

    def here(self, at: Place) -> list[Context]:
        """What a layer reads, for each part of the batch."""
        return [c.of_layer(at.layer) for c in self.context]

    def of(self, at: Place, dys: Any) -> tuple[Any, Any]:
        """dys, and the layer's kept values; where no loop ran the layer forward, or one that XLA unrolls, behind a barrier and told apart
        from the forward's: it would keep what is to be computed again."""
        kept, turns = runs.stored(self.parts, at), len(self.runs[at.run].groups)
        return (dys, kept) if at.in_loop or turns >= runs.FEWEST_TURNS else collectives.barrier((dys, collectives.distinct(kept)))

    def backward(
        self, at: Place, weights: Tree, kept: Any, dys: tuple[Any, ...], daux: list[Any], due: Tree = None
    ) -> tuple[tuple[Any, ...], Tree, Tree]:
        """dx of a layer, its gradients, and `due`. `daux` is stacked over layers."""
        results, due = self.cuts[at.kind].backward_parts(weights, kept, self.here(at), dys, pick(daux, at.layer), due)
        return tuple(r[0] for r in results), stacked.add([r[1] for r in results]), due
