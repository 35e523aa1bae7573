"""Loss and every gradient on meshes of data × tensor × ZeRO × accumulation × sequence parallelism equal one device, in float64."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.config import ModelConfig, RopeConfig
from jaxpar.models.decoder import DecoderFunctions
from jaxpar.parallel import collectives, ring, sequence, stacked, zero
from jaxpar.parallel.stack import LayerStack
from jaxpar.train.corpus import collect
from jaxpar.train.data import Loader, Rows, place
from jaxpar.train.gradients import Gradients
from tests.train import runs

TOLERANCE = 1e-11

# Every value of every column meets every value of every other column that can stand beside it (test_coverage checks).
COLUMNS = ("data", "tensor", "zero", "accumulation", "sequence_parallel", "interleave")
MESHES = [
    (1, 1, 0, 2, False, 2),
    (1, 2, 1, 1, True, 2),
    (1, 4, 2, 2, False, 1),
    (1, 2, 3, 2, True, 1),
    (2, 1, 1, 1, True, 1),
    (2, 2, 0, 2, True, 2),
    (2, 4, 3, 1, True, 2),
    (2, 1, 2, 2, False, 2),
    (2, 4, 1, 2, True, 1),
    (2, 2, 3, 1, False, 1),
    (4, 1, 3, 2, False, 2),
    (4, 2, 1, 1, False, 2),
    (4, 2, 2, 2, True, 1),
    (4, 2, 0, 1, True, 1),
    (4, 1, 0, 1, False, 1),
    (8, 1, 2, 1, True, 2),
    (8, 1, 1, 2, False, 1),
    (8, 1, 0, 1, True, 2),
    (8, 1, 3, 1, True, 1),
    (1, 4, 0, 1, True, 2),
    (1, 4, 1, 2, False, 2),
    (1, 1, 1, 1, True, 1),
    (1, 1, 2, 1, True, 1),
    (1, 1, 3, 1, True, 2),
]
POSSIBLE = {0: (1, 2, 4, 8), 1: (1, 2, 4), 2: (0, 1, 2, 3), 3: (1, 2), 4: (True, False), 5: (1, 2)}


def of(row, **changes):
    return runs.config(**dict(zip(COLUMNS, row, strict=True)) | changes)


def name(row):
    return "-".join(f"{column}{int(value)}" for column, value in zip(COLUMNS, row, strict=True))


def test_coverage():
    """The table is pairwise complete over what fits on 8 devices."""
    missing = []
    for a, b in itertools.combinations(range(len(COLUMNS)), 2):
        for pair in itertools.product(POSSIBLE[a], POSSIBLE[b]):
            fits = (a, b) != (0, 1) or pair[0] * pair[1] <= 8
            if fits and not any((row[a], row[b]) == pair for row in MESHES):
                missing.append((COLUMNS[a], COLUMNS[b], pair))
    assert not missing
    assert len({row[:5] for row in MESHES}) >= 14


def check(got, want, vocabulary):
    """(metrics, gradients) equal; padding rows of the vocabulary have no gradient."""
    assert got[0]["tokens"] == want[0]["tokens"]
    worst = runs.gap({"metrics": got[0], "gradients": got[1]}, {"metrics": want[0], "gradients": want[1]})
    assert worst[0] < TOLERANCE, worst
    squares = sum(np.square(leaf).sum() for leaf in jax.tree.leaves(got[1]))
    assert got[0]["grad_norm"] == pytest.approx(np.sqrt(squares), rel=1e-12)
    tables = [got[1][part]["table"] for part in ("embedding", "head") if part in got[1]]
    assert all(not table[vocabulary:].any() for table in tables)


def compare(run, reference):
    check(runs.gradients(run), runs.gradients(reference), run.model.vocabulary)


@pytest.mark.parametrize("row", MESHES, ids=name)
def test_equals_one_device(row):
    compare(of(row), runs.config())


RINGS = {
    "ZeRO-3, computed again": {"data": 2, "tensor": 4, "zero": 3, "remat": "block"},
    "accumulated": {"tensor": 2, "zero": 1, "accumulation": 2},
}


@pytest.mark.parametrize("case", RINGS)
def test_collective_matmul_equals_one_device(case):
    compare(runs.config(collective_matmul=True, **RINGS[case]), runs.config())


TIED = dataclasses.replace(
    runs.MODEL, kv_heads=1, tied=True, windows=(0,), norm_one_plus=True, score_softcap=3.0, embedding_scale=5.6, dropout=0.0
)
NEIGHBOURS = {
    "one key head, tied, 1+w, score cap": (TIED, {"tensor": 4, "data": 2, "zero": 1}),
    "the same, ZeRO-3, no sequence parallelism": (TIED, {"tensor": 2, "data": 4, "zero": 3, "sequence_parallel": False}),
    "one layer: no next one to gather ahead, none before to reduce behind": (
        dataclasses.replace(runs.MODEL, layers=1, windows=(0,)),
        {"data": 2, "tensor": 2, "zero": 3, "accumulation": 2, "interleave": 2},
    ),
    "yarn, wide heads": (
        ModelConfig(
            vocabulary=40,
            width=16,
            layers=2,
            heads=4,
            kv_heads=4,
            head_width=12,
            mlp_width=24,
            rope=RopeConfig(type="yarn", factor=4.0, original_length=8),
            init_std=0.3,
        ),
        {"tensor": 4, "data": 2, "zero": 2},
    ),
}


@pytest.mark.parametrize("case", NEIGHBOURS)
def test_neighbours_equal_one_device(case):
    model, mesh = NEIGHBOURS[case]
    compare(runs.config(model=model, **mesh), runs.config(model=model))


@pytest.mark.parametrize("keep", ["none", "outputs", "attention", "block"])
def test_remat_policies(keep):
    compare(runs.config(data=2, tensor=2, zero=1, remat=keep), runs.config())


def test_many_tiles_and_chunks():
    """Attention in tiles of 8 and the loss in chunks that do not divide the tokens."""
    compare(runs.config(data=2, tensor=2, zero=3, attention_block=8, loss_chunk=7), runs.config())


def test_z_loss_is_part_of_the_gradient():
    compare(runs.config(tensor=2, data=2, zero=1, z_loss=0.1), runs.config(z_loss=0.1))
    assert runs.gap(runs.gradients(runs.config(z_loss=0.1))[1], runs.gradients(runs.config())[1])[0] > 1e-3


@pytest.mark.parametrize("accumulation", [2, 4])
def test_z_loss_does_not_depend_on_accumulation(accumulation):
    compare(runs.config(accumulation=accumulation, z_loss=0.1), runs.config(z_loss=0.1))


def test_joined_documents():
    """Rows as one text: without segments the step attends over a whole row, which changes the loss, and still equals one device."""
    joined = {"data_documents": "joined"}
    compare(runs.config(data=2, tensor=2, zero=1, **joined), runs.config(**joined))
    assert runs.gap(runs.gradients(runs.config(**joined))[1], runs.gradients(runs.config())[1])[0] > 1e-3


class ThirdsOfLabels(DecoderFunctions):
    """A token's loss is a third of its label, times the first weight of the norm."""

    def loss(self, params, x_BSD, labels_BS, scale=1.0):
        thirds = jnp.where(labels_BS >= 0, labels_BS, 0).sum() / 3 * params["norm"]["weight"][0] + 0 * x_BSD.sum()
        total = collectives.all_reduce(thirds, "tensor")
        return scale * total, {"cross_entropy": jax.lax.stop_gradient(total), "z_loss": 0 * jax.lax.stop_gradient(total)}


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "zero": 2}], ids=["one device", "data 2"])
def test_losses_are_summed_and_divided_once(mesh):
    """Two microbatches with loss 2 over one token and 2 over three: 4 / 4, not the mean of 2 and 2/3. So on two devices, whose second has
    no token in the first microbatch."""
    run = runs.config(batch=4, accumulation=2, **mesh)
    built = runs.training(run)
    functions = built.gradients.functions
    engine = dataclasses.replace(built.gradients, functions=ThirdsOfLabels(**vars(functions)))
    params = runs.place_params(built)
    params["norm"]["weight"] = jnp.ones_like(params["norm"]["weight"])
    batch = runs.batch(run)
    batch["labels"] = np.full_like(batch["labels"], -1)
    batch["labels"][0, 0, 3] = 6
    batch["labels"][1, [0, 1, 1], [2, 5, 6]] = 2
    metrics, grads = jax.device_get(jax.jit(engine)(params, runs.place(built, batch), jnp.asarray(3, jnp.int32)))
    assert metrics["tokens"] == 4 and metrics["loss"] == pytest.approx(1.0, rel=1e-15)
    assert grads["norm"]["weight"][0] == pytest.approx(1.0, rel=1e-15)


