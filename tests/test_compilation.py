"""Programs that JAX's cache would give back wrong on CPU are compiled anew."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpar import configfile
from jaxpar.compilation import misread, without_cache
from jaxpar.train import loop

DEMO = Path(__file__).parent.parent / "configs" / "runs" / "demo.yaml"
TINY = ["model.layers=1", "data.sequence=32", "train.batch=8", "checkpoint.folder=null", "log.folder=null"]


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
    with without_cache(when=False):
        jax.jit(lambda x: x * 3 + 2)(jnp.arange(5.0)).block_until_ready()
    assert list(cache.iterdir()), "control: outside, programs are kept"


@pytest.mark.parametrize(
    ("mesh", "train", "anew"),
    [
        (["mesh.data=1", "mesh.seq=2", "mesh.tensor=1"], [], True),
        (["mesh.data=1", "mesh.tensor=2"], ["train.interleave=1", "train.collective_matmul=true"], True),
        (["mesh.data=2", "mesh.tensor=1"], [], False),
    ],
)
def test_training_that_permutes_leaves_the_cache_alone(mesh, train, anew, monkeypatch):
    asked = []

    def stop(when):
        asked.append(when)
        raise InterruptedError

    monkeypatch.setattr(loop, "without_cache", stop)
    config = configfile.load(DEMO, [*TINY, *mesh, *train])
    with pytest.raises(InterruptedError):
        loop.train(config, jax.devices()[:2])
    assert asked == [anew]


def test_only_on_several_devices_of_a_cpu():
    assert misread(2, True, "cpu")
    assert not misread(1, True, "cpu") and not misread(2, False, "cpu") and not misread(2, True, "gpu")
