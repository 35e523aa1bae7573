"""What is alive at a program's fullest moment, against programs whose buffers are known; and the peak's formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxpar.compilation import without_cache
from jaxpar.config import Config, DataConfig, ExpertsConfig, MeshShape, ModelConfig, MoeConfig, TrainConfig
from jaxpar.parallel.expert import Dispatch
from jaxpar.plan import buffers, formulas, memory, peak, saved, working
from jaxpar.plan.hlo import parse

SIZE = 256


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """x, sin(x @ x) and cos of a product of it are held at once: an argument and two temporaries."""

    def f(x):
        a = jnp.sin(x @ x)
        return (a @ jnp.cos(a @ x)).sum()

    folder = tmp_path_factory.mktemp("dump")
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_module_re": "^jit_f$", "xla_dump_hlo_as_text": True}
    lowered = jax.jit(f).lower(jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32))
    with without_cache():
        return folder, lowered.compile(compiler_options=options)


def test_what_is_alive_at_the_fullest_moment(dumped):
    folder, compiled = dumped
    alive = buffers.read_dump(folder)
    whole = [buffer for buffer in alive.buffers if buffer.array.shape == (SIZE, SIZE)]
    assert sorted(buffer.argument for buffer in whole) == [False, False, True]
    assert {buffer.bytes for buffer in whole} == {4 * SIZE * SIZE}
    temporary = sum(buffer.bytes for buffer in alive.buffers if not buffer.argument)
    assert temporary == compiled.memory_analysis().temp_size_in_bytes
    assert alive.at in compiled.as_text()


def test_without_a_record_nothing_is_known(tmp_path):
    assert buffers.read_dump(tmp_path) == buffers.Alive("", ())


def test_the_origin_of_a_buffer_is_behind_copies_tuples_and_loops():
    program = parse(
        "HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n"
        "  %g = f32[8]{0} negate(%p)\n"
        "  %c = f32[8]{0} copy(%g)\n"
        "  %t = (f32[8]{0}, f32[8]{0}) tuple(%p, %c)\n"
        "  %w = (f32[8]{0}, f32[8]{0}) while(%t), condition=%x, body=%y\n"
        "  ROOT %e = f32[8]{0} get-tuple-element(%w), index=1\n}\n"
    )
    places = program.computations["main"].instructions
    assert buffers.origin(program, places, "e", ()).name == "g"
    assert buffers.origin(program, places, "w", (0,)).name == "p"
    assert buffers.origin(program, places, "nothing", ()) is None


LOOP = """HloModule m

%carried (c: (f32[512,512], f32[512,512])) -> (f32[512,512], f32[512,512]) {
  %c = (f32[512,512]{1,0}, f32[512,512]{1,0}) parameter(0)
  %kept = f32[512,512]{1,0} get-tuple-element(%c), index=0
  %old = f32[512,512]{1,0} get-tuple-element(%c), index=1
  %new = f32[512,512]{1,0} add(%old, %kept)
  ROOT %end = (f32[512,512]{1,0}, f32[512,512]{1,0}) tuple(%kept, %new)
}

%cut (a: f32[8,512,512]) -> f32[512,512] {
  %a = f32[8,512,512]{2,1,0} parameter(0)
  %b = f32[1,512,512]{2,1,0} slice(%a), slice={[0:1], [0:512], [0:512]}
  ROOT %d = f32[512,512]{1,0} bitcast(%b)
}

