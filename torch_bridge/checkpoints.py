"""Between Hugging Face folders and jaxpar's checkpoint folders.

    import_folder        folder -> a checkpoint of step 0 that `jaxpar train` goes on from and `jaxpar generate` reads
    export_checkpoint    a checkpoint -> a folder that transformers loads
    Weights, open_weights    either kind as torch tensors, for `diff`

An imported checkpoint folder also has run.yaml, the run that its state fits, tokenizer.json, and `huggingface/`: the config.json,
tokenizer and generation files it came with, for an export to take along.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar import configfile, run_checks
from jaxpar.config import Config, MeshShape, ModelConfig
from jaxpar.mesh import make_mesh
from jaxpar.models.decoder import Decoder
from jaxpar.params import Tree, flatten, map_leaves
from jaxpar.train import padding
from jaxpar.train.checkpoint import Checkpoints, SavedCheckpoints, check_writable, state_bytes
from jaxpar.train.step import build_training
from jaxpar.train.tokenizer import load_tokenizer
from torch_bridge.arrays import ShardedView
from torch_bridge.convert import MAX_SHARD_BYTES, Source, bindings, dtype_name, export_params, import_params, read_model
from torch_bridge.families import find_family, infer_family
from torch_bridge.families.experts import with_training
from torch_bridge.formats.huggingface import CONFIG, TOKENIZER, carried, check_free, copy_carried, whole_folder, write_json
from torch_bridge.formats.safetensors import strict_json
from torch_bridge.mapping import to_leaves, to_torch
from torch_bridge.views import View

BESIDE = "huggingface"


def default_run(source: Source) -> Config:
    """The run of an import that names none: the defaults, a tokenizer no larger than the model's vocabulary."""
    run = Config()
    smaller = min(run.data.vocabulary, source.model.vocabulary)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, vocabulary=smaller))


def run_of(source: Source, run: Config, out: Path) -> Config:
    """`run` with the model of `source` (dropout stays the run's, as do routers' losses where it has any), its tokenizer unless it names
    one, `out` as checkpoint folder."""
    data = run.data
    if data.tokenizer is None and data.source != "tokens" and (source.folder / TOKENIZER).is_file():
        data = dataclasses.replace(data, tokenizer=str(out / TOKENIZER))
    moe = source.model.moe
    if run.model.moe.balance_weight or run.model.moe.z_weight or run.model.moe.jitter:
        moe = with_training(moe, run.model.moe)
    model = dataclasses.replace(source.model, dropout=run.model.dropout, moe=moe)
    return dataclasses.replace(run, model=model, data=data, checkpoint=dataclasses.replace(run.checkpoint, folder=str(out)))


