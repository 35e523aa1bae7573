"""JAX's persistent cache of compiled programs (`jax_compilation_cache_dir`), and which programs must not come from it.

without_cache   what is compiled inside is compiled anew, and not kept
anew            the same for a run's programs, where what the cache gives back may compute something else
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jaxpar.config import TrainConfig
from jaxpar.mesh import SEQ, TENSOR


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """What is compiled inside is compiled anew, and not kept."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it looks at the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def anew(mesh: Mesh, train: TrainConfig) -> contextlib.AbstractContextManager[None]:
    """`without_cache` for a run that permutes on simulated devices, else nothing.

    On CPU a program that was read back from the cache no longer keeps independent permutes in order, all of which have channel 1: devices
    then pair one with another, numbers are wrong from run to run, or XLA aborts (jax 0.10.2). Compiled anew, the same program is right.
    """
    permutes = mesh.shape[SEQ] > 1 or (train.collective_matmul and mesh.shape[TENSOR] > 1)
    return without_cache() if permutes and mesh.devices.flat[0].platform == "cpu" else contextlib.nullcontext()
