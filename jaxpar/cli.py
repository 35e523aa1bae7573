"""The command line.

    jaxpar train RUN.yaml [--set a.b=c]...       train, or resume where the checkpoint folder has something to resume
    jaxpar generate CKPT --prompt "Once" ...     text from a checkpoint
    jaxpar tokenize RUN.yaml FOLDER              the run's text as a folder of tokens, for data.source: tokens
    jaxpar compile RUN.yaml [--gpu h100]...      memory, traffic, work and time on a GPU cluster, with no GPU
    jaxpar params RUN.yaml [--set a.b=c]...      every parameter: shape, place on the mesh, ZeRO placement, count

What a user got wrong is one line on stderr and exit code 2; `--traceback` shows where it came from.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

import jax

import jaxpar
from jaxpar import configfile, distributed, gpu, params, rules, run_checks
from jaxpar.mesh import AXES


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    top = _Parser(prog="jaxpar", description=jaxpar.__doc__, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"jaxpar {jaxpar.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    errors = _Parser(add_help=False)
    errors.add_argument("--traceback", action="store_true", help="show where an error came from")
    run_file = _Parser(add_help=False)
    run_file.add_argument("run", metavar="RUN.yaml", help="a run file, such as configs/runs/demo.yaml")
    run_file.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="replace a value; may be repeated")

    train = commands.add_parser("train", parents=[run_file, errors], help="train or resume a run", allow_abbrev=False)
    train.add_argument("--until", type=int, metavar="STEP", help="save and leave after this step; rerunning goes on")
    train.set_defaults(call=_train)

    tokens = commands.add_parser("tokenize", parents=[run_file, errors], help="write the text of a run as tokens", allow_abbrev=False)
    tokens.add_argument("folder", metavar="FOLDER", help="a folder to make, for data.source: tokens")
    tokens.set_defaults(call=_tokenize)

    compiled = commands.add_parser(
        "compile", parents=[run_file, errors], help="compile the training step for GPUs and report, with no GPU present", allow_abbrev=False
    )
    compiled.add_argument("--gpu", default="h100", metavar="NAME", help="a file of configs/hardware, or a path to one (default h100)")
    compiled.add_argument("--nodes", type=int, metavar="N", help="hosts (default: what the mesh needs)")
    compiled.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a host (default 8)")
    compiled.add_argument("--json", metavar="FILE", help="write the report as JSON, - for stdout")
    compiled.add_argument("--hlo", metavar="FILE", help="write the compiled program's text")
    compiled.add_argument("--trace", metavar="FILE", help="write the simulated step as a Chrome trace")
    compiled.add_argument("--png", metavar="FILE", help="draw one layer of the simulated step")
    compiled.add_argument(
        "--knobs", action="store_true", help="compile alternatives as well, which is done anyway where the run does not fit"
    )
    compiled.set_defaults(call=_compile)

    table = commands.add_parser("params", parents=[run_file, errors], help="list the parameters of a run", allow_abbrev=False)
    table.set_defaults(call=_params)

    generate = commands.add_parser("generate", parents=[errors], help="text from a checkpoint", allow_abbrev=False)
    generate.add_argument("checkpoint", metavar="CKPT", help="a checkpoint folder of a run")
    generate.add_argument(
        "--prompt", required=True, action="append", dest="prompts", metavar="TEXT", help="text to continue; may be repeated"
    )
    generate.add_argument("--tokens", type=int, default=64, help="new tokens (default 64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    generate.add_argument("--top-k", type=int, default=None, help="sample among the k likeliest tokens only")
    generate.add_argument("--top-p", type=float, default=None, help="sample among the fewest tokens whose probabilities reach p")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--mesh", default="data=1", metavar="data=2,tensor=2", help="devices along each axis (default one)")
    generate.add_argument("--step", type=int, default=None, help="the checkpoint of this step (default the latest)")
    generate.set_defaults(call=_generate)
    return top


def _train(args: argparse.Namespace) -> int:
    config = configfile.load(args.run, args.overrides)
    gpu.reserve()
    distributed.start(config.train.cpu_devices)
    from jaxpar.train import loop

    return loop.train(config, until=args.until)


def _compile(args: argparse.Namespace) -> int:
    config = configfile.load(args.run, args.overrides)
    jax.config.update("jax_platforms", "cpu")  # compiling needs the CUDA plugin and no GPU; one that is there stays free
    from jaxpar.plan import command

    return command.run(config, command.Request(**{name: getattr(args, name) for name in command.Request.__dataclass_fields__}), args.run)


def _tokenize(args: argparse.Namespace) -> int:
    config = configfile.load(args.run, args.overrides)
    from jaxpar.train import data

    tokens = data.write_folder(config.data, args.folder)
    print(f"{args.folder}: {len(tokens.stream_T):,} tokens of {len(tokens.offsets) - 1:,} documents, vocabulary {tokens.vocabulary:,}")
    return 0


def _generate(args: argparse.Namespace) -> int:
    mesh = configfile.parse_mesh(args.mesh)
    if args.tokens < 1:
        raise ValueError(f"--tokens: {args.tokens} must be at least 1")
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature: {args.temperature} must be finite and not negative")
    if args.top_k is not None and args.top_k < 1:
        raise ValueError(f"--top-k: {args.top_k} must be at least 1")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p: {args.top_p} must be in (0, 1]")
    distributed.start(mesh.devices)
    from jaxpar.generation import command

    return command.run(
        args.checkpoint,
        prompts=args.prompts,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        mesh=mesh,
        step=args.step,
    )


def _params(args: argparse.Namespace) -> int:
    from jaxpar.models.decoder import declared

    config = configfile.load(args.run, args.overrides)
    run_checks.check_run(config, config.mesh.devices)
    specs = declared(config.model, config.mesh.tensor)
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    partitions = params.partition_specs(specs, rules.Rules(sizes, rules.table(config.train)))
    placements = params.zero_placements(specs, partitions, sizes) if config.train.zero else params.map_leaves(lambda path, _: None, specs)

    def row(path: str, parameter: params.Parameter, spec: rules.PartitionSpec, placement: rules.Placement | None) -> tuple[str, ...]:
        places = [f"{name}/{'·'.join(rules.as_axes(entry))}" if entry else name for name, entry in zip(parameter.axes, spec)]
        zero = f"{parameter.axes[placement[0]]}/{'·'.join(axis for axis in placement[1] if sizes[axis] > 1)}" if placement else "whole"
        return path, " × ".join(map(str, parameter.shape)), " ".join(places), zero, f"{parameter.real_size:,}"

    rows = [line for _, line in params.flatten(params.map_leaves(row, specs, partitions, placements))]
    _print_table(("parameter", "shape", "dims, /axis that splits", f"ZeRO-{config.train.zero}", "count"), rows)
    print(f"total {params.count(specs):,}")
    return 0


def _print_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Columns as wide as their widest entry, the last one flush right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths)), row[-1].rjust(widths[-1])]))


def _line(error: ValueError | OSError) -> str:
    """An error as one line; of an OSError the file and the reason, without the number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """What a user is told about a run, as one line; other warnings with their place, as Python prints them."""
    if category is UserWarning:
        return f"jaxpar: warning: {' '.join(str(message).split())}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. ValueError and OSError are what a user can cause: one line and 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    warnings.formatwarning = _warning
    try:
        args = parser().parse_args(arguments)
        code = int(args.call(args) or 0)
        sys.stdout.flush()  # a reader that has gone shows here rather than at exit
        return code
    except BrokenPipeError:  # as of `jaxpar params … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("jaxpar: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if "--traceback" in arguments:
            traceback.print_exc()
        print(f"jaxpar: error: {_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
