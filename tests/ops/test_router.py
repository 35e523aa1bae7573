"""Routers and balancing losses against plain numpy, token by token, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.ops import router
from jaxpar.ops.router import Router

T, E = 13, 12


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def reference(settings, logits, bias, valid):
    """One token after another, with Python lists."""
    weights, chosen = np.zeros((len(logits), settings.k)), np.full((len(logits), settings.k), logits.shape[1])
    for t, row in enumerate(logits):
        if not valid[t]:
            continue
        score = {"softmax_topk": softmax(row), "topk_softmax": row, "sigmoid": 1 / (1 + np.exp(-row))}[settings.kind]
        choice = score + bias
        size = len(row) // settings.groups
        groups = [sorted(choice[g * size : (g + 1) * size])[::-1] for g in range(settings.groups)]
        best = sorted(range(settings.groups), key=lambda g: -sum(groups[g][: settings.group_best]))[: settings.kept_groups]
        allowed = [e for e in range(len(row)) if e // size in best]
        picked = sorted(allowed, key=lambda e: -choice[e])[: settings.k]
        w = score[picked]
        if settings.kind == "topk_softmax":
            w = softmax(w)
        elif settings.normalise:
            w = w / w.sum()
        weights[t], chosen[t] = w * settings.scale, picked
    return weights, chosen


SETTINGS = {
    "softmax": Router(kind="softmax_topk", normalise=False),
    "softmax normalised": Router(kind="softmax_topk", k=3),
    "softmax of one": Router(kind="softmax_topk", k=1, normalise=False, scale=2.5),
    "topk": Router(kind="topk_softmax", k=4),
    "sigmoid": Router(kind="sigmoid", k=4, scale=2.5),
    "sigmoid as it is": Router(kind="sigmoid", k=2, normalise=False),
    "groups of V2": Router(kind="softmax_topk", k=3, normalise=False, groups=4, kept_groups=2, group_best=1),
    "groups of V3": Router(kind="sigmoid", k=4, groups=4, kept_groups=2, group_best=2, scale=1.5),
    "all experts": Router(kind="softmax_topk", k=E),
}


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(0)
    return rng.normal(size=(T, E)) * 2, rng.normal(size=E) * 0.3, rng.random(T) > 0.25


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", SETTINGS)
def test_select(case, biased, drawn):
    settings, (logits, bias, valid) = SETTINGS[case], drawn
    weights, chosen = router.select(settings, jnp.asarray(logits), jnp.asarray(bias) if biased else None, jnp.asarray(valid))
    want_weights, want_chosen = reference(settings, logits, bias * biased, valid)
    assert weights.dtype == jnp.float64 and chosen.dtype == jnp.int32
    np.testing.assert_array_equal(chosen, want_chosen)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-13)


def test_bias_changes_the_choice_and_not_the_weights(drawn):
    logits, bias, _ = drawn
    settings = Router(kind="sigmoid", k=3, normalise=False)
    plain, biased = router.select(settings, jnp.asarray(logits)), router.select(settings, jnp.asarray(logits), jnp.asarray(bias))
    assert (plain[1] != biased[1]).any()
    np.testing.assert_allclose(biased[0], np.take_along_axis(1 / (1 + np.exp(-logits)), np.asarray(biased[1]), 1), rtol=1e-13)
    gradient = jax.grad(lambda b: router.select(settings, jnp.asarray(logits), b)[0].sum())(jnp.asarray(bias))
    assert not gradient.any()


@pytest.mark.parametrize("normalise, want", [(True, [0.7311, 0.2689]), (False, [0.6439, 0.2369])])
def test_normalised_or_not(normalise, want):
    weights, chosen = router.select(Router(k=2, normalise=normalise), jnp.asarray([[2.0, 1, 0, -1]]))
    np.testing.assert_allclose(weights[0], want, atol=5e-5)
    np.testing.assert_array_equal(chosen[0], [0, 1])


def test_one_chosen_expert_has_a_gradient(drawn):
    """Unless its weight is always 1: the negative control, which configurations refuse."""

    def size(settings):
        return abs(jax.grad(lambda x: (router.select(settings, x)[0] ** 2).sum())(jnp.asarray(drawn[0]))).max()

    assert size(Router(k=1, normalise=False)) > 1e-2
    assert size(Router(kind="sigmoid", k=1, normalise=False)) > 1e-2
    assert size(Router(kind="topk_softmax", k=1)) == 0


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", SETTINGS)
def test_gradient_of_weights(case, biased, drawn):
    """Of each router against central differences of the reference: every logit of three tokens, one of them padding."""
    settings, (logits, bias, valid) = SETTINGS[case], drawn
    pull, bias, step = np.random.default_rng(1).normal(size=(T, settings.k)), bias * biased, 1e-6
    tokens = [*np.flatnonzero(valid)[:2], np.flatnonzero(~valid)[0]]

    def ours(x):
        return (router.select(settings, x, jnp.asarray(bias), jnp.asarray(valid))[0] * pull).sum()

    got = jax.jit(jax.grad(ours))(jnp.asarray(logits))
    for t in tokens:
        for e in range(E):
            moved = np.zeros((T, E))
            moved[t, e] = step
            above, below = (reference(settings, logits + sign * moved, bias, valid)[0][t] @ pull[t] for sign in (1, -1))
            assert abs(got[t, e] - (above - below) / (2 * step)) < 1e-8, (t, e)


def test_half_precision_logits_are_scored_in_float32(drawn):
    half = jnp.asarray(drawn[0], jnp.bfloat16)
    weights, _ = router.select(Router(), half)
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(weights, router.select(Router(), half.astype(jnp.float32))[0])


@pytest.mark.parametrize("kind", router.KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_a_number_reaches_the_weights(kind, value):
    """The step guard sees it in the loss; routing does not hide it, whatever place a sort gives it. Padding's does not matter."""
    logits = jnp.asarray([[0.0, value, 1, 2], [3.0, 1, 2, 0], [0.0, value, 1, 2]])
    weights, chosen = router.select(Router(kind=kind), logits, valid_T=jnp.asarray([True, True, False]))
    assert jnp.isnan(weights[0]).all() and jnp.isfinite(weights[1:]).all() and (chosen[:2] < 4).all()


