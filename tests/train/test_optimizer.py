"""One table, five rules × invariants; then each rule against a reference, on one device and on eight."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar import params as parameters
from jaxpar.config import MeshShape, OptimizerConfig
from jaxpar.mesh import make_mesh
from jaxpar.params import Parameter, map_leaves
from jaxpar.rules import DENSE, Rules
from jaxpar.train.optimizer import build, clip, decay_mask, state_shardings

L, N, H, D, F = 2, 4, 32, 128, 24
V, ROWS = 136, 131
STEPS = 3

# The table, query and output are large enough for adafactor to factor.
SPECS = {
    "embedding": {"table": Parameter((V, D), ("vocabulary", "embed"), matrix=1, role="embedding", rows=ROWS)},
    "head": {"table": Parameter((V, D), ("vocabulary", "embed"), matrix=1, role="head", rows=ROWS)},
    "layers": {
        "attention": {
            "query": Parameter((L, N, H, D), ("layers", "heads", "head_dim", "embed"), matrix=2, stacked=True),
            "output": Parameter((L, D, N, H), ("layers", "embed", "heads", "head_dim"), matrix=1, stacked=True),
            "query_bias": Parameter((L, N, H), ("layers", "heads", "head_dim"), role="bias", stacked=True),
        },
        "mlp": {"up": Parameter((L, F, D), ("layers", "mlp", "embed"), matrix=1, stacked=True)},
        "norm": {"weight": Parameter((L, D), ("layers", "embed"), role="norm", stacked=True)},
    },
    "norm": {"weight": Parameter((D,), ("embed",), role="norm")},
}
RATES = {"adamw": 0.05, "lion": 0.02, "sgd": 0.2, "adafactor": 0.05, "muon": 0.05}
NAMES = tuple(RATES)


def config(name, **fields):
    return OptimizerConfig(**{"name": name, "learning_rate": RATES[name], "schedule": "constant", "weight_decay": 0.1, **fields})


def decayed(spec):
    return spec.role in ("matrix", "embedding", "head")


def abstract(dtype):
    return map_leaves(lambda path, spec: jax.ShapeDtypeStruct(spec.shape, dtype), SPECS)


@functools.cache
def start():
    """float64 values, the layers of different sizes, padding rows zero; on the first device."""
    generator = np.random.default_rng(0)

    def leaf(path, spec):
        x = generator.normal(size=spec.shape)
        if spec.stacked:
            x[1] *= 3
        if spec.rows:
            x[spec.rows :] = 0
        return jnp.asarray(x, jnp.float64)

    return map_leaves(leaf, SPECS)


def gradients(params):
    """Of half the squared distance to .25, in real rows."""
    return jax.tree.map(lambda p: jnp.where(p == 0, 0.0, p - 0.25), params)


def loss(params):
    return 0.5 * sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradients(params)))


@functools.cache
def layout():
    """(mesh, shardings of ZeRO-1 masters) on 8 devices, data 4 × tensor 2."""
    mesh = make_mesh(MeshShape(data=4, tensor=2))
    partitions = parameters.partition_specs(SPECS, Rules(dict(mesh.shape), DENSE))
    placements = parameters.zero_placements(SPECS, partitions, dict(mesh.shape))
    return mesh, parameters.shardings(parameters.zero_specs(partitions, placements), mesh)


def stepper(name):
    optimizer = build(config(name), SPECS, 10)

    def step(params, state):
        updates, state = optimizer.update(gradients(params), state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, step


def run(step, params, state):
    """Parameters after each of STEPS steps, and the state at the end."""
    history = []
    for _ in range(STEPS):
        params, state = step(params, state)
        history.append(params)
    return history, state


@functools.cache
def whole(name):
    """On one device."""
    optimizer, step = stepper(name)
    return run(jax.jit(step), start(), jax.jit(optimizer.init)(start()))


@functools.cache
def sharded(name):
    """On eight devices: history, state at the end, its shardings, compiled step. Only adafactor has to be told where its results live."""
    optimizer, step = stepper(name)
    shardings = layout()[1]
    states = state_shardings(optimizer, shardings, SPECS, abstract(jnp.float64))
    params = jax.device_put(start(), shardings)
    state = jax.jit(optimizer.init, out_shardings=states)(params)
    forced = {"out_shardings": (shardings, states)} if name == "adafactor" else {}
    compiled = jax.jit(step, **forced).lower(params, state).compile()
    return *run(compiled, params, state), states, compiled


def apart(ours, theirs):
    """max|a−b| / max|b| of the worst leaf."""
    ours, theirs = jax.tree.leaves(jax.device_get(ours)), jax.tree.leaves(jax.device_get(theirs))
    return max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)) for a, b in zip(ours, theirs, strict=True))


# ---- invariants: one row a rule, one function a column


def keeps_dtypes_and_structure(name):
    """Shapes, dtypes, weak types and structure of the state are those of init after an update; updates look like the parameters."""
    optimizer = build(config(name, schedule="cosine", warmup=2), SPECS, 10)
    for dtype in (jnp.float32, jnp.float64, jnp.bfloat16):
        params = abstract(dtype)
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(optimizer.update, params, state, params)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        for a, b in zip(jax.tree.leaves((updates, after)), jax.tree.leaves((params, state)), strict=True):
            assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def keeps_shardings(name):
    """Every leaf of parameters and state lives where it was put; what mirrors a parameter lives where that parameter does."""
    history, state, states, _ = sharded(name)
    for leaf, place in zip(jax.tree.leaves((history[-1], state)), jax.tree.leaves((layout()[1], states)), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim), (leaf.sharding, place)


def communicates_only_to_see_matrices(name):
    collectives = re.findall(r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\(", sharded(name)[3].as_text())
    assert bool(collectives) == (name in ("adafactor", "muon"))


def equals_one_device(name):
    """Parameters and state of eight devices are those of one, and another rule's are not."""
    history, state, *_ = sharded(name)
    assert apart((history, state), whole(name)) < 1e-12
    assert apart(history, whole("sgd" if name == "adamw" else "adamw")[0]) > 1e-3


