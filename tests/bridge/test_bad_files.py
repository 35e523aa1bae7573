"""Folders with something wrong: one report that lists everything, before a byte of data is read and before anything is written."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE

from tests.bridge import hostile
from torch_bridge import cli
from torch_bridge.convert import read_model
from torch_bridge.formats.safetensors import FileTensor
from torch_bridge.report import BridgeError, Problem

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    base = tmp_path_factory.mktemp("originals")
    for name in ("llama", "llama-tied"):
        hostile.model(name).save_pretrained(base / name, max_shard_size="30KB")
        hostile.model(name).save_pretrained(base / f"{name} single")
    return base


@pytest.fixture
def folder(originals, tmp_path):
    """A copy to break: sharded, or in one file, by name."""

    def copy(name):
        shutil.copytree(originals / name, tmp_path / "in")
        return tmp_path / "in"

    return copy


@pytest.fixture(autouse=True)
def no_data_is_read(monkeypatch, request):
    if "reads" not in request.keywords:
        monkeypatch.setattr(FileTensor, "read", lambda *arguments: pytest.fail("a byte of data was read"))


def problems_of(folder, **options):
    with pytest.raises(BridgeError) as caught:
        read_model(folder, **options)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + len(caught.value.problems) and all(line.startswith("  ") for line in lines[1:])
    return list(caught.value.problems)


def only(folder, **options):
    (problem,) = problems_of(folder, **options)
    return problem


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def shard_of(folder, key):
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][key]


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_sound_folders_pass(folder):
    source = read_model(folder("llama"))
    assert len(source.tensors) == 51 and source.notes == () and source.ignored == {}


def test_missing_shard(folder):
    path = folder("llama")
    table = json.loads((path / INDEX).read_text())["weight_map"]
    files = sorted(set(table.values()))
    assert len(files) >= 3
    (path / files[1]).unlink()
    problem = only(path)
    assert problem.file == files[1] and problem.found == "no such file"
    assert next(key for key, file in table.items() if file == files[1]) in problem.expected


def test_truncated_file(folder):
    path = folder("llama single") / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 100)
    problem = only(path.parent)
    assert (problem.file, problem.expected) == ("model.safetensors", f"{size} bytes")
    assert problem.found.startswith(f"{size - 100} bytes, which cut off model.")


def test_a_stray_file_is_ignored_with_a_note(folder):
    path = folder("llama")
    save_file({"model.norm.weight": torch.full((24,), 77.0)}, path / "old.safetensors")
    (path / "optimizer.pt").write_bytes(b"x")
    source = read_model(path)
    assert [note.split(":")[0] for note in source.notes] == ["old.safetensors", "optimizer.pt"]
    assert source.tensors["model.norm.weight"].path.name.startswith("model-")


def test_index_names_an_absent_tensor(folder):
    path = folder("llama")
    file = shard_of(path, "model.norm.weight")
    rewrite(file, lambda tensors: tensors.pop("model.norm.weight"))
    problem = only(path)
    assert (problem.file, problem.tensor, problem.found) == (file.name, "model.norm.weight", "none of that name")


def test_index_omits_a_tensor(folder):
    path = folder("llama")
    edit(path / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))
    found = problems_of(path)
    assert {problem.tensor for problem in found} == {"model.norm.weight"} and len(found) == 2


@pytest.mark.parametrize(
    "name",
    [
        "../in/model.safetensors",
        "/abs.safetensors",
        "a/b.safetensors",
        "..",
        "x.bin",
        "a\\b.safetensors",
        "",
        3,
        "\0.safetensors",
    ],
)
def test_index_leaves_the_folder(folder, name):
    path = folder("llama")
    edit(path / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    found = problems_of(path)
    assert any(problem.file == INDEX and problem.tensor == "model.norm.weight" and "this folder" in problem.expected for problem in found)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}", '{"weight_map": {}}', '{"weight_map": {"a": "b", "a": "c"}}'])
def test_index_that_is_none(folder, text):
    path = folder("llama")
    (path / INDEX).write_text(text)
    assert only(path).file == INDEX


def test_no_index_for_several_files(folder):
    path = folder("llama")
    (path / INDEX).unlink()
    assert only(path).file == INDEX


def test_both_an_index_and_a_single_file(folder, originals):
    path = folder("llama")
    shutil.copy(originals / "llama single" / "model.safetensors", path)
    assert "torch would read only this one" in only(path).found


def test_shapes_and_dtypes(folder):
    path = folder("llama")
    norm, query = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"

    def transpose(tensors):
        tensors[query] = tensors[query].T.contiguous()

    def narrow(tensors):
        tensors[norm] = tensors[norm].half()

    rewrite(shard_of(path, query), transpose)
    rewrite(shard_of(path, norm), narrow)
    found = {problem.tensor: problem for problem in problems_of(path)}
    assert (found[query].expected, found[query].found) == ("shape [40, 24]", "[24, 40]")
    assert found[norm].found == "F16" and "F32, as config.json says" in found[norm].expected
    assert found.keys() == {norm, query}
    assert only(path, any_dtype=True).tensor == query


def test_dtypes_that_are_no_weights(folder):
    path = folder("llama single")

    def integers(tensors):
        tensors["model.norm.weight"] = torch.ones(24, dtype=torch.int8)

    rewrite(path / "model.safetensors", integers)
    assert only(path, any_dtype=True).found == "I8"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "bfloat16"}, "model."),
        ({"torch_dtype": "float16"}, "torch_dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": 16}, "dtype"),
    ],
)
def test_declared_dtypes(folder, changes, named):
    path = folder("llama single")
    edit(path / "config.json", lambda config: config.update(changes))
    assert any(problem.tensor.startswith(named) for problem in problems_of(path))


def test_torch_dtype_is_read_too(folder):
    path = folder("llama single")
    edit(path / "config.json", lambda config: config.update(torch_dtype=config.pop("dtype")))
    assert read_model(path).dtype == "float32"
    edit(path / "config.json", lambda config: config.pop("torch_dtype"))
    assert read_model(path).dtype == "float32"


def test_unknown_tensor(folder):
    path = folder("llama single")
    rewrite(path / "model.safetensors", lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}))
    problem = only(path)
    assert problem.tensor == "model.layers.0.self_attn.sinks" and problem.found == "unknown, shape [4]"


def test_a_bias_that_the_configuration_does_not_know(folder):
    path = folder("llama single")
    edit(path / "config.json", lambda config: config.update(attention_bias=False))
    assert len(problems_of(path)) == 3 * 4  # q, k, v and o of three layers


def test_rotary_buffers_are_ignored_with_a_reason(folder):
    path = folder("llama single")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(path / "model.safetensors", lambda tensors: tensors.update({name: torch.ones(5)}))
    assert "computed from the configuration" in read_model(path).ignored[name]


class Wrapped(torch.nn.Module):
    """What DDP makes of a name, without a process group."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def fsdp(model):
    """Names as in an FSDP model: every layer and the whole wrapped, layers checkpointed inside."""

    class Inside(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            setattr(self, FSDP_WRAPPED_MODULE, module)

    class Named(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.lm_head = model.model, model.lm_head

    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = Inside(checkpoint_wrapper(layer))
    return Inside(Named(model))


def checkpointed(model):
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = checkpoint_wrapper(layer)
    return model


WRAPPINGS = {"compile": torch.compile, "ddp": Wrapped, "ddp of compile": lambda model: Wrapped(torch.compile(model)), "fsdp": fsdp}


@pytest.mark.parametrize("wrapping", [*WRAPPINGS, "checkpointed"])
def test_names_of_wrapped_models(folder, wrapping):
    path = folder("llama single")
    model = {**WRAPPINGS, "checkpointed": checkpointed}[wrapping](hostile.model("llama"))
    # checkpoint_wrapper's own hooks clean state_dict; named_parameters show what is really there
    save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, path / "model.safetensors")
    names = set(load_file(path / "model.safetensors"))
    source = read_model(path)
    plain = {name for name, _ in hostile.model("llama").named_parameters()}
    assert source.tensors.keys() == plain
    assert bool(source.notes) == (names != plain)
    assert wrapping == "checkpointed" or names != plain


def test_two_names_for_one_tensor(folder):
    path = folder("llama single")
    rewrite(path / "model.safetensors", lambda tensors: tensors.update({"_orig_mod.model.norm.weight": torch.zeros(24)}))
    assert only(path).expected == "one tensor model.norm.weight"


def test_untied_without_a_head(folder):
    path = folder("llama single")
    rewrite(path / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    problem = only(path)
    assert problem.tensor == "lm_head.weight" and "only a tied model has no head" in problem.found


@pytest.mark.reads
def test_tied_with_an_equal_head(folder):
    path = folder("llama-tied single")
    rewrite(path / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    source = read_model(path)
    assert source.ignored == {"lm_head.weight": "equal to the embedding that it is tied to"}
    assert "lm_head.weight" not in source.tensors


@pytest.mark.reads
def test_tied_with_another_head(folder):
    path = folder("llama-tied single")

    def other(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][96, 23] += 1

    rewrite(path / "model.safetensors", other)
    assert only(path).found == "others, from row 96 on"
    rewrite(path / "model.safetensors", lambda tensors: tensors.update({"lm_head.weight": torch.zeros(3, 24)}))
    assert "[97, 24], since it is tied" in only(path).expected


@pytest.mark.parametrize(("layers", "words"), [(5, "without model.layers.3, 4"), (2, "and also model.layers.2")])
@pytest.mark.parametrize("kind", ["llama", "llama single"])
def test_wrong_number_of_layers(folder, kind, layers, words):
    path = folder(kind)
    edit(path / "config.json", lambda config: config.update(num_hidden_layers=layers))
    problem = only(path)
    assert (problem.tensor, problem.expected) == ("num_hidden_layers", f"{layers} layers")
    assert problem.found == f"3 in the files, {words}"


class Payload:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.bin.index.json", "consolidated.00.pth"])
def test_pickles_are_refused(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = folder("llama single")
    (path / "model.safetensors").unlink()
    (path / name).write_bytes(pickle.dumps(Payload()))
    problem = only(path)
    assert problem.file == name and "refused: reading them runs code" in problem.found
    assert not (tmp_path / "ran").exists()


def test_a_pickle_called_safetensors(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = folder("llama single")
    (path / "model.safetensors").write_bytes(pickle.dumps(Payload()))
    assert "header" in only(path).expected and not (tmp_path / "ran").exists()


def overlap(header):
    names = sorted((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"])
    first, second = (header[name]["data_offsets"] for name in names[:2])
    second[:] = [first[0], first[0] + second[1] - second[0]]


def beyond(header):
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    header[last]["data_offsets"] = [place + 4096 for place in header[last]["data_offsets"]]


@pytest.mark.parametrize("change", [overlap, beyond])
def test_offsets_that_overlap_or_leave_the_file(folder, change):
    path = folder("llama single") / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert all(problem.file == "model.safetensors" for problem in problems_of(path.parent))


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"model_type": "gpt2"}', '{"model_type": ["llama"]}', "\xff"])
def test_config_that_is_none(folder, text):
    path = folder("llama single")
    (path / "config.json").unlink()
    if text is not None:
        (path / "config.json").write_text(text, encoding="latin-1")
    assert only(path).file == "config.json"


def test_another_task(folder):
    path = folder("llama single")
    edit(path / "config.json", lambda config: config.update(architectures=["LlamaForSequenceClassification"]))
    assert only(path).tensor == "architectures"


def test_no_folder(tmp_path):
    assert only(tmp_path / "absent").found == "no such folder"
    (tmp_path / "empty").mkdir()
    assert [problem.file for problem in problems_of(tmp_path / "empty")] == ["config.json", "model.safetensors"]


def everything_wrong(path):
    table = json.loads((path / INDEX).read_text())["weight_map"]
    files = sorted(set(table.values()))
    os.truncate(path / files[0], (path / files[0]).stat().st_size - 8)
    (path / files[1]).unlink()
    rewrite(path / files[2], lambda tensors: tensors.update({"strange": torch.zeros(2)}))
    edit(path / "config.json", lambda config: config.update(hidden_act="relu", strange_setting=1))
    edit(path / INDEX, lambda index: index["weight_map"].update({"evil": "../x.safetensors"}))
    return files


def test_every_problem_is_listed(folder):
    path = folder("llama")
    files = everything_wrong(path)
    found = {(problem.file, problem.tensor) for problem in problems_of(path)}
    assert found == {
        (INDEX, "evil"),
        (files[0], ""),
        (files[1], ""),
        (files[2], "strange"),
        ("config.json", "hidden_act"),
        ("config.json", "strange_setting"),
    }


def test_the_command_prints_it_and_writes_nothing(folder, tmp_path, capsys):
    path = folder("llama")
    everything_wrong(path)
    assert cli.main(["import", str(path), str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"torch-bridge: error: {path}: 6 problems\n") and captured.err.count("\n") == 7
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in"]


def test_what_files_say_is_printed_safely():
    problem = Problem("a\nb", "\x1b[2J\ud800", "x" * 1000, "\r")
    assert str(problem).isprintable() and len(str(problem)) < 300
    str(problem).encode()


@pytest.mark.reads
def test_import_reads_after_all_that(folder):
    """The control of `no_data_is_read`: reading is what it forbids."""
    source = read_model(folder("llama"))
    tensor = source.tensors["model.norm.weight"]
    out = np.empty(24, np.float32)
    tensor.read(((0, 24),), out)
    assert out.any()
