"""Packing keeps every document apart and every token once; batches depend on seed and step alone, whoever reads them."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.config import DataConfig
from jaxpar.train import corpus
from jaxpar.train.data import IGNORED, Loader, Rows, local_sequences, open_data, place

VOCABULARY = 50
END = 0
GOLDEN = [21, 2, 13, 14, 9, 7, 28, 6]


def stream(lengths, seed=0):
    """Documents of these lengths, each closed by END."""
    rng = np.random.default_rng(seed)
    return corpus.collect([np.append(rng.integers(1, VOCABULARY, length - 1), END) for length in lengths], VOCABULARY)


def unpack(rows):
    """(documents read from ids and segments, next-token pairs read from labels), joining pieces that continue over a row's edge."""
    pieces, pairs = [], []
    for index in range(len(rows)):
        row = rows[index]
        for segment in range(1, row["segments"].max() + 1):
            inside = row["segments"] == segment
            ids, labels = row["ids"][inside], row["labels"][inside]
            assert row["positions"][inside].tolist() == list(range(len(ids)))
            assert np.array_equal(labels[:-1], ids[1:]), "inside a piece the label is the next token"
            pieces.append((ids, labels[-1]))
            pairs += [(a, b) for a, b in zip(ids, labels, strict=True) if b != IGNORED]
        padding = row["segments"] == 0
        assert np.all(row["labels"][padding] == IGNORED) and np.all(np.diff(padding.astype(int)) >= 0)
    documents, current = [], []
    for ids, after in pieces:
        current += ids.tolist()
        if after == IGNORED:
            documents.append(current)
            current = []
    return (documents if not current else [*documents, current]), pairs


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 23), min_size=1, max_size=12), sequence=st.integers(2, 9))
def test_packing_gives_back_documents(lengths, sequence):
    tokens = stream(lengths)
    documents, pairs = unpack(Rows(tokens, sequence, VOCABULARY))
    wanted = [tokens.stream_T[a:b].tolist() for a, b in itertools.pairwise(tokens.offsets)]
    if sum(lengths) % sequence == 1 and sum(lengths) > 1:
        # The stream's last token would be fed in a row of its own, with nothing to predict: it is only a label.
        wanted[-1] = wanted[-1][:-1]
        if wanted[-1] and lengths[-1] > 1:
            assert pairs[-1][1] == END
        wanted = [document for document in wanted if document]
    assert documents == wanted
    assert pairs == [pair for a, b in itertools.pairwise(tokens.offsets) for pair in itertools.pairwise(tokens.stream_T[a:b].tolist())]


def test_a_row_by_hand():
    tokens = corpus.collect([np.array([5, 6, END]), np.array([END]), np.array([7, 8, 9, 4, END])], VOCABULARY)
    rows = Rows(tokens, 6, VOCABULARY)
    assert len(rows) == 2
    assert {name: value.tolist() for name, value in rows[0].items()} == {
        "ids": [5, 6, END, END, 7, 8],
        "segments": [1, 1, 1, 2, 3, 3],
        "positions": [0, 1, 2, 0, 0, 1],
        "labels": [6, END, IGNORED, IGNORED, 8, 9],
    }
    assert {name: value.tolist() for name, value in rows[1].items()} == {
        "ids": [9, 4, END, 0, 0, 0],
        "segments": [1, 1, 1, 0, 0, 0],
        "positions": [0, 1, 2, 3, 4, 5],
        "labels": [4, END, IGNORED, IGNORED, IGNORED, IGNORED],
    }
    assert all(value.dtype == np.int32 for value in rows[0].values())


def loader(accumulation=2, shuffle=True, seed=3, batch=8, rows=None):
    rows = rows or Rows(stream([5, 1, 30, 12, 2, 9, 17, 40, 3]), 4, VOCABULARY)
    return Loader(rows, batch=batch, accumulation=accumulation, seed=seed, shuffle=shuffle)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_union_over_hosts_is_the_same_and_each_reads_only_its_own(hosts):
    class Counting(Rows):
        read = 0

        def __getitem__(self, index):
            type(self).read += 1
            return super().__getitem__(index)

    whole = loader().batch_at(5)
    assert whole["ids"].shape == (2, 4, 4) and whole["rows"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    mine = loader(rows=Counting(stream([5, 1, 30, 12, 2, 9, 17, 40, 3]), 4, VOCABULARY))
    share = 4 // hosts
    Counting.read = 0
    parts = [mine.batch_at(5, slice(h * share, (h + 1) * share)) for h in range(hosts)]
    assert Counting.read == 8, "every row is read by one host only"
    assert same({name: np.concatenate([part[name] for part in parts], axis=1) for name in whole}, whole)
    assert same(mine.batch_at(5, np.array([1, 3])), {name: value[:, [1, 3]] for name, value in whole.items()})


def test_accumulation_does_not_change_what_a_step_reads():
    one, four = loader(accumulation=1).batch_at(2), loader(accumulation=4).batch_at(2)
    assert same({name: value.reshape(one[name].shape) for name, value in four.items()}, one)


def test_resume_gives_the_same_batches():
    whole = list(loader().iterate(0, 9))
    assert len(whole) == 9
    for k in (1, 4, 8):
        rest = list(loader().iterate(k, 9))
        assert len(rest) == 9 - k and all(map(same, rest, whole[k:]))
    assert not same(whole[0], whole[1]), "the control: another step is another batch"
    endless = loader().iterate(4)
    assert same(next(endless), whole[4]) and same(next(endless), whole[5])
    endless.close()
    assert not same(loader(seed=4).batch_at(0), whole[0]), "the control: another seed is another order"


def order(seed, shuffle, epochs):
    class Numbered(Rows):
        def __getitem__(self, index):
            return {name: np.full(4, index % len(self), np.int32) for name in ("ids", "labels", "positions", "segments")}

    rows = Numbered(stream([120]), 4, VOCABULARY)
    assert len(rows) == 30
    drawn = loader(batch=3, accumulation=1, seed=seed, shuffle=shuffle, rows=rows)
    steps = [drawn.batch_at(step)["ids"][0, :, 0] for step in range(10 * epochs)]
    return np.concatenate(steps).reshape(epochs, 30).tolist()


def test_each_epoch_is_another_permutation():
    first, second, third = order(0, True, 3)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(30))
    assert first != second != third and first != list(range(30))
    assert order(0, False, 2) == [list(range(30))] * 2