def decreases_a_quadratic(name):
    losses = [loss(params) for params in (start(), *whole(name)[0])]
    assert all(after < before for before, after in itertools.pairwise(losses)), losses


def leaves_padding_rows_zero(name):
    assert not np.any(whole(name)[0][-1]["embedding"]["table"][ROWS:])


def decays_only_what_the_mask_says(name):
    """With zero gradients an update is −rate · decay · parameter, or nothing."""
    params = start()
    for decay in ("matrices", "all"):
        optimizer = build(config(name, decay=decay), SPECS, 10)
        updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)

        def check(path, spec, update, param, decay=decay):
            expected = -RATES[name] * 0.1 * param * (decay == "all" or decayed(spec))
            np.testing.assert_allclose(update, expected, rtol=1e-12, atol=0, err_msg=path)

        map_leaves(check, SPECS, updates, params)


INVARIANTS = (
    keeps_dtypes_and_structure,
    keeps_shardings,
    communicates_only_to_see_matrices,
    equals_one_device,
    decreases_a_quadratic,
    leaves_padding_rows_zero,
    decays_only_what_the_mask_says,
)


@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda invariant: invariant.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_invariant(name, invariant):
    invariant(name)


# ---- rules against references


def numpy_adamw(param, grads, rate, b1, b2, eps, decay, *, eps_inside=False, coupled=False):
    """torch.optim.AdamW's documented update, float64. The two switches are the faults that the test must tell apart."""
    m = v = 0.0
    for t, grad in enumerate(grads, 1):
        grad = grad + decay * param if coupled else grad
        param = param if coupled else param - rate * decay * param
        m = b1 * m + (1 - b1) * grad
        v = b2 * v + (1 - b2) * grad**2
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        param = param - rate * m_hat / (np.sqrt(v_hat + eps) if eps_inside else np.sqrt(v_hat) + eps)
    return param


def test_adamw_three_steps_as_torch_documents_it():
    specs = {"w": Parameter((3, 5), ("mlp", "embed"), matrix=1)}
    fields = {"learning_rate": 0.1, "b1": 0.8, "b2": 0.7, "eps": 0.1, "weight_decay": 0.1}
    optimizer = build(config("adamw", **fields), specs, 3)
    generator = np.random.default_rng(0)
    first, *grads = generator.normal(size=(4, 3, 5))
    params = {"w": jnp.asarray(first)}
    state = optimizer.init(params)
    for grad in grads:
        updates, state = optimizer.update({"w": jnp.asarray(grad)}, state, params)
        params = optax.apply_updates(params, updates)
    expected = numpy_adamw(first, grads, 0.1, 0.8, 0.7, 0.1, 0.1)
    np.testing.assert_allclose(params["w"], expected, rtol=0, atol=1e-14)
    for fault in ({"eps_inside": True}, {"coupled": True}):
        assert np.max(np.abs(numpy_adamw(first, grads, 0.1, 0.8, 0.7, 0.1, 0.1, **fault) - expected)) > 1e-3


