"""What is alive at a program's fullest moment, against programs whose buffers are known; and the peak's formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxpar.config import Config, DataConfig, MeshShape, ModelConfig, TrainConfig
from jaxpar.plan import buffers, formulas, peak
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
    cache = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compiled = lowered.compile(compiler_options=options)
    jax.config.update("jax_enable_compilation_cache", cache)
    return folder, compiled


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
    assert peak.kept_bytes(config(remat="none")) == 2 * peak.kept_bytes(config())


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