@functools.cache
def program(run):
    """step -> gradients of the run's first batch."""
    built = runs.training(run)
    jitted, params, batch = jax.jit(built.gradients), runs.place_params(built), runs.place(built, runs.batch(run))
    return lambda step: jax.device_get(jitted(params, batch, jnp.asarray(step, jnp.int32))[1])


def test_the_dropout_mask_is_a_function_of_seed_and_step():
    first, other = (program(runs.config(seed=seed)) for seed in (0, 1))
    assert runs.gap(first(3), first(3))[0] == 0
    assert runs.gap(first(4), first(3))[0] > 1e-2
    assert runs.gap(other(3), first(3))[0] > 1e-2
    assert runs.gap(other(3), first(4))[0] > 1e-2  # not of their sum


def test_without_dropout_seed_and_step_change_nothing():
    model = dataclasses.replace(runs.MODEL, dropout=0.0)
    first, other = (program(runs.config(model=model, seed=seed)) for seed in (0, 1))
    assert runs.gap(first(4), first(3))[0] == runs.gap(other(3), first(3))[0] == 0


# ---- negative controls: programs that are wrong and run


def lose_a_replica(patch):
    """Gradients of one device are not in the sum."""
    finish = zero.finish

    def broken(grads, places, dtype):
        mine = collectives.axis_index("data") > 0
        return finish(jax.tree.map(lambda g: g * mine, grads), places, dtype)

    patch.setattr(zero, "finish", broken)


