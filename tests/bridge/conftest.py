"""Tests of the bridge need torch and transformers (`make venv-torch`); without them nothing here is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["*"]
