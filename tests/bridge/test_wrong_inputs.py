"""Inputs that nobody listed: every wrong one is a line or a report with exit code 2, and leaves nothing; every right one is right."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from jaxpar.train.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from tests.bridge import hostile
from tests.bridge.loading import bits, load_quietly
from torch_bridge import cli, reference
from torch_bridge.convert import dtype_name, read_model
from torch_bridge.formats.huggingface import check_free, whole_folder

ROOT = Path(__file__).parent.parent.parent
TEXT = ["the quick brown fox jumps over the lazy dog\n" * 40]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A Llama in one file and in several, and its checkpoint."""
    base = tmp_path_factory.mktemp("originals")
    hostile.save(base / "llama", "llama")
    hostile.model("llama").save_pretrained(base / "sharded", max_shard_size="30KB")
    assert cli.main(["import", str(base / "llama"), str(base / "checkpoint")]) == 0
    return base


@pytest.fixture
def copy(originals, tmp_path):
    def made(name):
        shutil.copytree(originals / name, tmp_path / name)
        return tmp_path / name

    return made


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *arguments):
    """The report of a command that fails as a user's mistake must."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and err.startswith("torch-bridge: error: ") and "Traceback" not in err
    assert all(len(line) < 1500 for line in err.splitlines())
    return err


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- folders ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["nothing", "itself", "a folder", "a pipe"])
def test_what_is_no_file_is_called_what_it_is(capsys, copy, name, kind):
    """A snapshot of a cache whose blobs are gone is made of links to nothing."""
    folder = copy("llama")
    path = folder / name
    path.unlink()
    if kind in ("nothing", "itself"):
        path.symlink_to(folder / ("absent" if kind == "nothing" else name))
    elif kind == "a folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    found = {"nothing": "absent, which is not there", "itself": "which is not there", "a folder": "a folder", "a pipe": "something else"}
    err = refused(capsys, "inspect", folder)
    assert f"  {name}: expected a file, found " in err and found[kind] in err and err.count("\n") == 2


def test_links_are_followed(capsys, copy, tmp_path):
    folder = copy("llama")
    for number, path in enumerate(list(folder.iterdir())):
        path.rename(tmp_path / f"blob{number}")
        path.symlink_to(tmp_path / f"blob{number}")
    assert run(capsys, "import", folder, tmp_path / "out")[0] == 0
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_a_shard_that_is_a_link_to_nothing(capsys, copy):
    folder = copy("sharded")
    shard = next(folder.glob("model-00001-*"))
    shard.unlink()
    shard.symlink_to("gone")
    assert "found a link to gone, which is not there" in refused(capsys, "inspect", folder)


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "й" * 130 + ".safetensors"])
def test_file_names_that_no_disk_holds(capsys, copy, name):
    folder = copy("sharded")
    edit(folder / INDEX, weight_map={**json.loads((folder / INDEX).read_text())["weight_map"], "more": name})
    assert "expected the name of a .safetensors file" in refused(capsys, "inspect", folder)


def test_one_tensor_in_two_shards(capsys, copy):
    """The index decides where a tensor is; a file that holds more than it says is refused."""
    folder = copy("sharded")
    table = json.loads((folder / INDEX).read_text())["weight_map"]
    first = table["model.embed_tokens.weight"]
    shutil.copyfile(folder / first, folder / "again.safetensors")
    edit(folder / INDEX, weight_map={**table, "model.embed_tokens.weight": "again.safetensors"})
    assert "again.safetensors" in refused(capsys, "inspect", folder)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("scalar", torch.tensor(1.0)),
        ("empty", torch.zeros(0, 3)),
        ("модель.重み", torch.ones(2)),
        ("a\n\x1b[31m", torch.ones(2)),
        ("model.layers.٣.mlp.up_proj.weight", torch.ones(2)),
        ("model.layers.00.mlp.up_proj.weight", torch.ones(2)),
        ("model.norm.weight", torch.tensor(1.0)),
        ("model.norm.weight", torch.zeros(0)),
        ("model.norm.weight", torch.ones(24, 1)),
        ("model.norm.weight", torch.ones(24).to(torch.float8_e4m3fn)),
        ("model.norm.weight", torch.ones(24, dtype=torch.complex64)),
        ("model.norm.weight", torch.ones(24, dtype=torch.bool)),
    ],
)
def test_tensors_that_do_not_belong(capsys, copy, name, tensor):
    folder = copy("llama")
    save_file({**load_file(folder / "model.safetensors"), name: tensor}, folder / "model.safetensors")
    err = refused(capsys, "inspect", folder)
    assert name.encode("unicode_escape").decode() in err.encode("unicode_escape").decode().replace("\\\\", "\\")
    assert err.count("\n") == 2 and "\x1b" not in err


def test_a_mixture_of_dtypes(capsys, copy, tmp_path):
    """`--any-dtype` takes every float, each rounded once; what is no float stays refused."""
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].double() + 1e-12
    save_file(tensors, folder / "model.safetensors")
    assert refused(capsys, "import", folder, tmp_path / "out").count("\n") == 3
    assert run(capsys, "import", folder, tmp_path / "out", "--any-dtype")[0] == 0
    assert run(capsys, "export", tmp_path / "out", tmp_path / "back")[0] == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], tensor.float()) for name, tensor in tensors.items())


@pytest.mark.parametrize("low", [0, -1.0])
def test_llama3_rope_that_torch_cannot_compute(capsys, copy, low):
    folder = copy("llama")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edit(folder / "config.json", rope_parameters={**rope, "low_freq_factor": low})
    assert "low_frequency_factor" in refused(capsys, "inspect", folder)


@pytest.mark.parametrize("value", ["8.0", None, True, [8.0]])
def test_numbers_of_llama3_rope_as_other_types(capsys, copy, value):
    folder = copy("llama")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    for key in ("factor", "high_freq_factor"):
        edit(folder / "config.json", rope_parameters={**rope, key: value})
        assert f"rope_parameters.{key}: expected a number" in refused(capsys, "inspect", folder)


def test_optional_settings_left_out(copy):
    """Without architectures, with null heads and widths that torch derives: what torch's class makes of it."""
    folder = copy("llama")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model(folder).model.kv_heads == 2
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "self_attn" not in name}
    for layer in range(3):
        for part, shape in {"q": (24, 24), "k": (24, 24), "v": (24, 24), "o": (24, 24)}.items():
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = torch.randn(shape)
            tensors[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.randn(24)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    del config["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": None}))
    model = read_model(folder).model
    assert (model.kv_heads, model.head_width) == (4, 6)
    load_quietly(folder)