def lose_a_part(verb):
    """Partial sums of one tensor device are not in the sum."""

    def change(patch):
        reduce = getattr(sequence, verb)
        patch.setattr(sequence, verb, lambda x, axes, **dim: reduce(x * (collectives.axis_index(axes) > 0), axes, **dim))

    return change


def exchange_shards(patch):
    """Each device gets the gradient shard of its neighbour."""
    scatter = zero.scatter

    def broken(grads, places, dtype):
        swap = lambda g, place: g if place.split is None else collectives.permute(g, "data", [(0, 1), (1, 0)])  # noqa: E731
        return jax.tree.map(swap, scatter(grads, places, dtype), places)

    patch.setattr(zero, "scatter", broken)


def forget_a_microbatch(patch):
    """The second one starts from an empty buffer."""
    microbatch = Gradients.microbatch

    def broken(self, weights, held, scale, key, grads, batch):
        return microbatch(self, weights, held, scale, key, jax.tree.map(lambda g: 0 * g, grads), batch)

    patch.setattr(Gradients, "microbatch", broken)


def keep_another_layer(patch):
    """The backward reads what the other layer's forward kept."""
    backward = LayerStack.backward

    def broken(self, layers, saved, *rest, **named):
        rolled = dataclasses.replace(saved, parts=jax.tree.map(lambda a: jnp.roll(a, 1, 0), saved.parts))
        return backward(self, layers, rolled, *rest, **named)

    patch.setattr(LayerStack, "backward", broken)


