"""The commands end to end: inspect, import, train on, generate, export, diff; what they print, their exit codes."""

import json

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
import yaml

from jaxpar import configfile
from jaxpar.config import MeshShape
from jaxpar.generation import load, text
from jaxpar.train import loop
from jaxpar.train.checkpoint import SavedCheckpoints
from jaxpar.train.tokenizer import save_tokenizer, train_tokenizer
from tests.bridge import hostile
from tests.bridge.loading import bits, load_quietly
from torch_bridge import cli
from torch_bridge.compare import compare
from torch_bridge.views import ArrayView

VOCABULARY = 301
TEXT = ["the quick brown fox jumps over the lazy dog\n" * 40, "a journey of a thousand miles begins with a single step\n" * 40]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def folder(base):
    """A tied bfloat16 Qwen3 with a tokenizer of its own."""
    path = base / "qwen3"
    hostile.model("qwen3", vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=0).to(torch.bfloat16).save_pretrained(path)
    save_tokenizer(train_tokenizer(TEXT, 300), path)
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}))
    return path


@pytest.fixture(scope="module")
def run_file(base):
    (base / "corpus.txt").write_text("".join(TEXT))
    raw = {
        "model": {"dropout": 0.1},
        "mesh": {"data": 2, "tensor": 2},
        "data": {"source": "text", "path": str(base / "corpus.txt"), "sequence": 16},
        "train": {"steps": 3, "batch": 4, "compute_dtype": "float32", "attention_block": 16, "loss_chunk": 16},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every": 3},
    }
    path = base / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="module")
def checkpoint(base, folder, run_file):
    assert cli.main(["import", str(folder), str(base / "ckpt"), "--run", str(run_file), "--set", "train.seed=5"]) == 0
    return base / "ckpt"


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_inspect(capsys, folder):
    code, out, _ = run(capsys, "inspect", folder)
    assert code == 0
    assert out.startswith(f"{folder}: qwen3, ") and "bfloat16" in out.splitlines()[0]
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert lines["model.head_width"].split(maxsplit=2)[1:] == ["10", "config.json: head_dim"]
    assert lines["model.rope.theta"].endswith("config.json: rope_parameters.rope_theta")
    assert "q_proj" not in out and "tokenizer.json" in out


def test_inspect_plan(capsys, folder):
    _, out, _ = run(capsys, "inspect", folder, "--plan")
    line = next(line for line in out.splitlines() if line.startswith("layers/attention/query "))
    assert line.split("  ")[1:] != [] and "3 × 4 × 10 × 24" in line and "model.layers.{0..2}.self_attn.q_proj.weight" in line
    assert "40 × 24" in line and line.endswith("model.safetensors")


def test_import_makes_a_checkpoint_of_step_0(checkpoint, folder):
    with SavedCheckpoints(checkpoint) as saved:
        assert saved.steps() == [0]
        config = configfile.from_dict(saved.config(0))
        leaves = saved.record(0)["leaves"]
    assert leaves["params/embedding/table"] == [[VOCABULARY, 24], "float32"]
    assert any(name.startswith("optimizer/") for name in leaves)
    assert config == configfile.load(checkpoint / "run.yaml")
    assert (config.model.vocabulary, config.model.dropout, config.train.seed) == (VOCABULARY, 0.1, 5)
    assert config.data.tokenizer == str(checkpoint / "tokenizer.json")
    names = {path.name for path in (checkpoint / "huggingface").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def test_what_was_imported_goes_back_unchanged(capsys, base, checkpoint, folder):
    assert run(capsys, "export", checkpoint, base / "back", "--step", "0")[0] == 0
    assert bits(base / "back") == bits(folder)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (base / "back" / name).read_text() == (folder / name).read_text() or json.loads(
            (base / "back" / name).read_text()
        ) == json.loads((folder / name).read_text())
    assert run(capsys, "diff", folder, base / "back") == (0, "35 tensors, 0 differ\n", "")
    assert run(capsys, "diff", folder, checkpoint)[:2] == (0, "35 tensors, 0 differ\n")


def test_generate_from_the_import_is_torchs_greedy_choice(checkpoint, folder):
    generator, tokenizer = load(checkpoint, MeshShape(tensor=2), step=0)
    found = text(generator, tokenizer, ["the quick"], tokens=6)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("the quick")])
    # greedily, token by token: what a generation configuration may add is not meant
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    new = ids[0, len(tokenizer.encode("the quick")) :].tolist()
    if tokenizer.end in new:
        new = new[: new.index(tokenizer.end)]
    assert found == tokenizer.decode(new)


def test_training_goes_on_from_the_import_and_is_exported(capsys, base, checkpoint, folder):
    config = configfile.load(checkpoint / "run.yaml")
    assert loop.train(config, devices=jax.devices()[:4]) == 0
    with SavedCheckpoints(checkpoint) as saved:
        assert saved.steps() == [0, 3]
    assert run(capsys, "export", checkpoint, base / "trained", "--dtype", "float32", "--shard-gigabytes", "0.00002")[0] == 0
    assert len(list((base / "trained").glob("model-*.safetensors"))) > 2
    model = load_quietly(base / "trained")
    assert model.dtype == torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(base / "trained")
    assert tokenizer.decode(tokenizer("the quick brown")["input_ids"]) == "the quick brown" and tokenizer.eos_token == "<|end|>"
    code, out, _ = run(capsys, "diff", folder, base / "trained")
    assert code == 1 and "35 tensors, 35 differ" in out
    worst = float(out.splitlines()[0].split()[-1])
    assert 1e-4 < worst < 1  # learning rate × steps, relative to weights of that size
    assert run(capsys, "diff", folder, base / "trained", "--tolerance", "1")[0] == 0


