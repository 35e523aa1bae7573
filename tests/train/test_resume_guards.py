"""A run goes on only with what it began with, and says when it goes wrong."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpar import configfile
from jaxpar.config import ModelConfig, MoeConfig
from jaxpar.models.decoder import declared
from jaxpar.params import flatten
from jaxpar.train import loop
from jaxpar.train.checkpoint import Checkpoints
from jaxpar.train.corpus import write_tokens
from jaxpar.train.resume import SAME, check_same


def test_a_changed_corpus_does_not_replace_the_tokenizer(tmp_path):
    text, folder = tmp_path / "corpus.txt", tmp_path / "checkpoints"
    first, other = "the cat sat on the mat. " * 40, "ein ganz anderes Buch, Wort um Wort. " * 40
    config = configfile.from_dict(
        {
            "model": {"vocabulary": 300, "width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_width": 16},
            "data": {"source": "text", "path": str(text), "sequence": 8, "vocabulary": 300},
            "train": {"steps": 3, "batch": 2, "compute_dtype": "float32"},
            "checkpoint": {"folder": str(folder), "every": 1},
        }
    )
    devices = jax.devices()[:1]
    text.write_text(first)
    assert loop.train(config, devices, until=1) == 0
    kept = (folder / "tokenizer.json").read_bytes()

    text.write_text(other)
    with pytest.raises(ValueError, match="data.tokenizer: the tokenizer of this run is not the one beside its checkpoints"):
        loop.train(config, devices, until=2)
    assert (folder / "tokenizer.json").read_bytes() == kept

    text.write_text(first)  # the control: the corpus it began with goes on
    assert loop.train(config, devices, until=2) == 0
    assert (folder / "2").is_dir() and (folder / "tokenizer.json").read_bytes() == kept


def test_data_may_move_but_not_change(tmp_path):
    """Token folders, whose tokenizer stays the same whatever they hold."""
    ids = np.arange(400, dtype=np.uint32) % 61
    folders = {}
    for name, kept in (("begun", ids), ("moved", ids), ("longer", np.append(ids, ids[:9])), ("other", np.where(ids == 7, 8, ids))):
        folders[name] = tmp_path / name
        write_tokens(folders[name], iter([kept[:150], kept[150:]]), 61)
    config = configfile.from_dict(
        {
            "model": {"vocabulary": 61, "width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_width": 16},
            "data": {"source": "tokens", "path": str(folders["begun"]), "sequence": 8},
            "train": {"steps": 3, "batch": 2, "compute_dtype": "float32"},
            "checkpoint": {"folder": str(tmp_path / "checkpoints"), "every": 1},
        }
    )

    def go_on(name, until):
        return loop.train(dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(folders[name]))), devices, until=until)

    devices = jax.devices()[:1]
    assert go_on("begun", 1) == 0
    assert go_on("moved", 2) == 0
    with pytest.raises(ValueError, match=r"data\.path: the data changed from 400 tokens of 2 documents to 409 tokens of 2 documents since"):
        go_on("longer", 3)
    with pytest.raises(ValueError, match=r"data\.path: the data changed in content since this run began"):
        go_on("other", 3)
    assert go_on("begun", 3) == 0


def test_a_checkpoint_from_before_a_field_existed_has_its_default(tmp_path, monkeypatch):
    text = tmp_path / "corpus.txt"
    text.write_text("the cat sat on the mat. " * 40)
    config = configfile.from_dict(
        {
            "model": {"vocabulary": 300, "width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_width": 16},
            "data": {"source": "text", "path": str(text), "sequence": 8, "vocabulary": 300},
            "train": {"steps": 3, "batch": 2, "compute_dtype": "float32"},
            "checkpoint": {"folder": str(tmp_path / "checkpoints"), "every": 1},
        }
    )
    devices = jax.devices()[:1]
    assert loop.train(config, devices, until=1) == 0
    saved = configfile.dump(config)
    del saved["data"]["documents"]
    record = Checkpoints.record
    monkeypatch.setattr(Checkpoints, "record", lambda self, step: {**record(self, step), "config": saved})

    joined = dataclasses.replace(config, data=dataclasses.replace(config.data, documents="joined"))
    with pytest.raises(ValueError, match=r"data\.documents: the checkpoint was written with isolated"):
        loop.train(joined, devices, until=2)
    assert loop.train(config, devices, until=2) == 0
    saved["of_the_future"] = {}
    with pytest.raises(ValueError, match="step 2 in .* has a configuration of another version"):
        loop.train(config, devices, until=3)


def test_at_step_0_only_the_model_is_fixed():
    """An imported checkpoint has read no data: its batch and sequence are the run's to choose."""
    saved = configfile.dump(configfile.from_dict({}))
    other = configfile.dump(configfile.from_dict({"train": {"batch": 4}, "data": {"sequence": 32, "seed": 7}}))
    check_same(saved, other, 0)
    with pytest.raises(ValueError, match=r"data\.seed: the checkpoint was written with 0, the run asks for 7"):
        check_same(saved, other, 1)
    with pytest.raises(ValueError, match=r"model\.norm_eps: .* so its weights mean nothing"):
        check_same(saved, configfile.dump(configfile.from_dict({"model": {"norm_eps": 0.5}})), 0)


