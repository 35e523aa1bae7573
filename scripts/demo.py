"""The main job from end to end, on the embedded default: `make demo`.

Trains a small Llama on the language reference inside this Python, over 8 simulated devices (data 4 × tensor 2, ZeRO-1); leaves half way,
as a preempted job would, resumes from the checkpoint, and prints text sampled from the trained model. Then the bridge: the model as a
Hugging Face folder, compared with torch in float64 (logits, loss, every gradient, AdamW steps), and text that transformers samples from it.
"""

import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN, FOLDER = "configs/runs/demo.yaml", "runs/demo"
HALF = "120"


def command(module: str, name: str, *arguments: str) -> None:
    """One command, shown and run; the demo ends with its exit code if it fails."""
    print(f"\n$ {name} {' '.join(a if a.isascii() and ' ' not in a else repr(a) for a in arguments)}", flush=True)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache")}
    code = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment, check=False).returncode
    if code:
        sys.exit(code)


def jaxpar(*arguments: str) -> None:
    command("jaxpar", "jaxpar", *arguments)


def torch_bridge(*arguments: str) -> None:
    command("torch_bridge.cli", "torch-bridge", *arguments)


def sample_with_transformers(folder: Path, prompt: str, tokens: int) -> None:
    """Text that torch makes of an exported folder, tokenizer included."""
    import torch
    import transformers

    print(f"\ntransformers samples from {folder.relative_to(ROOT)}:")
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    torch.manual_seed(0)
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    found = model.generate(**given, max_new_tokens=tokens, do_sample=True, temperature=0.7, pad_token_id=model.config.pad_token_id or 0)
    print(tokenizer.decode(found[0], skip_special_tokens=True))


def main() -> None:
    started = time.monotonic()
    shutil.rmtree(ROOT / FOLDER, ignore_errors=True)
    jaxpar("train", RUN, "--until", HALF)
    jaxpar("train", RUN)
    for prompt, temperature in (("The following", "0.7"), ("A class definition", "0.7")):
        jaxpar("generate", f"{FOLDER}/checkpoints", "--prompt", prompt, "--tokens", "60", "--temperature", temperature)
    if find_spec("torch") and find_spec("transformers"):
        torch_bridge("export", f"{FOLDER}/checkpoints", f"{FOLDER}/huggingface")
        torch_bridge("parity", f"{FOLDER}/huggingface", "--mesh", "data=2,tensor=2")
        sample_with_transformers(ROOT / FOLDER / "huggingface", "A class definition", 60)
    else:
        print("\nto go on to torch (export, parity, generation with transformers): make venv-torch, or pip install 'jaxpar[torch]'")
    print(f"\ncheckpoints, tokenizer and metrics are in {FOLDER} ({time.monotonic() - started:.0f} s in all)")


if __name__ == "__main__":
    main()