# -- tokenizers and what else lies beside the weights ---------------------------------------------------------------------------------


def test_tokenizers_that_do_not_fit_are_noted(capsys, copy, tmp_path):
    folder = copy("llama")
    save_tokenizer(train_tokenizer(TEXT, 300), folder)
    code, out, _ = run(capsys, "import", folder, tmp_path / "one")
    last = load_tokenizer(folder / "tokenizer.json").size - 1
    assert code == 0 and f"note: tokenizer.json has ids up to {last}, the model up to 96" in out
    (folder / "tokenizer.json").write_text("{}")
    code, out, _ = run(capsys, "import", folder, tmp_path / "two")
    assert code == 0 and "note: tokenizer.json cannot be used" in out and out.count("\n") == 3
    assert "note: tokenizer.json cannot be used" in run(capsys, "inspect", folder)[1]


def test_what_lies_beside_the_weights_survives(capsys, copy, tmp_path):
    folder = copy("llama")
    save_tokenizer(train_tokenizer(TEXT, 300), folder)
    template = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    files = {
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "extra": "é"}),
        "special_tokens_map.json": json.dumps({"eos_token": {"content": "<|end|>", "lstrip": False}}),
        "added_tokens.json": "{}",
        "chat_template.jinja": template,
        "additional_chat_templates/tool_use.jinja": template + "tools",
        "generation_config.json": json.dumps({"temperature": 0.6, "do_sample": True, "eos_token_id": [0, 1]}),
        "merges.txt": "#version: 0.2\r\na b\n",
    }
    (folder / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    assert run(capsys, "import", folder, tmp_path / "checkpoint")[0] == 0
    assert run(capsys, "export", tmp_path / "checkpoint", tmp_path / "out")[0] == 0
    for name, text in files.items():
        assert (tmp_path / "out" / name).read_bytes() == text.encode(), name
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert bits(tmp_path / "out") == bits(folder)


def test_export_without_a_tokenizer(capsys, originals, tmp_path):
    assert run(capsys, "export", originals / "checkpoint", tmp_path / "out")[0] == 0
    load_quietly(tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").exists()


# -- the command line -----------------------------------------------------------------------------------------------------------------

PARITY = [
    (["--tolerance", "nan"], "tolerance"),
    (["--tolerance", "inf"], "tolerance"),
    (["--tolerance", "-1"], "tolerance"),
    (["--steps", "0"], "steps"),
    (["--steps", "1.5"], "--steps"),
    (["--dtype", "bfloat16"], "dtype"),
    (["--mesh", "tensor=3"], "does not divide model.heads 4"),
    (["--mesh", "tensor=0"], "mesh.tensor"),
    (["--mesh", "data=2,data=2"], "--mesh"),
    (["--mesh", "data=4096"], "4096 devices"),
    (["--json", "."], "is a folder"),
    (["--json", "absent/x.json"], "no folder"),
]


@pytest.mark.parametrize(("arguments", "words"), PARITY)
def test_arguments_of_parity(capsys, originals, arguments, words):
    assert words in refused(capsys, "parity", originals / "llama", *arguments)


def test_what_torch_cannot_load_is_one_line(copy):
    """Settings that change no number here, and that transformers stumbles over with errors of any type."""
    folder = copy("llama")
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="transformers cannot load it") as caught:
        reference.load(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


EXPORT = [
    (["--dtype", "float8"], "dtype: float8 is not one of float64"),
    (["--dtype", ""], "dtype"),
    (["--dtype", "int32"], "dtype"),
    (["--family", "bert"], "model_type"),
    (["--family", ""], "model_type"),
    (["--step", "-1"], "no complete step -1"),
    (["--shard-gigabytes", "inf"], "--shard-gigabytes"),
    (["--shard-gigabytes", "1e300"], "--shard-gigabytes"),
]


@pytest.mark.parametrize(("arguments", "words"), EXPORT)
def test_arguments_of_export(capsys, originals, tmp_path, arguments, words):
    assert words in refused(capsys, "export", originals / "checkpoint", tmp_path / "a" / "b", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_a_dtype_cannot_hold(capsys, copy, tmp_path):
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 70000.0
    tensors["lm_head.weight"][0, 0] = float("inf")  # infinite before: left so
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert run(capsys, "import", folder, tmp_path / "checkpoint")[0] == 0
    err = refused(capsys, "export", tmp_path / "checkpoint", tmp_path / "out", "--dtype", "float16")
    assert "float16 cannot hold the weight 70000.0" in err and not (tmp_path / "out").exists()
    assert run(capsys, "export", tmp_path / "checkpoint", tmp_path / "out", "--dtype", "bfloat16")[0] == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"][0, 0] == float("inf")


def test_dtypes_by_every_name():
    assert [dtype_name(name) for name in ("float16", "torch.bfloat16", np.float32, np.dtype(np.float64))] == [
        "float16",
        "bfloat16",
        "float32",
        "float64",
    ]


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x"])
def test_tolerances_of_diff(capsys, originals, value):
    assert "--tolerance" in refused(capsys, "diff", originals / "llama", originals / "llama", "--tolerance", value)


@pytest.mark.parametrize("command", ["import", "export"])
def test_folders_that_cannot_be_made(capsys, originals, tmp_path, command):
    """Said before anything is read, and nothing is left."""
    given = originals / ("llama" if command == "import" else "checkpoint")
    (tmp_path / "file").write_text("x")
    assert "exists already and is a file" in refused(capsys, command, given, tmp_path / "file")
    assert "is a file, no folder can be made in it" in refused(capsys, command, given, tmp_path / "file" / "a" / "b")
    assert "exists already and is not empty" in refused(capsys, command, given, tmp_path)
    refused(capsys, command, given, tmp_path / ("x" * 300))
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "x"


def test_folders_that_are_links_or_have_no_name(capsys, originals, tmp_path, monkeypatch):
    for name in ("full", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "full")
    (tmp_path / "new").symlink_to(tmp_path / "later")
    monkeypatch.chdir(tmp_path / "here")
    for name in (tmp_path / "link", tmp_path / "new", "."):
        assert run(capsys, "export", originals / "checkpoint", name)[0] == 0
    monkeypatch.chdir(tmp_path)
    for name in ("full", "later", "here"):
        assert (tmp_path / name / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "here", "later", "link", "new"]


BESIDE = [
    ("{", "no JSON"),
    ("[]", "no object"),
    ('{"model_type": 3}', "model_type"),
    ('{"dtype": 5}', "dtype"),
    ('{"a": 1, "a": 2}', "twice"),
]


@pytest.mark.parametrize(("text", "words"), BESIDE)
def test_a_checkpoint_whose_config_json_was_damaged(capsys, copy, tmp_path, text, words):
    folder = copy("checkpoint")
    (folder / "huggingface" / "config.json").write_text(text)
    err = refused(capsys, "export", folder, tmp_path / "out")
    assert "huggingface/config.json" in err and words in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_checkpoint_whose_data_was_damaged(capsys, copy, tmp_path):
    folder = copy("checkpoint")
    for path in (folder / "0" / "params").rglob("d/*"):
        os.truncate(path, 10)
    err = refused(capsys, "export", folder, tmp_path / "out")
    assert "cannot be read, its files are damaged: use another step" in err and err.count("\n") == 1


LAUNCHES = [
    {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
    {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "a",
        "SLURM_JOB_ID": "7",
    },
]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_one_of_several_processes_refuses(capsys, originals, tmp_path, monkeypatch, launch):
    """Each would do the whole, and write the same folder."""
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    assert "2 were started: start it once" in refused(capsys, "export", originals / "checkpoint", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_batch_script_before_its_srun_is_one_process(capsys, originals, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert run(capsys, "inspect", originals / "llama")[0] == 0


def test_interrupted_by_the_user(capsys, originals, monkeypatch):
    monkeypatch.setattr("torch_bridge.inspection.summary", lambda source: (_ for _ in ()).throw(KeyboardInterrupt()))
    code, _, err = run(capsys, "inspect", originals / "llama")
    assert code == 130 and err == "torch-bridge: interrupted\n"


def started(arguments, **options):
    command = [sys.executable, "-m", "torch_bridge.cli", *map(os.fspath, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_output_that_nobody_reads_on(originals):
    """As of `inspect DIR --plan | head -1`."""
    with started(["inspect", originals / "llama", "--plan"]) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(120), process.stderr.read()) == (141, b"")


@pytest.mark.slow
def test_names_beyond_the_terminals_encoding(copy):
    folder = copy("llama")
    odd = Path(os.fsdecode(os.fsencode(folder) + b"\xff\xe9"))
    folder.rename(odd)
    with started(["inspect", odd, "--plan"], env={**os.environ, "PYTHONIOENCODING": "ascii"}) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, b"") and b"\\udcff" in out and b"3 \\xd7 4" in out


# -- what stops an export midway ----------------------------------------------------------------------------------------------------

WRITE = """
import os, resource, signal, sys
from pathlib import Path
import numpy as np
from torch_bridge.formats.huggingface import whole_folder, write_tensors
from torch_bridge.views import ArrayView

class Killing(ArrayView):
    def read(self, index, out):
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
with whole_folder(Path(sys.argv[1])) as folder:
    last = (Killing if sys.argv[2] == "kill" else ArrayView)(np.zeros(2**15, np.float32))
    write_tensors(folder, {"a": ArrayView(np.zeros(2**14 - 64, np.float32)), "b": last}, 2**16)
"""


def write(folder, how):
    return subprocess.run([sys.executable, "-c", WRITE, str(folder), how], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_killed_midway(tmp_path):
    """No folder of that name, whole or half, and the next attempt succeeds."""
    out = tmp_path / "made" / "out"
    assert write(out, "kill").returncode == -9
    assert not out.exists()
    assert [path.name.startswith(".out.") for path in out.parent.iterdir()] == [True]
    assert write(out, "whole").returncode == 0
    assert len(list(out.glob("*.safetensors"))) == 2


def test_full_disk(tmp_path):
    done = write(tmp_path / "made" / "out", "full")
    assert done.returncode == 1 and "File too large; free space or choose another folder, nothing was left there" in done.stderr
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import asyncio.base_events, resource, sys, time
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
turn = asyncio.base_events.BaseEventLoop._run_once
pause = float(sys.argv.pop(1))
def later(loop):
    time.sleep(pause)
    turn(loop)
asyncio.base_events.BaseEventLoop._run_once = later
from torch_bridge import cli
sys.exit(cli.main())
"""


@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_a_full_disk_during_an_import(originals, tmp_path, pause):
    """The checkpoint's writer has threads of its own, which go on for a moment; on a busy machine for longer."""
    command = [sys.executable, "-c", LIMITED, str(pause), "import", str(originals / "llama"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 2 and "free space or choose another folder" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr  # of writes that fail after the first
    assert list(tmp_path.iterdir()) == []


def test_folders_made_above_go_too(tmp_path):
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "a" / "b" / "c"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    check_free(tmp_path / "a" / "b")
