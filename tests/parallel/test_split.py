"""Cutting a block: gradients equal autodiff's, nothing computed twice, W reads no weight, no weight is saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import make_mesh
from jaxpar.parallel import collectives, flatten, joint, operations, remat, split
from tests.parallel import blocks
from tests.parallel.blocks import gap

LAYER = {name: P(*spec[1:]) for name, spec in blocks.SPECS.items()}
X = P("data", "tensor")
ONE = jax.tree.map(lambda a: a[0], blocks.init())
MESH = make_mesh(MeshShape(data=2, tensor=2), jax.devices()[:4])
CONTEXT = blocks.context(4)._replace(layer={"window": jnp.asarray(3, jnp.int32)})
CONTEXT_SPECS = blocks.Context({"segments": P("data")}, {"scale": P()}, {"window": P()})


def mark(params):
    return {n: collectives.vary(w, ("data",) if "tensor" in collectives.varying(w) else ("data", "tensor")) for n, w in params.items()}


def one_each(tree):
    """Every device's own partial gradient, side by side."""
    return jax.tree.map(lambda g: collectives.vary(g, ("data", "tensor"))[None], tree)


def run(block, keep, fused_loops=False):
    """dx and dparams three ways: autodiff, B and W, BW; and the facts."""
    facts = []

    def local(params, x, context):
        params = mark(params)
        cut = split.cut(block, params, x, context, keep, fused_loops=fused_loops)
        facts.append(cut)
        y, aux, saved = cut.forward(params, x, context)
        dy = jnp.cos(y)
        daux = [jnp.cos(a) for a in jax.tree.leaves(aux) if joint.is_differentiable(a)]
        dx, deferred = cut.backward_input(params, saved, context, dy, daux)
        two = dx, one_each(cut.backward_weight(saved, deferred, context))
        dx, dparams = cut.backward(params, saved, context, dy, daux)
        fused = dx, one_each(dparams)

        def differentiable(params, x):
            y, aux = block(params, x, context)
            return y, [a for a in jax.tree.leaves(aux) if joint.is_differentiable(a)]

        _, transpose = jax.vjp(differentiable, params, x)
        dparams, dx = transpose((dy, daux))
        return two, fused, (dx, one_each(dparams))

    grads = X, jax.tree.map(lambda _: P(("data", "tensor")), LAYER)
    x = jax.random.normal(jax.random.key(5), (4, blocks.S, blocks.D), jnp.float64)
    program = jax.shard_map(local, mesh=MESH, in_specs=(LAYER, X, CONTEXT_SPECS), out_specs=(grads,) * 3)
    return *jax.jit(program)(ONE, x, CONTEXT), facts[-1]


@pytest.mark.parametrize("keep", remat.POLICIES)
@pytest.mark.parametrize("variant", ["everything, cast", "plain"])
def test_every_policy(variant, keep):
    two, fused, want, cut = run(blocks.make_block(**blocks.VARIANTS[variant]), remat.policy(keep))
    assert gap(two, want) < 1e-13
    assert gap(fused, want) < 1e-13
    cut.check_split()


@pytest.mark.parametrize("variant", ["remat", "jit", "chunked", "router", "cast"])
def test_every_difficulty(variant):
    """`cast` too at float64's tolerance: autodiff and the cut round the same float64 numbers to bf16, in the same places. One that came out
    of another order of additions would be off by a unit of bf16, 2^-8 of itself."""
    two, fused, want, cut = run(blocks.make_block(**blocks.VARIANTS[variant]), remat.policy("matmuls"))
    assert gap(two, want) < 1e-13
    assert gap(fused, want) < 1e-13
    cut.check_split()


def cut_only(block, keep, **options):
    """The cut on one device, without running it."""
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    found = []

    def local(params, x, context):
        found.append(split.cut(block, mark(params), x, context, remat.policy(keep), **options))
        return x

    x = jax.ShapeDtypeStruct((4, blocks.S, blocks.D), jnp.float64)
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(LAYER, X, CONTEXT_SPECS), out_specs=X), ONE, x, CONTEXT)
    return found[0]


def test_the_cast_rounds():
    """The negative control of the variant: without the cast the gradients are others."""
    *_, cast, _ = run(blocks.make_block(cast=jnp.bfloat16), remat.policy("matmuls"))
    *_, plain, _ = run(blocks.make_block(), remat.policy("matmuls"))
    assert 2**-9 < gap(cast, plain) < 2**-4


def test_cast_weights_are_not_saved():
    cut = cut_only(blocks.make_block(cast=jnp.bfloat16, router=True), "none")
    cut.check_split()
    shapes = {(shape, dtype) for shape, dtype in cut.facts.saved}
    assert not any(shape in blocks.SHAPES.values() for shape, _ in shapes)


def test_saved_bytes_fall_with_the_policy():
    units = lambda keep: sum(np.prod(shape) for shape, _ in cut_only(blocks.make_block(), keep).facts.saved) / (4 * blocks.S * blocks.D)  # noqa: E731
    sizes = {keep: units(keep) for keep in ("none", "matmuls", "outputs", "attention", "block")}
    assert sizes["none"] > sizes["matmuls"] > sizes["outputs"] > sizes["attention"] > sizes["block"] == 1
    assert sizes["attention"] == 2


