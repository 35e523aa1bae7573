"""Mixtral and Qwen3-MoE: settings, names and bytes, a tensor for each expert or one for all, on one device and over a mesh."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxpar import configfile
from jaxpar.config import ExpertsConfig, MeshShape, ModelConfig, MoeConfig, TrainConfig
from jaxpar.mesh import make_mesh
from jaxpar.models.decoder import Decoder
from jaxpar.params import flatten
from tests.bridge import hostile
from tests.bridge.loading import DTYPES, bits, load_quietly
from tests.bridge.test_families import PLAIN, library_of, read, refused
from tests.bridge.test_mapping import PADDED, changed, labelled, leaves_of
from torch_bridge import inspection
from torch_bridge.checkpoints import import_folder, open_weights, run_of
from torch_bridge.compare import compare
from torch_bridge.convert import default_places, export_params, import_params, read_model, torch_arrays, tree_of_arrays
from torch_bridge.families import find_family, infer_family
from torch_bridge.families.experts import with_training
from torch_bridge.formats.safetensors import FileTensor
from torch_bridge.mapping import bind, expected_shapes, to_torch
from torch_bridge.report import BridgeError
from torch_bridge.source import bindings as source_bindings
from torch_bridge.views import ArrayView, box_shape, read_all

NAMES = tuple(hostile.EXPERTS)
ONE, MESH = MeshShape(), MeshShape(data=2, expert=2, tensor=2)
EXPERTS, WIDTH = 12, {"mixtral": 36, "qwen3_moe": 14}


def mesh_of(shape):
    return make_mesh(shape, jax.devices()[: shape.devices])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name, stacked=False, dtype="float32"):
        key = (name, stacked, dtype)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model")
            model = hostile.model(name, num_hidden_layers=2).to(DTYPES[dtype])
            model.save_pretrained(made[key], max_shard_size="60KB", save_original_format=not stacked)
        return made[key]

    return folder


# Settings


def test_settings_of_the_hub():
    """As Mixtral-8x7B's and Qwen3-30B-A3B's config.json spell them."""
    mixtral = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02}
    model, provenance = read("mixtral", **mixtral, sliding_window=None, rope_theta=1e6)
    assert model.moe == MoeConfig(experts=8, per_token=2, width=24) and model.windows == (0,)
    assert provenance["model.moe.experts"] == "config.json: num_local_experts"
    assert provenance["model.moe.width"] == "config.json: intermediate_size"
    qwen = {"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 20, "norm_topk_prob": True, "decoder_sparse_step": 1}
    qwen |= {"mlp_only_layers": [], "sliding_window": None, "use_sliding_window": False, "max_window_layers": 4, "head_dim": 128}
    model, _ = read("qwen3_moe", **qwen, router_aux_loss_coef=0.001, rope_scaling=None)
    assert model.moe == MoeConfig(experts=12, per_token=4, width=20) and model.mlp_width == 24 and model.qk_norm


LARGE = {
    # config.json of mistralai/Mixtral-8x7B-v0.1 and Qwen/Qwen3-30B-A3B, and how many tensors their indexes list
    "mixtral-8x7b": (
        "mixtral",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32}
        | {"num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": 32000},
        995,
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_experts_per_tok": 8, "num_hidden_layers": 48}
        | {"num_key_value_heads": 4, "num_experts": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 151936, "head_dim": 128}
        | {"moe_intermediate_size": 768, "norm_topk_prob": True},
        18867,
    ),
}


@pytest.mark.parametrize("preset", LARGE)
def test_presets_are_the_hubs_models(preset, tmp_path):
    family, raw, tensors = LARGE[preset]
    (tmp_path / "run.yaml").write_text(f"model: {{preset: {preset}}}\n")
    wanted = configfile.load(tmp_path / "run.yaml").model
    model, _ = read(family, **raw, max_position_embeddings=32768)
    assert model == dataclasses.replace(wanted, moe=with_training(wanted.moe, model.moe))
    assert len(expected_shapes(source_bindings(find_family(family), model))) == tensors


@pytest.mark.parametrize("name", NAMES)
def test_absent_keys_have_the_librarys_defaults(name):
    model, provenance = read(name, num_key_value_heads="absent", num_attention_heads=32, hidden_size=64)
    raw = {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"}
    library = library_of(name)(**{**raw, "num_attention_heads": 32, "hidden_size": 64})
    assert model.rope.theta == library.rope_parameters["rope_theta"] and model.kv_heads == library.num_key_value_heads
    assert model.moe.experts == library.num_local_experts and model.moe.per_token == library.num_experts_per_tok
    assert model.moe.normalise == getattr(library, "norm_topk_prob", True)
    assert model.moe.width == getattr(library, "moe_intermediate_size", library.intermediate_size)
    assert model.windows == (library.sliding_window or 0,) and "default" in provenance["model.moe.experts"]


def test_the_balancing_loss_is_torchs_where_torch_adds_it():
    assert read("mixtral", router_aux_loss_coef=0.3)[0].moe.balance_weight == 0
    moe = read("mixtral", router_aux_loss_coef=0.3, output_router_logits=True)[0].moe
    assert (moe.balance, moe.balance_weight) == ("layers", 0.3)


def test_either_spelling_of_the_number_of_experts():
    for name in NAMES:
        for keys in (("num_experts",), ("num_local_experts",), ("num_experts", "num_local_experts")):
            assert read(name, **dict.fromkeys(keys, 10))[0].moe.experts == 10


def test_a_window_for_all_layers_where_it_is_switched_on():
    assert read("qwen3_moe", sliding_window=7)[0].windows == (0,)
    assert read("qwen3_moe", sliding_window=7, use_sliding_window=True, max_window_layers=2)[0].windows == (7,)
    assert library_of("qwen3_moe")(**PLAIN, sliding_window=7, use_sliding_window=True).sliding_window == 7


REFUSED = [
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers: expected experts in every n-th layer behind the first dense ones"),
    ("qwen3_moe", {"mlp_only_layers": [3]}, "and in the last, 3; other orders cannot be stacked, found experts in layers 0, 1, 2"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, "found experts in no layer"),
    ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers: expected numbers of layers"),
    ("qwen3_moe", {"decoder_sparse_step": 3}, "decoder_sparse_step: expected experts in every n-th layer"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: expected at least 1"),
    ("qwen3_moe", {"num_experts": 8, "num_local_experts": 9}, "num_local_experts: expected what num_experts says, 8"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts: expected at least 1"),
    ("qwen3_moe", {"num_experts": 10**12}, "num_experts: expected at most"),
    ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size: expected at least 1"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false"),
    ("qwen3_moe", {"num_experts_per_tok": 9, "num_experts": 8}, "num_experts_per_tok: expected experts that can be built"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window: expected at least 1"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise: expected 0.0"),
    ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("mixtral", {"router_aux_loss_coef": "0.1"}, "router_aux_loss_coef: expected a number"),
    ("mistral", {"num_local_experts": 8}, "num_local_experts"),
]


@pytest.mark.parametrize(("family", "changes", "named"), REFUSED, ids=[named.split(":")[0] for _, _, named in REFUSED])
def test_refused_by_name(family, changes, named):
    problems = refused(family, **changes)
    assert any(named in problem for problem in problems), problems


MOE = MoeConfig(experts=6, per_token=2, width=8)
WRITTEN = [
    ("mixtral", {"moe": MOE, "windows": (5,)}),
    ("mixtral", {"moe": dataclasses.replace(MOE, balance="layers", balance_weight=0.02)}),
    ("qwen3_moe", {"moe": dataclasses.replace(MOE, width=4, normalise=False, per_token=1), "qk_norm": True, "windows": (9,)}),
    ("qwen3_moe", {"moe": MOE, "qk_norm": True, "qkv_bias": True, "output_bias": True, "tied": True}),
    ("qwen3_moe", {"moe": dataclasses.replace(MOE, every=2), "qk_norm": True}),
    ("qwen3_moe", {"moe": dataclasses.replace(MOE, dense_layers=3), "qk_norm": True}),
    ("qwen3_moe", {"moe": dataclasses.replace(MOE, dense_layers=1, every=3), "qk_norm": True, "layers": 7}),
]


@pytest.mark.parametrize(("family", "changes"), WRITTEN)
def test_what_is_written_is_read_again(family, changes):
    model = ModelConfig(**{"width": 16, "heads": 4, "kv_heads": 2, "layers": 4, "mlp_width": 8, "norm_eps": 0.1, **changes})
    raw = json.loads(json.dumps(find_family(family).write(model)))
    again, settings = find_family(family).read(raw, None, frozenset())
    assert not settings.problems and again == model
    assert infer_family(model).name == family


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mixtral", {"moe": MoeConfig()}, "moe.experts"),
        ("llama", {"moe": MOE}, "moe.experts"),
        ("mixtral", {"moe": dataclasses.replace(MOE, normalise=False)}, "moe.normalise"),
        ("mixtral", {"moe": dataclasses.replace(MOE, shared_width=8)}, "moe.shared_width"),
        ("mixtral", {"moe": dataclasses.replace(MOE, router="sigmoid")}, "moe.router"),
        ("qwen3_moe", {"moe": dataclasses.replace(MOE, groups=2), "qk_norm": True}, "moe.groups"),
        ("qwen3_moe", {"moe": MOE}, "qk_norm"),
        ("qwen3_moe", {"moe": MOE, "qk_norm": True, "windows": (4, 0)}, "windows"),
    ],
)
def test_what_a_family_cannot_say(family, changes, named):
    with pytest.raises(ValueError, match=rf"model\.{named}"):
        find_family(family).write(ModelConfig(**changes))


# Names


def case(name, stacked, rules=None):
    raw = hostile.config(name, num_hidden_layers=2).to_dict()
    family = find_family(name)
    model, settings = family.read(raw, None, frozenset())
    assert not settings.problems, settings.problems
    return model, bind(rules or family.table(model, stacked), Decoder(model, PADDED).specs)


def misplaced(bindings, model, stacked):
    """Leaves of experts and routers whose labels are not where torch's names say."""
    arrays = labelled(expected_shapes(bindings))
    leaves, wrong = leaves_of(bindings, arrays), set()
    per_expert = {"gate": ("w1", "gate_proj"), "up": ("w3", "up_proj"), "down": ("w2", "down_proj")}
    mixtral = not model.qk_norm
    for layer in range(model.layers):
        at = f"model.layers.{layer}." + ("block_sparse_moe." if mixtral and not stacked else "mlp.")
        ours = {leaf: leaves[f"layers/mlp/{leaf}"][layer] for leaf in ("router", *per_expert)}
        wrong |= {"router"} if not np.array_equal(ours["router"], arrays[at + "gate.weight"]) else set()
        for leaf, spelled in per_expert.items():
            for expert in range(EXPERTS):
                if stacked:
                    both = arrays[at + f"experts.{'down_proj' if leaf == 'down' else 'gate_up_proj'}"][expert]
                    width = model.moe.width
                    want = {"gate": both[:width], "up": both[width:], "down": both}[leaf]
                else:
                    want = arrays[f"{at}experts.{expert}.{spelled[not mixtral]}.weight"]
                if not np.array_equal(ours[leaf][expert], want):
                    wrong.add(leaf)
    return wrong


