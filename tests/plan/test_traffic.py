"""A program with known collectives: what is traced, what is compiled and what the formulas say are the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.parallel import collectives as comm
from jaxpar.plan.traffic import Collective, axes_of, collectives, replica_groups, ring_bytes, summary
from tests.traced import traced_collectives

AXES = ("pipe", "data", "expert", "seq", "tensor")
SIZES = {"pipe": 1, "data": 2, "expert": 1, "seq": 2, "tensor": 2}
N = 16  # x and w are [N, N] float32 on every device
FULL = N * N * 4
STEPS = 3


def make_mesh(order: list[int]) -> Mesh:
    devices = np.array(jax.devices())[order].reshape(tuple(SIZES.values()))
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 5)


def every_collective(x, w):
    x, w = comm.vary(x, ("data", "tensor")), comm.vary(w, ("data", "tensor"))

    def body(x, _):
        x = comm.vary(comm.all_reduce(x @ w, "data"), "data")
        return x, comm.reduce_scatter(x, ("data", "tensor"), 0)

    x, scattered = lax.scan(body, x, None, length=STEPS)
    ring = comm.permute(x, "tensor", [(0, 1), (1, 0)])
    gathered = comm.all_gather(x, ("data", "tensor"), 0)
    traded = comm.all_to_all(x, "data", 1, 0)
    largest = comm.all_reduce_max(x.max(1), "tensor")
    alone = comm.all_reduce(comm.vary(x, "pipe"), "pipe")  # an axis of size 1 sends nothing
    return scattered, ring, gathered, traded, largest, alone


OUT = (P(None, ("data", "tensor")), P(("data", "tensor")), P(("data", "tensor")), P(("data", "tensor")), P("data"), P(("data", "tensor")))

EXPECTED = {
    # kind, axes, dtype: count, bytes sent by a device, payload
    ("all_reduce", ("data",), "float32"): (STEPS, STEPS * FULL, STEPS * FULL),
    ("reduce_scatter", ("data", "tensor"), "float32"): (STEPS, STEPS * FULL * 3 / 4, STEPS * FULL),
    ("permute", ("tensor",), "float32"): (1, FULL, FULL),
    ("all_gather", ("data", "tensor"), "float32"): (1, 3 * FULL, 4 * FULL),
    ("all_to_all", ("data",), "float32"): (1, FULL / 2, FULL),
    ("all_reduce", ("tensor",), "float32"): (1, N * 4, N * 4),
}


def as_tuples(found):
    return {key: (total.count, total.bytes, total.payload) for key, total in summary(found).items()}


@pytest.fixture(scope="module", params=["ordered", "permuted"])
def program(request):
    mesh = make_mesh(list(range(8)) if request.param == "ordered" else [0, 3, 1, 2, 7, 6, 5, 4])
    step = jax.shard_map(every_collective, mesh=mesh, in_specs=(P(), P()), out_specs=OUT)
    traced = jax.jit(step).trace(*2 * [jax.ShapeDtypeStruct((N, N), jnp.float32)])
    return mesh, traced.jaxpr, traced.lower().compile().as_text()


def test_compiled_program_sends_what_the_formulas_say(program):
    mesh, _, text = program
    assert as_tuples(collectives(text, mesh)) == EXPECTED


def test_traced_program_sends_what_the_formulas_say(program):
    mesh, jaxpr, _ = program
    assert as_tuples(traced_collectives(jaxpr, mesh.shape)) == EXPECTED


def test_group_size_and_source_are_recorded(program):
    mesh, _, text = program
    (gather,) = [each for each in collectives(text, mesh) if each.kind == "all_gather"]
    assert gather.group == 4 and not gather.asynchronous and "all_gather" in gather.source


def test_another_mesh_is_noticed(program):
    _, _, text = program
    with pytest.raises(ValueError, match="another one"):
        collectives(text, make_mesh_of_four())


def make_mesh_of_four() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 1, 1, 2), AXES, axis_types=(AxisType.Auto,) * 5)


def test_a_doubled_collective_is_seen(program):
    """Negative control: the same instruction once more changes the total."""
    mesh, _, text = program
    (line,) = [line for line in text.splitlines() if " all-gather(" in line]
    again = line.replace(line.split(" = ")[0].strip(), "%again", 1)
    found = as_tuples(collectives(text.replace(line, f"{line}\n{again}"), mesh))
    assert found != EXPECTED
    assert found["all_gather", ("data", "tensor"), "float32"] == (2, 6 * FULL, 8 * FULL)


def test_bfloat16_is_sent_as_float32_on_cpu_and_traced_as_written():
    mesh = make_mesh(list(range(8)))

    def step(x):
        return comm.all_reduce(comm.vary(x, "data"), "data"), comm.all_gather(comm.vary(x, "seq"), "seq", 0)

    traced = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=(P(), P("seq")))).trace(
        jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    )
    written, sent = traced_collectives(traced.jaxpr, mesh.shape), collectives(traced.lower().compile().as_text(), mesh)
    assert [each.dtype for each in written] == 2 * ["bfloat16"]
    assert {each.dtype for each in sent} == {"float32"}
    assert sum(each.payload for each in sent) == 2 * sum(each.payload for each in written)


def test_gradient_of_a_cond_and_a_remat_is_walked():
    """The transpose of a gather is a reduce-scatter; the branch that sends most counts; remat's recomputation appears again."""
    mesh = make_mesh(list(range(8)))

    def loss(w, flag):
        gather = jax.checkpoint(lambda w: jnp.sin(comm.all_gather(w, "data", 0)).sum())
        value = lax.cond(flag, gather, lambda w: gather(w) + gather(2 * w), w)
        return comm.all_reduce(comm.vary(value, ("data",)), "data")

    step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    jaxpr = jax.make_jaxpr(step)(jnp.ones((8, 4), jnp.float32), jnp.array(True))
    found = summary(traced_collectives(jaxpr, mesh.shape))
    assert found["reduce_scatter", ("data",), "float32"].count == 2
    assert found["all_gather", ("data",), "float32"].count >= 2