def test_expert_choice():
    """Expert by expert; of the last sequence, which has two valid tokens, fewer than three; gradients as a softmax's, by hand."""
    rng = np.random.default_rng(2)
    logits, valid = rng.normal(size=(3, 7, 4)), np.arange(7)[None] < np.array([7, 5, 2])[:, None]
    pull = rng.normal(size=(3, 7, 4))
    mask = router.taken(jnp.asarray(logits), 3, jnp.asarray(valid))
    weights, chosen = router.expert_choice(jnp.asarray(logits), mask)
    gradient = jax.grad(lambda x: (router.expert_choice(x, mask)[0] * pull).sum())(jnp.asarray(logits))
    want = np.zeros((3, 7, 4), bool)
    for b in range(3):
        score = np.stack([softmax(row) for row in logits[b]])
        for e in range(4):
            for s in sorted(np.flatnonzero(valid[b]), key=lambda s: -score[s, e])[:3]:
                want[b, s, e] = True
        np.testing.assert_allclose(weights[b], score * want[b], rtol=1e-13)
        for s in range(7):
            pulled = pull[b, s] * want[b, s]
            np.testing.assert_allclose(gradient[b, s], score[s] * (pulled - score[s] @ pulled), rtol=1e-12, atol=1e-16)
    np.testing.assert_array_equal(mask, want)
    np.testing.assert_array_equal(chosen, np.where(want, np.arange(4), 4))
    ties = router.taken(jnp.zeros((1, 5, 2)), 2, jnp.ones((1, 5), bool))
    np.testing.assert_array_equal(ties[0, :, 0], [True, True, False, False, False])
    assert jnp.isnan(router.expert_choice(jnp.asarray(logits).at[0, 2, 1].set(jnp.nan), mask)[0][0, 2]).sum() == want[0, 2].sum()


def test_jitter():
    """Uniform noise of each element; of rows and tokens that are here, whichever others are; its gradient is the noise."""
    x, key = jnp.full((8, 50, 40), 2.0), jax.random.key(0)
    rows, tokens = jnp.arange(8), jnp.arange(50)
    noisy = router.jitter(x, 0.1, key, rows, tokens)
    assert 1.8 <= noisy.min() < 1.801 and 2.199 < noisy.max() <= 2.2 and abs(noisy.mean() - 2) < 0.005
    assert abs(noisy.std() - 0.2 / 3**0.5) < 0.002 and len(np.unique(noisy)) > 15_000
    np.testing.assert_array_equal(router.jitter(x[2:5, 10:], 0.1, key, rows[2:5], tokens[10:]), noisy[2:5, 10:])
    np.testing.assert_array_equal(router.jitter(x, 0.0, key, rows, tokens), x)
    gradient = jax.grad(lambda x: router.jitter(x, 0.1, key, rows, tokens).sum())(x)
    np.testing.assert_allclose(gradient, noisy / 2, rtol=1e-15)


@pytest.fixture(scope="module")
def routed():
    """Logits [B, S, E] of sequences with 9, 4 and no valid tokens, their scores and choices of 2."""
    rng = np.random.default_rng(3)
    logits, valid = rng.normal(size=(3, 9, E)), np.arange(9)[None] < np.array([9, 4, 0])[:, None]
    scores = np.stack([[softmax(row) for row in sequence] for sequence in logits])
    _, chosen = router.select(Router(), jnp.asarray(logits.reshape(-1, E)), valid_T=jnp.asarray(valid.reshape(-1)))
    return logits, scores, np.asarray(chosen).reshape(3, 9, 2), valid


def counted(chosen):
    return np.array([[sum(int(c) == e for c in sequence.flat) for e in range(E)] for sequence in chosen])


