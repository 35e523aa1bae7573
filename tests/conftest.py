"""Every test sees 8 simulated CPU devices, 64-bit types and a compilation cache inside the clone (shared by workers and by runs).

LLVM compiles the small programs without optimizing them, in half the time, and from the older of XLA's two CPU emitters where there still
is a choice (jaxlib 0.10), in half of that; what XLA itself does to a program is the same.
"""

import importlib.metadata
import os
from pathlib import Path

FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones end the process on a flag they do not know
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))

import jax  # noqa: E402  (reads the flags)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