def test_while_around_a_collective_is_refused_when_traced():
    mesh = make_mesh(list(range(8)))

    def step(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x + comm.all_reduce(comm.vary(x, "data"), "data"), x)

    jaxpr = jax.make_jaxpr(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P()))(jnp.ones(4, jnp.float32))
    with pytest.raises(ValueError, match="length is unknown"):
        traced_collectives(jaxpr, mesh.shape)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x=1", [[0, 1], [2, 3]]),
        ("replica_groups={}, x=1", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[8], x=1", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups=[2,4]<=[4,2]T(1,0), x=1", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, x=1", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x=1", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'b'}, x=1", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}, x=1", [[3, 1], [2, 0]]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}, x=1", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("no groups", []),
    ],
)
def test_each_form_of_replica_groups(text, groups):
    assert replica_groups(text, 8) == groups


def test_an_unknown_form_of_replica_groups_is_an_error():
    with pytest.raises(ValueError, match="not known"):
        replica_groups("replica_groups=<new>, x=1", 8)


def test_axes_of_groups():
    assert axes_of([[0, 4], [1, 5]], SIZES) == ("data",)
    assert axes_of([[0, 5], [1, 4]], SIZES) == ("data", "tensor")
    assert axes_of([[3]], SIZES) == ()


@pytest.mark.parametrize(
    ("kind", "sent"), [("all_reduce", 150), ("all_gather", 75), ("reduce_scatter", 75), ("all_to_all", 75), ("permute", 100)]
)
def test_ring_bytes(kind, sent):
    assert ring_bytes(kind, 4, 100) == sent


GPU = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: bf16[8]) -> bf16[8] {
  %p = bf16[8]{0} parameter(0)
  ROOT %inner = bf16[8]{0} collective-permute(%p), channel_id=4, source_target_pairs={{0,1},{2,3},{4,5},{6,7}}
}

ENTRY %main (x: bf16[4,8], y: f32[2]) -> bf16[8,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = f32[2]{0:T(256)} parameter(1)
  %start = ((bf16[4,8]{1,0}, f32[2]{0}), (bf16[8,8]{1,0}, /*index=1*/f32[4]{0})) all-gather-start(%x, %y), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}, backend_config={"collective_backend_config":{"is_sync":false}}
  %done = (bf16[8,8]{1,0}, f32[4]{0}) all-gather-done(%start)
  %whole = bf16[8,8]{1,0} get-tuple-element(%done), index=0
  %slow = bf16[8,8]{1,0} all-reduce-start(%whole), channel_id=2, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true}}
  %waited = bf16[8,8]{1,0} all-reduce-done(%slow)
  %row = bf16[8]{0} slice(%waited), slice={[0:1],[0:8]}
  %go = ((bf16[8]{0}), bf16[8]{0}, u32[]) async-start(%row), calls=%wrapped
  %gone = bf16[8]{0} async-done(%go), calls=%wrapped
  ROOT %self = bf16[8,8]{1,0} all-reduce(%waited), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
}
"""  # noqa: E501


def test_start_and_done_pairs_combined_and_synchronous_ones():
    found = collectives(GPU, make_mesh(list(range(8))))
    assert found == [
        Collective("all_gather", ("tensor",), 2, 1, 64.0, 128, "bfloat16", True, "start"),
        Collective("all_gather", ("tensor",), 2, 1, 8.0, 16, "float32", True, "start"),
        Collective("all_reduce", ("data",), 2, 1, 128.0, 128, "bfloat16", False, "slow"),
        Collective("permute", ("tensor",), 2, 1, 16, 16, "bfloat16", True, "inner"),
    ]
