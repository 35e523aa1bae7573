"""What the layer stack promises of a layer's body, read off Llama-3-8B compiled for 64 H100s: weights and gradients travel behind
compute, activations are gathered once per use, nothing is widened before it is sent, and no array of logits outgrows its chunk."""

import math
from collections import Counter

import pytest

from jaxpar.plan import costs, formulas
from jaxpar.plan.hlo import buffers_at_least, parse
from jaxpar.plan.simulate import simulate
from jaxpar.plan.traffic import axes_of, collectives, groups_of, kind_of
from tests.plan import gpu

pytestmark = gpu.MARKS

RUNS = {
    "data 8 × tensor 8, interleaved": (),
    "data 8 × tensor 8": ("train.interleave=1",),
    "ZeRO-3 over 64": ("mesh.data=64", "mesh.tensor=1", "train.interleave=1"),
}


@pytest.fixture(params=RUNS, scope="module")
def compiled(request):
    return gpu.compiled("llama3_8b_h100x64", *gpu.COMPARED, *RUNS[request.param])


def bodies(program):
    """The loops over layers: bodies with matmuls and attention."""
    loops = {
        each.attribute("body")
        for computation in program.computations.values()
        for each in computation.instructions.values()
        if each.opcode == "while"
    }
    for name in loops:
        body = list(program.computations[name].instructions.values())
        if any(costs.ATTENTION in each.attributes for each in body):
            yield body


def sent_over(program, body, sizes, *axes):
    """(kind, whether a matmul or attention runs between its start and its end, bytes of results) of a body's collectives over `axes`."""
    for place, each in enumerate(body):
        if kind_of(each) is None or axes_of(groups_of(each, sizes), sizes) != axes:
            continue
        between = []
        if each.opcode.endswith("-start"):
            end = next(n for n, other in enumerate(body) if other.opcode.endswith("-done") and each.name in other.operands)
            between = [work.kind for other in body[place:end] if (work := costs.work(program, other)) is not None]
        given = each.results[len(each.operands) if each.opcode.endswith("-start") else 0 :]  # a start's operands come first
        yield kind_of(each), bool({"matmul", "attention"} & set(between)), sum(array.bytes for array in given)


def behind_compute(compiled, text):
    program, sizes = parse(text), dict(compiled.mesh.shape)
    return [each for body in bodies(program) for each in sent_over(program, body, sizes, "data")]


def test_weights_and_gradients_travel_behind_compute(compiled):
    """Every gather and reduce-scatter over `data`, in both passes."""
    found = behind_compute(compiled, compiled.text)
    assert {kind for kind, *_ in found} == {"all_gather", "reduce_scatter"}
    assert all(hidden for _, hidden, _ in found)
    made_synchronous = compiled.text.replace("all-gather-start(", "all-gather(")
    assert not all(hidden for _, hidden, _ in behind_compute(compiled, made_synchronous)), "control"


@pytest.fixture(scope="module")
def pairs():
    """8B on 8: two layers a turn, the copies of docs/compile.md."""
    return gpu.compiled("llama3_8b_h100x8")


def test_two_layers_a_turn_travel_behind_compute(pairs):
    """Every reduce-scatter, and of the gathered bytes nine tenths in each pass: the last one or two of a turn are too late for its matmuls,
    and the first are small. 3% of the step at most waits for them and for what the step's ends send."""
    program, sizes = parse(pairs.text), dict(pairs.mesh.shape)
    loops = [list(sent_over(program, body, sizes, "data")) for body in bodies(program) if attentions(body) == 2]
    backward, forward = sorted(loops, key=lambda loop: any(kind == "reduce_scatter" for kind, *_ in loop), reverse=True)
    assert {kind for kind, *_ in forward} == {"all_gather"} and {kind for kind, *_ in backward} == {"all_gather", "reduce_scatter"}
    assert all(hidden for kind, hidden, _ in backward if kind == "reduce_scatter")
    assert share_hidden(forward) >= 0.9 and share_hidden(backward) >= 0.95
    layer = sum(2 * weight.elements for weight in formulas.weights(pairs.config) if weight.layers)
    for loop in (forward, backward):  # two layers' weights
        assert sum(size for kind, _, size in loop if kind == "all_gather") == 2 * layer
    assert simulate(pairs.text, pairs.mesh, pairs.hardware).exposed("data") <= 0.03


def test_made_synchronous_two_layers_a_turn_do_not(pairs):
    """Control."""
    text = pairs.text.replace("all-gather-start(", "all-gather(")
    program, sizes = parse(text), dict(pairs.mesh.shape)
    assert all(share_hidden(list(sent_over(program, body, sizes, "data"))) == 0 for body in bodies(program) if attentions(body) == 2)


def attentions(body):
    return sum(costs.ATTENTION in each.attributes for each in body)


def share_hidden(loop):
    gathers = [(hidden, size) for kind, hidden, size in loop if kind == "all_gather"]
    return sum(hidden * size for hidden, size in gathers) / sum(size for _, size in gathers)


def test_a_layer_gathers_its_activations_once_per_use(compiled):
    """Attention and MLP enter once each in the forward, once when it is computed again, and their gradients once. All three are left as
    often, but that the MLP's output is not computed again."""
    program, sizes, parts = parse(compiled.text), dict(compiled.mesh.shape), compiled.config.train.interleave
    found = Counter(kind for body in bodies(program) for kind, *_ in sent_over(program, body, sizes, "tensor"))
    assert found == ({"all_gather": 6 * parts, "reduce_scatter": 5 * parts} if sizes["tensor"] > 1 else {})


def test_nothing_is_widened_before_it_is_gathered(compiled):
    gathered = {each.dtype for each in collectives(compiled.text, compiled.mesh) if each.kind == "all_gather"}
    assert gathered == {"bfloat16", "int32"}  # weights, activations; ids


def test_no_gradient_is_reduced_whole_in_a_layer(compiled):
    """Norm weights' gradients, too small for ZeRO to split in vain, wait for the end of the step."""
    assert not [each for body in bodies(parse(compiled.text)) for each in body if kind_of(each) == "all_reduce"]


def test_logits_exist_in_chunks(compiled):
    config = compiled.config
    entries = config.model.vocabulary // config.mesh.tensor
    rows = max(config.train.loss_chunk, config.model.width)  # of the logits; of the head's table and its gradient
    found = [buffer.array for buffer in buffers_at_least(compiled.text, 1) if entries in buffer.array.shape]
    assert found and all(math.prod(array.shape) <= rows * entries for array in found)
