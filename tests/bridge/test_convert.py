"""torch -> JAX -> torch, byte for byte, on one device and on meshes; the export is what transformers expects."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import torch

from jaxpar.config import MeshShape
from jaxpar.mesh import TENSOR, make_mesh
from jaxpar.models.decoder import Decoder
from jaxpar.params import flatten, padded_vocabulary, partition_specs, zero_placements, zero_specs
from jaxpar.rules import DENSE, Rules
from tests.bridge import hostile
from tests.bridge.loading import DTYPES, bits, load_quietly
from torch_bridge import convert
from torch_bridge.convert import export_params, import_params, read_model, torch_arrays, tree_of_arrays
from torch_bridge.formats.safetensors import FileTensor
from torch_bridge.views import box_shape

MESHES = {"one device": MeshShape(), "data 2 × tensor 2": MeshShape(data=2, tensor=2), "tensor 4": MeshShape(tensor=4)}


def mesh_of(shape):
    return make_mesh(shape, jax.devices()[: shape.devices])


def folder_of(folder, name, dtype="float32", **changes):
    hostile.model(name, **changes).to(DTYPES[dtype]).save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name, dtype="float32", **changes):
        key = (name, dtype, *changes.items())
        if key not in made:
            made[key] = folder_of(tmp_path_factory.mktemp("model"), name, dtype, **changes)
        return made[key]

    return folder


ROUND_TRIPS = [(name, dtype) for name in hostile.NAMES for dtype in ("float32", "bfloat16")] + [("llama", "float16")]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("name", "dtype"), ROUND_TRIPS)
def test_round_trip_is_byte_equal(folders, tmp_path, name, dtype, mesh):
    folder = folders(name, dtype, **({"num_key_value_heads": 1} if mesh == "tensor 4" else {}))
    source = read_model(folder)
    assert source.dtype == dtype
    params = import_params(source, mesh_of(MESHES[mesh]))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
    out = export_params(params, source.model, tmp_path / "out", family=source.family.name, raw=source.raw, max_shard_bytes=15_000)
    assert bits(out) == bits(folder)
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", hostile.NAMES)
def test_transformers_loads_an_export_without_a_word(folders, tmp_path, name):
    source = read_model(folders(name))
    params = import_params(source, mesh_of(MESHES["data 2 × tensor 2"]))
    # config.json written anew, without the one it came with
    out = export_params(params, source.model, tmp_path / "out", "float32", source.family.name, max_positions=64)
    again, before = load_quietly(out), hostile.model(name)
    assert type(again) is type(before)
    ids = torch.arange(40)[None] % 97
    assert torch.equal(again(ids).logits, before(ids).logits)
    tied = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert tied == source.model.tied == ("lm_head.weight" not in bits(out))
    assert read_model(out).model == source.model


def test_a_wrong_rule_changes_what_torch_computes(folders, tmp_path, monkeypatch):
    """The negative control of both tests above: up and gate swapped on the way out."""
    source = read_model(folders("llama-tied"))
    params = import_params(source, mesh_of(MeshShape()))
    swapped = {"layers/mlp/gate": "layers/mlp/up", "layers/mlp/up": "layers/mlp/gate"}
    rules = tuple(dataclasses.replace(rule, leaf=swapped.get(rule.leaf, rule.leaf)) for rule in source.family.rules)
    monkeypatch.setitem(convert.find_family.__globals__["FAMILIES"], "llama", dataclasses.replace(source.family, rules=rules))
    out = export_params(params, source.model, tmp_path / "out", family="llama", raw=source.raw)
    assert bits(out) != bits(source.folder)
    ids = torch.arange(40)[None] % 97
    assert not torch.allclose(load_quietly(out)(ids).logits, hostile.model("llama-tied")(ids).logits, rtol=0.1)


def test_padded_vocabulary_is_exported_unpadded(tmp_path):
    folder = folder_of(tmp_path / "in", "qwen3", vocab_size=5)
    source = read_model(folder)
    params = import_params(source, mesh_of(MeshShape(tensor=4)))
    table = params["embedding"]["table"]
    assert table.shape == (8, 24) and not np.asarray(table)[5:].any() and np.asarray(table)[:5].all()
    out = export_params(params, source.model, tmp_path / "out", family="qwen3")
    assert bits(out)["model.embed_tokens.weight"][1] == (5, 24)
    assert bits(out) == bits(folder)


def test_masters_are_float32_and_go_back_exactly(folders, tmp_path):
    folder = folders("qwen2", "bfloat16")
    source = read_model(folder)
    params = import_params(source, mesh_of(MESHES["data 2 × tensor 2"]), dtype="float32")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
    out = export_params(params, source.model, tmp_path / "out", "bfloat16", "qwen2", raw=source.raw)
    assert bits(out) == bits(folder)
    narrow = export_params(params, source.model, tmp_path / "wide", family="qwen2", raw=source.raw)
    assert json.loads((narrow / "config.json").read_text())["dtype"] == "float32"
    assert load_quietly(narrow).dtype == torch.float32


def zero_places(source, mesh):
    specs = Decoder(source.model, padded_vocabulary(source.model.vocabulary, mesh.shape[TENSOR])).specs
    partitions = partition_specs(specs, Rules(dict(mesh.shape), DENSE))
    return zero_specs(partitions, zero_placements(specs, partitions, dict(mesh.shape)))


@pytest.mark.parametrize("places", ["tensor", "zero"])
def test_each_byte_is_read_once(folders, monkeypatch, places):
    """Whatever is split is read by the box; what devices hold alike is read once for all of them."""
    source = read_model(folders("llama"))
    mesh = mesh_of(MESHES["data 2 × tensor 2"])
    read = {}
    whole_read = FileTensor.read

    def counting(self, index, out):
        read[self.name] = read.get(self.name, 0) + math.prod(box_shape(index)) * self.dtype.itemsize
        whole_read(self, index, out)

    monkeypatch.setattr(FileTensor, "read", counting)
    params = import_params(source, mesh, zero_places(source, mesh) if places == "zero" else None)
    assert read == {key: tensor.bytes for key, tensor in source.tensors.items()}
    shards = [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    split = [shard for shard in shards if shard.data.size < math.prod(params["embedding"]["table"].shape)]
    assert len(split) > len(shards) / 2


def test_values_are_where_the_mesh_puts_them(folders):
    source = read_model(folders("llama"))
    mesh = mesh_of(MESHES["data 2 × tensor 2"])
    whole = dict(flatten(import_params(source, mesh_of(MeshShape(tensor=2)))))
    for path, leaf in flatten(import_params(source, mesh, zero_places(source, mesh))):
        assert np.array_equal(np.asarray(leaf), np.asarray(whole[path])), path


def test_arrays_of_torch_and_back(folders):
    source = read_model(folders("llama"))
    params = import_params(source, mesh_of(MESHES["data 2 × tensor 2"]))
    arrays = torch_arrays(params, source.model, "llama")
    state = hostile.model("llama").state_dict()
    assert arrays.keys() == state.keys()
    assert all(np.array_equal(arrays[key], state[key].numpy()) for key in arrays)
    tree = tree_of_arrays(arrays, source.model, "llama", tensor=2)
    for path, leaf in flatten(params):
        assert np.array_equal(dict(flatten(tree))[path], np.asarray(leaf)), path
    arrays["lm_head.weight"] = arrays["lm_head.weight"][:5]
    del arrays["model.norm.weight"]
    with pytest.raises(ValueError, match=r"lm_head.weight is \(5, 24\), not \(97, 24\); model.norm.weight is missing"):
        tree_of_arrays({**arrays}, source.model, "llama")


def test_tied_arrays(folders):
    source = read_model(folders("qwen3"))
    arrays = torch_arrays(import_params(source, mesh_of(MeshShape())), source.model, "qwen3")
    assert "lm_head.weight" not in arrays
    head = {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    tree_of_arrays({**arrays, **head}, source.model, "qwen3")
    with pytest.raises(ValueError, match="differs from the embedding"):
        tree_of_arrays({**arrays, "lm_head.weight": head["lm_head.weight"] + 1}, source.model, "qwen3")


def test_nothing_is_overwritten_or_left_half(folders, tmp_path, monkeypatch):
    source = read_model(folders("qwen3"))
    params = import_params(source, mesh_of(MeshShape()))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="exists already and is not empty"):
        export_params(params, source.model, tmp_path / "out", family="qwen3")
    with pytest.raises(ValueError, match="mlp_bias"):
        export_params(params, dataclasses.replace(source.model, mlp_bias=True), tmp_path / "new", family="qwen3")
    monkeypatch.setattr("torch_bridge.formats.huggingface.write_file", lambda *arguments: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export_params(params, source.model, tmp_path / "new", family="qwen3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_refused_dtypes(folders, tmp_path):
    source = read_model(folders("qwen3"))
    params = import_params(source, mesh_of(MeshShape()))
    with pytest.raises(ValueError, match="dtype: int8 is not one of"):
        export_params(params, source.model, tmp_path / "out", "int8", "qwen3")
    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(ValueError, match="JAX_ENABLE_X64"):
            import_params(source, mesh_of(MeshShape()), dtype="float64")
    finally:
        jax.config.update("jax_enable_x64", True)
