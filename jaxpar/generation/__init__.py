"""Text generation on a mesh of data × expert × seq × tensor.

command.py     `jaxpar generate`; `load` a checkpoint, `text` from prompts
build.py       `build_generator` from parameters, wherever these live
generator.py   `Generator`: prompts to tokens
places.py      how a model lies on a mesh that generates
"""

from jaxpar.generation.build import build_generator
from jaxpar.generation.command import load, text
from jaxpar.generation.generator import Choice, Generator

__all__ = ["Choice", "Generator", "build_generator", "load", "text"]
