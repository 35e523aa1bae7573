"""jaxpar on seq × tensor against torch in float64, by every method of context parallelism and through the command line."""

import pytest

from jaxpar.config import ContextConfig, MeshShape
from tests.bridge import hostile
from torch_bridge.cli import main
from torch_bridge.parity.ladder import run_parity

MESH = MeshShape(seq=4, tensor=2)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}  # four query heads a device: enough for Ulysses over 4
OWN = {"qwen2": {"hidden_size": 32}}  # whose heads are width / heads wide, which must be even
METHODS = {
    "ring": ContextConfig(method="ring", layout="zigzag"),
    "ulysses": ContextConfig(method="ulysses"),
    "gather": ContextConfig(method="gather", layout="striped"),
    "usp": ContextConfig(method="usp", ulysses=2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: hostile.save(tmp_path_factory.mktemp(name), name, **HEADS, **OWN.get(name, {})) for name in ("llama", "mistral", "qwen2")}


def check(folder, context, mesh=MESH):
    report = run_parity(folder, mesh, "float64", 2, sequence=hostile.SEQUENCE, context=context)
    assert report.passed, {name: (rung.max_relative, rung.worst) for name, rung in report.rungs.items()}
    assert report.tolerance == 1e-10


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if name == "llama" and method != "usp" else pytest.mark.slow)  # usp: the command below
        for name in ("llama", "mistral", "qwen2")
        for method in METHODS
    ],
)
def test_every_method_equals_torch(method, name, folders):
    """Logits, loss, every gradient and steps; a window, and windows that differ from layer to layer, are in the slow ones."""
    check(folders[name], METHODS[method])


def test_the_command(folders, capsys):
    arguments = ["parity", str(folders["llama"]), "--mesh", "seq=4,tensor=2", "--steps", "1", "--sequence", "24"]
    assert main([*arguments, "--context", "method=usp,layout=contiguous,ulysses=2"]) == 0
    assert main([*arguments, "--context", "method=spiral"]) == 2
    assert "train.context.method: 'spiral' is not one of ring, ulysses, gather, usp" in capsys.readouterr().err
