"""The command line of parity: `torch-bridge parity DIR --mesh data=2,tensor=2 --dtype float64 --steps 3`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxpar import configfile, distributed


def add_parser(commands: Any, **settings: Any) -> None:
    """Add `parity` to the subparsers of a command line. `settings` go to its parser; their `parents` bring rope_length, ignore and
    any_dtype, see `read_model`. It sets `call`."""
    parser = commands.add_parser("parity", help="compare jaxpar with torch on a checkpoint", **settings)
    parser.add_argument("folder", metavar="DIR", help="a Hugging Face folder")
    parser.add_argument("--mesh", default="data=1", metavar="data=2,tensor=2", help="devices along each axis (default one)")
    parser.add_argument(
        "--context", default="method=ring", metavar="method=usp,ulysses=2", help="how mesh.seq shares attention (default ring)"
    )
    parser.add_argument("--dtype", default="float64", help="float64 or float32 of jaxpar; torch is float64 (default float64)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="AdamW steps (default 3)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="largest relative difference (default 1e-10, float32 1e-4)")
    parser.add_argument("--sequence", type=int, default=48, metavar="S", help="tokens a row (default 48)")
    parser.add_argument("--bisect", action="store_true", help="also name the first module whose output differs")
    parser.add_argument("--worst", type=int, default=3, metavar="K", help="leaves shown for each rung (default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the verdict")
    parser.set_defaults(call=call)


def call(args: argparse.Namespace) -> int:
    """0 where every rung passes, 1 where one does not. Raises ValueError or OSError for what a user can mend."""
    mesh, context = configfile.parse_mesh(args.mesh), configfile.parse_context(args.context)
    if args.worst < 1:
        raise ValueError(f"--worst: {args.worst} must be at least 1")
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json: there is no folder {Path(args.json).absolute().parent}; make it, or choose another file")
    if args.json is not None and Path(args.json).is_dir():
        raise ValueError(f"--json: {args.json!r} is a folder; name a file")
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    distributed.start(mesh.devices, {name: os.environ[name] for name in ("XLA_FLAGS",) if name in os.environ})  # simulated devices alone
    try:
        from torch_bridge.parity.ladder import run_parity  # torch takes seconds to import
    except ImportError as error:
        raise ValueError(f"{error.name} is missing; parity needs torch and transformers: pip install 'jaxpar[torch]'") from None

    report = run_parity(
        args.folder,
        mesh,
        args.dtype,
        args.steps,
        tolerance=args.tolerance,
        sequence=args.sequence,
        bisect=args.bisect,
        context=context,
        reading={"rope_length": args.rope_length, "ignore": args.ignore, "any_dtype": args.any_dtype},
    )
    report.print(Console(), args.worst)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report.json, indent=2) + "\n")
    return 0 if report.passed else 1
