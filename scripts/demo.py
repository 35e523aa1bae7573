"""The main job from end to end, on the embedded default: `make demo`.

Trains a small Llama on the language reference inside this Python, over 8 simulated devices (data 4 × tensor 2, ZeRO-1); leaves half way,
as a preempted job would, resumes from the checkpoint, and prints text sampled from the trained model.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN, FOLDER = "configs/runs/demo.yaml", "runs/demo"
HALF = "120"


def jaxpar(*arguments: str) -> None:
    """One command, shown and run; the demo ends with its exit code if it fails."""
    print(f"\n$ jaxpar {' '.join(a if a.isascii() and ' ' not in a else repr(a) for a in arguments)}", flush=True)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache")}
    code = subprocess.run([sys.executable, "-m", "jaxpar", *arguments], cwd=ROOT, env=environment, check=False).returncode
    if code:
        sys.exit(code)


def main() -> None:
    started = time.monotonic()
    shutil.rmtree(ROOT / FOLDER, ignore_errors=True)
    jaxpar("train", RUN, "--until", HALF)
    jaxpar("train", RUN)
    for prompt, temperature in (("The following", "0.7"), ("A class definition", "0.7")):
        jaxpar("generate", f"{FOLDER}/checkpoints", "--prompt", prompt, "--tokens", "60", "--temperature", temperature)
    print(f"\ncheckpoints, tokenizer and metrics are in {FOLDER} ({time.monotonic() - started:.0f} s in all)")


if __name__ == "__main__":
    main()
