"""Programs that JAX's cache would give back wrong on CPU are compiled anew."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpar import configfile
from jaxpar.compilation import anew, without_cache
from jaxpar.config import MeshShape, TrainConfig
from jaxpar.mesh import make_mesh
from jaxpar.train import loop

DEMO = Path(__file__).parent.parent / "configs" / "runs" / "demo.yaml"
TINY = [
    "mesh.data=1",
    "mesh.seq=2",
    "mesh.tensor=1",
    "model.layers=1",
    "data.sequence=32",
    "train.batch=8",
    "checkpoint.folder=null",
    "log.folder=null",
]


@pytest.fixture
def cache(tmp_path):
    """An empty cache of its own that keeps everything."""
    names = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_nothing_is_kept_inside(cache):
    with without_cache():
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(5.0)).block_until_ready()
    assert not list(cache.iterdir())
    jax.jit(lambda x: x * 3 + 2)(jnp.arange(5.0)).block_until_ready()
    assert list(cache.iterdir()), "control: outside, programs are kept"


@pytest.mark.parametrize(
    ("shape", "ring", "off"),
    [
        (MeshShape(seq=2), False, True),
        (MeshShape(tensor=2), True, True),
        (MeshShape(tensor=2), False, False),
        (MeshShape(data=2), True, False),
        (MeshShape(), True, False),
    ],
)
def test_runs_that_permute_on_cpu_leave_the_cache_alone(shape, ring, off):
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    with anew(mesh, TrainConfig(collective_matmul=ring)):
        assert jax.config.jax_enable_compilation_cache != off
    assert jax.config.jax_enable_compilation_cache


def test_training_asks_with_its_mesh(monkeypatch):
    asked = []

    def stop(mesh, train):
        asked.append((mesh.shape["seq"], train))
        raise InterruptedError

    monkeypatch.setattr(loop, "anew", stop)
    config = configfile.load(DEMO, TINY)
    with pytest.raises(InterruptedError):
        loop.train(config, jax.devices()[:2])
    assert asked == [(2, config.train)]