@pytest.mark.parametrize("stacked", [False, True], ids=["per expert", "stacked"])
@pytest.mark.parametrize("name", NAMES)
def test_bijection_and_places(name, stacked, folders):
    model, bindings = case(name, stacked)
    shapes = expected_shapes(bindings)
    assert shapes == {key: shape for key, (_, shape, _) in bits(folders(name, stacked)).items()}
    arrays = labelled(shapes)
    leaves = leaves_of(bindings, arrays)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {path: spec.shape for path, spec in flatten(Decoder(model, PADDED).specs)}
    labels = np.concatenate([leaf.ravel() for leaf in leaves.values()])
    assert np.array_equal(np.sort(labels[labels != 0]), np.arange(1, 1 + sum(array.size for array in arrays.values())))
    back = to_torch(bindings, {path: ArrayView(leaf) for path, leaf in leaves.items()})
    assert list(back) == list(arrays) and all(np.array_equal(read_all(back[key]), array) for key, array in arrays.items())
    assert misplaced(bindings, model, stacked) == set()


PATTERNS = {
    "every second": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "dense first": {"mlp_only_layers": [0, 1], "num_hidden_layers": 3},
    "dense first, then every second": {"mlp_only_layers": [0, 1, 3], "num_hidden_layers": 5},
}


