"""Generation with a cache against the whole forward without one, on meshes of data × tensor; the command; what bad input gets."""

import dataclasses
import warnings
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import cli, configfile, generation
from jaxpar.config import Config, ContextConfig, MeshShape, MoeConfig, RopeConfig, TrainConfig
from jaxpar.generation import Choice, Generator, build_generator
from jaxpar.generation.places import parameter_places
from jaxpar.mesh import make_mesh
from jaxpar.models import attention
from jaxpar.train.checkpoint import Checkpoints
from jaxpar.train.tokenizer import save_tokenizer, train_tokenizer
from tests.models import reference
from tests.models.whole import gemma, hostile, sinks, specs_of, values

# with seeds of values under which greedy tokens do not repeat
MODELS = {"hostile": (hostile(), 35), "gemma": (gemma(), 14), "sinks": (sinks(), 246)}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [12, 0, 11, 2]]
LONGER = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7, 0, 3], [12, 0, 11, 2]]  # for who sees a prefix from both sides
TOKENS = 7
SAMPLED = {"temperature": 1.3, "top_k": 6, "top_p": 0.95, "seed": 11}


def prompts(name):
    return LONGER if name == "sinks" else PROMPTS


def run_config(model, dtype="float64", context=ContextConfig()):  # noqa: B008
    train = TrainConfig(compute_dtype=dtype, master_dtype="float64", attention_block=4, context=context)
    return Config(model=model, train=train)


def mesh_of(data, tensor):
    return make_mesh(MeshShape(data=data, tensor=tensor), jax.devices()[: data * tensor])


def built(name, data=1, tensor=1, dtype="float64"):
    model, seed = MODELS[name]
    return build_generator(run_config(model, dtype), mesh_of(data, tensor), values(specs_of(model, 1), seed))


generator_of = lru_cache(built)


def whole_forward(name):
    """The last real token's logits of one sequence, dense, without a cache; padded so that one program serves all lengths."""
    model, seed = MODELS[name]
    params = jax.tree.map(jnp.asarray, values(specs_of(model, 1), seed))
    length = max(map(len, prompts(name))) + TOKENS

    @jax.jit
    def last(ids_S, count):
        positions_BS = jnp.arange(length, dtype=jnp.int32)[None]
        batch = {"ids": ids_S[None], "positions": positions_BS, "segments": (positions_BS < count).astype(jnp.int32)}
        return reference.logits(params, batch, model)[0, count - 1]

    return lambda ids: np.asarray(last(np.pad(np.asarray(ids, np.int32), (0, length - len(ids))), len(ids)))


