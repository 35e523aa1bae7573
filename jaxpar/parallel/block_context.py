"""What a block of the layer stack reads beside its parameters and its input."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxpar.parallel import stacked


class Context(NamedTuple):
    """Never differentiated.

    batch: leaves [B, ...], such as positions and segments [B, S]; shared: leaves of any shape, such as a dropout key;
    layer: leaves [L, ...], of which a block sees its own layer's, such as the attention window.
    """

    batch: dict[str, Any]
    shared: dict[str, Any]
    layer: dict[str, Any]

    def of_layer(self, i: Any) -> Context:
        """What layer i reads."""
        return self._replace(layer=stacked.pick(self.layer, i))

    def cut(self, parts: int) -> tuple[Context, ...]:
        """That of each of equal parts along B."""
        pieces = {name: stacked.cut(leaf, parts) for name, leaf in self.batch.items()}
        return tuple(self._replace(batch={name: piece[n] for name, piece in pieces.items()}) for n in range(parts))
