"""Folders for the tests: made, read by the safetensors library, loaded by transformers without a word."""

import logging
import warnings
from pathlib import Path

import ml_dtypes  # noqa: F401 (numpy then knows bfloat16)
import numpy as np
import torch
import transformers
from safetensors import safe_open

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def bits(folder) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """{tensor: (dtype, shape, bytes)} of every safetensors file of a folder, by the safetensors library. A tensor stands once."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no dict)
                tensor = file.get_tensor(key)
                assert key not in found, f"{key} stands twice"
                found[key] = (str(tensor.dtype), tuple(tensor.shape), raw(tensor).tobytes())
    return found


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


class _Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def load_quietly(folder, **options):
    """The model that transformers makes of a folder. Fails on a missing, unexpected or mismatched key, a warning, a line in its log."""
    records = _Records()
    logger = logging.getLogger("transformers")
    logger.addHandler(records)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto", **options)
    finally:
        logger.removeHandler(records)
    assert records.lines == []
    assert {name: list(values) for name, values in info.items() if len(values)} == {}
    return model
