"""jaxpar: parallel training of large transformers in JAX, every number checkable against PyTorch."""

__version__ = "0.1.0"