def join_in_another_order(patch):
    """Interleaved parts come back exchanged."""
    join = stacked.join
    patch.setattr(stacked, "join", lambda parts: join(parts[::-1]))


def put_chunks_in_another_order(patch):
    """Tokens that came around the ring take the places of other devices'."""
    start = ring._start
    patch.setattr(ring, "_start", lambda k, length: start(k + 1, length))


def test_padding_of_a_joined_row_is_not_seen():
    """A corpus of one document is the same text joined or isolated, the padding of its last row included."""
    found = []
    for documents in ("joined", "isolated"):
        run = runs.config(data_documents=documents, batch=2)
        tokens = collect([np.arange(21) % run.model.vocabulary], run.model.vocabulary)
        loader = Loader(Rows(tokens, runs.SEQUENCE, run.model.vocabulary), batch=2, accumulation=1, seed=0, shuffle=False)
        built = runs.training(run)
        batch = place(loader.batch_at(0), built.batch_shardings["ids"], loader.microbatch)
        found.append(jax.device_get(jax.jit(built.gradients)(runs.place_params(built), batch, np.int32(3))))
    assert found[0][0]["tokens"] == 20
    assert runs.gap(*found)[0] < TOLERANCE


def test_dropout_does_not_depend_on_the_default_generator():
    """JAX_DEFAULT_PRNG_IMPL=rbg, a common choice on accelerators, would draw other masks on every mesh."""
    run = runs.config(model=dataclasses.replace(runs.MODEL, layers=1, windows=(0,)))
    want = runs.gradients.__wrapped__(run)
    with jax.default_prng_impl("rbg"):
        got = runs.gradients.__wrapped__(run)
    assert runs.gap(got, want)[0] == 0


# What each column would get wrong, as a change of the reference that the comparison must notice.
BROKEN = {
    "data": (lose_a_replica, {"data": 2}),
    "tensor": (lose_a_part("reduce_scatter"), {"tensor": 2}),
    "sequence_parallel": (lose_a_part("all_reduce"), {"tensor": 2, "sequence_parallel": False}),
    "zero": (exchange_shards, {"data": 2, "zero": 1}),
    "accumulation on one device": (forget_a_microbatch, {"accumulation": 2}),
    "remat on one device": (keep_another_layer, {"remat": "outputs"}),
    "collective_matmul": (put_chunks_in_another_order, {"tensor": 2, "collective_matmul": True}),
    "interleave on one device": (join_in_another_order, {"interleave": 2}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_wrong_program_is_noticed(case, monkeypatch):
    """What each column could get wrong without a type error fails the comparison."""
    change, mesh = BROKEN[case]
    change(monkeypatch)
    got = runs.gradients.__wrapped__(runs.config(**mesh))  # not from the cache, and not into it
    want = runs.gradients(runs.config())
    with pytest.raises(AssertionError):
        check(got, want, runs.MODEL.vocabulary)


SEVERAL = [row for row in MESHES if row[0] * row[1] > 1]


def trace(row):
    built = runs.training(of(row))
    jax.eval_shape(built.gradients, built.abstract_state["params"], built.abstract_batch, jax.ShapeDtypeStruct((), np.int32))


@pytest.mark.parametrize("row", SEVERAL, ids=name)
def test_a_missing_or_doubled_reduction_is_refused(row, monkeypatch):
    """Negative control of every mesh, inside the engine: the step without its last reductions, or with them twice, does not type-check."""
    finish = zero.finish
    monkeypatch.setattr(zero, "finish", lambda grads, places, dtype: grads)
    with pytest.raises(ValueError, match="out_specs"):
        trace(row)
    monkeypatch.setattr(zero, "finish", lambda grads, places, dtype: finish(finish(grads, places, dtype), places, dtype))
    with pytest.raises(TypeError, match="does not vary over"):
        trace(row)
