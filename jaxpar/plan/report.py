"""What a compiled training step sends and holds, beside what the formulas say; and tables of it.

Measured, measure   one compiled step: its collectives, memory and matmuls
block_facts         how a block was cut: kept values, FLOPs of F, B and W
traffic_rows, memory_row, facts_row, table
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.config import Config
from jaxpar.parallel import zero
from jaxpar.parallel.split import Facts
from jaxpar.params import Tree
from jaxpar.plan import formulas
from jaxpar.plan.loops import matmul_flops
from jaxpar.plan.traffic import Collective, collectives, summary
from jaxpar.train.gradients import BATCH_SPECS
from jaxpar.train.step import Training


@dataclass(frozen=True)
class Measured:
    """One compiled step on one device. Bytes: `arguments` are state and batch, `aliased` what of them is written in place, `temporary`
    the rest of the peak. `flops` are of matmuls."""

    text: str
    sent: list[Collective]
    arguments: int
    outputs: int
    aliased: int
    temporary: int
    flops: int


def measure(training: Training) -> Measured:
    """Compile the step for abstract arguments and read what came out. Nothing is allocated."""
    compiled = training.step.lower(training.abstract_state, training.abstract_batch).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return Measured(
        text=text,
        sent=collectives(text, training.mesh),
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        flops=matmul_flops(text),
    )


def block_facts(training: Training) -> Facts:
    """The facts of the first layer's cut under this run's remat policy, on one device of its mesh. Traces a forward, compiles nothing."""
    gradients, found = training.gradients, []
    places = gradients.places

    def local(params: Tree, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        first = jax.tree.map(lambda a: a[0], batch)
        context = gradients.context(jax.random.key(0), first)
        dtype = gradients.config.train.compute_dtype
        outer = {"embedding": zero.gather(params["embedding"], places["embedding"], dtype)}
        layers = params["layers"] if gradients.config.train.zero == 3 else zero.gather(params["layers"], places["layers"], dtype)
        stack: Any = gradients.stack()
        _, saved, _ = stack.forward(layers, gradients.functions.embed(outer, first["ids"], context), context)
        found.append(saved.cuts[0].facts)
        return {}

    homes = jax.tree.map(lambda place: place.home, places)
    program = jax.shard_map(local, mesh=training.mesh, in_specs=(homes, BATCH_SPECS), out_specs=PartitionSpec())
    jax.eval_shape(program, training.abstract_state["params"], training.abstract_batch)
    return found[0]


def kept_bytes(facts: Facts) -> int:
    """Values that the forward of one layer and part of the batch keeps for its backward."""
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in facts.saved)


def traffic_rows(expected: Iterable[Collective], found: Iterable[Collective]) -> list[tuple[Any, ...]]:
    """(kind, axes, dtype, operations and kB of the arrays by formula and in the program, kB that a device sends, equal?)."""
    said, sent = summary(expected), summary(found)
    rows = []
    for key in dict.fromkeys([*said, *sent]):
        a, b = said.get(key), sent.get(key)
        kind, axes, dtype = key
        numbers = [(each.count, kilo(each.payload)) if each else (0, kilo(0)) for each in (a, b)]
        equal = a is not None and b is not None and a.payload == b.payload
        rows.append((kind, " × ".join(axes), dtype, *numbers[0], *numbers[1], kilo(b.bytes if b else 0), "yes" if equal else "NO"))
    return rows


def memory_row(label: str, config: Config, measured: Measured, kept: int) -> tuple[Any, ...]:
    """(label, state by formula and measured, weights, gradients and kept values by formula, their sum, temporaries measured)."""
    state = formulas.state_bytes(config) + formulas.batch_bytes(config)
    parts = (formulas.weight_bytes(config), formulas.gradient_bytes(config), kept * config.model.layers * config.train.interleave)
    return (label, *map(mega, (state, measured.arguments, *parts, sum(parts), measured.temporary)))


def facts_row(label: str, facts: Facts, tokens: int) -> tuple[Any, ...]:
    """(label, MFLOP of F, B, W and BW, whether B + W = BW, bytes kept a token)."""
    parts = (facts.flops_forward, facts.flops_backward_input, facts.flops_backward_weight, facts.flops_backward)
    equal = facts.flops_backward_input + facts.flops_backward_weight == facts.flops_backward
    return (label, *map(mega, parts), "yes" if equal else "NO", kept_bytes(facts) // tokens)


def mega(number: float) -> str:
    return f"{number / 1e6:.3f}"


def kilo(number: float) -> str:
    return f"{number / 1e3:.2f}"


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Plain text: a title, a header, rows; numbers to the right."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(header))]
    numeric = [all(line[n].replace(".", "").isdigit() for line in lines[1:]) for n in range(len(header))]

    def draw(line: list[str]) -> str:
        cells = (cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, numeric, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join(["", title, draw(lines[0]), draw(["-" * width for width in widths]), *map(draw, lines[1:])])
