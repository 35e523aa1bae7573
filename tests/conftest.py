"""Every test sees 8 simulated CPU devices, 64-bit types and a compilation cache inside the clone (shared by workers and by runs).

LLVM compiles the small programs without optimizing them, in half the time; what XLA itself does to a program is the same.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")

import jax

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
