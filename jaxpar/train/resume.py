"""What a run that goes on must have in common with the one that it goes on from; each check raises ValueError, one line, with the fix.

    check_same         fields of the configuration that decide what the data position and the weights mean
    check_tokenizer    the tokenizer beside the checkpoints: token ids mean the same text
    check_data         the tokens themselves: count and a hash of samples, kept beside the checkpoints as data.json

The configuration does not say what a file holds: a corpus may be changed in place, or moved without a change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jaxpar.train.corpus import Tokens
from jaxpar.train.tokenizer import Tokenizer, load_tokenizer

DATA = "data.json"
# A run that goes on must read the data it would have read; these fields decide which part of it that is. And its weights must mean what
# they meant: these fields of the model change what it computes and no shape shows it.
SAME = {
    "data": ("seed", "shuffle", "sequence", "documents"),
    "train": ("batch",),
    "model": (
        *("rope", "norm_eps", "norm_one_plus", "activation", "windows", "prefix"),
        *("score_scale", "score_softcap", "logit_softcap", "embedding_scale"),
        *("moe.activation", "moe.per_token", "moe.router", "moe.normalise", "moe.scale"),
        *("moe.groups", "moe.kept_groups", "moe.group_best"),
    ),
}


def check_same(saved: dict[str, Any], wanted: dict[str, Any], step: int) -> None:
    """Of two configurations as `configfile.dump` gives them, all fields in `SAME` must be equal; at step 0, as of an imported checkpoint,
    only those of the model: no data has been read."""
    for section, fields in SAME.items():
        if step == 0 and section != "model":
            continue
        meaning = "its weights mean" if section == "model" else "its data position means"
        for field in fields:
            old, new = (_as_yaml(_field(config[section], field)) for config in (saved, wanted))
            if old != new:
                raise ValueError(
                    f"{section}.{field}: the checkpoint was written with {old}, the run asks for {new}, "
                    f"so {meaning} nothing; set {section}.{field}={old}, or choose another checkpoint.folder"
                )


def check_tokenizer(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Refuse another tokenizer than the one beside the checkpoints: ids would mean other text, in old checkpoints too.

    The same configuration can give another one: a corpus changed in place, or the embedded one of another Python.
    """
    beside = folder / "tokenizer.json"
    if tokenizer is not None and beside.is_file() and load_tokenizer(beside).text() != tokenizer.text():
        raise ValueError(
            f"data.tokenizer: the tokenizer of this run is not the one beside its checkpoints, {beside}, so token ids mean other text; "
            f"bring back the corpus or tokenizer it began with, or choose another checkpoint.folder"
        )


def check_data(folder: Path, tokens: Tokens) -> None:
    """Refuse other tokens than those that `save_data` recorded. Without a record, as beside an imported checkpoint, nothing is refused."""
    beside = folder / DATA
    if not beside.is_file():
        return
    old, new = json.loads(beside.read_text(encoding="utf-8")), tokens.fingerprint()
    if old != new:
        counts = " to ".join(f"{record['tokens']:,} tokens of {record['documents']:,} documents" for record in (old, new))
        what = f"changed from {counts}" if (old["tokens"], old["documents"]) != (new["tokens"], new["documents"]) else "changed in content"
        raise ValueError(
            f"data.path: the data {what} since this run began ({beside}), so its data position means nothing; "
            f"bring back what it began with, or choose another checkpoint.folder"
        )


def save_data(tokens: Tokens, folder: Path) -> None:
    """Write the record that `check_data` reads, atomically."""
    path = folder / DATA
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(tokens.fingerprint()) + "\n", encoding="utf-8")
    temporary.replace(path)


def _field(section: dict[str, Any], name: str) -> Any:
    first, _, rest = name.partition(".")
    return _field(section[first], rest) if rest else section[first]


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
