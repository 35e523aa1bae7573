"""make bench-bridge: the figures of docs/bridge.md, on this machine. Needs torch (make venv-torch).

    python scripts/bench_bridge.py [families] [experts] [smollm2] [witness] [streaming]      all of them without arguments

families    parity of the hostile tiny checkpoints of tests/bridge: one device and data 2 × tensor 2, float64 and float32, 3 AdamW steps
experts     the same of the two with experts, in float64: one device and data 2 × expert 2 × tensor 2, with and without the balancing loss
smollm2     parity of SmolLM2-135M (fetch_smollm2.py): float64 on one device and on tensor 3, float32 on one device
witness     torch's DDP, FSDP2 and DTensor tensor parallelism against jaxpar's meshes (second_witness.py)
streaming   memory and time of importing a synthetic folder of 4 GB (bench_streaming.py)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

SECTIONS = ("families", "experts", "smollm2", "witness", "streaming")


def ladder(name: str, folder: Path, mesh: str, dtype: str, steps: int, sequence: int) -> bool:
    """One row of Markdown: the largest relative difference of each rung, and torch's own in that dtype."""
    from jaxpar import configfile
    from torch_bridge.parity.ladder import run_parity
    from torch_bridge.parity.report import RUNGS

    report = run_parity(folder, configfile.parse_mesh(mesh), dtype, steps, sequence=sequence)
    cells = [f"{report.rungs[rung].max_relative:.1e}" for rung in RUNGS]
    own = ", ".join(f"{report.torch[rung].max_relative:.1e}" for rung in RUNGS) if report.torch else "–"
    print("|", " | ".join([name, mesh, dtype, *cells, own, "passed" if report.passed else f"past {report.tolerance:.0e}"]), "|", flush=True)
    return report.passed


def header() -> None:
    print("\n| checkpoint | mesh | dtype | logits | loss | gradients | AdamW steps | torch's own, that dtype | verdict |")
    print("|---|---|---|---|---|---|---|---|---|")


def families() -> bool:
    from tests.bridge import hostile

    header()
    passed = True
    with tempfile.TemporaryDirectory() as made:
        for name in hostile.NAMES:
            folder = hostile.save(Path(made) / name, name)
            for mesh in ("data=1", "data=2,tensor=2"):
                passed &= ladder(name, folder, mesh, "float64", 3, hostile.SEQUENCE)
            for mesh in ("data=1", "data=2,tensor=2"):
                ladder(name, folder, mesh, "float32", 3, hostile.SEQUENCE)  # printed, not judged: see docs/bridge.md
    return passed


def experts() -> bool:
    from tests.bridge import hostile

    header()
    passed = True
    with tempfile.TemporaryDirectory() as made:
        for name in hostile.EXPERTS:
            for kind in ("", ", balancing loss", ", balancing loss, dense layers"):
                label = name + kind
                changes = {"output_router_logits": bool(kind), "router_aux_loss_coef": 0.3}
                if "dense" in kind:
                    if name == "mixtral":  # which has none
                        continue
                    changes |= {"mlp_only_layers": [0, 1, 3], "num_hidden_layers": 5}
                folder = hostile.save(Path(made) / label, name, **changes)
                for mesh in ("data=1", "data=2,expert=2,tensor=2"):
                    passed &= ladder(label, folder, mesh, "float64", 3, hostile.SEQUENCE)
    return passed


def smollm2() -> bool:
    sys.path.insert(0, str(FOLDER))
    from fetch_smollm2 import fetch

    folder = fetch()
    header()
    exact = [ladder("SmolLM2-135M", folder, mesh, "float64", 3, 48) for mesh in ("data=1", "tensor=3")]
    ladder("SmolLM2-135M", folder, "data=1", "float32", 3, 48)  # gradients of 30 layers in float32: torch's own differ by as much
    return all(exact)


def script(name: str) -> bool:
    """A process of its own, which sets its devices itself."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run([sys.executable, str(FOLDER / name)], env=environment, check=False).returncode == 0


def main() -> int:
    chosen = sys.argv[1:] or list(SECTIONS)
    for name in chosen:
        if name not in SECTIONS:
            print(f"bench_bridge: {name!r} is not one of {', '.join(SECTIONS)}", file=sys.stderr)
            return 2
    import jax
    import transformers

    transformers.utils.logging.disable_progress_bar()
    jax.config.update("jax_enable_x64", True)
    run = {
        "families": families,
        "experts": experts,
        "smollm2": smollm2,
        "witness": lambda: script("second_witness.py"),
        "streaming": lambda: script("bench_streaming.py"),
    }
    passed = [run[name]() for name in chosen]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
