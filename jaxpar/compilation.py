"""JAX's persistent cache of compiled programs (`jax_compilation_cache_dir`), and which programs must not come from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def without_cache(when: bool = True) -> Iterator[None]:
    """What is compiled inside is compiled anew, and not kept."""
    before = jax.config.jax_enable_compilation_cache
    if not when or not before:
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it looks at the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def misread(devices: int, permutes: bool, platform: str) -> bool:
    """Whether a program that was read back from the cache may compute something else.

    On CPU it no longer keeps independent permutes in order, all of which have channel 1: devices then pair one with another, numbers are
    wrong from run to run, or XLA aborts (jax 0.10.2). Compiled anew, the same program is right.
    """
    return platform == "cpu" and devices > 1 and permutes
