"""What the layer stack promises of a layer's body, read off Llama-3-8B compiled for 64 H100s: weights and gradients travel behind
compute, activations are gathered once per use, nothing is widened before it is sent, no large buffer is copied."""

import pytest

from jaxpar.plan import costs
from jaxpar.plan.hlo import executions, parse
from jaxpar.plan.traffic import axes_of, groups_of, kind_of
from tests.plan import gpu

pytestmark = gpu.MARKS

INTERLEAVED, ALONE = (), ("train.interleave=1",)
SHARDED = ("mesh.data=64", "mesh.tensor=1", "train.interleave=1")
RUNS = {"data 8 × tensor 8, interleaved": INTERLEAVED, "data 8 × tensor 8": ALONE, "ZeRO-3 over 64": SHARDED}


@pytest.fixture(params=RUNS, scope="module")
def compiled(request):
    return gpu.compiled("llama3_8b_h100x64", *gpu.COMPARED, *RUNS[request.param])


def layers_of(compiled):
    """Instructions in loops as long as the stack, and what else the loop over layers runs."""
    program = parse(compiled.text)
    layers = compiled.config.model.layers
    return program, [(each, times) for each, times in executions(program, lambda each: 1.0) if layers - 3 < times < layers]


def hidden(program, sizes, axes, text=None):
    """For each collective over `axes` in a loop over layers: whether a matmul or attention runs between its start and its end."""
    found = []
    for computation in program.computations.values():
        body = list(computation.instructions.values())
        for place, each in enumerate(body):
            if kind_of(each) is None or axes_of(groups_of(each, sizes), sizes) != axes:
                continue
            if not each.opcode.endswith("-start"):
                found.append((each, False))
                continue
            end = next(n for n in range(place, len(body)) if body[n].opcode.endswith("-done") and each.name in body[n].operands)
            kinds = {work.kind for inner in body[place:end] if (work := costs.work(program, inner)) is not None}
            found.append((each, bool(kinds & {"matmul", "attention"})))
    return found
