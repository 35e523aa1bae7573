"""What the README says: its example runs as it is printed, and the files and commands that it names exist."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
MOST_LINES = 12


def test_the_example_is_short():
    (example,) = EXAMPLES
    assert len([line for line in example.splitlines() if line.strip()]) <= MOST_LINES


@pytest.mark.slow
def test_the_example_runs():
    """In a fresh interpreter on one device, from the root of the clone; five losses, the first near ln(vocabulary)."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", EXAMPLES[0]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(line) for line in done.stdout.split()]
    assert len(losses) == 5 and abs(losses[0] - math.log(2048)) < 0.5 and losses[-1] < losses[0]


def named_paths(text):
    """Paths in backticks, links or the example that begin with a folder of the repository, and links to files at its root."""
    inside = re.findall(r"(?<![\w/.])((?:tests|scripts|jaxpar|configs|\.ci)/[\w./-]*\w)", text)
    return {*inside, *re.findall(r"\]\(([^)#:]+)\)", text)}


def test_every_file_that_it_names_exists():
    paths = named_paths(TEXT)
    assert {"tests/train/test_gradients.py", "CONTRIBUTING.md"} <= paths
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]
    assert not (ROOT / named_paths("see `tests/train/test_nothing.py`").pop()).exists()


def test_every_make_target_that_it_names_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([\w-]+)", TEXT, re.MULTILINE))
    assert {"test", "bench"} <= named <= targets
