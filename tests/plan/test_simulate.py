"""The simulator on small scheduled programs whose times are known by hand."""

import dataclasses
import json
import math
import types
import zlib

import numpy as np
import pytest

from jaxpar.plan import costs, hardware, timeline
from jaxpar.plan.hlo import parse
from jaxpar.plan.simulate import simulate
from jaxpar.plan.traffic import Collective
from jaxpar.plan.walk import LOOP

# A GPU of round numbers: 1e12 FLOP/s, 1e9 bytes/s of memory, 1e8 on either link, nothing lost, nothing to start.
LINK = hardware.Link(bandwidth=1e8, fraction=1.0, latency=0.0)
GPU = dataclasses.replace(
    hardware.load("h100"),
    memory_bandwidth=1e9,
    peak_flops={"bfloat16": 1e12, "float32": 1e12},
    node=LINK,
    network=LINK,
    launch=0.0,
    kernel=0.0,
    fractions=hardware.Fractions(matmul=1.0, attention_forward=1.0, attention_backward=0.5, memory=1.0),
)


class Cluster:
    """What the simulator reads of a mesh: sizes, and devices that know their host, `per_host` in each."""

    def __init__(self, per_host: int, **sizes: int):
        self.shape = sizes
        self.devices = np.array([types.SimpleNamespace(process_index=n // per_host) for n in range(math.prod(sizes.values()))])


MESH = Cluster(4, data=2, tensor=4)
MB = 1_000_000
TENSOR, DATA = "replica_groups={{0,1,2,3},{4,5,6,7}}", "replica_groups={{0,4},{1,5},{2,6},{3,7}}"


def module(entry, *computations):
    body = "\n".join(f"  {line}" for line in entry.strip().splitlines())
    parts = "\n\n".join(computations)
    return f"HloModule step, is_scheduled=true\n\n{parts}\n\nENTRY %main (p: f32[250000]) -> f32[250000] {{\n{body}\n}}\n"


def computation(name, text):
    lines = "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())
    return f"%{name} (param: f32[1]) -> f32[1] {{\n{lines}\n}}"


@pytest.fixture(autouse=True)
def perfect_shapes(monkeypatch):
    monkeypatch.setattr(costs, "shape_efficiency", lambda shape, cores: 1.0)
    for name in ("SMALL_LAUNCH", "SMALL_NODE", "SMALL_NETWORK"):
        monkeypatch.setattr(costs, name, 1.0)  # no second protocol here


P = "%p = f32[250000]{0} parameter(0)"


def gather(name, operand, groups=TENSOR, sync=False):
    """A quarter of 4 MB, or half of 2 MB, from each: sends 3 MB over 4 devices (30 ms), 1 MB over 2 (10 ms)."""
    size = 1_000_000 if groups == TENSOR else 500_000
    types = f"(f32[250000]{{0}}, f32[{size}]{{0}})"
    config = ', backend_config={"collective_backend_config":{"is_sync":true}}' if sync else ""
    return f"{name} = {types} all-gather-start({operand}), {groups}, dimensions={{0}}{config}"


def done(name, operand, groups=TENSOR):
    return f"{name} = f32[{1_000_000 if groups == TENSOR else 500_000}]{{0}} all-gather-done({operand})"


def times(entry, *computations):
    return simulate(module(entry, *computations), MESH, GPU)


def test_kernels_run_one_after_another():
    found = times(f"{P}\n%a = f32[250000]{{0}} negate(%p)\nROOT %b = f32[250000]{{0}} negate(%a)")
    assert found.step_seconds == pytest.approx(4e-3) and found.kinds == {"memory": pytest.approx(4e-3)}
    assert not found.exposed_seconds


def pair(*between, sync=False):
    lines = [P, gather("%s", "%p", sync=sync), *between, done("%d", "%s"), "ROOT %r = f32[250000]{0} slice(%d), slice={[0:250000]}"]
    return "\n".join(lines)


def test_a_collective_is_exposed_by_what_its_neighbours_leave():
    alone = times(pair())
    assert alone.exposed_seconds == {("tensor",): pytest.approx(30e-3)}
    hidden = times(pair("%a = f32[250000]{0} negate(%p)", "%b = f32[250000]{0} negate(%a)"))
    assert hidden.exposed_seconds == {("tensor",): pytest.approx(26e-3)}
    assert hidden.step_seconds == pytest.approx(alone.step_seconds)
    assert hidden.exposed("tensor") == pytest.approx(26 / 32) and hidden.exposed("data") == 0


def test_made_synchronous_it_is_exposed_whole():
    """Control: the same program, but its collective blocks."""
    found = times(pair("%a = f32[250000]{0} negate(%p)", sync=True))
    assert found.exposed_seconds == {("tensor",): pytest.approx(30e-3)} and found.step_seconds == pytest.approx(34e-3)
    plain = times(f"{P}\n%g = f32[1000000]{{0}} all-gather(%p), {TENSOR}, dimensions={{0}}\nROOT %n = f32[250000]{{0}} negate(%p)")
    assert plain.exposed_seconds == {("tensor",): pytest.approx(30e-3)}


def test_links_work_at_the_same_time_and_each_in_order():
    def waiting(first, second):
        lines = [P, gather("%s", "%p", first), gather("%t", "%p", second), done("%d", "%s", first), done("%e", "%t", second)]
        return times("\n".join([*lines, "ROOT %n = f32[250000]{0} negate(%p)"]))

    both = waiting(TENSOR, DATA)
    assert both.step_seconds == pytest.approx(32e-3), "the network beside NVLink"
    assert both.exposed_seconds == {("tensor",): pytest.approx(30e-3)}
    queue = waiting(TENSOR, TENSOR)
    assert queue.step_seconds == pytest.approx(62e-3) and queue.busy_seconds == {("tensor",): pytest.approx(60e-3)}


def test_waiting_is_charged_to_what_the_link_carries():
    """The data axis inside a node shares NVLink: who waits for it waits first for the gather before it, over tensor."""
    lines = [P, gather("%s", "%p", TENSOR), gather("%t", "%p", DATA), done("%e", "%t", DATA), done("%d", "%s", TENSOR)]
    found = simulate(module("\n".join([*lines, "ROOT %n = f32[250000]{0} negate(%p)"])), Cluster(8, data=2, tensor=4), GPU)
    assert found.exposed_seconds == {("tensor",): pytest.approx(30e-3), ("data",): pytest.approx(10e-3)}


LOOPS = """%i = s32[] constant(0)
%t = (s32[], f32[250000]{{0}}) tuple(%i, %p)
%w = (s32[], f32[250000]{{0}}) while(%t), condition=%cond, body=%{body}, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}
ROOT %r = f32[250000]{{0}} get-tuple-element(%w), index=1"""
COND = computation("cond", "%c = s32[] parameter(0)\nROOT %k = pred[] constant(true)")


def body(name, *lines):
    read = ["%q = (s32[], f32[250000]{0}) parameter(0)", "%j = s32[] get-tuple-element(%q), index=0"]
    read += ["%x = f32[250000]{0} get-tuple-element(%q), index=1"]
    return computation(name, "\n".join([*read, *lines, "ROOT %out = (s32[], f32[250000]{0}) tuple(%j, %y)"]))


def test_loops_multiply_inner_ones_too():
    inner = body("inner", gather("%s", "%x"), "%y = f32[250000]{0} negate(%x)", done("%d", "%s"))
    loop = LOOPS.replace("ROOT %r", "%y").replace("%i =", "%i2 =").replace("(%i,", "(%i2,").replace("%p", "%x").replace("%t", "%t2")
    outer = body("outer", *loop.format(body="inner", trips=7).splitlines())
    found = times(f"{P}\n{LOOPS.format(body='outer', trips=5)}", COND, inner, outer)
    assert found.exposed_seconds == {("tensor",): pytest.approx(35 * 28e-3)}
    assert found.kinds == {"memory": pytest.approx(35 * 2e-3)}
    assert found.step_seconds == pytest.approx(35 * (30e-3 + LOOP) + 5 * LOOP)
    assert len(found.events) < 40, "repeated iterations are counted, not walked"


def test_of_a_conditional_the_longer_branch_runs():
    short = computation("short", "%a = f32[250000]{0} parameter(0)\nROOT %b = f32[250000]{0} negate(%a)")
    long = computation("long", "%a = f32[250000]{0} parameter(0)\n%b = f32[250000]{0} negate(%a)\nROOT %c = f32[250000]{0} negate(%b)")
    line = "ROOT %r = f32[250000]{0} conditional(%i, %p, %p), branch_computations={%short, %long}"
    assert times(f"{P}\n%i = s32[] constant(0)\n{line}", short, long).step_seconds == pytest.approx(4e-3)


def test_a_wrapped_collective_is_waited_for_through_its_chain():
    wrapped = computation(
        "wrapped",
        f"%a = f32[1000000]{{0}} parameter(0)\nROOT %r = f32[250000]{{0}} reduce-scatter(%a), {TENSOR}, dimensions={{0}}, to_apply=%add",
    )
    lines = [
        "%p = f32[1000000]{0} parameter(0)",
        "%s = ((f32[1000000]{0}), f32[250000]{0}, u32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[1000000]{0}), f32[250000]{0}, u32[]) async-update(%s)",
        "ROOT %d = f32[250000]{0} async-done(%u)",
    ]
    assert times("\n".join(lines), wrapped).exposed_seconds == {("tensor",): pytest.approx(30e-3)}


def work_of(text, name, *computations):
    program = parse(module(text, *computations))
    return costs.work(program, program.computations["main"].instructions[name])


def test_matmul_in_a_fusion_counts_its_flops():
    gemm = computation(
        "gemm",
        "%a = bf16[64,32]{1,0} parameter(0)\n%b = bf16[32,16]{1,0} parameter(1)\n"
        "ROOT %c = bf16[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    text = "%a = bf16[64,32]{1,0} parameter(0)\n%b = bf16[32,16]{1,0} parameter(1)\n"
    found = work_of(text + "ROOT %f = bf16[64,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm", "f", gemm)
    assert (found.kind, found.flops, found.shapes) == ("matmul", 2 * 64 * 32 * 16, ((1, 64, 16, 32),))
    assert found.bytes == 2 * (64 * 32 + 32 * 16 + 64 * 16) and found.dtype == "bfloat16"


def test_in_place_updates_and_slices_touch_only_the_slice():
    update = computation(
        "update",
        "%a = f32[32,100]{1,0} parameter(0)\n%i = s32[] parameter(1)\n%z = s32[] constant(0)\n"
        "%old = f32[1,100]{1,0} dynamic-slice(%a, %i, %z), dynamic_slice_sizes={1,100}\n%new = f32[1,100]{1,0} negate(%old)\n"
        "ROOT %u = f32[32,100]{1,0} dynamic-update-slice(%a, %new, %i, %z)",
    )
    text = "%a = f32[32,100]{1,0} parameter(0)\n%i = s32[] parameter(1)\n"
    found = work_of(text + "ROOT %f = f32[32,100]{1,0} fusion(%a, %i), kind=kLoop, calls=%update", "f", update)
    assert found.bytes == 400 + 4 + 400, "one row read and written, one index read"


def attention(backward, mask="CAUSAL", window=0):
    shape = "bf16[2,4,128,64]{3,1,2,0}"
    config = {"intermediate_tensor_shape": {"dimensions": ["2", "4", "128", "128"]}, "mask_type": mask, "sliding_window_length": window}
    target = "__cudnn$fmhaSoftmaxBackward" if backward else "__cudnn$fmhaSoftmax"
    config = json.dumps({"cudnn_fmha_backend_config": config})
    return (
        f"%q = bf16[2,128,4,64]{{3,2,1,0}} parameter(0)\n"
        f'ROOT %f = ({shape}, f32[2,4,128]{{2,1,0}}) custom-call(%q, %q, %q), custom_call_target="{target}", backend_config={config}'
    )


def test_attention_counts_two_products_forward_and_five_backward():
    pairs = 2 * 4 * 128 * 128 * 64
    assert work_of(attention(False, "NO_MASK"), "f").flops == 4 * pairs
    assert work_of(attention(False), "f").flops == 2 * pairs
    assert work_of(attention(True), "f").flops == 5 * pairs
    backward = work_of(attention(True), "f")
    assert costs.seconds(backward, GPU) == pytest.approx(max(backward.flops / 0.5e12, backward.bytes / 1e9))


def sent(kind, axes, group, megabytes):
    return [Collective(kind, axes, group, 1, megabytes * MB, 0, "float32", True, "")]


def test_a_group_over_nodes_leaves_each_by_all_its_adapters():
    fast = dataclasses.replace(GPU, node=dataclasses.replace(LINK, bandwidth=4e8))
    one = costs.transmission(sent("all_gather", ("data",), 8, 8), 1, fast)
    two = costs.transmission(sent("all_gather", ("data",), 16, 8), 2, fast)
    eight = costs.transmission(sent("all_gather", ("data",), 64, 8), 8, fast)
    inside = costs.transmission(sent("all_gather", ("data",), 8, 8), 8, fast)
    assert [one[1], two[1], eight[1], inside[1]] == pytest.approx([80e-3, 40e-3, 20e-3, 20e-3])
    assert [one[0], two[0], eight[0], inside[0]] == ["network", "network", "network", "node"]


def test_latency_counts_steps_on_the_links_they_take():
    slow = dataclasses.replace(
        GPU, node=dataclasses.replace(LINK, latency=1e-3), network=dataclasses.replace(LINK, latency=0.1), launch=5.0
    )
    reduce = costs.transmission(sent("all_reduce", ("data",), 16, 0), 8, slow)[1]
    assert reduce == pytest.approx(min(5 + 27e-3 + 3 * 0.1, 1 + 30)), "30 steps, 3 of them between the 2 nodes"


def test_unscheduled_programs_and_loops_of_unknown_length_are_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        simulate(module(f"{P}\nROOT %n = f32[250000]{{0}} negate(%p)").replace("is_scheduled=true", "x=1"), MESH, GPU)
    with pytest.raises(ValueError, match="trip count unknown"):
        lines = LOOPS.format(body="inner", trips=7).replace("known_trip_count", "other")
        times(f"{P}\n{lines}", COND, body("inner", "%y = f32[250000]{0} negate(%x)"))


def test_trace_and_picture():
    inner = body("inner", gather("%s", "%x"), "%y = f32[250000]{0} negate(%x)", done("%d", "%s"))
    found = times(f"{P}\n{LOOPS.format(body='inner', trips=7)}", COND, inner)
    trace = json.loads(json.dumps(timeline.chrome_trace(found.events)))["traceEvents"]
    assert {e["args"]["name"] for e in trace if e["ph"] == "M"} == {"compute", "node"}
    assert sum(e["dur"] for e in trace if e.get("cat") == "wait") == pytest.approx(2 * 28e3), "two iterations are walked"
    assert "5 more iterations" in [e["name"] for e in trace]
    once = timeline.layer(found.events)
    assert {e.kind for e in once} == {"memory", "all_gather", "wait"}
    png = timeline.picture(once)
    assert png.startswith(b"\x89PNG") and png.endswith(b"IEND\xaeB`\x82")
    data = zlib.decompress(png[png.index(b"IDAT") + 4 : png.index(b"IEND") - 8])
    assert len(data) == (1 + 3 * timeline.WIDTH) * (timeline.GAP + 2 * (timeline.ROW + timeline.GAP))
    assert bytes(timeline.COLOURS["wait"]) in data


def test_the_picture_is_of_the_innermost_loop():
    """Layers within microbatches: an iteration of the outer loop holds repeated ones and takes longer."""
    inner = body("inner", gather("%s", "%x"), "%y = f32[250000]{0} negate(%x)", done("%d", "%s"))
    loop = LOOPS.replace("ROOT %r", "%y").replace("%i =", "%i2 =").replace("(%i,", "(%i2,").replace("%p", "%x").replace("%t", "%t2")
    outer = body("outer", *loop.format(body="inner", trips=7).splitlines())
    once = timeline.layer(times(f"{P}\n{LOOPS.format(body='outer', trips=5)}", COND, inner, outer).events)
    assert {e.kind for e in once} == {"memory", "all_gather", "wait"} and max(e.end for e in once) - min(e.start for e in once) < 0.031


def test_a_loop_inside_a_layer_that_sends_nothing_is_part_of_the_picture():
    """As over the rows of experts."""
    inner = body("inner", "%y = f32[250000]{0} negate(%x)")
    loop = LOOPS.replace("ROOT %r", "%y").replace("%i =", "%i2 =").replace("(%i,", "(%i2,").replace("%p", "%x").replace("%t", "%t2")
    outer = body("outer", gather("%s", "%x"), *loop.format(body="inner", trips=7).splitlines(), done("%d", "%s"))
    once = timeline.layer(times(f"{P}\n{LOOPS.format(body='outer', trips=5)}", COND, inner, outer).events)
    assert "all_gather" in {e.kind for e in once} and sum(e.kind == "memory" for e in once) >= 2


def test_large_square_matmuls_are_efficient_and_skinny_ones_are_not(monkeypatch):
    monkeypatch.undo()
    large, skinny, few = (costs.shape_efficiency((1, *shape), 132) for shape in ((32768, 4096, 4096), (32768, 32, 4096), (64, 64, 4096)))
    assert large > 0.9 and skinny < 0.6 and few < 0.1
