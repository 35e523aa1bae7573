"""jaxpar train for schedulers: exit code 75 where the run stopped, saved, before its last step, so that the scheduler starts it again.

    python scripts/launch/until_done.py RUN.yaml [--set a.b=c]... [--until STEP]

`jaxpar train` itself ends with 0 after SIGTERM, which a scheduler takes for the end of the job. Other exit codes are those of
`jaxpar train`. A run without `checkpoint.folder` cannot go on, so it is done whenever it ends.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from jaxpar import cli, configfile
from jaxpar.config import Config
from jaxpar.train.checkpoint import SavedCheckpoints

AGAIN = 75  # EX_TEMPFAIL of sysexits.h


def done(config: Config, until: int | None = None) -> bool:
    """Whether the last step, or step `until`, is saved."""
    if config.checkpoint.folder is None:
        return True
    with SavedCheckpoints(config.checkpoint.folder) as saved:
        latest = saved.latest()
    return latest is not None and latest >= min(config.train.steps, until or config.train.steps)


def main(arguments: Sequence[str]) -> int:
    code = cli.main(["train", *arguments])
    if code:
        return code
    args = cli.parser().parse_args(["train", *arguments])
    return 0 if done(configfile.load(args.run, args.overrides), args.until) else AGAIN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
