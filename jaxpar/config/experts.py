"""The section `train.experts` of a run: where experts are and how tokens reach them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxpar.config.checks import one_of, require


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Experts are split over the mesh axes `axes` and reached by `dispatch`; `jaxpar/parallel/expert.py` says what each way sends.

    With `ragged` and `gather` a device has room for `buffer_factor` times its balanced load, and a step that needs more is repeated; with
    `capacity` an expert has room for `capacity_factor` times its own, and the rest is dropped by `priority`, the latest (`position`) or the
    lightest (`weight`). A device's tokens go in `chunks`, one of which travels while another is served. `columns` splits each expert's
    columns and rows over `tensor`, as an MLP's, instead of folding `axes` over it.
    """

    axes: tuple[str, ...] = ("expert",)
    dispatch: str = "ragged"
    buffer_factor: float = 1.5
    capacity_factor: float = 1.25
    priority: str = "position"
    chunks: int = 1
    columns: bool = False

    def __post_init__(self) -> None:
        one_of("train.experts.axes", self.axes, (("expert",), ("expert", "tensor"), ("expert", "seq", "tensor")))
        one_of("train.experts.dispatch", self.dispatch, ("ragged", "capacity", "gather"))
        require(
            1 <= self.buffer_factor < math.inf,
            f"train.experts.buffer_factor: {self.buffer_factor} must be at least 1, the balanced load, and finite",
        )
        require(0 < self.capacity_factor < math.inf, f"train.experts.capacity_factor: {self.capacity_factor} must be positive and finite")
        one_of("train.experts.priority", self.priority, ("position", "weight"))
        require(self.chunks >= 1, f"train.experts.chunks: {self.chunks} must be at least 1")
        require(
            not (self.columns and "tensor" in self.axes),
            "train.experts.columns: tensor cannot split both experts and their columns; leave it out of train.experts.axes",
        )