def test_plain_block_counts():
    """Seven weights (the router unused): seven matmuls in F and in W. F has two of attention beside them; B has seven for the inputs of
    the weights, four of attention's gradient, and the scores once more, which this policy does not keep. None is done twice."""
    facts = cut_only(blocks.make_block(), "matmuls").facts
    tokens = 4 * blocks.S
    seven = 2 * tokens * (4 * blocks.D * blocks.D + 3 * blocks.D * blocks.F)
    scores = 2 * tokens * blocks.S * blocks.D
    assert facts.weight_matmuls_forward == facts.matmuls_backward_weight == 7
    assert facts.flops_forward == seven + 2 * scores
    assert facts.flops_backward_input == seven + 5 * scores
    assert facts.flops_backward_weight == seven
    assert facts.flops_backward_input + facts.flops_backward_weight == facts.flops_backward
    whole = cut_only(blocks.make_block(), "none").facts
    assert whole.flops_backward_input == seven + 4 * scores


def test_fused_loop_keeps_its_weight_gradients_in_b():
    """The negative control of the assertion: a loop left whole moves three weight matmuls into B, and the check says so."""
    block = blocks.make_block(chunks=2)
    two, fused, want, cut = run(block, remat.policy("matmuls"), fused_loops=True)
    assert gap(two, want) < 1e-13 and gap(fused, want) < 1e-13
    assert cut.facts.matmuls_backward_weight == cut.facts.weight_matmuls_forward - 3
    with pytest.raises(AssertionError, match="could not be opened"):
        cut.check_split()


def test_product_of_weights_is_refused_in_the_split_form():
    def block(p, x, context):
        return x @ (p["query"] @ p["key"]), {}

    cut = cut_only(block, "matmuls")
    with pytest.raises(AssertionError, match="reads a weight"):
        cut.check_split()
    with pytest.raises(AssertionError, match="reads a weight"):
        cut.backward_weight((), (), {})


def test_closing_over_a_traced_array_is_refused():
    def local(x):
        with pytest.raises(AssertionError, match="context"):
            split.cut(lambda p, y, c: (y * p["w"] * x, {}), {"w": jnp.ones(3)}, jnp.ones(3), {}, remat.policy("none"))
        return x

    jax.eval_shape(local, jnp.ones(3))


def test_unknown_policy_names_the_field():
    with pytest.raises(ValueError, match="train.remat.*matmuls"):
        remat.policy("everything-please")


def test_duplicates_are_merged():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) * jnp.cos(jnp.sin(x)) + jnp.sin(x + 1.0))(1.0)
    ops, outputs, _ = flatten.flatten(closed, [operations.Value(a) for a in closed.in_avals])
    merged, _ = flatten.merge_duplicates(ops, outputs)
    assert operations.count(ops, "sin") == 3 and operations.count(merged, "sin") == 2


def test_loops_over_different_arrays_are_not_merged():
    """Two scans alike but for the array they captured."""
    tables = jnp.arange(3.0), jnp.arange(3.0) * 2

    def both(x):
        return [jax.lax.scan(lambda c, t: (c + t, c), x, table)[0] for table in tables]

    closed = jax.make_jaxpr(both)(1.0)
    ops, outputs, captured = flatten.flatten(closed, [x := operations.Value(closed.in_avals[0])])
    ops, outputs = flatten.merge_duplicates(ops, outputs)
    env = {**captured, x: jnp.asarray(1.0)}
    flatten.run(ops, env)
    assert [float(env[o]) for o in outputs] == [4.0, 7.0]


def test_a_debugging_print_in_a_block_prints(capsys):
    """Outside and inside a loop, where the carry that it reads may be used by nothing else."""

    def block(p, x, context):
        jax.debug.print("largest {}", abs(x).max())

        def chunk(number, piece):
            jax.debug.print("chunk {}", number)
            return number + 1, piece @ p["query"].T

        return jax.lax.scan(chunk, 0, x)[1], {}

    cut = split.cut(block, ONE, jnp.ones((1, 2, blocks.D)), {}, remat.policy("matmuls"))
    cut.forward(ONE, jnp.ones((1, 2, blocks.D)), {})
    jax.effects_barrier()
    assert sorted(capsys.readouterr().out.splitlines()) == ["chunk 0", "largest 1.0"]


def test_an_order_that_the_forward_wants_is_no_reason_to_compute_again():
    """A barrier ties two products in the forward; the backward reads one of them: it is computed again, the other is not."""

    def block(params, x, context):
        first, second = collectives.barrier((x @ params["first"], x @ params["second"]))
        return first + jnp.tanh(second), {}

    params, x = {"first": jnp.ones((4, 4)), "second": jnp.ones((4, 4))}, jnp.ones((3, 4))
    facts = split.cut(block, params, x, None, remat.policy("block")).facts
    once = 2 * 3 * 4 * 4
    assert facts.flops_forward == 2 * once and facts.flops_backward == 5 * once
