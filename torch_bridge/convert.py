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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.config import ModelConfig, TrainConfig
from jaxpar.mesh import TENSOR
from jaxpar.models.decoder import Decoder
from jaxpar.params import Tree, flatten, map_leaves, padded_vocabulary, partition_specs
from jaxpar.rules import Rules, table
from torch_bridge.arrays import ShardedView, global_array
from torch_bridge.casting import Cast
from torch_bridge.families import find_family, infer_family
from torch_bridge.families.decoder import EMBEDDING, HEAD, Family
from torch_bridge.families.experts import with_training
from torch_bridge.formats.huggingface import CONFIG, copy_carried, whole_folder, write_json, write_tensors
from torch_bridge.mapping import expected_shapes, to_leaves, to_torch
from torch_bridge.source import TORCH_DTYPES, Source, bindings, read_model
from torch_bridge.views import ArrayView, View, read_all

__all__ = ["Source", "bindings", "default_places", "export_params", "import_params", "read_model", "torch_arrays", "tree_of_arrays"]

MAX_SHARD_BYTES = 5 * 10**9


def default_places(model: ModelConfig, mesh: Mesh, train: TrainConfig | None = None) -> Tree:
    """PartitionSpecs of a model's parameters on a mesh: split over `tensor`, experts over `train.experts.axes`, default `expert`; equal
    elsewhere."""
    specs = Decoder(model, padded_vocabulary(model.vocabulary, mesh.shape[TENSOR])).specs
    return partition_specs(specs, Rules(dict(mesh.shape), table(train or TrainConfig())))


def import_params(source: Source, mesh: Mesh, shardings: Tree | None = None, dtype: Any = None) -> Tree:
    """The parameters on `mesh`, vocabulary padded for its tensor axis: nested dict of global jax.Arrays.

    `shardings`: a tree of NamedSharding or PartitionSpec, such as a run's `training.shardings["params"]`; default
    `default_places`. `dtype`: default the file's. Each process reads, once, what its devices hold, by several threads; on a CPU device the
    bytes read are the array, elsewhere host memory holds one leaf's shard at a time.
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
    stacked: bool = False,
) -> Path:
    """Write `params`, padded or not, as a folder that transformers loads: model.safetensors or shards of `max_shard_bytes` with an index,
    config.json, and copies of `files` (tokenizer, generation settings). Returns the folder.

    `dtype`: default the arrays'. `family`: a model_type; default the first that can hold the model. `raw`: the config.json that the model
    came with; what it says beside the architecture (token ids, …) is kept, all of it where it still describes this model. A tied table
    is written once. `max_positions`: max_position_embeddings where `raw` has none. `stacked`: a layer's experts in one tensor, which only
    transformers 5 reads, instead of one tensor for each matrix of each.

    The folder appears whole, or not at all. All shards must be on this process's devices.
    Raises ValueError for a folder that is not empty, or a model that the family cannot hold.
    """
    folder = Path(folder)
    chosen = infer_family(model) if family is None else find_family(family)
    padded = params["embedding"]["table"].shape[0]
    leaves: dict[str, View] = {path: ShardedView(path, leaf) for path, leaf in flatten(params)}
    first = next(iter(leaves.values())).dtype.name
    wanted = first if dtype is None else dtype_name(dtype)
    leaves = {path: Cast(first, wanted).apply((view,))[0] for path, view in leaves.items()}
    config = write_configuration(chosen, model, wanted, raw or {}, max_positions)
    tensors = to_torch(bindings(chosen, model, padded, stacked), leaves)
    with whole_folder(folder) as temporary:
        write_json(temporary / CONFIG, config)
        copy_carried(map(Path, files), temporary)
        write_tensors(temporary, tensors, max_shard_bytes)
    return folder


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, or of torch's with that prefix. ValueError for any that torch's weights have not."""
    try:
        name = dtype.removeprefix("torch.") if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in TORCH_DTYPES:
        raise ValueError(f"dtype: {name or repr(dtype)} is not one of {', '.join(TORCH_DTYPES)}")
    return name


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
    """Whether two models differ in dropout, initial values and the losses of routers alone."""
    return replace(one, dropout=other.dropout, init_std=other.init_std, moe=with_training(one.moe, other.moe)) == other


def torch_arrays(tree: Tree, model: ModelConfig, family: str | None = None, stacked: bool = False) -> dict[str, np.ndarray]:
    """Any tree shaped like the parameters, of jax or numpy arrays, as torch's keys and layouts: gradients, moments, updated weights.

    A vocabulary padded for any mesh is cropped; a tied table appears once, under the embedding's key. `stacked` as `export_params`; so are
    the experts of torch's modules.
    """
    chosen = infer_family(model) if family is None else find_family(family)
    leaves: dict[str, View] = {path: ShardedView(path, leaf) for path, leaf in flatten(tree)}
    views = to_torch(bindings(chosen, model, tree["embedding"]["table"].shape[0], stacked), leaves)
    return {key: read_all(view) for key, view in views.items()}


def tree_of_arrays(
    arrays: Mapping[str, np.ndarray], model: ModelConfig, family: str | None = None, tensor: int = 1, stacked: bool = False
) -> Tree:
    """{torch key: array} -> nested dict of numpy arrays, vocabulary padded for a tensor axis of that size. Every key is used once.

    Raises ValueError naming keys that are missing, unknown or misshapen. A tied model's head may be there if it is equal.
    """
    chosen = infer_family(model) if family is None else find_family(family)
    padded = padded_vocabulary(model.vocabulary, tensor)
    bound = bindings(chosen, model, padded, stacked)
    wanted = expected_shapes(bound)
    given = dict(arrays)
    if model.tied and HEAD in given and not np.array_equal(given.pop(HEAD), given.get(EMBEDDING, np.nan), equal_nan=True):
        raise ValueError(f"{HEAD}: differs from the embedding that it is tied to")
    wrong = [f"{key} is missing" for key in wanted.keys() - given.keys()] + [f"{key} is unknown" for key in given.keys() - wanted.keys()]
    wrong += [f"{key} is {given[key].shape}, not {wanted[key]}" for key in wanted.keys() & given.keys() if given[key].shape != wanted[key]]
    if wrong:
        raise ValueError(f"tensors: {'; '.join(sorted(wrong))}")
    leaves = to_leaves(bound, {key: ArrayView(np.asarray(given[key])) for key in wanted})
    return map_leaves(lambda path, _: read_all(leaves[path]), Decoder(model, padded).specs)