def test_the_order_is_the_one_runs_were_started_with():
    """A checkpoint is resumed with whatever Grain is installed then: a change of its shuffle must not pass unseen."""
    assert order(0, True, 1)[0][:8] == GOLDEN


def test_errors(tmp_path):
    tokens = stream([5, 9, 30])
    with pytest.raises(ValueError, match=r"id \d+ at position \d+ is outside the vocabulary of 3"):
        Rows(tokens, 4, 3)
    with pytest.raises(ValueError, match=r"data\.seed: -1 must be between"):
        loader(seed=-1)


def test_a_bad_id_beyond_the_scan_stops_the_run_when_read(monkeypatch):
    monkeypatch.setattr(corpus, "SCAN", 8)
    tokens = corpus.collect([np.array([*range(1, 11), 60, END])], 61)
    rows = Rows(tokens, 4, VOCABULARY)
    with pytest.raises(ValueError, match=r"id 60 at position 10 is outside the vocabulary of 50"):
        list(loader(rows=rows, batch=2, accumulation=1).iterate(0, 4))


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 1, 8), (1, 2, 4)])
def test_place(shape):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "expert", "seq"))
    sharding = NamedSharding(mesh, PartitionSpec(None, ("data", "expert"), "seq"))
    drawn = Loader(Rows(stream([70, 3, 90]), 8, VOCABULARY), batch=16, accumulation=2, seed=0, shuffle=True)
    batch = drawn.batch_at(1)
    assert local_sequences(sharding, 8).tolist() == list(range(8))
    placed = place(batch, sharding, 8)
    assert same({name: np.asarray(value) for name, value in placed.items()}, batch)
    assert placed["ids"].sharding == sharding and placed["rows"].sharding.spec == PartitionSpec(None, ("data", "expert"))
    for shard in placed["labels"].addressable_shards:
        assert np.array_equal(shard.data, batch["labels"][shard.index])


def test_place_refuses_a_batch_without_its_sequences():
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1, 1), ("data", "expert", "seq"))
    sharding = NamedSharding(mesh, PartitionSpec(None, ("data", "expert"), "seq"))
    drawn = Loader(Rows(stream([70]), 4, VOCABULARY), batch=8, accumulation=1, seed=0, shuffle=True)
    with pytest.raises(AssertionError, match="were not read"):
        place(drawn.batch_at(0, slice(0, 4)), sharding, 8)


def test_open_data_every_source(tmp_path):
    (tmp_path / "a.txt").write_text("some text to read " * 20)
    (tmp_path / "a.jsonl").write_text('{"text": "some text to read"}\n' * 3)
    text, tokenizer = open_data(DataConfig(source="text", path=str(tmp_path), vocabulary=270))
    assert tokenizer.decode(text.stream_T) == "some text to read " * 20 and text.stream_T[-1] == tokenizer.end
    lines, _ = open_data(DataConfig(source="jsonl", path=str(tmp_path), vocabulary=270))
    assert len(lines.offsets) == 4
    corpus.write_tokens(tmp_path / "tokens", [text.stream_T], text.vocabulary, tokenizer.text())
    folder, beside = open_data(DataConfig(source="tokens", path=str(tmp_path / "tokens")))
    assert np.array_equal(folder.stream_T, text.stream_T) and beside.encode("text") == tokenizer.encode("text")
    embedded, _ = open_data(DataConfig())
    assert embedded.vocabulary == 2048 and len(embedded.stream_T) > 50_000
    assert open_data(DataConfig(sequence=64))[0] is embedded, "tokenized once a process"


def test_joined_documents_are_one_text():
    """Positions run on over document ends, every next token is a label, and nothing but the last row's padding is apart."""
    tokens = stream([3, 1, 9]).joined()
    rows = Rows(tokens, 4, VOCABULARY)
    read = [rows[i] for i in range(len(rows))]
    assert np.array_equal(np.concatenate([r["labels"] for r in read])[:12], tokens.stream_T[1:])
    assert all(np.array_equal(r["positions"], np.arange(4)) and (r["segments"] == 1).all() for r in read[:3])