def import_folder(source: Source, out: str | Path, run: Config) -> Config:
    """Write `out`: a checkpoint of step 0 with the parameters of `source` and a fresh optimizer of `run`. Returns the run.

    Checkpoints know no mesh, so the first device of this process makes it, whatever `run.mesh` asks for; that wants 12 bytes a parameter
    with AdamW. The folder appears whole, or not at all. Raises ValueError where `out` is not empty or `run` contradicts the model.
    """
    out = Path(out)
    check_free(out)
    config = run_of(source, run, out)
    run_checks.check_run(config, config.mesh.devices)
    with whole_folder(out) as temporary:
        mesh = make_mesh(MeshShape(), jax.devices()[:1])
        training = build_training(dataclasses.replace(config, mesh=MeshShape()), mesh)
        check_writable(temporary, "OUT", state_bytes(training.abstract_state))
        params = import_params(source, mesh, training.shardings["params"], config.train.master_dtype)
        state = padding.trim(training.first_state(params), training.abstract_state, training.gradients.specs)
        with Checkpoints(temporary, config.checkpoint.keep) as checkpoints:
            checkpoints.save(0, state, configfile.dump(config))
        (temporary / "run.yaml").write_text(yaml.safe_dump(configfile.dump(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
        (temporary / BESIDE).mkdir()
        copy_carried((source.folder / CONFIG, *source.carried), temporary / BESIDE)
        if (source.folder / TOKENIZER).is_file():
            shutil.copyfile(source.folder / TOKENIZER, temporary / TOKENIZER)
    return config


@dataclass(frozen=True, eq=False)
class Saved:
    """Parameters read from a checkpoint, on one device, unpadded. `raw` is the config.json that they came with, or empty."""

    folder: Path
    step: int
    config: Config
    params: Tree
    raw: dict[str, Any]


def read_checkpoint(folder: str | Path, step: int | None = None) -> Saved:
    """The parameters of a step, the latest unless named. Raises ValueError naming the folder or the step."""
    folder = Path(folder)
    raw = _configuration_beside(folder)
    with SavedCheckpoints(folder) as saved:
        chosen, config, leaves = saved.run(step)
        padded = max(leaves.get("params/embedding/table", [[0]])[0][0], config.model.vocabulary)
        place = NamedSharding(make_mesh(MeshShape(), jax.devices()[:1]), PartitionSpec())

        def wanted(path: str, parameter: Any) -> jax.ShapeDtypeStruct:
            dtype = leaves.get(f"params/{path}", [None, config.train.master_dtype])[1]
            return jax.ShapeDtypeStruct(parameter.shape, np.dtype(dtype), sharding=place)

        params = saved.restore_params(chosen, map_leaves(wanted, Decoder(config.model, padded).specs))
    return Saved(folder, chosen, config, params, raw)


def _configuration_beside(folder: Path) -> dict[str, Any]:
    """The config.json that a checkpoint came with, empty where there is none. ValueError naming the file for one that was damaged since."""
    path = folder / BESIDE / CONFIG
    if not path.is_file():
        return {}
    try:
        raw = strict_json(path.read_bytes())
        if not isinstance(raw, dict):
            raise ValueError("no object")
        if raw.get("model_type") is not None:
            find_family(raw["model_type"])
        for key in ("dtype", "torch_dtype"):
            if raw.get(key) is not None:
                dtype_name(raw[key])
    except ValueError as error:
        raise ValueError(f"{path}: {error}; put the config.json of the import there again") from None
    return raw


def export_checkpoint(
    folder: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    family: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    stacked: bool = False,
) -> Path:
    """A checkpoint's parameters as a Hugging Face folder, with the tokenizer that lies beside them.

    `dtype`: default that of the folder it was imported from, else the masters'. `family`: default the one it was imported from, else the
    first that can hold the model. `stacked` as `export_params`. Raises ValueError naming what is wrong; nothing half-written stays.
    """
    out = Path(out)
    check_free(out)
    if dtype is not None:
        dtype = dtype_name(dtype)
    if family is not None:
        find_family(family)
    saved = read_checkpoint(folder, step)
    model, raw = saved.config.model, dict(saved.raw)
    family = family or raw.get("model_type") or infer_family(model).name
    said = raw.get("dtype") or raw.get("torch_dtype")
    files = carried(saved.folder / BESIDE)
    with whole_folder(out) as temporary:
        if TOKENIZER in {file.name for file in files} or not (saved.folder / TOKENIZER).is_file():
            made: dict[str, Any] = {}
        else:
            made = tokenizer_files(saved.folder / TOKENIZER, temporary, saved.config)
        export_params(
            saved.params,
            model,
            temporary / "model",
            dtype or said,
            family,
            max_shard_bytes,
            raw={**made, **raw},
            files=files,
            max_positions=saved.config.data.sequence,
            stacked=stacked,
        )
        for file in (temporary / "model").iterdir():
            file.rename(temporary / file.name)
        (temporary / "model").rmdir()
    return out


def tokenizer_files(path: Path, folder: Path, config: Config) -> dict[str, Any]:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json of a tokenizer that jaxpar made. Returns the token ids that
    config.json repeats."""
    tokenizer = load_tokenizer(path)
    name = tokenizer.backend.id_to_token(tokenizer.end)
    (folder / TOKENIZER).write_text(tokenizer.text(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": name,
        "pad_token": name,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.data.sequence,
    }
    write_json(folder / "tokenizer_config.json", settings)
    ids = {"eos_token_id": tokenizer.end, "pad_token_id": tokenizer.end}
    write_json(folder / "generation_config.json", ids)
    return ids


@dataclass(frozen=True, eq=False)
class Weights:
    """Tensors by torch key, not yet read; each expert's by themselves."""

    family: str
    tensors: Mapping[str, View]


def open_weights(folder: str | Path, *, ignore: frozenset[str] = frozenset(), rope_length: int | None = None) -> Weights:
    """A Hugging Face folder or a jaxpar checkpoint folder as torch tensors. Raises ValueError or BridgeError where it is neither."""
    folder = Path(folder)
    if (folder / CONFIG).exists() or not folder.is_dir() or any(folder.glob("*.safetensors*")):
        source = read_model(folder, any_dtype=True, ignore=ignore, rope_length=rope_length)
        if not source.stacked:
            return Weights(source.family.name, source.tensors)
        each = to_torch(bindings(source.family, source.model), to_leaves(source.bindings(), source.tensors))
        return Weights(source.family.name, each)
    saved = read_checkpoint(folder)
    family = find_family(saved.raw["model_type"]) if saved.raw.get("model_type") else infer_family(saved.config.model)
    leaves = {path: ShardedView(path, leaf) for path, leaf in flatten(saved.params)}
    model: ModelConfig = saved.config.model
    return Weights(family.name, to_torch(bindings(family, model, saved.params["embedding"]["table"].shape[0]), leaves))