@lru_cache
def recomputed(name):
    """Greedy continuations by running the whole sequence again for each token."""
    last = whole_forward(name)
    found = []
    for prompt in prompts(name):
        ids = list(prompt)
        for _ in range(TOKENS):
            logits_V = last(ids)
            second, first = np.sort(logits_V)[-2:]
            assert first - second > 1e-9, "a tie would let rounding choose"
            ids.append(int(logits_V.argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.parametrize(
    "name, data, tensor",
    [("hostile", 1, 1), ("hostile", 2, 2), ("hostile", 4, 2), ("hostile", 1, 4), ("gemma", 2, 2), ("gemma", 1, 4), ("sinks", 2, 2)],
)
def test_greedy_equals_the_whole_forward_on_every_mesh(name, data, tensor):
    """Prompts of three lengths in one batch, so each also equals what it would be alone."""
    expected = recomputed(name)
    assert len({token for row in expected for token in row}) > 5, "tokens that repeat would hide a wrong cache"
    assert generator_of(name, data, tensor).generate(prompts(name), TOKENS) == expected


@pytest.mark.parametrize(
    ("name", "mesh", "context"),
    [
        ("hostile", MeshShape(seq=4, tensor=2), ContextConfig()),
        ("hostile", MeshShape(seq=2), ContextConfig(method="usp", ulysses=4)),
        ("sinks", MeshShape(seq=2, tensor=2), ContextConfig()),
        pytest.param("hostile", MeshShape(seq=8), ContextConfig(method="ulysses"), marks=pytest.mark.slow),
        pytest.param("hostile", MeshShape(data=2, seq=2), ContextConfig(method="ulysses"), marks=pytest.mark.slow),
        pytest.param("hostile", MeshShape(seq=8), ContextConfig(method="gather", layout="striped"), marks=pytest.mark.slow),
        pytest.param("gemma", MeshShape(seq=4, tensor=2), ContextConfig(layout="contiguous"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_prompts_and_cache_split_over_seq(name, mesh, context):
    """The prompt as training attends to it, then a cache of which each device has a part."""
    model, seed = MODELS[name]
    many = build_generator(
        run_config(model, context=context), make_mesh(mesh, jax.devices()[: mesh.devices]), values(specs_of(model, 1), seed)
    )
    assert many.generate(prompts(name), TOKENS) == recomputed(name)


def test_what_usp_trained_generates_on_one_device():
    model, seed = MODELS["hostile"]
    config = run_config(model, context=ContextConfig(method="usp", ulysses=4))
    assert build_generator(config, mesh_of(1, 1), values(specs_of(model, 1), seed)).generate(PROMPTS, TOKENS) == recomputed("hostile")


def test_one_program_serves_every_length_and_each_prompt_alone():
    model = generator_of("hostile")
    greedy = model.generate(PROMPTS, TOKENS)
    alone = [model.generate([prompt], TOKENS)[0] for prompt in PROMPTS]
    assert alone == greedy
    assert [model.generate([prompt], 3)[0] for prompt in PROMPTS] == [row[:3] for row in greedy]
    assert model._program._cache_size() == 2  # of four rows and of one


def test_a_row_stops_before_the_end_token_and_the_others_go_on():
    model = generator_of("hostile")
    end = recomputed("hostile")[0][2]
    expected = [row[: row.index(end)] if end in row else row for row in recomputed("hostile")]
    assert [len(row) for row in expected] == [2, 6, 7]
    assert model.generate(PROMPTS, TOKENS, end=end) == expected


def test_a_cache_that_is_not_written_would_be_noticed(monkeypatch):
    layers = Generator._layers

    def forgetful(self, params, ids_BS, positions_BS, segments_BS, cache, slots):
        x_BSD, written = layers(self, params, ids_BS, positions_BS, segments_BS, cache, slots)
        return x_BSD, written if ids_BS.shape[1] > 1 else cache

    monkeypatch.setattr(Generator, "_layers", forgetful)
    assert built("hostile").generate(PROMPTS, TOKENS) != recomputed("hostile")


def test_sampled_tokens_are_the_same_on_every_mesh():
    one, many = generator_of("hostile"), generator_of("hostile", 2, 2)
    found = one.generate(PROMPTS, TOKENS, **SAMPLED)
    assert many.generate(PROMPTS, TOKENS, **SAMPLED) == found
    assert found != one.generate(PROMPTS, TOKENS) and found != one.generate(PROMPTS, TOKENS, **{**SAMPLED, "seed": 12})
    assert many.generate(PROMPTS, TOKENS, temperature=0.9, top_k=1, seed=5) == recomputed("hostile")
    assert many.generate(PROMPTS, TOKENS, temperature=0.9, top_p=1e-6, seed=5) == recomputed("hostile")


def test_uncut_sampling_on_another_mesh_equals_a_cut_that_keeps_everything():
    one, many = generator_of("hostile"), generator_of("hostile", 1, 4)
    assert many.generate(PROMPTS, TOKENS, temperature=1.3, seed=2) == one.generate(PROMPTS, TOKENS, temperature=1.3, top_k=99, seed=2)


def test_equal_prompts_are_sampled_differently():
    found = generator_of("hostile").generate([[7]] * 3, TOKENS, **SAMPLED)
    assert len({tuple(row) for row in found}) == 3


def test_bfloat16_runs_and_agrees_at_first():
    half = built("hostile", 1, 2, "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype(jnp.bfloat16)}
    found = half.generate(PROMPTS, TOKENS)
    assert all(len(row) == TOKENS and 0 <= min(row) <= max(row) < 13 for row in found)
    assert sum(row[0] == other[0] for row, other in zip(found, recomputed("hostile"))) >= 2


@pytest.mark.parametrize(
    "prompts, changes, message",
    [
        ([], {}, "prompt: none given"),
        ([[1], []], {}, "prompt: number 1 is empty"),
        ([[1, 13]], {}, "prompt: token id 13 is outside the model's vocabulary, 0 to 12"),
        ([[-1]], {}, "prompt: token id -1 is outside"),
        ([[1]], {"tokens": 0}, "tokens: 0 must be at least 1"),
        ([[1]], {"tokens": 10**11}, "tokens: 100000000000 must be at least 1 and below"),
        ([[1]], {"temperature": -0.5}, "temperature: -0.5 must be finite and not negative"),
        ([[1]], {"temperature": float("nan")}, "temperature: nan"),
        ([[1]], {"top_k": 0}, "top_k: 0 must be at least 1"),
        ([[1]], {"top_p": 0.0}, "top_p: 0.0 must be in"),
        ([[1]], {"seed": -1}, "seed: -1 must be in 0 to"),
    ],
)
def test_bad_arguments(prompts, changes, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        generator_of("hostile").generate(prompts, **{"tokens": TOKENS, **changes})
    assert "\n" not in str(error.value)


def test_a_prompt_shorter_than_the_prefix():
    message = r"^prompt: number 1 has 2 tokens, but the model sees its first 3 \(model\.prefix\) from both sides .* give at least 3$"
    with pytest.raises(ValueError, match=message):
        generator_of("sinks").generate([[1, 2, 3], [4, 5]], TOKENS)


def test_sinks_that_are_left_out_would_be_noticed(monkeypatch):
    monkeypatch.setattr(attention, "with_sinks", lambda o_BSNW, lse_BNS, sinks_N: o_BSNW)
    assert built("sinks").generate(LONGER, TOKENS) != recomputed("sinks")


def test_a_mesh_that_does_not_fit():
    model = hostile()
    build = lambda shape: build_generator(run_config(model), make_mesh(shape, jax.devices()[: shape.devices]), {})  # noqa: E731
    with pytest.raises(ValueError, match=r"^mesh\.tensor: 3 cannot share 4 query heads and 2 key/value heads; sizes that work: 1, 2, 4$"):
        build(MeshShape(tensor=3))
    with pytest.raises(ValueError, match=r"^mesh\.pipe: 2 must be 1: generation splits over data, expert, seq and tensor only"):
        build(MeshShape(pipe=2))
    experts = dataclasses.replace(model, mlp_bias=False, moe=MoeConfig(experts=12))
    with pytest.raises(ValueError, match=r"^mesh\.expert: 8 does not divide model\.moe\.experts 12; sizes that work: 1, 2, 3, 4, 6, 12$"):
        parameter_places(run_config(experts), make_mesh(MeshShape(expert=8), jax.devices()))


def test_a_diverged_model_is_refused(monkeypatch):
    model = generator_of("hostile")
    monkeypatch.setitem(model.params, "norm", {"weight": model.params["norm"]["weight"] * jnp.nan})
    with pytest.raises(ValueError, match="^checkpoint: its logits are not finite"):
        model.generate(PROMPTS, TOKENS)


TEXT = ["the quick brown fox", "a lazy dog"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint folder of two steps: step 1 as written on tensor 2 with its padding, step 2 without any."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = train_tokenizer(TEXT, 257)
    model = hostile(vocabulary=257, rope=RopeConfig(type="linear", theta=123.0, factor=2.0, original_length=8))
    config = Config(model=model, train=run_config(model).train, mesh=MeshShape(data=2, tensor=2))
    with Checkpoints(folder) as checkpoints:
        for step, tensor in ((1, 2), (2, 1)):
            params = jax.tree.map(jnp.asarray, values(specs_of(model, tensor), seed=7))
            checkpoints.save(step, {"params": params, "step": jnp.int32(step)}, configfile.dump(config))
            checkpoints.wait()
    save_tokenizer(tokenizer, folder)
    return folder


def test_checkpoints_of_any_padding_on_any_mesh(saved):
    """Padded for tensor 2 and read on 4; without padding, read on one."""
    found = []
    for step, mesh in ((1, MeshShape(tensor=4)), (None, MeshShape(data=2))):
        generator, tokenizer = generation.load(saved, mesh, step)
        with pytest.warns(UserWarning, match="past the 16 that model.rope"):
            found.append(generation.text(generator, tokenizer, TEXT, tokens=6))
    assert found[0] == found[1] and all(found[0])


def test_the_command(saved, capsys):
    argv = ["generate", str(saved), "--prompt", TEXT[0], "--prompt", TEXT[1], "--tokens", "6", "--mesh", "tensor=4"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cli.main(argv) == 0
        printed = capsys.readouterr().out
        assert cli.main([*argv, "--step", "1", "--temperature", "2", "--top-k", "9", "--top-p", "0.9", "--seed", "4"]) == 0
    sampled = capsys.readouterr().out
    assert printed.startswith(TEXT[0]) and f"\n\n{TEXT[1]}" in printed and printed != sampled


@pytest.mark.parametrize(
    "options, message",
    [
        (["--prompt", ""], "prompt: '' holds no token"),
        (["--prompt", "a", "--mesh", "tensor=16"], "mesh: 16 devices are asked for and there are 8"),
        (["--prompt", "a", "--mesh", "tensor=3"], "mesh.tensor: 3 cannot share"),
        (["--prompt", "a", "--mesh", "pipe=2"], "mesh.pipe: 2 must be 1"),
        (["--prompt", "a", "--step", "7"], "has no complete step 7 (steps there: 1, 2)"),
        (["--prompt", "a", "--top-p", "1.5"], "--top-p: 1.5 must be in (0, 1]"),
    ],
)
def test_bad_commands(saved, capsys, options, message):
    assert cli.main(["generate", str(saved), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_a_folder_without_a_checkpoint(tmp_path, capsys):
    for folder, message in ((tmp_path / "gone", "does not exist"), (tmp_path, "has no complete checkpoint")):
        assert cli.main(["generate", str(folder), "--prompt", "a"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "gone").exists()


def test_a_prompt_sends_what_each_layer_sees():
    """Keys and values of a contiguous ring of 4: a window of 3 reaches one device back, the other layer all three."""
    model, seed = MODELS["hostile"]
    assert model.layer_windows == (3, 0)
    config = run_config(model, context=ContextConfig(layout="contiguous"))
    generator = build_generator(config, make_mesh(MeshShape(seq=4), jax.devices()[:4]), values(specs_of(model, 1), seed))
    prompts, length = generator._batch(PROMPTS, TOKENS)
    program = generator._program.trace(generator.params, prompts, Choice(-1, 0, 0.0, 0, 0.0), length=length, how="likeliest")
    jaxpr = str(program.jaxpr)
    assert jaxpr.count("ppermute[") == 2 * (1 + 3 - 1)  # the other layer's second and third sends are a loop's
