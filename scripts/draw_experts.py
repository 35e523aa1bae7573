"""Draws docs/experts.svg: the load of experts over a short training, configs/runs/demo_experts.yaml, with and without correction bias.

Run: python scripts/draw_experts.py [folder for the two runs' metrics]; some minutes on two cores. Metrics that are there are kept.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from jaxpar.train.metrics import read_metrics

ROOT = Path(__file__).parent.parent
RUN, TARGET = ROOT / "configs" / "runs" / "demo_experts.yaml", ROOT / "docs" / "experts.svg"
RUNS = {"without the bias": ("false", "#c0504d"), "with the bias": ("true", "#2f6db5")}
LAYER, WIDTH, HEIGHT = 0, 300, 160  # the first layer with experts; a panel's size in pixels


def measured(folder: Path, correction: str) -> list[dict]:
    """Metrics of a run, trained where its folder does not have them yet."""
    if not (folder / "metrics.jsonl").exists():
        sets = (f"model.moe.correction={correction}", f"log.folder={folder}", f"checkpoint.folder={folder}/checkpoints")
        command = [sys.executable, "-m", "jaxpar", "train", str(RUN), *(part for each in sets for part in ("--set", each))]
        subprocess.run(command, check=True, cwd=ROOT)
    return read_metrics(folder)


def relative_load(records: list[dict]) -> np.ndarray:
    """Load of each expert of one layer in units of the mean: [steps logged, E]."""
    load = np.array([record["expert_load"][LAYER] for record in records], float)
    return load / load.mean(1, keepdims=True)


def text(x: float, y: float, words: str, size: int = 11, **more: str) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{attributes}>{words}</text>'


def lines(runs: dict[str, list[dict]], left: float, top: float) -> list[str]:
    """The busiest expert over the mean, mean over layers, a line for each run."""
    highest = max(record["expert_load_max"] for records in runs.values() for record in records)
    last = max(records[-1]["step"] for records in runs.values())
    parts = [text(left, top - 8, "busiest expert / mean, mean over layers", 13, font_weight="bold")]
    place = lambda step, value: (left + WIDTH * step / last, top + HEIGHT * (1 - (value - 1) / (highest - 1)))  # noqa: E731
    for value in np.arange(1, highest, 0.5 if highest < 4 else 1):
        y = place(0, value)[1]
        parts += [f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>', text(left - 6, y + 4, f"{value:g}", text_anchor="end")]
    for n, (name, records) in enumerate(runs.items()):
        colour = RUNS[name][1]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(record["step"], record["expert_load_max"]) for record in records))
        parts += [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
        parts.append(text(left + WIDTH, top + 14 + 14 * n, name, 12, fill=colour, text_anchor="end"))
    return [*parts, text(left, top + HEIGHT + 16, "step 0"), text(left + WIDTH, top + HEIGHT + 16, str(last), text_anchor="end")]


def heat(name: str, records: list[dict], left: float, top: float) -> list[str]:
    """A row for each expert, a column for each step logged: white at the mean, red above, blue below."""
    load = relative_load(records)
    cell, row = WIDTH / len(load), HEIGHT / load.shape[1]
    parts = [text(left, top - 8, f"load of each expert of layer 1, {name}", 13, font_weight="bold")]
    for step, expert in np.ndindex(load.shape):
        over = float(np.clip(np.log2(max(load[step, expert], 1e-3)) / 2, -1, 1))  # a quarter and four times the mean are the ends
        faded = round(255 * (1 - abs(over)))
        colour = f"rgb(255,{faded},{faded})" if over > 0 else f"rgb({faded},{faded},255)"
        x, y = left + step * cell, top + expert * row
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell + 0.2:.1f}" height="{row - 0.5:.1f}" fill="{colour}"/>')
    return [*parts, text(left, top + HEIGHT + 16, "red: 4 times the mean, white: the mean, blue: a quarter or less")]


def svg(runs: dict[str, list[dict]]) -> str:
    """The panels side by side."""
    left, gap, top = 30, 40, 30
    parts = lines(runs, left, top)
    for n, (name, records) in enumerate(runs.items(), 1):
        parts += heat(name, records, left + n * (WIDTH + gap), top)
    width, height = left + 3 * WIDTH + 2 * gap + 10, top + HEIGHT + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def summary(name: str, records: list[dict]) -> str:
    """A run's last quarter in numbers."""
    late = records[-len(records) // 4 :]
    mean = {key: np.mean([record[key] for record in late]) for key in ("loss", "expert_load_max", "router_entropy")}
    repeated = sum(record["expert_overflow"] > 0 for record in records)
    return (
        f"{name}: loss {mean['loss']:.3f}, busiest expert {mean['expert_load_max']:.2f} times the mean, router entropy "
        f"{mean['router_entropy']:.2f} nats over the last {len(late)} of {len(records)} logged steps; {repeated} repeated for overflow"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else made).absolute()
        runs = {name: measured(folder / correction, correction) for name, (correction, _) in RUNS.items()}
    TARGET.write_text(svg(runs))
    for name, records in runs.items():
        print(summary(name, records))
    print(TARGET)
