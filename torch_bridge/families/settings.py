"""A model's config.json, read strictly: the file's own values win, a library default is named as one, nothing is passed over in silence.

Settings    values by key with their provenance; every problem is collected, none raised
INERT       keys that change no number of the forward or backward pass
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch_bridge.report import Problem

CONFIG = "config.json"
REQUIRED = object()

# Of every configuration class: identity, generation, bookkeeping, heads of other tasks. Generation settings lived here before
# generation_config.json.
# fmt: off
INERT = frozenset((
    "architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "name_or_path", "auto_map", "use_cache",
    "initializer_range", "max_position_embeddings", "pretraining_tp", "output_attentions", "output_hidden_states", "return_dict",
    "return_dict_in_generate", "output_scores", "torchscript", "use_bfloat16", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "decoder_start_token_id", "unk_token_id", "prefix", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "task_specific_params", "classifier_dropout", "tokenizer_class", "chunk_size_feed_forward",
    "is_encoder_decoder", "is_decoder", "add_cross_attention", "tf_legacy_loss", "pruned_heads", "max_length", "min_length",
    "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "transformers.js_config", "unsloth_version",
    "unsloth_fixed",
))
# fmt: on

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", dict: "an object", list: "a list"}


class Settings:
    """`raw` is config.json as parsed, `library` the torch class whose defaults hold for absent keys.

    `provenance` says for each field of jaxpar's model where its value is from. `problems` grows; a bad value is replaced by its default, so
    that reading goes on.
    """

    def __init__(self, raw: Mapping[str, Any], library: str) -> None:
        self.raw, self.library = raw, library
        self.provenance: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.used: set[str] = set()

    def take(self, field: str, key: str, kind: type, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """The value of `key` as a `kind`. `default` is torch's where the key is absent, `null` what null means (default: not allowed).

        Returns None for a required value that is absent or wrong; the problem is noted."""
        self.used.add(key)
        if key not in self.raw:
            if default is REQUIRED:
                self.refuse(key, _WORDS[kind], "no such key")
                return None
            self.provenance[field] = f"{self.library}'s default ({key} is absent)"
            return default
        self.provenance[field] = f"{CONFIG}: {key}"
        value = self.raw[key]
        if value is None:
            if null is not REQUIRED:
                return null
            if default is None:
                return None
        return self.typed(key, value, kind, None if default is REQUIRED else default)

    def typed(self, key: str, value: Any, kind: type, default: Any) -> Any:
        """`value` when it is a `kind`; else `default`, and a problem under the name `key`. Numbers are finite."""
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < 2**1000 else math.inf
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            self.refuse(key, _WORDS[kind], repr(value))
            return default
        return value

    def refuse(self, key: str, expected: str, found: str) -> None:
        self.problems.append(Problem(CONFIG, key, expected, found))

    def finish(self, inert: Mapping[str, Any], ignore: frozenset[str]) -> None:
        """Refuse keys that nothing has read. Null says nothing; `inert` names values that change nothing, `ignore` what the user waives."""
        for key, value in self.raw.items():
            if key in self.used or key in INERT or key.startswith("_") or key in ignore or value is None:
                continue
            if key in inert:
                if value != inert[key] or isinstance(value, bool) != isinstance(inert[key], bool):
                    self.refuse(key, f"{inert[key]!r}, what {self.library}'s torch model computes", repr(value))
            else:
                self.refuse(
                    key, f"a setting of {self.library} (--ignore {key} passes over one that changes no number)", f"unknown {value!r}"
                )
