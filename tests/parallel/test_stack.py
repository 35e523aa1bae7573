"""The layer stack equals differentiating a loop over layers: fused, split, prefetched, accumulating, interleaved."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape
from jaxpar.mesh import make_mesh
from jaxpar.parallel import collectives, remat, runs
from jaxpar.parallel.stack import LayerStack
from tests.parallel import blocks
from tests.parallel.blocks import gap

MESH = make_mesh(MeshShape(data=4, tensor=2))
X = P("data", "tensor")
CONTEXT_SPECS = blocks.Context({"segments": P("data")}, {"scale": P()}, {"window": P()})
HOME = {  # ZeRO: the model width over data, except in norms, which stay whole
    name: P(
        *(
            ("data" if entry is None and size == blocks.D and len(spec) > 2 else entry)
            for entry, size in zip(spec, (0, *blocks.SHAPES[name]))
        )
    )
    if name not in ("norm", "norm2", "router")
    else P()
    for name, spec in blocks.SPECS.items()
}
DIM = {name: tuple(spec).index("data") - 1 if "data" in tuple(spec) else None for name, spec in HOME.items()}
BLOCK = blocks.make_block(**blocks.VARIANTS["everything"])


def axes(name):
    return ("data",) if "tensor" in tuple(blocks.SPECS[name]) else ("data", "tensor")


def mark(layers):
    return {name: collectives.vary(w, axes(name)) for name, w in layers.items()}


def gather(layer):
    return mark({n: w if DIM[n] is None else collectives.all_gather(w, "data", DIM[n]) for n, w in layer.items()})


def reduce(grads):
    return {n: g if DIM[n] is None else collectives.reduce_scatter(g, "data", DIM[n]) for n, g in grads.items()}


def finish(grads, scattered):
    """Sum what is still partial over data and tensor."""
    left = {n: tuple(a for a in axes(n) if not (scattered and a == "data" and DIM[n] is not None)) for n in grads}
    return {n: collectives.all_reduce(g, left[n]) if left[n] else g for n, g in grads.items()}


def objective(y, aux):
    return jnp.sin(y).sum() + (aux["chances"] ** 2).sum()


@functools.cache
def one_device():
    """(y, counts) of the blocks one after another on a single device."""

    def local(layers, x, context):
        counts = []
        for i in range(blocks.L):
            layer = jax.tree.map(lambda a: a[i], mark(layers))
            x, aux = BLOCK(layer, x, context._replace(layer={"window": context.layer["window"][i]}))
            counts.append(aux["counts"])
        return x, collectives.all_reduce(jnp.stack(counts), ("data", "tensor"))

    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    program = jax.shard_map(local, mesh=mesh, in_specs=(blocks.SPECS, X, CONTEXT_SPECS), out_specs=(X, P()))
    return jax.device_get(jax.jit(program)(blocks.init(), inputs(), blocks.context()))


def inputs():
    return jax.random.normal(jax.random.key(7), (blocks.B, blocks.S, blocks.D), jnp.float64)


def daux_of(aux):
    return [2 * aux["chances"]]


def run(form, *, zero=0, parts=1, keep="matmuls", repeat=1, again=(), fused_loops=False, in_pairs=False):
    """(y, dx, dlayers, counts) of the stack on data 4 × tensor 2. `repeat` accumulates the same gradients that often."""
    built = LayerStack(
        BLOCK,
        remat.policy(keep),
        gather if zero == 3 else None,
        reduce if zero >= 2 else None,
        parts=parts,
        again=again,
        fused_loops=fused_loops,
        in_pairs=in_pairs,
    )

    def local(layers, x, context):
        layers = layers if zero == 3 else mark(layers)
        grads = None
        for _ in range(repeat):
            y, saved, aux = built.forward(layers, x, context)
            dy, daux = jnp.cos(y), daux_of(aux)
            if form == "fused":
                dx, grads = built.backward(layers, saved, dy, daux, grads)
            elif form == "split":
                dx, deferred = built.backward_input(layers, saved, dy, daux)
                if grads is None:
                    like = jax.eval_shape(lambda *a: built.backward(*a)[1], layers, saved, dy, daux)
                    grads = jax.tree.map(lambda t: collectives.zeros(t, collectives.varying_of(t)), like)
                grads = built.backward_weight(saved, deferred, grads)
            else:
                total, pull = jax.vjp(lambda layers, x: objective(*built.differentiable(layers, x, context)), layers, x)
                grads, dx = pull(collectives.vary_like(jnp.ones_like(total), total))
        counts = collectives.all_reduce(aux["counts"], ("data", "tensor"))
        return y, dx, finish(grads, zero >= 2), counts

    home = HOME if zero >= 2 else blocks.SPECS
    program = jax.shard_map(local, mesh=MESH, in_specs=(HOME if zero == 3 else blocks.SPECS, X, CONTEXT_SPECS), out_specs=(X, X, home, P()))
    return jax.device_get(jax.jit(program)(blocks.init(), inputs(), blocks.context()))


@functools.cache
def expected():
    """The same blocks under autodiff of a Python loop, on the same mesh: the router term of the objective is one of each device's sums."""

    def local(layers, x, context):
        layers = mark(layers)

        def total(layers, x):
            sums, auxes = jnp.zeros(()), []
            for i in range(blocks.L):
                layer = jax.tree.map(lambda a: a[i], layers)
                x, aux = BLOCK(layer, x, context._replace(layer={"window": context.layer["window"][i]}))
                sums += (aux["chances"] ** 2).sum()
                auxes.append(aux["counts"])
            return jnp.sin(x).sum() + sums, (x, jnp.stack(auxes))

        (_, (y, counts)), (dlayers, dx) = jax.value_and_grad(total, (0, 1), has_aux=True)(layers, x)
        return y, dx, finish(dlayers, False), collectives.all_reduce(counts, ("data", "tensor"))

    program = jax.shard_map(local, mesh=MESH, in_specs=(blocks.SPECS, X, CONTEXT_SPECS), out_specs=(X, X, blocks.SPECS, P()))
    return jax.device_get(jax.jit(program)(blocks.init(), inputs(), blocks.context()))