# torch.optim.AdamW of torch 2.13.0+cpu, float64: lr=1e-2, betas=(0.9, 0.95), eps=0.1, weight_decay=0.1; parameter after each step.
TORCH_START = (0.5, -1.25, 2.0, 0.0, -0.03125, 3.75)
TORCH_GRADIENTS = (
    (0.1, -0.2, 0.3, 0.05, -1.5, 0.0),
    (-0.4, 0.25, 0.3, -0.05, 2.0, 1e-3),
    (0.7, 0.125, -0.6, 0.01, 0.5, -2e-3),
)
TORCH_STEPS = (
    (0.4945, -1.24208333333333, 1.9905, -0.00333333333333333, -0.02184375, 3.74625),
    (0.498137887418935, -1.24196784808857, 1.9810095, -0.00315456140350877, -0.0236473424669872, 3.74245149264375),
    (0.494950785472358, -1.24305888659527, 1.97963454098853, -0.00329562438146692, -0.0261901164843654, 3.73874910380549),
)


def test_adamw_three_steps_as_torch_computes_them():
    specs = {"w": Parameter((6,), ("embed",), role="matrix")}
    fields = {"learning_rate": 1e-2, "b1": 0.9, "b2": 0.95, "eps": 0.1, "weight_decay": 0.1}

    def steps(**changes):
        optimizer = build(config("adamw", **fields | changes), specs, 3)
        params = {"w": jnp.asarray(TORCH_START, jnp.float64)}
        state = optimizer.init(params)
        for grad in TORCH_GRADIENTS:
            updates, state = optimizer.update({"w": jnp.asarray(grad, jnp.float64)}, state, params)
            params = optax.apply_updates(params, updates)
            yield np.asarray(params["w"])

    for ours, theirs in zip(steps(), TORCH_STEPS, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
    for change in ({"eps": 0.101}, {"weight_decay": 0.099}, {"b2": 0.951}):
        assert np.abs(list(steps(**change))[-1] - TORCH_STEPS[-1]).max() > 1e-7, change


def test_sgd_is_momentum_without_dampening():
    specs = {"w": Parameter((4,), ("embed",), role="norm")}
    optimizer = build(config("sgd", momentum=0.9), specs, 3)
    params = {"w": jnp.ones(4)}
    state = optimizer.init(params)
    buffer, expected = 0.0, 1.0
    for grad in (1.0, -2.0, 0.5):
        updates, state = optimizer.update({"w": jnp.full(4, grad)}, state, params)
        params = optax.apply_updates(params, updates)
        buffer = 0.9 * buffer + grad
        expected -= RATES["sgd"] * buffer
    np.testing.assert_allclose(params["w"], expected, rtol=1e-14)


def one_by_one(reference, select):
    """Matrices of the chosen parameters, each trained on its own by `reference` from start(): {(path, layer): [O, I] at the end}."""
    found = {}

    def add(path, spec, param):
        for layer in range(L) if spec.stacked else [None]:
            one = param if layer is None else param[layer]
            one = one[:ROWS] if spec.rows else one
            outs = math.prod(one.shape[: spec.matrix])
            found[path, layer] = one.reshape(outs, -1) if spec.matrix else one.reshape(-1)

    map_leaves(lambda path, spec, param: add(path, spec, param) if select(spec) else None, SPECS, start())
    params, state = found, reference.init(found)
    update = jax.jit(reference.update)
    for _ in range(STEPS):
        updates, state = update(gradients(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def check_one_by_one(name, expected):
    trained = dict(parameters.flatten(whole(name)[0][-1]))
    for (path, layer), value in expected.items():
        ours = trained[path] if layer is None else trained[path][layer]
        ours = np.asarray(ours).reshape(-1)[: value.size]
        np.testing.assert_allclose(ours, value.reshape(-1), rtol=0, atol=1e-12 * float(jnp.max(jnp.abs(value))), err_msg=f"{path} {layer}")


def test_adafactor_equals_optax_adafactor_on_every_matrix():
    """Optax's recipe adds its decay after the rate: the same number once multiplied by the rate."""
    rate = RATES["adafactor"]
    for select, decay in ((decayed, rate * 0.1), (lambda spec: not decayed(spec), None)):
        check_one_by_one("adafactor", one_by_one(optax.adafactor(rate, weight_decay_rate=decay), select))


def test_muon_equals_optax_muon_on_every_matrix_and_adamw_elsewhere():
    rate = RATES["muon"]
    muon = optax.contrib.muon(rate, beta=0.9, weight_decay=0.1, consistent_rms=0.2)
    check_one_by_one("muon", one_by_one(muon, lambda spec: spec.role == "matrix"))
    for select, decay in ((lambda spec: spec.role in ("embedding", "head"), 0.1), (lambda spec: not decayed(spec), 0.0)):
        check_one_by_one("muon", one_by_one(optax.adamw(rate, 0.9, 0.95, 1e-8, weight_decay=decay), select))


# ---- shardings of the state


def test_what_mirrors_a_parameter_takes_its_sharding_and_the_rest_is_replicated():
    mesh, shardings = layout()
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    query, bias = ("layers", "attention", "query"), ("layers", "attention", "query_bias")

    def at(tree, path):
        return functools.reduce(lambda node, key: node[key], path, tree)

    assert "data" in str(at(shardings, query).spec) and "tensor" in str(at(shardings, query).spec)
    places = {name: state_shardings(build(config(name), SPECS, 10), shardings, SPECS, abstract(jnp.float32)) for name in NAMES}
    adam, lion, trace, factored = (places[name][0] for name in ("adamw", "lion", "sgd", "adafactor"))
    assert adam.mu == adam.nu == lion.mu == trace.trace == shardings
    assert adam.count == lion.count == places["adamw"][2].count == replicated
    assert at(factored[0].v, bias) == at(shardings, bias)
    for statistic in (factored[0].v_row, factored[0].v_col, factored[0].v, factored[0].count):
        assert at(statistic, query) == replicated
    groups = places["muon"][0].inner_states
    assert at(groups["muon"].inner_state[0].mu, query) == at(shardings, query)
    assert at(groups["muon"].inner_state[0].count, query) == replicated
    assert at(groups["adamw"].inner_state.nu, ("embedding", "table")) == shardings["embedding"]["table"]


def test_a_record_of_another_shape_is_refused():
    wrong = map_leaves(lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if "up" in path else leaf, abstract(jnp.float32))
    with pytest.raises(AssertionError, match="layers/mlp/up"):
        state_shardings(build(config("adamw"), SPECS, 10), layout()[1], SPECS, wrong)


# ---- clipping, mask


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float64))) for leaf in jax.tree.leaves(tree)))