def test_counts_are_of_valid_tokens(routed):
    _, _, chosen, valid = routed
    got = router.count(jnp.asarray(chosen), E)
    np.testing.assert_array_equal(got, counted(chosen))
    np.testing.assert_array_equal(got.sum(1), 2 * valid.sum(1))


def test_losses(routed):
    """Each against sums over tokens; what padding holds changes nothing."""
    logits, scores, chosen, valid = routed
    tokens, counts = valid.sum(1), counted(chosen)
    share = np.array([sum((scores[b, s] for s in range(9) if valid[b, s]), np.zeros(E)) for b in range(3)])
    got = router.shares(jnp.asarray(scores), jnp.asarray(valid))
    np.testing.assert_allclose(got, share, rtol=1e-13, atol=1e-18)
    want = [sum(E / (2 * n) * counts[b, e] * share[b, e] / n for e in range(E)) if n else 0 for b, n in enumerate(tokens)]
    np.testing.assert_allclose(router.sequence_balance(jnp.asarray(counts), got, jnp.asarray(tokens), 2), want, rtol=1e-13)
    want = sum(E / (2 * 13) * counts.sum(0)[e] * share.sum(0)[e] / 13 for e in range(E))
    np.testing.assert_allclose(router.load_balance(jnp.asarray(counts.sum(0)), got.sum(0), 2), want, rtol=1e-13)
    lse = np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(router.z_loss(jnp.asarray(logits), jnp.asarray(valid)), (lse**2 * valid).sum(1), rtol=1e-13)
    want = [-sum((scores[b, s] * np.log(scores[b, s])).sum() for s in range(9) if valid[b, s]) for b in range(3)]
    np.testing.assert_allclose(router.entropy(jnp.asarray(scores), jnp.asarray(valid)), want, rtol=1e-13)
    spoiled = np.where(valid[..., None], scores, 0.9)
    np.testing.assert_allclose(router.shares(jnp.asarray(spoiled), jnp.asarray(valid)), share, rtol=1e-13, atol=1e-18)


def test_gradients_of_losses(routed):
    """By hand: the load does not move, a share moves as a softmax does, the squared log-sum-exp as twice it times the scores; none of
    padding."""
    logits, scores, chosen, valid = routed
    tokens, counts, total = valid.sum(1), counted(chosen), valid.sum()
    mask = jnp.asarray(valid)

    def shares(x):
        return router.shares(router.scores(x, "softmax_topk"), mask)

    def want(pull, b, s):
        return scores[b, s] * (pull - scores[b, s] @ pull) if valid[b, s] else np.zeros(E)

    sequence = jax.grad(lambda x: router.sequence_balance(jnp.asarray(counts), shares(x), jnp.asarray(tokens), 2).sum())(
        jnp.asarray(logits)
    )
    whole = jax.grad(lambda x: router.load_balance(jnp.asarray(counts.sum(0)), shares(x).sum(0), 2))(jnp.asarray(logits))
    z = jax.grad(lambda x: router.z_loss(x, mask).sum())(jnp.asarray(logits))
    for b, s in np.ndindex(valid.shape):
        n = max(tokens[b], 1)
        np.testing.assert_allclose(sequence[b, s], want(E * counts[b] / (2 * n * n), b, s), rtol=1e-10, atol=1e-16)
        np.testing.assert_allclose(whole[b, s], want(E * counts.sum(0) / (2 * total**2), b, s), rtol=1e-10, atol=1e-16)
        np.testing.assert_allclose(z[b, s], 2 * np.log(np.exp(logits[b, s]).sum()) * scores[b, s] * valid[b, s], rtol=1e-12)
    entropy = jax.grad(lambda x: router.entropy(router.scores(x, "softmax_topk"), mask).sum())(jnp.asarray(logits))
    assert not entropy.any(), "a metric moves nothing"


def test_balanced_load_has_loss_one_and_collapse_more():
    even = jnp.full((1, 4), 6)
    np.testing.assert_allclose(router.sequence_balance(even, jnp.full((1, 4), 3.0), jnp.asarray([12]), 2), [1.0])
    np.testing.assert_allclose(router.load_balance(jnp.asarray([24, 0, 0, 0]), jnp.asarray([24.0, 0, 0, 0]), 1), 4.0)


def test_losses_add_up_over_parts_of_the_tokens(routed):
    """Shares of some tokens with the counts of all: what a device that holds part of each sequence adds."""
    _, scores, chosen, valid = routed
    counts, tokens = router.count(jnp.asarray(chosen), E), jnp.asarray(valid.sum(1))
    whole = router.shares(jnp.asarray(scores), jnp.asarray(valid))
    first, second = (router.shares(jnp.asarray(scores[:, part]), jnp.asarray(valid[:, part])) for part in (slice(0, 5), slice(5, 9)))
    for loss in (lambda p: router.sequence_balance(counts, p, tokens, 2), lambda p: router.load_balance(counts.sum(0), p.sum(0), 2)):
        np.testing.assert_allclose(loss(first) + loss(second), loss(whole), rtol=1e-13)