CASES = {
    "fused": {"form": "fused"},
    "split": {"form": "split"},
    "custom_vjp": {"form": "custom_vjp"},
    "prefetched weights, delayed reductions": {"form": "fused", "zero": 3, "keep": "block"},
    "some of the last layer's weights gathered again": {"form": "fused", "zero": 3, "keep": "block", "again": ("up", "down")},
    "reductions only": {"form": "fused", "zero": 2},
    "split under ZeRO-3": {"form": "split", "zero": 3},
    "loop left whole": {"form": "split", "fused_loops": True},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_autodiff_of_a_loop(case):
    y, dx, dlayers, counts = run(**CASES[case])
    want = expected()
    assert gap((y, dx, dlayers), want[:3]) < 1e-12
    assert (counts == want[3]).all() and counts.sum() == blocks.L * blocks.B * blocks.S


@pytest.mark.parametrize("case", ["fused", "split under ZeRO-3"])
def test_accumulation_adds(case):
    *_, dlayers, _ = run(**CASES[case], repeat=2)
    assert gap(jax.tree.map(lambda a: a / 2, dlayers), expected()[2]) < 1e-12


@pytest.mark.parametrize("case", ["fused", "split under ZeRO-3"])
def test_interleaved_parts(case):
    """Two parts of the batch: the same y, counts and gradients. `daux` is taken at the sums of both parts, as the objective is."""
    y, dx, dlayers, counts = run(**CASES[case], parts=2)
    want = expected()
    assert gap(y, want[0]) < 1e-13 and (counts == want[3]).all()
    assert gap((dx, dlayers), want[1:3]) < 1e-12


@pytest.mark.parametrize("layers", [4, 5], ids="{} layers".format)
def test_loops_that_take_two_layers_a_turn(layers, monkeypatch):
    """Forward and backward with an odd layer before the loop and without, what is kept of the first layer apart and not."""
    monkeypatch.setattr(blocks, "L", layers)
    monkeypatch.setattr(runs, "FEWEST_TURNS", 1)
    want = expected.__wrapped__()
    for case in ("prefetched weights, delayed reductions", "split under ZeRO-3", "reductions only"):
        y, dx, dlayers, counts = run(**CASES[case], in_pairs=True)
        assert gap((y, dx, dlayers), want[:3]) < 1e-12, case
        assert (counts == want[3]).all(), case


def test_sharded_forward_equals_one_device():
    (y, _, _, counts), (want, want_counts) = expected(), one_device()
    assert gap(y, want) < 1e-13 and (counts == want_counts).all()


def test_a_lost_reduction_is_noticed():
    """Negative control: halving one gradient, as a missing sum over a pair would, is far outside the tolerance."""
    *_, dlayers, _ = run("fused")
    assert gap(dlayers | {"up": dlayers["up"] / 2}, expected()[2]) > 0.4


def test_reducing_what_is_already_equal_is_refused():
    """Negative control of the strict collectives: an array that is whole on every device, summed over them."""

    def local(x):
        return collectives.all_reduce(x, "data")

    with pytest.raises(TypeError, match="does not vary over"):
        jax.eval_shape(jax.shard_map(local, mesh=MESH, in_specs=P(), out_specs=P()), jnp.ones(4))
