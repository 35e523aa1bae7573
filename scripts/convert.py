"""Convert from a clone, without installing it: python scripts/convert.py import DIR OUT (or inspect, export, diff; see --help)"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torch_bridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