def test_clipping_scales_to_the_limit_on_any_sharding():
    norm = norm_of(start())
    for params in (start(), jax.device_put(start(), layout()[1])):
        clipped = jax.jit(clip)(params, norm, 2.0)
        assert float(norm_of(clipped)) == pytest.approx(2.0, rel=1e-13)
        assert apart(clipped, jax.tree.map(lambda p: p * (2 / norm), params)) < 1e-13
        for a, b in zip(jax.tree.leaves(clipped), jax.tree.leaves(params), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_below_the_limit_nothing_changes():
    grads = {"a": jnp.full(16, (1 + 2**-7) / 4, jnp.bfloat16), "b": jnp.zeros(3, jnp.bfloat16)}
    clipped = clip(grads, jnp.float32(1 + 2**-7), 1.5)
    for a, b in zip(jax.tree.leaves(clipped), jax.tree.leaves(grads), strict=True):
        assert a.dtype == b.dtype and bool(jnp.all(a == b))


def test_decay_mask_by_role():
    mask = dict(parameters.flatten(decay_mask(config("adamw"), SPECS)))
    assert {path for path, on in mask.items() if not on} == {"layers/attention/query_bias", "layers/norm/weight", "norm/weight"}
    assert all(dict(parameters.flatten(decay_mask(config("adamw", decay="all"), SPECS))).values())


def test_a_schedule_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"optimizer\.warmup"):
        build(config("adamw", warmup=10), SPECS, 10)
