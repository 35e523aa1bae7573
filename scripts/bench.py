"""make bench: the numbers of the README's table, on this machine, in about three minutes.

    python scripts/bench.py [ratio] [traffic] [memory] [flops] [context] [experts]      all of them without arguments

ratio     jaxpar's step against scripts/reference_llama.py, one device, alternated in one run (bench_ratio.py)
traffic   collectives of the compiled step against the formulas, by ZeRO level               (bench_step.py, as the next two)
memory    bytes of the compiled step against the formulas, by ZeRO level and by remat policy
flops     matmuls of a Llama block: forward, input gradient, weight gradients, by remat policy
context   rows split over `seq`: work of devices by layout, step time of 8 devices against one   (bench_context.py)
experts   8 experts, 2 a token, against the dense model of as many active parameters, alternated in one run (bench_experts.py)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SECTIONS = ("ratio", "traffic", "memory", "flops", "context", "experts")


def run(script: str, arguments: list[str], devices: int) -> None:
    """A process of its own, for the number of simulated devices is fixed when JAX starts."""
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "PYTHONPATH": str(FOLDER.parent)}
    subprocess.run([sys.executable, str(FOLDER / script), *arguments], env={**os.environ, **settings}, check=True)


def main() -> int:
    chosen = sys.argv[1:] or list(SECTIONS)
    for name in chosen:
        if name not in SECTIONS:
            print(f"bench: {name!r} is not one of {', '.join(SECTIONS)}", file=sys.stderr)
            return 2
    if "ratio" in chosen:
        run("bench_ratio.py", [], 1)
    if "experts" in chosen:
        run("bench_experts.py", [], 1)
    if "context" in chosen:
        run("bench_context.py", [], 8)
    if tables := [name for name in chosen if name not in ("ratio", "context", "experts")]:
        run("bench_step.py", tables, 8)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