def test_a_router_that_chooses_otherwise_is_refused_and_one_that_balances_otherwise_is_not():
    def dumped(**moe):
        return configfile.dump(configfile.from_dict({"model": {"moe": {"experts": 8, **moe}}}))

    check_same(dumped(), dumped(balance_weight=0.1, correction_rate=0.01, z_weight=1e-3, jitter=0.1), 1)
    for field, old, new in (("per_token", 2, 4), ("scale", 1.0, 2.5), ("router", "softmax_topk", "sigmoid"), ("normalise", "true", False)):
        with pytest.raises(ValueError, match=rf"model\.moe\.{field}: the checkpoint was written with {old}, .*its weights mean nothing"):
            check_same(dumped(), dumped(**{field: new}), 0)


def test_a_run_that_diverges_says_so(tmp_path, capsys):
    text = tmp_path / "corpus.txt"
    text.write_text("the cat sat on the mat. " * 40)
    raw = {
        "model": {"vocabulary": 300, "width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_width": 16},
        "data": {"source": "text", "path": str(text), "sequence": 8, "vocabulary": 300},
        "optimizer": {"learning_rate": 1e30, "schedule": "constant"},
        "train": {"steps": 4, "batch": 2, "compute_dtype": "float32"},
        "log": {"every": 1},
    }
    config = configfile.from_dict(raw)
    assert loop.train(config, jax.devices()[:1]) == 0
    assert "steps skipped so far" in capsys.readouterr().out
    calm = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-3))
    assert loop.train(calm, jax.devices()[:1]) == 0
    assert "skipped" not in capsys.readouterr().out


DENSE = ModelConfig(vocabulary=61, width=32, layers=4, heads=4, kv_heads=2, head_width=8, mlp_width=48)
SPARSE = dataclasses.replace(DENSE, moe=MoeConfig(experts=4, width=24))
SHOWN = {  # by a leaf's shape, or by a leaf that is there or is not
    **{"vocabulary": 62, "width": 64, "layers": 8, "heads": 8, "kv_heads": 4, "head_width": 6, "value_head_width": 4, "mlp_width": 40},
    **dict.fromkeys(("qk_norm", "qkv_bias", "output_bias", "mlp_bias", "tied", "sinks", "moe.correction", "moe.biases"), True),
    **{"moe.experts": 8, "moe.width": 16, "moe.shared_width": 8, "moe.dense_layers": 2, "moe.every": 2},
}
ONLY_TRAINING = {"dropout", "init_std", "moe.balance", "moe.balance_weight", "moe.z_weight", "moe.correction_rate", "moe.jitter"}


def test_whatever_changes_what_weights_mean_is_refused():
    """Each field of a model is held to be the same, is seen in the shapes of parameters, or matters to training alone."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)} - {"moe"}
    fields |= {f"moe.{field.name}" for field in dataclasses.fields(MoeConfig)}
    groups = [set(SAME["model"]), set(SHOWN), ONLY_TRAINING]
    assert fields == set.union(*groups) and len(fields) == sum(map(len, groups))

    def shapes(model):
        return {path: leaf.shape for path, leaf in flatten(declared(model, 1))}

    for name, value in SHOWN.items():
        _, moe, field = name.rpartition("moe.")
        base = SPARSE if moe else DENSE
        changed = dataclasses.replace(base, moe=dataclasses.replace(base.moe, **{field: value})) if moe else base
        changed = changed if moe else dataclasses.replace(base, **{name: value})
        assert shapes(changed) != shapes(base), name