def test_a_checkpoint_of_jaxpars_own(capsys, base, run_file):
    """Trained from nothing: no config.json came with it, and its tokenizer is jaxpar's."""
    own = base / "own"
    sizes = {"vocabulary": 300, "width": 16, "layers": 1, "heads": 4, "kv_heads": 2, "mlp_width": 20, "tied": True}
    overrides = [f"model.{key}={json.dumps(value)}" for key, value in sizes.items()]
    config = configfile.load(run_file, [*overrides, f"checkpoint.folder={own}", "data.vocabulary=300", "train.steps=1", "model.dropout=0"])
    loop.train(config, devices=jax.devices()[:4])
    assert run(capsys, "export", own, base / "fresh")[0] == 0
    model = load_quietly(base / "fresh")
    raw = json.loads((base / "fresh" / "config.json").read_text())
    assert raw["model_type"] == "llama" and raw["max_position_embeddings"] == 16 and raw["dtype"] == "float32"
    tokenizer = transformers.AutoTokenizer.from_pretrained(base / "fresh")
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0 and tokenizer.eos_token == "<|end|>"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.showwarning", lambda *arguments, **options: None)
        ids = model.generate(torch.tensor([tokenizer("the quick")["input_ids"]]), max_new_tokens=4, do_sample=False)
    assert ids.shape[1] > len(tokenizer("the quick")["input_ids"])
    assert run(capsys, "diff", own, base / "fresh")[:2] == (0, f"{len(bits(base / 'fresh'))} tensors, 0 differ\n")


def test_diff_of_what_cannot_be_compared(capsys, base, folder):
    hostile.save(base / "llama", "llama")
    code, out, _ = run(capsys, "diff", folder, base / "llama")
    assert code == 1 and "[301, 24] and [97, 24]" in out and "only in A" in out and "only in B" in out


def test_compare():
    def views(**arrays):
        return {key: ArrayView(np.asarray(value)) for key, value in arrays.items()}

    nan = float("nan")
    first = views(same=[1.0, nan], off=[1.0, -2.0], bad=[1.0, nan], empty=np.zeros((0, 3)))
    second = views(same=[1.0, nan], off=np.float32([1.0, -4.0]), bad=[1.0, 2.0], empty=np.zeros((0, 3)))
    found = {difference.key: difference for difference in compare(first, second)}
    assert found["same"].equal and found["empty"].equal
    assert (found["off"].absolute, found["off"].relative) == (2.0, 0.5)
    assert found["bad"].relative == float("inf") and not found["bad"].equal


def test_scalars_are_compared():
    assert not next(compare({"a": ArrayView(np.array(1.0))}, {"a": ArrayView(np.array(2.0))})).equal


WRONG = [
    (["inspect", "absent"], "no such folder"),
    (["import", "absent", "out"], "no such folder"),
    (["import", "absent", "out", "--set", "a=b"], "--set: changes a run file"),
    (["import", "absent", "out", "--run", "absent.yaml"], "absent.yaml: No such file"),
    (["export", "absent", "out"], "absent does not exist"),
    (["export", "absent", "out", "--shard-gigabytes", "0"], "--shard-gigabytes"),
    (["diff", "absent", "absent", "--tolerance", "-1"], "--tolerance"),
    (["diff", "absent", "absent"], "no such folder"),
    (["melt"], "invalid choice"),
    ([], "required"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_mistakes_are_one_report_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and err.startswith("torch-bridge: error: ") and words in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_mistakes_with_what_is_there(capsys, base, checkpoint, folder, run_file):
    before = sorted(base.iterdir())
    assert "exists already" in run(capsys, "import", folder, checkpoint)[2]
    assert "exists already" in run(capsys, "export", checkpoint, folder)[2]
    assert "no complete step 77" in run(capsys, "export", checkpoint, base / "new", "--step", "77")[2]
    assert "dtype: int8" in run(capsys, "export", checkpoint, base / "new", "--dtype", "int8")[2]
    assert "model.qk_norm" in run(capsys, "export", checkpoint, base / "new", "--family", "llama")[2]
    assert "model_type: 'gpt2'" in run(capsys, "export", checkpoint, base / "new", "--family", "gpt2")[2]
    err = run(capsys, "import", folder, base / "new", "--run", run_file, "--set", "mesh.tensor=3")[2]
    assert "mesh.tensor: 3 does not divide" in err
    assert sorted(base.iterdir()) == before


def test_one_file_with_a_head_that_differs_from_its_tied_table(capsys, tmp_path):
    hostile.save(tmp_path / "in", "llama-tied")
    tensors = safetensors.torch.load_file(tmp_path / "in" / "model.safetensors")
    safetensors.torch.save_file({**tensors, "lm_head.weight": torch.zeros(97, 24)}, tmp_path / "in" / "model.safetensors")
    code, _, err = run(capsys, "import", tmp_path / "in", tmp_path / "out")
    assert code == 2 and "lm_head.weight: expected the embedding's values" in err and not (tmp_path / "out").exists()
