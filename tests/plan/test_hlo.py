"""Trip counts, matrix products and buffers of compiled programs, against numbers known by hand."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxpar.ops.blockwise import block_forward
from jaxpar.ops.tiles import Marks, Masking
from jaxpar.plan.hlo import buffers_at_least, parse
from jaxpar.plan.loops import at_most, executions, matmul_flops

M, K, OUTER, INNER = 32, 48, 3, 5


def loops(x, w, v):
    """x [M,K] float32, w [K,K], v [2,K,8]: OUTER × INNER products of M·K·K, and one batched one of 2·M·K·8."""

    def inner(x, _):
        return jnp.tanh(x @ w), None

    def outer(x, _):
        return lax.scan(inner, x, None, length=INNER)[0], None

    x = lax.scan(outer, x, None, length=OUTER)[0]
    return jnp.einsum("bmk,bko->bmo", jnp.stack([x, x + 1]), v)


FLOPS = 2 * OUTER * INNER * M * K * K + 2 * 2 * M * K * 8


@pytest.fixture(scope="module")
def text():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((M, K), (K, K), (2, K, 8))]
    return jax.jit(loops).lower(*shapes).compile().as_text()


def test_matmul_flops_count_nested_loops_and_batches(text):
    assert matmul_flops(text) == FLOPS


def test_trip_counts_come_from_the_condition_when_xla_gives_none(text):
    assert '"known_trip_count"' in text
    assert matmul_flops(re.sub(r'"known_trip_count":\{"n":"\d+"\}', "", text)) == FLOPS


def test_a_longer_loop_counts_more(text):
    """Negative control: the count really comes from the loop."""
    assert matmul_flops(text.replace(f'"known_trip_count":{{"n":"{INNER}"}}', '"known_trip_count":{"n":"50"}')) > 5 * FLOPS


@pytest.fixture(scope="module")
def endless():
    def step(x, w):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)

    return jax.jit(step).lower(*[jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2).compile().as_text()


def test_a_loop_of_unknown_length_is_an_error_if_it_holds_what_is_counted(endless):
    with pytest.raises(ValueError, match="trip count unknown"):
        matmul_flops(endless)
    assert [count for _, count in executions(parse(endless), lambda each: each.opcode == "while")] == [1]


def test_tiles_of_attention_with_a_window_that_is_an_array_are_counted_at_most():
    """Four tiles a side have ten pairs on and below the diagonal: two products each, whatever the window turns out to be."""

    def attend(q, window):
        positions = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), (1, 64))
        masking = Masking(scale=1.0, ordered=True, block=16)
        return block_forward(masking, q, q, q, Marks(positions, positions, window=window))[0]

    q, window = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.jit(attend).lower(q, window).compile().as_text()
    assert matmul_flops(text) == 10 * 2 * (2 * 2 * 16 * 16 * 8)
    assert len(at_most(parse(text))) == 1
    known = jax.jit(lambda q: attend(q, None)).lower(q).compile().as_text()
    assert matmul_flops(known) == matmul_flops(text) and at_most(parse(known)) == [], "control"


@pytest.mark.parametrize(
    ("direction", "first", "limit", "step", "trips"),
    [("LT", 0, 7, 1, 7), ("LT", 0, 7, 2, 4), ("LE", 1, 7, 2, 4), ("GT", 9, 0, -2, 5), ("LT", 5, 5, 1, 0)],
)
def test_trip_count_of_a_counter(direction, first, limit, step, trips):
    program = f"""HloModule m

%body (s: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {{
  %s = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4,4]{{1,0}} get-tuple-element(%s), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
  %y = f32[4,4]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = (s32[], f32[4,4]{{1,0}}) tuple(%next, %y)
}}

%condition (s: (s32[], f32[4,4])) -> pred[] {{
  %s.1 = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %limit = s32[] constant({limit})
  ROOT %go = pred[] compare(%i.1, %limit), direction={direction}
}}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {{
  %x.1 = f32[4,4]{{1,0}} parameter(0)
  %zero = s32[] constant({first})
  %start = (s32[], f32[4,4]{{1,0}}) tuple(%zero, %x.1)
  %loop = (s32[], f32[4,4]{{1,0}}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[4,4]{{1,0}} get-tuple-element(%loop), index=1
}}
"""
    assert matmul_flops(program) == trips * 2 * 4**3


def test_library_calls_for_matmul_are_counted_from_their_shapes():
    program = """HloModule m

ENTRY %main (x: f32[2,3,5], w: f32[2,5,7]) -> f32[2,3,7] {
  %x = f32[2,3,5]{2,1,0} parameter(0)
  %w = f32[2,5,7]{2,1,0} parameter(1)
  ROOT %y = f32[2,3,7]{2,1,0} custom-call(%x, %w), custom_call_target="__onednn$matmul"
}
"""
    assert matmul_flops(program) == 2 * 2 * 3 * 5 * 7


def test_of_two_branches_the_larger_counts():
    def step(flag, x):
        return lax.cond(flag, lambda x: x @ x, lambda x: jnp.sin(x @ x) @ x, x)

    text = jax.jit(step).lower(jax.ShapeDtypeStruct((), jnp.bool_), jax.ShapeDtypeStruct((16, 16), jnp.float32)).compile().as_text()
    assert matmul_flops(text) == 2 * 2 * 16**3


def test_buffers_of_a_size(text):
    """The stacked [2,M,K] pair is the largest array that is written; arguments do not count."""
    size = 2 * M * K * 4
    assert {buffer.array.shape for buffer in buffers_at_least(text, size)} == {(2, M, K)}
    assert buffers_at_least(text, size + 1) == []


def test_text_without_a_program_is_an_error():
    with pytest.raises(ValueError, match="ENTRY"):
        parse("not HLO")
