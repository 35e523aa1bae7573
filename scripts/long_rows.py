"""What a longer row costs: temporaries of the 1M run at 32k to 1M tokens over 64 H100s, compiled for GPUs without any.

    PYTHONPATH=. JAX_PLATFORMS=cpu python scripts/long_rows.py [--set KEY=VALUE ...]      needs JAX's CUDA plugin

`kept` is what the forward of the layers keeps for the backward, by formula: it is linear in the row, and so are temporaries if each added
token adds a fixed multiple of it. `largest` is the program's largest array.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path

from jaxpar import configfile
from jaxpar.config import Config
from jaxpar.plan import compile as compiling
from jaxpar.plan import hardware, saved

RUN = Path(__file__).parent.parent / "configs" / "runs" / "llama3_8b_1m_h100x64.yaml"
TOKENS = (32768, 131072, 262144, 524288, 1048576)


@dataclass(frozen=True)
class Row:
    """Bytes of one GPU, and the dims without ones of every array of the program, each in ascending order."""

    tokens: int
    temporary: int
    kept: int
    shapes: frozenset[tuple[int, ...]]

    @property
    def largest(self) -> tuple[int, ...]:
        return max(self.shapes, key=math.prod)


def row(config: Config, temporary: int, text: str) -> Row:
    """The row of a compiled run: its temporary bytes and the text of its program."""
    shapes = {tuple(sorted(int(size) for size in dims.split(",") if int(size) > 1)) for dims in re.findall(r"\w\d+\[([\d,]+)\]", text)}
    return Row(config.data.sequence, temporary, saved.saved_bytes(config), frozenset(shapes))


def more_than_linear(short: Row, long: Row, least: int) -> list[tuple[int, ...]]:
    """Arrays of `least` elements or more of a row twice as long without a counterpart that is the same but for one dim half as large: what
    grows with the square of the row, as scores would, has two."""

    def halved(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        rest = [(place, size // 2) for place, size in enumerate(shape) if size % 2 == 0]
        return [tuple(sorted(n for n in (*shape[:place], half, *shape[place + 1 :]) if n > 1)) for place, half in rest]

    large = (shape for shape in long.shapes if math.prod(shape) >= least)
    return sorted(shape for shape in large if shape not in short.shapes and not set(halved(shape)) & short.shapes)


def squares(row: Row, least: int) -> list[tuple[int, ...]]:
    """Arrays with two dims of `least` or more, as the scores of two blocks of so many tokens have."""
    return sorted(shape for shape in row.shapes if sum(size >= least for size in shape) > 1)


def growth(rows: list[Row]) -> list[float]:
    """Bytes of temporaries that an added token adds, over those that are kept of it; from each row to the next."""
    return [(b.temporary - a.temporary) / (b.kept - a.kept) for a, b in zip(rows, rows[1:], strict=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    settings, h100, rows = parser.parse_args().set, hardware.load("h100"), []
    print(f"{'tokens':>9}  {'temporaries':>11}  {'kept':>9}  {'added/kept':>10}  largest array")
    for tokens in TOKENS:
        config = configfile.load(RUN, [*settings, f"data.sequence={tokens}"])
        compiled = compiling.compile_run(config, h100)
        rows.append(row(config, compiled.sizes.temp_size_in_bytes, compiled.text))
        ratio = "".join(f"{each:.2f}" for each in growth(rows[-2:]))
        last = rows[-1]
        print(f"{tokens:9}  {last.temporary / 2**30:7.2f} GiB  {last.kept / 2**30:5.2f} GiB  {ratio:>10}  {list(last.largest)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
