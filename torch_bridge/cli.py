"""The command line.

    torch-bridge inspect DIR [--plan]         what a Hugging Face folder holds: model, where each setting is from, every tensor
    torch-bridge import DIR OUT [--run R]     a jaxpar checkpoint of it, to train on or generate from
    torch-bridge export CKPT DIR              a checkpoint as a folder that transformers loads
    torch-bridge parity DIR                   jaxpar against torch: logits, loss, gradients, optimizer steps
    torch-bridge diff A B                     two folders or checkpoints, tensor by tensor; exit code 1 where they differ

What a user got wrong is a report on stderr, one line a problem, and exit code 2; `--traceback` shows where it came from.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax

from jaxpar import configfile, distributed
from torch_bridge.parity import command as parity_command


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="torch-bridge", description="Weights from torch to jaxpar and back.", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    errors = _Parser(add_help=False)
    errors.add_argument("--traceback", action="store_true", help="show where an error came from")
    reading = _Parser(add_help=False)
    reading.add_argument("--rope-length", type=int, metavar="TOKENS", help="the length that dynamic rope assumes")
    reading.add_argument("--ignore", action="append", default=[], metavar="KEY", help="pass over a setting of config.json; may be repeated")
    reading.add_argument("--any-dtype", action="store_true", help="take tensors of other floating point dtypes than config.json says")

    inspect = commands.add_parser("inspect", parents=[reading, errors], help="say what a folder holds", allow_abbrev=False)
    inspect.add_argument("folder", metavar="DIR", help="a Hugging Face folder")
    inspect.add_argument("--plan", action="store_true", help="list every tensor and the leaf it becomes")
    inspect.set_defaults(call=_inspect)

    load = commands.add_parser("import", parents=[reading, errors], help="make a jaxpar checkpoint", allow_abbrev=False)
    load.add_argument("folder", metavar="DIR", help="a Hugging Face folder")
    load.add_argument("out", metavar="OUT", help="a checkpoint folder to make")
    load.add_argument("--run", metavar="RUN.yaml", help="the run to prepare: mesh, optimizer, data; its model is replaced")
    load.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="replace a value of the run")
    load.set_defaults(call=_import)

    export = commands.add_parser("export", parents=[errors], help="make a Hugging Face folder", allow_abbrev=False)
    export.add_argument("checkpoint", metavar="CKPT", help="a checkpoint folder of a run")
    export.add_argument("folder", metavar="DIR", help="a folder to make")
    export.add_argument("--step", type=int, help="the checkpoint of this step (default the latest)")
    export.add_argument("--dtype", help="float32, bfloat16, float16 or float64 (default that of the import, else the masters')")
    export.add_argument("--family", help="a model_type, such as llama or qwen3_moe (default that of the import, else the first that fits)")
    export.add_argument("--stacked", action="store_true", help="a layer's experts in one tensor, for transformers 5")
    export.add_argument("--shard-gigabytes", type=float, default=5.0, metavar="GB", help="most of one file (default 5)")
    export.set_defaults(call=_export)

    diff = commands.add_parser("diff", parents=[reading, errors], help="compare weights", allow_abbrev=False)
    diff.add_argument("first", metavar="A", help="a Hugging Face folder or a checkpoint folder")
    diff.add_argument("second", metavar="B", help="the same")
    diff.add_argument("--tolerance", type=float, default=0.0, metavar="X", help="relative difference that counts as equal (default 0)")
    diff.set_defaults(call=_diff)

    parity_command.add_parser(commands, parents=[reading, errors], allow_abbrev=False)
    return top


def _reading(args: argparse.Namespace) -> dict[str, Any]:
    return {"rope_length": args.rope_length, "ignore": args.ignore, "any_dtype": args.any_dtype}


def _alone(environ: Mapping[str, str]) -> None:
    """ValueError in one of several processes that a launcher started: each would do the whole and all write one folder."""
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        return  # a batch script itself, before its srun
    launch = None
    with contextlib.suppress(ValueError):
        launch = distributed.detect(environ)
    if launch is not None and launch.processes > 1:
        raise ValueError(f"torch-bridge is one process, and {launch.processes} were started: start it once (srun --ntasks=1)")


def _on_host() -> None:
    """Files in, files out: host memory holds more than a device, which would only be passed through. JAX_PLATFORMS says otherwise."""
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")


def _inspect(args: argparse.Namespace) -> int:
    from torch_bridge import inspection
    from torch_bridge.convert import read_model

    source = read_model(args.folder, **_reading(args))
    for line in inspection.summary(source):
        print(line)
    if args.plan:
        print()
        for line in inspection.plan(source):
            print(line)
    return 0


def _import(args: argparse.Namespace) -> int:
    if args.overrides and args.run is None:
        raise ValueError("--set: changes a run file, so it needs --run RUN.yaml")
    run = configfile.load(args.run, args.overrides) if args.run else None
    _on_host()
    from torch_bridge import inspection
    from torch_bridge.checkpoints import default_run, import_folder
    from torch_bridge.convert import read_model

    source = read_model(args.folder, **_reading(args))
    import_folder(source, args.out, default_run(source) if run is None else run)
    print(f"{args.out}: {source.family.name} of {inspection.parameters(source):,} parameters, step 0")
    for note in inspection.tokenizer_notes(source):
        print(f"note: {note}")
    print(f"train on: jaxpar train {args.out}/run.yaml")
    return 0


def _export(args: argparse.Namespace) -> int:
    if not args.shard_gigabytes > 0 or not math.isfinite(args.shard_gigabytes * 1e9):
        raise ValueError(f"--shard-gigabytes: {args.shard_gigabytes} must be positive and finite")
    _on_host()
    from torch_bridge.checkpoints import export_checkpoint

    out = export_checkpoint(
        args.checkpoint,
        args.folder,
        step=args.step,
        dtype=args.dtype,
        family=args.family,
        max_shard_bytes=int(args.shard_gigabytes * 1e9),
        stacked=args.stacked,
    )
    print(f"{out}: written")
    return 0


def _diff(args: argparse.Namespace) -> int:
    if not 0 <= args.tolerance < math.inf:
        raise ValueError(f"--tolerance: {args.tolerance} must be a number, not negative")
    _on_host()
    from torch_bridge.checkpoints import open_weights
    from torch_bridge.compare import compare

    kinds = {"ignore": frozenset(args.ignore), "rope_length": args.rope_length}
    first, second = (open_weights(folder, **kinds) for folder in (args.first, args.second))
    found = list(compare(first.tensors, second.tensors))
    different = [difference for difference in found if not difference.equal]
    width = max((len(difference.key) for difference in different), default=0)
    for difference in sorted(different, key=lambda difference: -difference.relative):
        values = difference.note or f"absolute {difference.absolute:.3e}  relative {difference.relative:.3e}"
        print(f"{difference.key.ljust(width)}  {values}")
    failed = [difference for difference in different if difference.note or not difference.relative <= args.tolerance]
    beyond = f", {len(failed)} beyond {args.tolerance:g}" if args.tolerance else ""
    print(f"{len(found)} tensors, {len(different)} differ{beyond}")
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. ValueError and OSError are what a user can cause: a report and 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if argv is None and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files and tensors are not all of the terminal's encoding
    try:
        args = parser().parse_args(arguments)
        _alone(os.environ)
        code = int(args.call(args) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who read the output, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        if "--traceback" in arguments:
            traceback.print_exc()
        print(f"torch-bridge: error: {_report(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("torch-bridge: interrupted", file=sys.stderr)
        return 130


def _report(error: ValueError | OSError) -> str:
    from torch_bridge.report import BridgeError

    if isinstance(error, BridgeError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
