"""Weights of a torch model as jaxpar's parameters, and back; everything is checked before the first byte of data is read.

read_model       folder -> Source: family, jaxpar's ModelConfig, tensors not yet read
import_params    Source -> params, each device reading only its slices of the files
export_params    params -> a folder that transformers loads
torch_arrays     any tree shaped like params (gradients, updated weights) -> {torch key: numpy array}
tree_of_arrays   the inverse

source = read_model("SmolLM2-135M")
params = import_params(source, make_mesh(MeshShape(data=2, tensor=2)), dtype="float32")
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.config import ModelConfig
from jaxpar.mesh import TENSOR
from jaxpar.models.decoder import Decoder
from jaxpar.params import Tree, flatten, map_leaves, padded_vocabulary, partition_specs
from jaxpar.rules import DENSE, Rules
from torch_bridge.arrays import ShardedView, global_array
from torch_bridge.families import FAMILIES, find_family, infer_family
from torch_bridge.families.decoder import HEAD, Family
from torch_bridge.formats.huggingface import CONFIG, Folder, carried, read_folder, whole_folder, write_json, write_tensors
from torch_bridge.formats.safetensors import NAMES, FileTensor
from torch_bridge.mapping import Binding, bind, expected_shapes, to_leaves, to_torch
from torch_bridge.report import BridgeError, Problem
from torch_bridge.transforms import Cast
from torch_bridge.views import ArrayView, View, read_all

TORCH_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, eq=False)
class Source:
    """A checked folder. `tensors` are those that a leaf is made of; `ignored` maps the others to the reason; `provenance` says for each
    field of the model where its value is from; `dtype` is that of the tensors."""

    folder: Path
    family: Family
    model: ModelConfig
    raw: dict[str, Any]
    provenance: dict[str, str]
    dtype: str
    tensors: dict[str, FileTensor]
    ignored: dict[str, str]
    notes: tuple[str, ...]

    @property
    def carried(self) -> tuple[Path, ...]:
        """Tokenizer and generation files, for an export to take along."""
        return carried(self.folder)

    def bindings(self, vocabulary_padded: int | None = None) -> tuple[Binding, ...]:
        return bindings(self.family, self.model, vocabulary_padded)


def bindings(family: Family, model: ModelConfig, vocabulary_padded: int | None = None) -> tuple[Binding, ...]:
    """How `family` names and lays out the parameters of `model`. Raises ValueError where it has no tensor for one."""
    return bind(family.rules, Decoder(model, vocabulary_padded or model.vocabulary).specs)


def read_model(folder: str | Path, *, rope_length: int | None = None, ignore: Collection[str] = (), any_dtype: bool = False) -> Source:
    """Check a folder and say what it holds. Data is read in one case only: a tied model that has a head all the same, which must equal the
    embedding.

    `rope_length`: tokens that dynamic rope assumes. `ignore`: settings of config.json that are unknown here and change no number.
    `any_dtype` takes tensors of other dtypes than config.json says, as long as they are floating point.

    Raises BridgeError with everything that is wrong: files, settings, tensors.
    """
    files = read_folder(Path(folder))
    problems = files.problems
    family, model, provenance = _configuration(files, rope_length, frozenset(ignore))
    tensors, ignored, dtype = files.tensors, {}, ""
    if family is not None:
        ignored = {key: reason for key in files.tensors for reason in [_reason(family, key)] if reason}
    if family is not None and model is not None:
        if model.tied and HEAD in tensors:
            ignored[HEAD] = "equal to the embedding that it is tied to"
        tensors = {key: tensor for key, tensor in tensors.items() if key not in ignored}
        problems += _check_tensors(files, tensors, family, model)
        dtype, wrong = _dtype(files, tensors, any_dtype)
        problems += wrong
    if not problems and HEAD in ignored:
        problems += _check_tied(files.tensors[HEAD], files.tensors["model.embed_tokens.weight"])
    if problems:
        raise BridgeError(folder, problems)
    assert family is not None and model is not None
    return Source(Path(folder), family, model, files.config, provenance, dtype, tensors, ignored, tuple(files.notes))


def _configuration(
    files: Folder, rope_length: int | None, ignore: frozenset[str]
) -> tuple[Family | None, ModelConfig | None, dict[str, str]]:
    if not files.config:
        if not any(problem.file == CONFIG for problem in files.problems):
            files.refuse(CONFIG, "settings", "an empty object")
        return None, None, {}
    kind = files.config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        files.refuse(CONFIG, f"one of {', '.join(FAMILIES)}", repr(kind), "model_type")
        return None, None, {}
    architectures = files.config.get("architectures")
    if architectures not in (None, [FAMILIES[kind].architecture]):
        files.refuse(CONFIG, f"[{FAMILIES[kind].architecture!r}], a language model", repr(architectures), "architectures")
    model, settings = FAMILIES[kind].read(files.config, rope_length, ignore)
    files.problems += settings.problems
    return FAMILIES[kind], model, settings.provenance


def _reason(family: Family, key: str) -> str | None:
    return next((ignored.reason for ignored in family.ignored if re.fullmatch(ignored.pattern, key)), None)


def _layer(key: str) -> int | None:
    found = re.match(r"model\.layers\.(\d{1,9})\.", key)
    return int(found[1]) if found else None


def _check_tensors(files: Folder, tensors: Mapping[str, FileTensor], family: Family, model: ModelConfig) -> list[Problem]:
    """Missing, unknown and misshapen tensors. A wrong number of layers is one problem, not one a tensor."""
    problems = []
    wanted = expected_shapes(bindings(family, model))
    there = {layer for key in (*tensors, *files.unreadable) if (layer := _layer(key)) is not None}
    absent = [layer for layer in range(model.layers) if layer not in there] if files.whole else []
    surplus = sorted(layer for layer in there if layer >= model.layers)
    if absent or surplus:
        which = ", ".join(str(layer) for layer in (absent or surplus)[:8])
        count = f"{len(there)} in the files ({'without' if absent else 'also'} model.layers.{which}{', …' if len(absent or surplus) > 8 else ''})"
        problems.append(Problem(CONFIG, "num_hidden_layers", f"{model.layers} layers", count))
    for key, shape in wanted.items():
        if key in tensors:
            if tensors[key].shape != shape:
                problems.append(Problem(tensors[key].path.name, key, f"shape {list(shape)}", f"{list(tensors[key].shape)}"))
        elif key not in files.unreadable and files.whole and _layer(key) not in absent:
            missing = "none; only a tied model has no head" if key == HEAD else "none"
            problems.append(Problem(str(files.path), key, f"a tensor of shape {list(shape)}", missing))
    for key, tensor in tensors.items():
        if key not in wanted and _layer(key) not in surplus:
            problems.append(
                Problem(tensor.path.name, key, f"a tensor of a {family.name} with these settings", f"unknown, shape {list(tensor.shape)}")
            )
    return problems


def _dtype(files: Folder, tensors: Mapping[str, FileTensor], any_dtype: bool) -> tuple[str, list[Problem]]:
    """The dtype of the model: config.json's, or that of most tensors; and the tensors that have another."""
    problems: list[Problem] = []
    says = {key: files.config[key] for key in ("dtype", "torch_dtype") if files.config.get(key) is not None}
    for key, value in list(says.items()):
        if not isinstance(value, str) or value.removeprefix("torch.") not in TORCH_DTYPES:
            problems.append(Problem(CONFIG, key, f"one of {', '.join(TORCH_DTYPES)}", repr(value)))
            del says[key]
    names = {value.removeprefix("torch.") for value in says.values()}
    if len(names) > 1:
        problems.append(Problem(CONFIG, "torch_dtype", f"what dtype says, {says['dtype']!r}", repr(says["torch_dtype"])))
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        counts[NAMES[tensor.dtype]] = counts.get(NAMES[tensor.dtype], 0) + 1
    floats = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    usual = max((dtype for dtype in counts if dtype in floats), key=lambda dtype: counts[dtype], default="F32")
    wanted = TORCH_DTYPES[min(names)] if names and not any_dtype else usual
    allowed = set(floats) if any_dtype else {wanted}
    expected = f"dtype {wanted}" + (f", as {CONFIG} says" if names else ", as most tensors have") + " (--any-dtype takes every float)"
    for key, tensor in tensors.items():
        if NAMES[tensor.dtype] not in allowed:
            problems.append(Problem(tensor.path.name, key, "a floating point dtype" if any_dtype else expected, NAMES[tensor.dtype]))
    return floats[wanted], problems


