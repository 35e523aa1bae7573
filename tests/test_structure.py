"""Rules about the source itself, read from its syntax trees. Every rule is also run on a snippet that breaks it."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "jaxpar").rglob("*.py"))
EVERYTHING = sorted(path for top in ("jaxpar", "torch_bridge", "scripts", "tests") for path in (ROOT / top).rglob("*.py"))

RAW_COLLECTIVES = {
    *("psum", "pmax", "pmin", "pmean", "psum_scatter", "ppermute", "pshuffle", "pswapaxes", "pcast", "pvary", "pbroadcast"),
    *("all_gather", "all_to_all", "ragged_all_to_all", "axis_index", "axis_size"),
}
SLOW_NNX = {"jit", "grad", "value_and_grad", "custom_vjp", "scan", "vmap", "pmap", "remat", "shard_map", "cond", "while_loop", "fori_loop"}
AXES = {"data", "pipe", "expert", "seq", "tensor"}
FOREIGN = {"torch", "transformers", "torch_bridge"}
MOST_LINES = 500


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """`L.psum` as `jax.lax.psum`, by what the module's imports and assignments call things."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (base := dotted(node.value, names)):
        return f"{base}.{node.attr}"
    return None


def local_names(tree: ast.AST) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
            and (path := dotted(node.value, names))
        ):
            names[node.targets[0].id] = path
    return names


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported or referred to."""
    names = local_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Name | ast.Attribute) and (path := dotted(node, names)):
            yield node.lineno, path
        elif isinstance(node, ast.Call) and dotted(node.func, names) in ("importlib.import_module", "pytest.importorskip") and node.args:
            yield node.lineno, ast.unparse(node.args[0]).strip("'\"")


def raw_collectives(tree: ast.AST) -> list[int]:
    found = []
    for line, path in uses(tree):
        parts = path.split(".")
        if parts[0] == "jax" and (parts[-1] in RAW_COLLECTIVES or path == "jax.lax.*"):
            found.append(line)
    return found


def axis_strings(tree: ast.AST) -> list[int]:
    """Strings that are an axis name. `data` may be a section of the configuration: the key of a dict display, or the argument of `.get`."""
    sections = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
    sections |= {
        id(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in AXES and not (node.value == "data" and id(node) in sections)
    ]


def unchecked_shard_map(tree: ast.AST) -> list[int]:
    return [
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword)
        and node.arg in ("check_vma", "check_rep")
        and not (isinstance(node.value, ast.Constant) and node.value.value is True)
    ]


def foreign_imports(tree: ast.AST) -> list[int]:
    return [line for line, path in uses(tree) if path.split(".")[0] in FOREIGN]


def private_jax(tree: ast.AST) -> list[int]:
    return [line for line, path in uses(tree) if path.startswith(("jax._src", "jaxlib", "flax.nnx._"))]


def slow_nnx(tree: ast.AST) -> list[int]:
    return [line for line, path in uses(tree) if path.startswith("flax.nnx.") and path.split(".")[-1] in SLOW_NNX]


COLLECTIVES_FILE = ROOT / "jaxpar/parallel/collectives.py"
AXIS_FILES = (ROOT / "jaxpar/mesh.py", ROOT / "jaxpar/config/run.py", ROOT / "jaxpar/config/experts.py")

# rule, files it holds for, what breaks it, what does not
RULES: list[tuple[Callable[[ast.AST], list[int]], list[Path], list[str], list[str]]] = [
    (
        raw_collectives,
        [path for path in SOURCES if path != COLLECTIVES_FILE],
        [
            "from jax import lax\nlax.psum(x, 'a')",
            "import jax\njax.lax.all_gather(x, 'a')",
            "import jax as j\nj.lax.ppermute(x, 'a', [])",
            "import jax.lax as L\nL.psum_scatter(x, 'a')",
            "from jax.lax import psum as add",
            "from jax.lax import *",
            "from jax._src.lax.parallel import all_to_all",
            "import jax\nL = jax.lax\nL.pmax(x, 'a')",
            "from jax import lax\nreduce = lax.psum",
            "def f():\n    from jax import lax\n    return lax.axis_index('a')",
        ],
        ["from jaxpar.parallel import collectives\ncollectives.all_gather(x, axes, 0)", "from jax import lax\nlax.scan(f, x, None)"],
    ),
    (
        axis_strings,
        [path for path in SOURCES if path not in AXIS_FILES],
        ["P('data')", "P(None, ('tensor', AXIS))", "mesh.shape['data']", "DATA = 'data'", "all_reduce(x, 'seq')", "{'tensor': 1}"],
        ["P(DATA)", "{'data': {'step': 1}}", "config.get('data')", "'data.source'"],
    ),
    (
        unchecked_shard_map,
        SOURCES,
        ["jax.shard_map(f, check_vma=False)", "shard_map(f, check_rep=flag)"],
        ["jax.shard_map(f, check_vma=True)", "jax.shard_map(f)"],
    ),
    (
        foreign_imports,
        SOURCES,
        [
            "import torch",
            "from transformers import AutoModel",
            "def f():\n    import torch.nn as nn",
            "import importlib\nimportlib.import_module('torch')",
        ],
        ["import jax", "torch_dtype = 1"],
    ),
    (private_jax, SOURCES, ["from jax._src import core", "import jax\njax._src.core"], ["from jax.extend import core"]),
    (
        slow_nnx,
        SOURCES,
        [
            "from flax import nnx\nnnx.jit(f)",
            "import flax\nflax.nnx.scan(f)",
            "from flax.nnx import vmap",
            "from flax import nnx as n\n@n.remat\ndef f(): ...",
        ],
        ["from flax import nnx\nnnx.split(m)", "import jax\njax.jit(f)"],
    ),
]
NAMES = [rule.__name__ for rule, *_ in RULES]


@pytest.mark.parametrize(("rule", "paths", "bad", "good"), RULES, ids=NAMES)
def test_source_follows(rule, paths, bad, good):
    broken = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in rule(ast.parse(path.read_text()))]
    assert not broken


@pytest.mark.parametrize(("rule", "paths", "bad", "good"), RULES, ids=NAMES)
def test_rule_finds_what_breaks_it_and_nothing_else(rule, paths, bad, good):
    assert [snippet for snippet in bad if not rule(ast.parse(snippet))] == []
    assert [snippet for snippet in good if rule(ast.parse(snippet))] == []


def without_subject(paths: list[Path]) -> list[Path]:
    return [
        path for path in paths if {path.stem, *path.relative_to(ROOT).parts[:-1]} & {"utils", "util", "common", "helpers", "helper", "misc"}
    ]


def too_long(path: Path, text: str) -> bool:
    return text.count("\n") > MOST_LINES


def test_modules_have_a_subject():
    assert without_subject(EVERYTHING) == []
    assert without_subject([ROOT / "jaxpar/utils.py", ROOT / "jaxpar/common/mesh.py", ROOT / "jaxpar/mesh.py"]) != []


def test_files_are_short():
    assert [str(path) for path in EVERYTHING if too_long(path, path.read_text())] == []
    assert too_long(ROOT, "\n" * (MOST_LINES + 1))


def test_the_rules_see_the_package():
    """The lists above are of real files, so a moved package cannot turn the rules off."""
    assert COLLECTIVES_FILE in SOURCES and all(path in SOURCES for path in AXIS_FILES)
    assert raw_collectives(ast.parse(COLLECTIVES_FILE.read_text()))


def test_axis_names_are_the_mesh_s():
    from jaxpar import mesh

    assert set(mesh.AXES) == AXES