ENTRY %main (p: f32[8,512,512]) -> f32[512,512] {
  %p = f32[8,512,512]{2,1,0} parameter(0)
  %s = f32[512,512]{1,0} fusion(%p), kind=kLoop, calls=%cut
  %z = f32[512,512]{1,0} broadcast(%k)
  %t = (f32[512,512]{1,0}, f32[512,512]{1,0}) tuple(%s, %z)
  %w = (f32[512,512]{1,0}, f32[512,512]{1,0}) while(%t), condition=%x, body=%carried
  ROOT %e = f32[512,512]{1,0} get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize("name, index, made", [("c", (0,), "p"), ("c", (1,), "new"), ("w", (0,), "p"), ("e", (), "new"), ("s", (), "p")])
def test_the_origin_of_what_a_loop_carries(name, index, made):
    """What the body leaves alone is what the loop started with, behind a slice; what it changes is what it puts there."""
    program = parse(LOOP)
    places = {name: each for computation in program.computations.values() for name, each in computation.instructions.items()}
    assert buffers.origin(program, places, name, index).name == made


MODEL = ModelConfig(vocabulary=1024, width=512, layers=8, heads=8, kv_heads=4, head_width=64, mlp_width=1024)


def config(**train):
    return Config(
        model=MODEL,
        mesh=MeshShape(data=4, tensor=2),
        data=DataConfig(sequence=1024, vocabulary=1024),
        train=TrainConfig(**{"batch": 16, "zero": 3, **train}),
    )


def test_16_bytes_a_parameter_and_its_zero_shares():
    elements = sum(weight.total for weight in formulas.weights(config()))
    states = [peak.formula_bytes(config(zero=zero))["state"] for zero in (0, 1, 2, 3)]
    assert states == [16 * elements, 7 * elements, 5.5 * elements, 4 * elements]


def test_korthikanti_and_what_is_kept():
    """34 sbh/t a layer without scores; kept here the same order, less for narrower keys and no dropout masks."""
    one = 4 * 1024 * 512
    assert peak.formula_bytes(config())["activations"] == 8 * 34 * one / 2
    assert peak.formula_bytes(config(sequence_parallel=False))["activations"] == 8 * (10 + 24 / 2) * one
    assert peak.formula_bytes(config(remat="block"))["activations"] == 8 * 2 * one / 2
    tokens, width, hidden = one // 512, 512 // 2, 1024 // 2  # numbers a device and token: between blocks, of the MLP
    own = 2 * (8 + 4) * 64 // 2 + 2 * 8 * 64 // 2 + 4 * 8 // 2 + 2 * 4 * 64 // 2  # bytes: queries, keys; outputs, log-sum-exp; values
    none = tokens * (own + 2 * 2 * width + 2 * 2 * 512 + 4 * 2 * (width + 1) + (3 * 2 + 3 * 4) * hidden)
    assert saved.saved_bytes(config(remat="none")) == 8 * none


@pytest.mark.parametrize("change", [{"accumulation": 2}, {"remat": "block"}, {"loss_chunk": 256}, {"batch": 8}])
def test_the_predicted_peak_falls_with_what_should_lower_it(change):
    """With a vocabulary large enough for the loss to be the fullest moment."""
    large = {"model": dataclasses.replace(MODEL, vocabulary=65536)}
    assert peak.predicted_peak(dataclasses.replace(config(**change), **large)) < peak.predicted_peak(dataclasses.replace(config(), **large))


def test_the_predicted_peak_falls_with_zero_and_devices():
    levels = [peak.predicted_peak(config(zero=zero)) for zero in (0, 1, 3)]
    assert levels == sorted(levels, reverse=True)
    wider = dataclasses.replace(config(), mesh=MeshShape(data=4, tensor=4))
    assert peak.predicted_peak(wider) < peak.predicted_peak(config())


def test_what_a_layer_works_with():
    """Of one part: the whole MLP and five arrays of width D inside, two between blocks of which each device has half; of two parts, a half
    batch's MLP and seven half batches of width D."""
    tokens, heads = 4 * 1024, (2 * 8 + 2 * 4) // 2 * 64
    one = 2 * tokens * (2 * 512 // 2 + 5 * 512 + heads + 4 * 1024 // 2)
    assert working.working_bytes(config()) == one
    assert working.working_bytes(config(mlp_chunk=256)) == one - 2 * (tokens * 3 // 4) * 4 * 1024 // 2
    assert working.working_bytes(config(interleave=2)) == 2 * tokens * (2 * 512 // 2 + heads) + tokens * (7 * 512 + 4 * 1024 // 2)


@pytest.mark.parametrize(
    "dispatch, numbers", [("ragged", 8 * 1.5 * 2 + 2 * 2), ("capacity", 6 * 1.25 * 2), ("gather", 4 * 1.5 * 2 + 2 * 4)]
)
def test_rows_of_experts_are_what_their_layer_works_with(dispatch, numbers):
    """Values of width D for each of a device's 2 × 1024 tokens, by hand: rows of the buffer (1.5 or 1.25 times two choices), choices, and
    what four devices gather."""
    moe = dataclasses.replace(MODEL, moe=MoeConfig(experts=8, per_token=2, width=256))
    sparse = dataclasses.replace(config(experts=ExpertsConfig(dispatch=dispatch)), model=moe, mesh=MeshShape(data=2, expert=4))
    dense = dataclasses.replace(sparse, model=dataclasses.replace(MODEL, mlp_width=8))
    assert working.working_bytes(sparse) - working.working_bytes(dense) == 2 * 2048 * (numbers * 512 - 4 * 8)


def test_kept_queries_are_held_twice_where_sequences_come_behind_tokens():
    """Two sequences of a part and gathers over `tensor`; seven layers of eight, or of nine eight, two a turn."""
    nine = {"model": dataclasses.replace(MODEL, layers=9)}
    twice = 2 * 4 * 1024 * (4 + 2 * 2) * 64
    assert working.turned_bytes(config(remat="matmuls", interleave=2)) == 7 * twice
    assert working.turned_bytes(dataclasses.replace(config(remat="outputs"), **nine)) == 8 * twice
    less = [{"remat": "attention"}, {"remat": "matmuls", "sequence_parallel": False}, {"remat": "matmuls", "interleave": 4}]
    for change in ({"remat": "outputs"}, {"zero": 2}, {"collective_matmul": True}, *less):
        assert working.turned_bytes(config(**change)) == 0


def test_what_none_holds_twice():
    """Both norms' outputs with all tokens and the MLP's product; gate, up and three float32 arrays of the first of two parts."""
    tokens, one = 4 * 1024, 2 * (2 * 512 + 512) + (2 * 2 + 3 * 4) * 512 // 2
    assert working.turned_bytes(config(remat="none", interleave=2)) == 7 * tokens * one
    assert working.turned_bytes(config(remat="none", interleave=4)) == working.turning_bytes(config(remat="none", interleave=4)) == 0
    assert working.turned_bytes(config(remat="none")) == 0 and working.turning_bytes(config(remat="none")) == 3 * tokens * 4 * 512


def test_the_moments_of_a_step():
    """Which there are, by ZeRO level and policy; a buffer that microbatches add to is there from the beginning."""
    assert list(peak.moments(config(zero=1))) == ["loss", "loop"]
    assert list(peak.moments(config())) == ["loss", "loop", "last"]
    assert list(peak.moments(config(zero=2, remat="none"))) == ["loss", "loop", "last", "turning", "forward"]
    once, twice = peak.moments(config(batch=8)), peak.moments(config(accumulation=2))
    added = 4 * sum(weight.total // (4 if weight.split else 1) for weight in formulas.weights(config()))
    assert twice["loss"] - once["loss"] == added + formulas.batch_bytes(config()) - formulas.batch_bytes(config(batch=8))


def test_buffers_are_told_apart_by_shape_and_origin():
    """Arrays of a gate's 512 × 1024 elements: tokens by width, a layer's weight gathered, its gradient, and one shaped like tokens and
    weight at once, which only its origin tells."""
    alike = dataclasses.replace(config(batch=4, zero=1), mesh=MeshShape(data=4, tensor=1))  # 1024 tokens, 1024 wide MLP
    name = "jit(step)/while/body"
    lines = {
        "gathered": ("bf16[1024,512]", "all-gather(%p)", "all_gather"),
        "cast": ("bf16[1024,512]", "convert(%p)", "convert_element_type"),
        "gradient": ("bf16[512,1024]", "negate(%p)", "transpose(jvp())/dot_general"),
        "zeros": ("bf16[8,1024,512]", "broadcast(%k)", "broadcast"),
        "forward": ("bf16[1024,512]", "negate(%p)", "jvp()/dot_general"),
        "halves": ("bf16[2,512,512]", "negate(%p)", "transpose(jvp())/dot_general"),
    }
    text = "\n".join(
        ["HloModule m", "", "ENTRY %main (p: f32[512,1024]) -> f32[] {", "  %p = f32[512,1024]{1,0} parameter(0)"]
        + [f'  %{key} = {shape} {made}, metadata={{op_name="{name}/{source}"}}' for key, (shape, made, source) in lines.items()]
        + ["}", ""]
    )
    places = parse(text).computations["main"].instructions
    alive = [buffers.Buffer(key, (), places[key].results[0], places[key].results[0].bytes, False) for key in lines]
    one = 2 * 512 * 1024
    found = memory.temporaries(alike, text, buffers.Alive("p", tuple(alive)))
    assert found == {"weights": 2 * one, "gradients": 9 * one, "activations": 2 * one}


def test_shapes_of_a_parameter():
    shapes = memory.weight_shapes(config())  # 8 layers, 4 replicas, 4 of 8 heads on a device
    assert {(512, 512), (128, 512), (4, 128, 512), (8, 512, 512), (7, 512, 512), (4, 64, 512), (256, 512)} <= shapes
    assert not {(2, 1024, 512), (512, 1024, 4), (8, 1024, 512), (4, 512, 1024)} & shapes, "tokens"


@pytest.mark.parametrize("router", ["softmax_topk", "expert_choice"])
@pytest.mark.parametrize("dispatch, factor", [("ragged", 1.5), ("ragged", 64.0), ("gather", 3.0), ("capacity", 1.25), ("capacity", 40.0)])
@pytest.mark.parametrize("ways, chunks", [(1, 1), (2, 1), (8, 4)])
def test_rows_of_experts_are_those_of_the_dispatch(router, dispatch, factor, ways, chunks):
    """Of all chunks, whatever room is asked for: never more than all that could come."""
    moe, experts = MoeConfig(experts=8, width=512, router=router), {"dispatch": dispatch, "chunks": chunks}
    experts = ExpertsConfig(**experts, buffer_factor=factor, capacity_factor=factor)
    run = dataclasses.replace(
        config(experts=experts), model=dataclasses.replace(MODEL, moe=moe), mesh=MeshShape(data=8 // ways, expert=ways)
    )
    tokens, k = saved.expert_tokens(run) // chunks, 8 if router == "expert_choice" else 2
    built = Dispatch(experts=8, axes=("expert",), method=dispatch, buffer_factor=factor, capacity_factor=factor, chunks=chunks)
    rows = 8 * built.capacity(tokens, k) if dispatch == "capacity" else built.rows(tokens, k, ways)
    assert saved.expert_rows(run) == chunks * rows
