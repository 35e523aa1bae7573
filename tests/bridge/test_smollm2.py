"""A real model: SmolLM2-135M-Instruct from PyPI, imported, compared with torch in float32, trained on, exported.

Dims: B rows, S sequence, V vocabulary.
"""

import importlib.util
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxpar.config import Config, DataConfig, MeshShape, OptimizerConfig, TrainConfig
from jaxpar.generation import build_generator
from jaxpar.mesh import make_mesh
from jaxpar.train.data import Loader, Rows, local_sequences, open_data, place
from jaxpar.train.step import build_training
from tests.bridge.loading import load_quietly
from torch_bridge import reference
from torch_bridge.convert import export_params, import_params, read_model
from torch_bridge.parity import forward

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (find_spec("gguf") and find_spec("accelerate")), reason="transformers' GGUF reader needs gguf and accelerate"),
]
ROWS, SEQUENCE, STEPS, TOKENS = 4, 96, 20, 32
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder():
    path = Path(__file__).parent.parent.parent / "scripts" / "fetch_smollm2.py"
    spec = importlib.util.spec_from_file_location("fetch_smollm2", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    try:
        return script.fetch()
    except OSError as error:
        pytest.skip(f"no network: {error}")


@pytest.fixture(scope="module")
def source(folder):
    return read_model(folder)


@pytest.fixture(scope="module")
def torch_side(folder):
    return reference.load(folder, "float32")


@pytest.fixture(scope="module")
def config(folder, source):
    """Twenty steps on the demo's corpus, one device."""
    return Config(
        model=source.model,
        data=DataConfig(tokenizer=str(folder / "tokenizer.json"), sequence=SEQUENCE),
        optimizer=OptimizerConfig(learning_rate=1e-4, schedule="constant", warmup=2),
        train=TrainConfig(steps=STEPS, batch=ROWS, zero=0, compute_dtype="float32", attention_block=SEQUENCE, loss_chunk=ROWS * SEQUENCE),
    )


@pytest.fixture(scope="module")
def training(config):
    return build_training(config, make_mesh(config.mesh, jax.devices()[:1]))


@pytest.fixture(scope="module")
def params(source, training):
    return import_params(source, training.mesh, training.shardings["params"], "float32")


@pytest.fixture(scope="module")
def rows(config):
    tokens, _ = open_data(config.data)
    return Rows(tokens, SEQUENCE, config.model.vocabulary)


@pytest.fixture(scope="module")
def text(rows):
    """A batch [1, B, S] of the corpus, one document a row."""
    whole = (row for row in map(rows.__getitem__, range(50, len(rows))) if (row["segments"] == 1).all() and (row["labels"] >= 0).all())
    found = [next(whole) for _ in range(ROWS)]
    batch = {name: np.stack([row[name] for row in found])[None] for name in found[0]}
    return batch | {"rows": np.arange(ROWS, dtype=np.int32)[None]}


@pytest.fixture(scope="module")
def torch_logits(torch_side, text):
    return torch_side.logits(text["ids"][0])


@pytest.fixture(scope="module")
def logits(training, params, text):
    return forward.logits(training, params, text)


def perplexity(logits_BSV, labels_BS):
    """exp of the mean token loss, in float64."""
    scores = logits_BSV.astype(np.float64)
    top = scores.max(-1, keepdims=True)
    normalizer = np.log(np.exp(scores - top).sum(-1)) + top[..., 0]
    return math.exp((normalizer - np.take_along_axis(scores, labels_BS[..., None], -1)[..., 0]).mean())


def off(found, wanted):
    """Largest difference of logits, relative to the range of the wanted ones."""
    return np.abs(found - wanted).max() / (wanted.max() - wanted.min())


def test_logits_and_perplexity_are_torchs(logits, torch_logits, text, config):
    labels = text["labels"][0]
    ours, theirs = perplexity(logits, labels), perplexity(torch_logits, labels)
    print(f"logits: {off(logits, torch_logits):.1e} of their range; perplexity {ours:.6f}, torch's off by {abs(theirs / ours - 1):.1e}")
    assert off(logits, torch_logits) < 1e-4
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours < config.model.vocabulary / 500, "a model that has not learned English"


def test_another_rope_theta_shows(training, params, text, config, torch_logits):
    model = replace(config.model, rope=replace(config.model.rope, theta=10_000.0))
    other = build_training(replace(config, model=model), training.mesh)
    assert off(forward.logits(other, params, text), torch_logits) > 1e-2


@pytest.fixture(scope="module")
def prompt(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]
    return tokenizer, ids


def greedy(model, ids):
    """`TOKENS` ids that transformers puts after `ids`, past the end of the answer."""
    model.generation_config.eos_token_id = None
    given = torch.tensor([ids])
    with torch.no_grad():
        found = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=TOKENS)
    return found[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def answer(torch_side, prompt):
    tokenizer, ids = prompt
    found = greedy(torch_side.model, ids)
    assert len(found) == TOKENS and "Paris" in tokenizer.decode(found)
    return found


@pytest.mark.parametrize("tensor", [1, 3])
def test_greedy_tokens_are_torchs(source, config, prompt, answer, tensor):
    mesh = make_mesh(MeshShape(tensor=tensor), jax.devices()[:tensor])
    generator = build_generator(replace(config, mesh=MeshShape(tensor=tensor)), mesh, import_params(source, mesh, dtype="float32"))
    assert generator.generate([prompt[1]], TOKENS)[0] == answer


def test_training_goes_on_and_the_result_loads_in_transformers(source, config, training, params, rows, text, logits, prompt, tmp_path):
    """Last, for a step takes its state's memory."""
    sharding = training.batch_shardings["ids"]
    loader = Loader(rows, batch=ROWS, accumulation=1, seed=0, shuffle=True)
    state = training.first_state(jax.tree.map(jnp.copy, params))
    losses = []
    for batch in loader.iterate(0, STEPS, local_sequences(sharding, ROWS)):
        state, metrics = training.step(state, place(batch, sharding, ROWS))
        losses.append(float(metrics["loss"]))
    labels = text["labels"][0]
    before, trained = perplexity(logits, labels), forward.logits(training, state["params"], text)
    after = perplexity(trained, labels)
    print(f"{STEPS} steps: perplexity {before:.3f} -> {after:.3f}; losses {' '.join(f'{loss:.3f}' for loss in losses)}")
    assert after < before

    out = export_params(state["params"], source.model, tmp_path / "exported", raw=source.raw, files=source.carried)
    model = load_quietly(out).eval()
    with torch.no_grad():
        found = model(torch.from_numpy(text["ids"][0]).long()).logits.numpy()
    assert off(trained, found) < 1e-4
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"] == prompt[1]
    assert "Paris" in tokenizer.decode(greedy(model, prompt[1]))