def _check_tied(head: FileTensor, embedding: FileTensor) -> list[Problem]:
    """Reads both, 64 MiB at a time."""
    if head.shape != embedding.shape or head.dtype != embedding.dtype:
        found = f"{NAMES[head.dtype]} {list(head.shape)}"
        return [Problem(head.path.name, HEAD, f"{NAMES[embedding.dtype]} {list(embedding.shape)}, since it is tied", found)]
    rows, width = embedding.shape
    step = max(1, 2**26 // (width * embedding.dtype.itemsize))
    for start in range(0, rows, step):
        box = ((start, min(rows, start + step)), (0, width))
        one, other = (np.empty((box[0][1] - start, width), embedding.dtype) for _ in range(2))
        head.read(box, one)
        embedding.read(box, other)
        if one.tobytes() != other.tobytes():
            different = int((one.view(np.uint8) != other.view(np.uint8)).any(axis=1).argmax()) + start
            return [Problem(head.path.name, HEAD, "the embedding's values: config.json says tied", f"others, from row {different} on")]
    return []


def default_places(model: ModelConfig, mesh: Mesh) -> Tree:
    """PartitionSpecs of a model's parameters on a mesh: split over `tensor`, equal elsewhere."""
    specs = Decoder(model, padded_vocabulary(model.vocabulary, mesh.shape[TENSOR])).specs
    return partition_specs(specs, Rules(dict(mesh.shape), DENSE))


def import_params(source: Source, mesh: Mesh, shardings: Tree | None = None, dtype: Any = None) -> Tree:
    """The parameters on `mesh`, vocabulary padded for its tensor axis: nested dict of global jax.Arrays.

    `shardings`: a tree of NamedSharding or PartitionSpec, such as a run's `training.shardings["params"]`; default split over `tensor` and
    equal elsewhere. `dtype`: default the file's. Each process reads, once, what its devices hold; on a CPU device the bytes read are the
    array, elsewhere host memory holds one leaf's shard at a time.
    Raises ValueError for a mesh that does not divide the model, OSError for a file that changed since it was checked.
    """
    wanted = np.dtype(source.dtype if dtype is None else dtype)
    if wanted == np.float64 and not jax.config.jax_enable_x64:
        raise ValueError("dtype: float64 needs 64-bit types; set the environment variable JAX_ENABLE_X64=1")
    padded = padded_vocabulary(source.model.vocabulary, mesh.shape[TENSOR])
    specs = Decoder(source.model, padded).specs
    places = default_places(source.model, mesh) if shardings is None else shardings
    tensors: dict[str, View] = {key: Cast(source.dtype, wanted.name).apply((tensor,))[0] for key, tensor in source.tensors.items()}
    leaves = to_leaves(source.bindings(padded), tensors)

    def leaf(path: str, _: Any, place: Any) -> jax.Array:
        sharding = NamedSharding(mesh, place) if isinstance(place, PartitionSpec) else place
        return global_array(leaves[path], sharding)

    return map_leaves(leaf, specs, places)


def export_params(
    params: Tree,
    model: ModelConfig,
    folder: str | Path,
    dtype: Any = None,
    family: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    raw: Mapping[str, Any] | None = None,
    files: Sequence[str | Path] = (),
    max_positions: int | None = None,
) -> Path:
    """Write `params`, padded or not, as a folder that transformers loads: model.safetensors or shards of `max_shard_bytes` with an index,
    config.json, and copies of `files` (tokenizer, generation settings). Returns the folder.

    `dtype`: default the arrays'. `family`: a model_type; default the first that can hold the model. `raw`: the config.json that the model came
    with; what it says beside the architecture (token ids, …) is kept, all of it where it still describes this model. A tied table is
    written once. `max_positions`: max_position_embeddings where `raw` has none.

    The folder appears whole, or not at all. All shards must be on this process's devices.
    Raises ValueError for a folder that is not empty, or a model that the family cannot hold.
    """
    folder = Path(folder)
    chosen = infer_family(model) if family is None else find_family(family)
    padded = params["embedding"]["table"].shape[0]
    leaves: dict[str, View] = {path: ShardedView(path, leaf) for path, leaf in flatten(params)}
    first = next(iter(leaves.values())).dtype.name
    wanted = first if dtype is None else np.dtype(dtype).name
    if wanted not in TORCH_DTYPES:
        raise ValueError(f"dtype: {wanted} is not one of {', '.join(TORCH_DTYPES)}")
    leaves = {path: Cast(first, wanted).apply((view,))[0] for path, view in leaves.items()}
    tensors = to_torch(bindings(chosen, model, padded), leaves)
    config = write_configuration(chosen, model, wanted, raw or {}, max_positions)
    with whole_folder(folder) as temporary:
        write_json(temporary / CONFIG, config)
        for file in map(Path, files):
            (temporary / file.name).write_bytes(file.read_bytes())
        write_tensors(temporary, tensors, max_shard_bytes)
    return folder


def write_configuration(
    family: Family, model: ModelConfig, dtype: str, raw: Mapping[str, Any], max_positions: int | None
) -> dict[str, Any]:
    """config.json of an export. Where `raw` describes `model` already only the dtype is changed."""
    if raw.get("model_type") == family.name:
        read, _ = family.read(dict(raw), model.rope.static_length, frozenset(raw))
        if read == model or (read is not None and _training_only(read, model)):
            return {**{key: value for key, value in raw.items() if key != "torch_dtype"}, "dtype": dtype}
    said = family.write(model)
    kept = {key: value for key, value in raw.items() if key in KEPT and key not in said}
    rope = model.rope
    reach = rope.original_length if rope.type == "dynamic" else rope.original_length and round(rope.original_length * rope.factor)
    positions = {"max_position_embeddings": reach or max_positions or 2048}
    if rope.type == "dynamic":
        kept.pop("max_position_embeddings", None)
    return {**said, **positions, **{key: None for key in TOKEN_IDS}, "attention_dropout": 0.0, **kept, "dtype": dtype}


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
KEPT = frozenset((*TOKEN_IDS, "max_position_embeddings", "use_cache", "transformers_version"))


def _training_only(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two models differ in dropout and initial values alone."""
    from dataclasses import replace

    return replace(one, dropout=other.dropout, init_std=other.init_std) == other


def torch_arrays(tree: Tree, model: ModelConfig, family: str | None = None) -> dict[str, np.ndarray]:
    """Any tree shaped like the parameters, of jax or numpy arrays, as torch's keys and layouts: gradients, moments, updated weights.

    A vocabulary padded for any mesh is cropped; a tied table appears once, under the embedding's key.
    """
    chosen = infer_family(model) if family is None else find_family(family)
    leaves: dict[str, View] = {path: ShardedView(path, leaf) for path, leaf in flatten(tree)}
    views = to_torch(bindings(chosen, model, tree["embedding"]["table"].shape[0]), leaves)
    return {key: read_all(view) for key, view in views.items()}


def tree_of_arrays(arrays: Mapping[str, np.ndarray], model: ModelConfig, family: str | None = None, tensor: int = 1) -> Tree:
    """{torch key: array} -> nested dict of numpy arrays, vocabulary padded for a tensor axis of that size. Every key is used once.

    Raises ValueError naming keys that are missing, unknown or misshapen. A tied model's head may be there if it is equal.
    """
    chosen = infer_family(model) if family is None else find_family(family)
    padded = padded_vocabulary(model.vocabulary, tensor)
    bound = bindings(chosen, model, padded)
    wanted = expected_shapes(bound)
    given = dict(arrays)
    if model.tied and HEAD in given:
        if not np.array_equal(given.pop(HEAD), given.get("model.embed_tokens.weight", np.nan), equal_nan=True):
            raise ValueError(f"{HEAD}: differs from the embedding that it is tied to")
    wrong = [f"{key} is missing" for key in wanted.keys() - given.keys()] + [f"{key} is unknown" for key in given.keys() - wanted.keys()]
    wrong += [f"{key} is {given[key].shape}, not {wanted[key]}" for key in wanted.keys() & given.keys() if given[key].shape != wanted[key]]
    if wrong:
        raise ValueError(f"tensors: {'; '.join(sorted(wrong))}")
    leaves = to_leaves(bound, {key: ArrayView(np.asarray(given[key])) for key in wanted})
    return map_leaves(lambda path, _: read_all(leaves[path]), Decoder(model, padded).specs)
