"""`jaxpar tokenize`: a folder that training reads as the same tokens."""

import numpy as np
import pytest
import yaml

from jaxpar.cli import main
from jaxpar.config import DataConfig
from jaxpar.train.data import open_data


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.txt").write_text(f"Document {number} says: " + "a rose is a rose " * (number + 1))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"data": {"source": "text", "path": str(tmp_path / "text"), "vocabulary": 270}}))
    return path


def test_the_folder_holds_what_the_text_is(tmp_path, run_file, capsys):
    folder = tmp_path / "tokens"
    assert main(["tokenize", str(run_file), str(folder)]) == 0
    text, tokenizer = open_data(DataConfig(source="text", path=str(tmp_path / "text"), vocabulary=270))
    read, beside = open_data(DataConfig(source="tokens", path=str(folder)))
    assert np.array_equal(text.stream_T, read.stream_T) and np.array_equal(text.offsets, read.offsets)
    assert beside.text() == tokenizer.text() and read.vocabulary == tokenizer.size
    assert capsys.readouterr().out == f"{folder}: {len(read.stream_T)} tokens of 3 documents, vocabulary {tokenizer.size}\n"


@pytest.mark.parametrize(
    "sets, message",
    [
        (["data.path=/nowhere"], "data.path: /nowhere does not exist"),
        (["data.source=tokens"], "data.source: tokens are tokens already"),
        (["data.vocabulary=100"], "data.vocabulary: 100 must be at least 257"),
        ([], "is already there: remove it or name another"),
    ],
)
def test_mistakes_leave_nothing(tmp_path, run_file, capsys, sets, message):
    folder = tmp_path / "tokens"
    if not sets:
        folder.mkdir()
    assert main(["tokenize", str(run_file), str(folder), *(part for override in sets for part in ("--set", override))]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jaxpar: error: ") and err.count("\n") == 1 and message in err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == (["run.yaml", "text"] if sets else ["run.yaml", "text", "tokens"])
