"""Interleaving of parts: stages of a block, their order in the program, and that values stay what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import TENSOR, make_mesh
from jaxpar.parallel import collectives, remat, split
from jaxpar.parallel.flatten import flatten
from jaxpar.parallel.operations import Value
from jaxpar.parallel.sequence import SequenceParallel

W, S, D = 8, 16, 8
MESH = make_mesh(MeshShape(tensor=2), jax.devices()[:2])


def block(params, x_BSD, context):
    """Two layers with a boundary around each, as attention and MLP have."""
    edge = SequenceParallel()
    for up, down in (("a", "b"), ("c", "d")):
        h = jnp.tanh(edge.enter(x_BSD * 2) @ params[up])
        x_BSD = x_BSD + edge.leave(h @ params[down])
    return x_BSD, {}


@pytest.fixture(scope="module")
def arguments():
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = {"a": (D, W), "b": (W, D), "c": (D, W), "d": (W, D)}
    params = {name: jax.random.normal(key, shapes[name], jnp.float64) for name, key in zip(shapes, keys, strict=False)}
    return params, jax.random.normal(keys[4], (4, S, D), jnp.float64), jax.random.normal(keys[5], (4, S, D), jnp.float64)


SPECS = {"a": P(None, TENSOR), "b": P(TENSOR), "c": P(None, TENSOR), "d": P(TENSOR)}


def program(parts, keep="block"):
    """Forward and backward of `parts` equal parts of a batch, and the jaxpr's operations."""

    def local(params, x, dy):
        xs, dys = jnp.split(x, parts), jnp.split(dy, parts)
        cut = split.cut(block, params, xs[0], {}, remat.policy(keep))
        forward, _ = cut.forward_parts(params, xs, [{}] * parts)
        backward, _ = cut.backward_parts(params, [kept for _, _, kept in forward], [{}] * parts, dys, [])
        grads = jax.tree.map(lambda *g: sum(g), *(dparams for _, dparams in backward))
        return jnp.concatenate([y for y, _, _ in forward]), jnp.concatenate([dx for dx, _ in backward]), grads

    tokens = P(None, TENSOR)
    return jax.shard_map(local, mesh=MESH, in_specs=(SPECS, tokens, tokens), out_specs=(tokens, tokens, SPECS))


@pytest.mark.parametrize("keep", ["block", "none", "outputs"])
def test_values_and_gradients_do_not_depend_on_parts(arguments, keep):
    whole, parts = (jax.jit(program(n, keep))(*arguments) for n in (1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), whole, parts)


def depends(ops, later, earlier):
    """Whether operation `later` cannot run before `earlier` has."""
    reached = set(earlier.outputs)
    for op in ops:
        if any(isinstance(a, Value) and a in reached for a in op.inputs):
            reached |= set(op.outputs)
    return any(isinstance(a, Value) and a in reached for a in later.inputs)


def forward_ops(parts, together, due=False):
    """Operations of the forward of `parts` parts; with `due`, of one part that a gather from outside accompanies."""

    def local(params, x):
        xs = jnp.split(x, parts)
        cut = split.cut(block, params, xs[0], {}, remat.policy("block"))
        if due:
            results, shards = cut.forward_parts(params, xs, [{}] * parts, due=collectives.all_gather(x, TENSOR, dim=1))
            return [results[0][0] + collectives.reduce_scatter(shards, TENSOR, dim=1)]
        if together:
            return [y for y, _, _ in cut.forward_parts(params, xs, [{}] * parts)[0]]
        return [cut.forward(params, x, {})[0] for x in xs]

    mapped = jax.shard_map(local, mesh=MESH, in_specs=(SPECS, P(None, TENSOR)), out_specs=[P(None, TENSOR)] * parts)
    shapes = {name: jax.ShapeDtypeStruct((D, W), jnp.float32) for name in SPECS}
    closed = jax.make_jaxpr(mapped)(shapes, jax.ShapeDtypeStruct((4, S, D), jnp.float32))
    inner = next(eqn.params["jaxpr"] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map")
    inner = jax.extend.core.ClosedJaxpr(inner, ()) if not hasattr(inner, "jaxpr") else inner
    return flatten(inner, [Value(v.aval) for v in inner.jaxpr.invars])[0]


def named(ops, *names):
    return [op for op in ops if op.name in names]


def test_stages_alternate_between_parts_and_exchanges_leave_behind_the_other_ones_stage():
    ops = forward_ops(2, together=True)
    _, b0, a1, b1, c0, d0, c1, _ = named(ops, "dot_general")  # in program order: stage 0 of both parts, then stage 1
    assert depends(ops, a1, b0) and depends(ops, c0, b1) and depends(ops, c1, d0), "a stage begins when the other part's has ended"
    leave0 = named(ops, "reduce_scatter")[0]
    gathers = named(ops, "all_gather")
    assert depends(ops, leave0, b0) and not depends(ops, leave0, b1), "part 0 leaves while part 1 computes"
    assert len(gathers) == 4 and not depends(ops, leave0, named(ops, "reduce_scatter")[1])


def test_without_interleaving_nothing_orders_the_parts():
    """Control: one after the other, the second part's matmuls depend on nothing of the first's."""
    ops = forward_ops(2, together=False)
    first, second = named(ops, "dot_general")[:4], named(ops, "dot_general")[4:]
    assert not any(depends(ops, late, early) for late in second for early in first)
    assert not named(ops, "optimization_barrier")


def test_one_part_has_no_barriers():
    assert not named(forward_ops(1, together=True), "optimization_barrier")


def test_what_travels_beside_a_single_part_has_arrived_before_its_last_matmul():
    ops = forward_ops(1, together=True, due=True)
    *others, last = named(ops, "dot_general")
    gather = named(ops, "all_gather")[0]
    assert depends(ops, last, gather) and not any(depends(ops, other, gather) for other in others)