@pytest.mark.parametrize("stacked", [False, True], ids=["per expert", "stacked"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_layers_without_experts_there_and_back(pattern, stacked, tmp_path):
    folder = hostile.save(tmp_path / "in", "qwen3_moe", stacked, **PATTERNS[pattern])
    source = read_model(folder)
    params = import_params(source, mesh_of(MESH))
    state = dict(hostile.model("qwen3_moe", **PATTERNS[pattern]).named_parameters())
    arrays = torch_arrays(params, source.model, stacked=True)
    assert arrays.keys() == state.keys() and all(np.array_equal(arrays[key], state[key].detach()) for key in arrays)
    out = export_params(params, source.model, tmp_path / "out", "float32", max_positions=64, stacked=stacked)
    assert bits(out) == bits(folder) and read_model(out).model == source.model
    load_quietly(out, experts_implementation="eager")


def test_wrong_rules_are_noticed():
    family = find_family("mixtral")
    w1, w3 = (f"model.layers.{{layer}}.block_sparse_moe.experts.{{expert}}.w{n}.weight" for n in (1, 3))
    swapped = changed(changed(family.rules, "layers/mlp/gate", key=w3), "layers/mlp/up", key=w1)
    assert misplaced(*reversed(case("mixtral", False, swapped)), False) == {"gate", "up"}
    fused = tuple(
        dataclasses.replace(rule, leaf="layers/mlp/up", joined=("layers/mlp/gate",)) if rule.joined else rule for rule in family.stacked
    )
    assert misplaced(*reversed(case("mixtral", True, fused)), True) == {"gate", "up"}
    model, bindings = case("mixtral", False)
    lexicographic = [
        dataclasses.replace(binding, keys=tuple(sorted(binding.keys))) if binding.paths == ("layers/mlp/down",) else binding
        for binding in bindings
    ]
    assert misplaced(lexicographic, model, False) == {"down"}


# Bytes


@pytest.mark.parametrize(
    ("name", "stacked", "dtype", "mesh"),
    [
        ("mixtral", False, "float32", MESH),
        ("mixtral", True, "bfloat16", MESH),
        ("qwen3_moe", False, "bfloat16", MeshShape(expert=4, tensor=2)),
        ("qwen3_moe", True, "float32", ONE),
    ],
    ids=str,
)
def test_round_trip_is_byte_equal(folders, tmp_path, name, stacked, dtype, mesh):
    folder = folders(name, stacked, dtype)
    source = read_model(folder)
    assert source.dtype == dtype and source.stacked == stacked
    params = import_params(source, mesh_of(mesh))
    out = export_params(params, source.model, tmp_path / "out", raw=source.raw, max_shard_bytes=50_000, stacked=stacked)
    assert bits(out) == bits(folder)
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    other = export_params(params, source.model, tmp_path / "other", raw=source.raw, stacked=not stacked)
    assert bits(other) == bits(folders(name, not stacked, dtype))


@pytest.mark.parametrize("stacked", [False, True], ids=["per expert", "stacked"])
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_an_export_without_a_word(folders, tmp_path, name, stacked):
    source = read_model(folders(name))
    params = import_params(source, mesh_of(MESH))
    # config.json written anew, without the one it came with
    out = export_params(params, source.model, tmp_path / "out", "float32", max_positions=64, stacked=stacked)
    eager = {"experts_implementation": "eager"}
    again, before = load_quietly(out, **eager), load_quietly(folders(name), **eager)
    assert type(again) is type(before)
    states = again.state_dict(), before.state_dict()
    assert states[0].keys() == states[1].keys() and all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    ids = torch.arange(40)[None] % 97
    # torch's sums round by where in memory a matrix lies, which differs between files
    assert torch.allclose(again(ids).logits, before(ids).logits, rtol=1e-4, atol=1e-4)
    assert read_model(out).model == source.model


@pytest.mark.parametrize("stacked", [False, True], ids=["per expert", "stacked"])
def test_each_device_reads_its_own_experts_alone(folders, monkeypatch, stacked):
    """Experts over expert × tensor, so that every device has three: each byte is read once, and no box spans two devices' experts."""
    source, mesh = read_model(folders("mixtral", stacked)), mesh_of(MESH)
    read, boxes = {}, []
    whole_read = FileTensor.read

    def counting(self, index, out):
        read[self.name] = read.get(self.name, 0) + math.prod(box_shape(index)) * self.dtype.itemsize
        if stacked and "experts" in self.name:
            boxes.append(index[0])
        whole_read(self, index, out)

    monkeypatch.setattr(FileTensor, "read", counting)
    places = default_places(source.model, mesh, TrainConfig(experts=ExpertsConfig(axes=("expert", "tensor"))))
    params = import_params(source, mesh, places)
    assert read == {key: tensor.bytes for key, tensor in source.tensors.items()}
    assert all(start // 3 == (stop - 1) // 3 for start, stop in boxes) and (boxes != []) == stacked
    gate = params["layers"]["mlp"]["gate"]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 3, 36, 24)}
    by_default = import_params(source, mesh)
    for path, leaf in flatten(by_default):
        assert np.array_equal(np.asarray(leaf), np.asarray(dict(flatten(params))[path])), path


def test_arrays_of_torch_and_back(folders):
    """By the names of torch's modules, as gradients have them."""
    source = read_model(folders("qwen3_moe"))
    params = import_params(source, mesh_of(MESH))
    arrays = torch_arrays(params, source.model, stacked=True)
    state = {key: value for key, value in hostile.model("qwen3_moe", num_hidden_layers=2).named_parameters()}
    assert arrays.keys() == state.keys() and all(np.array_equal(arrays[key], state[key].detach()) for key in arrays)
    tree = tree_of_arrays(arrays, source.model, tensor=2, stacked=True)
    assert all(np.array_equal(dict(flatten(tree))[path], np.asarray(leaf)) for path, leaf in flatten(params))


def test_plan_and_diff(folders, tmp_path):
    lines = list(inspection.plan(read_model(folders("mixtral"))))
    assert any("layers/mlp/up " in line and "block_sparse_moe.experts.{0..11}.w3.weight" in line for line in lines)
    lines = list(inspection.plan(read_model(folders("mixtral", True))))
    assert any("layers/mlp/gate and layers/mlp/up " in line and "layers.{0..1}.mlp.experts.gate_up_proj" in line for line in lines)
    one, other = (open_weights(folders("mixtral", stacked)) for stacked in (False, True))
    assert all(difference.equal for difference in compare(one.tensors, other.tensors))


def test_a_checkpoint_and_the_runs_own_losses_of_routers(folders, tmp_path):
    source = read_model(folders("mixtral"))
    run = ModelConfig(moe=MoeConfig(balance="sequence", balance_weight=0.01, z_weight=0.001))
    from torch_bridge.checkpoints import default_run, export_checkpoint

    plain = default_run(source)
    assert run_of(source, plain, tmp_path).model == source.model
    config = import_folder(source, tmp_path / "checkpoint", dataclasses.replace(plain, model=run))
    moe = config.model.moe
    assert (moe.experts, moe.balance, moe.balance_weight, moe.z_weight) == (12, "sequence", 0.01, 0.001)
    for stacked in (False, True):
        out = export_checkpoint(tmp_path / "checkpoint", tmp_path / f"out {stacked}", stacked=stacked)
        assert bits(out) == bits(folders("mixtral", stacked))
        assert json.loads((out / "config.json").read_text()) == source.raw


# Bad files


def broken(folder, tmp_path, change=None, **settings):
    """A copy of a single-file checkpoint with other tensors or settings; the problems found in it."""
    shutil.copytree(folder, tmp_path / "bad")
    raw = json.loads((tmp_path / "bad/config.json").read_text())
    (tmp_path / "bad/config.json").write_text(json.dumps({**raw, **settings}))
    if change is not None:
        from safetensors.torch import load_file, save_file

        tensors = {key: value for file in sorted((tmp_path / "bad").glob("*.safetensors")) for key, value in load_file(file).items()}
        for file in (*(tmp_path / "bad").glob("*.safetensors*"),):
            file.unlink()
        change(tensors)
        save_file(tensors, tmp_path / "bad/model.safetensors")
    with pytest.raises(BridgeError) as error:
        read_model(tmp_path / "bad")
    return [str(problem) for problem in error.value.problems]


def test_a_wrong_number_of_experts_is_one_problem(folders, tmp_path):
    (problem, *others) = broken(folders("mixtral"), tmp_path, num_local_experts=16)
    assert "number of experts: expected 16 experts, found 12 in the files, without experts.12, 13, 14, 15" in problem
    assert all("gate.weight" in other for other in others) and len(others) == 2  # the routers of both layers
    shutil.rmtree(tmp_path / "bad")
    (problem, *others) = broken(folders("mixtral"), tmp_path, num_local_experts=11)
    assert "11 experts, found 12 in the files, and also experts.11" in problem and len(others) == 2
    shutil.rmtree(tmp_path / "bad")
    problems = broken(folders("mixtral", True), tmp_path, num_local_experts=16)
    assert any("gate_up_proj: expected shape [16, 72, 24], found [12, 72, 24]" in problem for problem in problems) and len(problems) == 6


def test_a_missing_expert_a_transposed_router_and_mixed_spellings(folders, tmp_path):
    at = "model.layers.1.mlp."

    def change(tensors):
        del tensors[at + "experts.10.up_proj.weight"]
        tensors[at + "gate.weight"] = tensors[at + "gate.weight"].T.contiguous()
        tensors[at + "experts.down_proj"] = torch.zeros(12, 24, 14)

    problems = broken(folders("qwen3_moe"), tmp_path, change)
    assert len(problems) == 3
    assert any(f"{at}experts.10.up_proj.weight: expected a tensor of shape [14, 24], found none" in problem for problem in problems)
    assert any(f"{at}gate.weight: expected shape [12, 24], found [24, 12]" in problem for problem in problems)
    assert any(f"{at}experts.down_proj: expected a tensor of a qwen3_moe" in problem for problem in problems)


def test_experts_that_the_mesh_does_not_divide(folders):
    with pytest.raises(ValueError, match=r"layers/mlp/.*cannot cut 12 in 8"):
        import_params(read_model(folders("mixtral")), mesh_of(MeshShape(expert=8)))


def test_transformers_writes_what_is_expected_here():
    """A version that names its experts' modules otherwise would make parity compare nothing."""
    assert int(transformers.__version__.split(".")[0]) >= 5
    names = dict(hostile.model("mixtral", num_hidden_layers=1).named_parameters())
    assert {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"} <= set(
        names
    )
