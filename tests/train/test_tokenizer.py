"""Byte-level BPE is deterministic and lossless; any tokenizer.json works; documents end with the end token."""

import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from jaxpar.config import DataConfig
from jaxpar.train import corpus
from jaxpar.train.tokenizer import END, encode, load_tokenizer, save_tokenizer, train_tokenizer

DOCUMENTS = ["the cat sat on the mat, the end", "a cat, a mat, a hat"] * 3
SCRIPT = "from jaxpar.train.tokenizer import train_tokenizer as t; print(t({documents!r}, 300).text())"


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(iter(DOCUMENTS), 300)


def test_trained_round_trip_and_size(trained):
    assert trained.end == 0 and 257 < trained.size <= 300
    text = "the hat\n\n  héllo wörld \N{SNOWMAN} <|end|> \x00"
    assert trained.decode(trained.encode(text)) == text
    assert len(trained.encode("the mat")) < len("the mat")


def test_text_never_makes_a_special_token(trained):
    assert trained.end not in trained.encode(f"before {END} after")
    trained.backend.encode_special_tokens = False
    assert trained.end in trained.encode(f"before {END} after"), "the control: without the guard it does"
    trained.backend.encode_special_tokens = True


def test_training_is_deterministic_across_processes(trained):
    out = subprocess.run([sys.executable, "-c", SCRIPT.format(documents=DOCUMENTS)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == trained.text()


def test_save_and_load(trained, tmp_path):
    again = load_tokenizer(save_tokenizer(trained, tmp_path / "new"))
    text = f"the cat {END} sat"
    assert again.encode(text) == trained.encode(text) and again.end == trained.end and again.size == trained.size
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["tokenizer.json"]


def test_encode_closes_each_document(trained):
    encoded = list(encode(trained, iter(DOCUMENTS)))
    assert len(encoded) == len(DOCUMENTS) and all(ids.dtype == np.uint32 for ids in encoded)
    for text, ids in zip(DOCUMENTS, encoded, strict=True):
        assert ids[-1] == trained.end and trained.end not in ids[:-1] and trained.decode(ids) == text
    assert int(max(map(np.max, encoded))) < trained.size


@pytest.mark.parametrize(("vocabulary", "end"), [({"a": 0, "</s>": 1, "[UNK]": 2}, 1), ({"a": 0, "[UNK]": 1}, 2)])
def test_foreign_tokenizer(tmp_path, vocabulary, end):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.enable_truncation(1)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    ids = next(encode(loaded, ["a a b"]))
    assert loaded.end == end and ids.tolist() == [0, 0, vocabulary["[UNK]"], end], "no truncation, no padding"
    assert loaded.size > max(ids)


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"data\.vocabulary: 256 must be at least 257"):
        train_tokenizer(DOCUMENTS, 256)
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*none\.json does not exist"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*bad\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "bad.json")
    gaps = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 2}, unk_token="[UNK]"))
    gaps.save(str(tmp_path / "gaps.json"))
    with pytest.raises(ValueError, match=r"data\.tokenizer: its ids have gaps"):
        load_tokenizer(tmp_path / "gaps.json")


def test_text_that_cannot_be_encoded(trained, tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})).save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"data\.tokenizer: the text cannot be encoded \(WordLevel error: Missing \[UNK\]"):
        list(encode(loaded, ["a", "b"]))
    with pytest.raises(ValueError, match=r"data\.tokenizer: the text cannot be encoded \(no text in UTF-8\)"):
        trained.encode("half \ud800")


def test_embedded_corpus_fills_the_vocabulary():
    tokenizer = train_tokenizer(corpus.documents(DataConfig()), 1024)
    assert tokenizer.size == 1024
