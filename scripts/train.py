"""Train, or resume, from a clone without installing it: python scripts/train.py configs/runs/demo.yaml --set train.steps=20"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxpar.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
