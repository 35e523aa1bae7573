"""python -m jaxpar: the command line, `jaxpar/cli.py`."""

import sys

from jaxpar.cli import main

sys.exit(main())
