"""Documents from every source, token folders whole or not there, and what bad input is told."""

import json

import numpy as np
import pytest

from jaxpar.config import DataConfig
from jaxpar.train import corpus


def read(**fields):
    return list(corpus.documents(DataConfig(**fields)))


def test_embedded_is_english_in_a_fixed_order():
    found = read()
    assert found == read() and len(found) > 50 and sum(map(len, found)) > 300_000
    assert any("assignment" in text for text in found)


def test_text_file_and_folder(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first\n\n\nstill first")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "stray.md").write_text("not read")
    assert read(source="text", path=str(tmp_path)) == ["first\n\n\nstill first", "second"]
    assert read(source="text", path=str(tmp_path / "b.txt")) == ["second"]
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfmarked\r\n")
    assert read(source="text", path=str(tmp_path / "b.txt")) == ["marked\n"]


def test_jsonl(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "one", "id": 1}\n\n{"body": "two\\u2028more"}\n')
    assert read(source="jsonl", path=str(file), field="body") == ["one", "two\u2028more"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r"data\.field: .*a\.jsonl line 2 has no text in 'text' \(it has body\)"),
        ('{"text": 3}', r"data\.field: .*line 2 has no text in 'text'"),
        ("[1]", r"line 2 has no text in 'text' \(it is not an object\)"),
        ('{"text": ', r"data\.path: .*line 2 is not JSON"),
        ('{"text": "x", "deep": ' + "[" * 100_000 + "]" * 100_000 + "}", r"data\.path: .*line 2 is not JSON"),
        (r'{"text": "a\ud800b"}', r"data\.path: .*line 2 holds half a character"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        read(source="jsonl", path=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_missing_empty_and_undecodable(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path: .*nowhere does not exist"):
        read(source="text", path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"data\.path: folder .* has no \*\.txt file"):
        read(source="text", path=str(tmp_path))
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(ValueError, match=r"data\.path: .* holds no text"):
        read(source="text", path=str(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 at byte 3"):
        read(source="text", path=str(tmp_path))


@pytest.mark.parametrize(("vocabulary", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_token_folder_round_trip(tmp_path, vocabulary, dtype):
    ids = [np.array([1, 2, vocabulary - 1]), np.array([], np.int64), np.array([7])]
    tokens = corpus.write_tokens(tmp_path / "made" / "tokens", iter(ids), vocabulary, tokenizer="{}")
    assert isinstance(tokens.stream_T, np.memmap) and tokens.stream_T.dtype == dtype and tokens.vocabulary == vocabulary
    assert tokens.stream_T.tolist() == [1, 2, vocabulary - 1, 7] and tokens.offsets.tolist() == [0, 3, 3, 4]
    in_memory = corpus.collect(ids, vocabulary)
    assert np.array_equal(in_memory.stream_T, tokens.stream_T) and np.array_equal(in_memory.offsets, tokens.offsets)
    assert (tmp_path / "made" / "tokens" / "tokenizer.json").read_text() == "{}"


def test_token_folder_is_whole_or_not_there(tmp_path):
    def broken():
        yield np.array([1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        corpus.write_tokens(tmp_path / "tokens", broken(), 10)
    with pytest.raises(ValueError, match=r"id 10 at position 3 is outside the vocabulary of 10"):
        corpus.write_tokens(tmp_path / "tokens", [np.array([1, 2]), np.array([3, 10])], 10)
    with pytest.raises(ValueError, match="no tokens"):
        corpus.write_tokens(tmp_path / "tokens", [], 10)
    assert list(tmp_path.iterdir()) == []
    corpus.write_tokens(tmp_path / "tokens", [np.array([1])], 10)
    with pytest.raises(ValueError, match="already there"):
        corpus.write_tokens(tmp_path / "tokens", [np.array([1])], 10)


def test_damaged_token_folder(tmp_path):
    folder = tmp_path / "tokens"
    with pytest.raises(ValueError, match=r"data\.path: .*is not a folder"):
        corpus.read_tokens(folder)
    corpus.write_tokens(folder, [np.array([1, 2, 3])], 10)
    np.save(folder / "documents.npy", np.array([0, 2]))
    with pytest.raises(ValueError, match=r"documents\.npy must rise from 0 to the 3 tokens"):
        corpus.read_tokens(folder)
    for damaged in (b"", b"junk"):
        (folder / "documents.npy").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"documents\.npy is not a file of offsets"):
            corpus.read_tokens(folder)
    (folder / "tokens.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"tokens\.bin has 3 bytes"):
        corpus.read_tokens(folder)
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint16", "vocabulary": float("inf")}))
    with pytest.raises(ValueError, match=r"meta\.json needs"):
        corpus.read_tokens(folder)
    (folder / "meta.json").write_text(json.dumps({"dtype": "int8"}))
    with pytest.raises(ValueError, match=r"meta\.json needs"):
        corpus.read_tokens(folder)
    (folder / "tokens.bin").unlink()
    with pytest.raises(ValueError, match=r"tokens\.bin is missing"):
        corpus.read_tokens(folder)


def test_ids_outside_the_vocabulary_are_named_by_position(monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 4)
    tokens = corpus.collect([np.array([0, 1, 2, 3, 4, 9, 5])], 10)
    corpus.check_tokens(tokens, 10)
    with pytest.raises(ValueError, match=r"id 9 at position 5 is outside the vocabulary of 9: raise model\.vocabulary"):
        corpus.check_tokens(tokens, 9)
    with pytest.raises(ValueError, match=r"id -1 at position 1"):
        corpus.check_ids(np.array([0, -1]), 9, "data")
    with pytest.raises(ValueError, match=r"data\.path: corpus is empty"):
        corpus.check_tokens(corpus.collect([], 10), 10)
