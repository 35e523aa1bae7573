"""Compare jaxpar with torch from a clone, without installing it: python scripts/parity.py DIR --mesh data=2,tensor=2 --dtype float64"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torch_bridge.cli import main

if __name__ == "__main__":
    sys.exit(main(["parity", *sys.argv[1:]]))
