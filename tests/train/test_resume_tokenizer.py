"""A run goes on only with the tokenizer that it began with."""

import jax
import pytest

from jaxpar import configfile
from jaxpar.train import loop


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
