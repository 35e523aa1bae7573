"""Text from a checkpoint: `jaxpar generate`. The model on its mesh is in `generator.py`.

    run    the command: prompts in, text on stdout
    load   checkpoint folder -> generator and tokenizer
    text   prompts -> continuations

`load` and `text` are what a program uses:

    generator, tokenizer = load("runs/demo/checkpoints", MeshShape(tensor=2))
    print(text(generator, tokenizer, ["The language"], tokens=64, temperature=0.8)[0])
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.config import Config, MeshShape
from jaxpar.config.checks import require
from jaxpar.generation.build import build_generator
from jaxpar.generation.generator import Generator
from jaxpar.generation.places import parameter_places
from jaxpar.mesh import TENSOR, make_mesh
from jaxpar.parallel.sampling import check_choice
from jaxpar.params import Parameter, Tree, map_leaves
from jaxpar.train.checkpoint import SavedCheckpoints
from jaxpar.train.tokenizer import Tokenizer, load_tokenizer


def run(
    checkpoint: str | Path,
    *,
    prompts: Sequence[str],
    mesh: MeshShape,
    tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    step: int | None = None,
) -> int:
    """Print each prompt and its continuation, an empty line between two. Returns the exit code, 0.

    Raises ValueError, one line, for what a user can mend; nothing is printed then.
    """
    check_choice(tokens, temperature, top_k, top_p, seed)
    generator, tokenizer = load(checkpoint, mesh, step)
    continuations = text(generator, tokenizer, prompts, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if jax.process_index() == 0:
        print("\n\n".join(prompt + continuation for prompt, continuation in zip(prompts, continuations)))
    return 0


def load(checkpoint: str | Path, mesh: MeshShape, step: int | None = None) -> tuple[Generator, Tokenizer]:
    """The model of a run's checkpoint folder, the latest step unless `step` says which, on the first devices that `mesh` asks for; and the
    tokenizer.json beside the checkpoints.

    Whatever mesh wrote the parameters, each device reads just its part. Raises ValueError naming the folder, the step or the mesh axis.
    """
    devices = jax.devices()
    require(mesh.devices <= len(devices), f"mesh: {mesh.devices} devices are asked for and there are {len(devices)}; use fewer")
    with SavedCheckpoints(checkpoint) as saved:
        chosen, config, leaves = saved.run(step)
        tokenizer = load_tokenizer(Path(checkpoint) / "tokenizer.json")
        placed = make_mesh(mesh, devices[: mesh.devices])
        params = saved.restore_params(chosen, _saved_types(config, placed, leaves))
    return build_generator(config, placed, params), tokenizer


def _saved_types(config: Config, mesh: Mesh, leaves: dict[str, Any]) -> Tree:
    """Shapes and dtype in the file, and where to read them to. Tables may be padded for another mesh, or not at all: where `tensor` does
    not divide their rows it splits their width for the moment."""
    specs, partitions = parameter_places(config, mesh)
    dtype, tensor = jnp.dtype(config.train.master_dtype), mesh.shape[TENSOR]

    def leaf(path: str, parameter: Parameter, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        shape = parameter.shape
        if parameter.rows and f"params/{path}" in leaves:
            shape = (max(leaves[f"params/{path}"][0][0], parameter.rows), *shape[1:])
            if shape[0] % tensor:
                spec = PartitionSpec(None, TENSOR if shape[1] % tensor == 0 else None)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    return map_leaves(leaf, specs, partitions)


def text(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> list[str]:
    """The text that follows each prompt, up to the end of the document or `tokens` tokens. See `Generator.generate`.

    Raises ValueError as `generate`. Warns where a sequence may grow past what its rope was scaled for.
    """
    require(not isinstance(prompts, str), f"prompts: {prompts!r} is one string; give a list of them")
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt, encoded in zip(prompts, ids):
        require(len(encoded) > 0, f"prompt: {prompt!r} holds no token; give some text")
    reach, longest = generator.config.model.rope.reach, max(map(len, ids), default=0) + tokens
    if reach is not None and longest > reach:
        warnings.warn(
            f"tokens: prompt and continuation may take {longest} tokens, past the {reach} that model.rope is scaled for", stacklevel=2
        )
    found = generator.generate(ids, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, end=tokenizer.end)
    return [_continuation(tokenizer, encoded, new) for encoded, new in zip(ids, found)]


def _continuation(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """Decoded behind its prompt: a decoder may drop the space before its first word, or join bytes of one character."""
    before, both = tokenizer.decode(prompt), tokenizer.decode(prompt + new)
    return both[len(before) :] if both.startswith(before) else tokenizer.decode(new)
