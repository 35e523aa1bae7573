"""`per_matrix` against optax on each layer's own [O, I] matrix, in float64; each case also shows that the plain stacked leaf differs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.params import Parameter, map_leaves
from jaxpar.train.perlayer import per_matrix

L, N, H, D, F = 3, 4, 6, 16, 10
V, ROWS = 12, 11

SPECS = {
    "embedding": {"table": Parameter((V, D), ("vocabulary", "embed"), matrix=1, role="embedding", rows=ROWS)},
    "layers": {
        "query": Parameter((L, N, H, D), ("layers", "heads", "head_dim", "embed"), matrix=2, stacked=True),
        "output": Parameter((L, D, N, H), ("layers", "embed", "heads", "head_dim"), matrix=1, stacked=True),
        "up": Parameter((L, F, D), ("layers", "mlp", "embed"), matrix=1, stacked=True),
        "square": Parameter((L, D, D), ("layers", "mlp", "embed"), matrix=1, stacked=True),
        "bias": Parameter((L, N, H), ("layers", "heads", "head_dim"), role="bias", stacked=True),
        "norm": Parameter((L, D), ("layers", "embed"), role="norm", stacked=True),
    },
    "norm": {"weight": Parameter((D,), ("embed",), role="norm")},
}
MATRICES = {"layers": {name: SPECS["layers"][name] for name in ("query", "output", "up", "square")}}

OUT_IN = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
RULES = {
    "adafactor": (
        lambda: optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=8), optax.clip_by_block_rms(0.5)),
        SPECS,
    ),
    "muon": (
        lambda: optax.chain(optax.contrib.scale_by_muon(weight_dimension_numbers=lambda tree: jax.tree.map(lambda leaf: OUT_IN, tree))),
        MATRICES,
    ),
}


def values(specs, seed, scale=1.0):
    """Random values, each layer of another size; zero in padding rows."""
    generator = np.random.default_rng(seed)

    def leaf(path, spec):
        x = generator.normal(size=spec.shape) * scale
        if spec.stacked:
            x *= np.arange(1.0, spec.shape[0] + 1).reshape(-1, *[1] * (x.ndim - 1))
        if spec.rows:
            x[spec.rows :] = 0
        return jnp.asarray(x, jnp.float64)

    return map_leaves(leaf, specs)


def matrices(specs, tree):
    """{(path, layer): one matrix or vector}: written with reshapes of its own."""
    found = {}

    def leaf(path, spec, x):
        for layer in range(spec.shape[0]) if spec.stacked else [None]:
            one = np.asarray(x if layer is None else x[layer])
            one = one[: spec.rows] if spec.rows else one
            outs = int(np.prod(one.shape[: spec.matrix]))
            found[path, layer] = one.reshape(outs, one.size // outs) if spec.matrix else one.reshape(one.size)

    map_leaves(leaf, specs, tree)
    return found


def run(optimizer, params, steps=3):
    """Updates of `steps` steps, with gradients that are given."""
    state, update, history = jax.jit(optimizer.init)(params), jax.jit(optimizer.update), []
    for step in range(steps):
        updates, state = update(jax.tree.map(lambda p, step=step: jnp.sin(7 * p + step), params), state, params)
        history.append(updates)
        params = jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)
    return history, state


@pytest.fixture(scope="module", params=RULES)
def case(request):
    make, specs = RULES[request.param]
    params = values(specs, seed=0)
    return request.param, make, specs, params, *run(per_matrix(make(), specs), params)


def test_equal_to_each_layers_matrix_on_its_own(case):
    name, make, specs, params, history, _ = case
    expected, _ = run(make(), matrices(specs, params))
    for ours, theirs in zip(history, expected, strict=True):
        ours = matrices(specs, ours)
        assert ours.keys() == theirs.keys()
        for key, update in theirs.items():
            assert np.max(np.abs(update)) > 1e-3
            np.testing.assert_allclose(ours[key], update, rtol=0, atol=1e-12 * np.max(np.abs(update)), err_msg=f"{name} {key}")


def test_negative_control_one_layer_taken_for_another_view_differs():
    """Adafactor on the stacked leaf, and muon on heads instead of the matrix, are something else."""
    make, _ = RULES["adafactor"]
    params = values(SPECS, seed=0)["layers"]["up"]
    ours, _ = run(per_matrix(make(), {"up": SPECS["layers"]["up"]}), {"up": params}, steps=1)
    raw, _ = run(make(), {"up": params}, steps=1)
    assert np.max(np.abs(ours[0]["up"] - raw[0]["up"])) > 1e-3

    make, _ = RULES["muon"]
    spec = SPECS["layers"]["query"]
    params = {"query": values({"query": spec}, seed=0)["query"]}
    wrong = Parameter(spec.shape, spec.axes, matrix=1, stacked=True)
    ours, _ = run(per_matrix(make(), {"query": spec}), params, steps=1)
    other, _ = run(per_matrix(make(), {"query": wrong}), params, steps=1)
    assert np.max(np.abs(ours[0]["query"] - other[0]["query"])) > 1e-3


def test_padding_rows_change_nothing_and_stay_zero():
    make, _ = RULES["adafactor"]

    def table(rows):
        return {"table": Parameter((rows, D), ("vocabulary", "embed"), matrix=1, role="embedding", rows=ROWS)}

    params = values(table(ROWS), seed=1)
    padded = {"table": jnp.pad(params["table"], ((0, 5), (0, 0)))}
    history, _ = run(per_matrix(make(), table(ROWS)), params)
    with_padding, _ = run(per_matrix(make(), table(ROWS + 5)), padded)
    ignoring, _ = run(make(), padded)
    for ours, theirs in zip(with_padding, history, strict=True):
        np.testing.assert_array_equal(ours["table"][:ROWS], theirs["table"])
        assert not np.any(ours["table"][ROWS:])
    assert np.max(np.abs(ignoring[-1]["table"][:ROWS] - history[-1]["table"])) > 1e-4


def test_state_leaves_carry_layers_and_mirrors_have_the_parameters_shape(case):
    name, *_, state = case
    if name == "muon":
        assert state[0].mu["layers"]["query"].shape == (L, N, H, D)
        assert state[0].count["layers"]["query"].shape == (L,)
        return
    factored = state[0]
    assert sorted([factored.v_row["layers"]["query"].shape, factored.v_col["layers"]["query"].shape]) == [(L, D), (L, N * H)]
    assert factored.v["layers"]["query"].shape == (L, 1)
    assert factored.v["layers"]["bias"].shape == (L, N, H)
    assert sorted([factored.v_row["embedding"]["table"].shape, factored.v_col["embedding"]["table"].shape]) == [(ROWS,), (D,)]
    assert factored.count["norm"]["weight"].shape == ()


def test_works_masked_and_with_nothing_to_do():
    make, _ = RULES["muon"]
    groups = map_leaves(lambda path, spec: "muon" if spec.role == "matrix" else "rest", SPECS)
    params = values(SPECS, seed=2)
    history, _ = run(optax.partition({"muon": per_matrix(make(), SPECS), "rest": optax.identity()}, groups), params, steps=1)
    alone, _ = run(per_matrix(make(), MATRICES), {"layers": {name: params["layers"][name] for name in MATRICES["layers"]}}, steps=1)
    for name in MATRICES["layers"]:
        np.testing.assert_allclose(history[0]["layers"][name], alone[0]["layers"][name], rtol=0, atol=1e-13)
    nothing = optax.partition({"muon": per_matrix(make(), SPECS), "rest": optax.identity()}, jax.tree.map(lambda group: "rest", groups))
    history, _ = run(nothing, params, steps=1)
    np.testing.assert_allclose(history[0]["norm"]["weight"], np.sin(7 * params["norm"]["weight"]), atol=1e-12)


def test_a_leaf_of_another_shape_than_its_record_is_refused():
    make, _ = RULES["muon"]
    with pytest.raises(AssertionError, match="layers/up"):
        per_matrix(make(), MATRICES).init({"layers": {"up": jnp.zeros((F, D))}})
