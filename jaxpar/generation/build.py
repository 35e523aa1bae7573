"""A generator from a run's configuration and parameters, wherever these live."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.config import Config
from jaxpar.generation.generator import Generator
from jaxpar.generation.places import dropless, parameter_places
from jaxpar.mesh import SEQ, TENSOR
from jaxpar.models.decoder import decoder_functions
from jaxpar.models.options import Options
from jaxpar.parallel.sequence import Replicated
from jaxpar.params import Parameter, Tree, map_leaves, shardings


def build_generator(config: Config, mesh: Mesh, params: Tree) -> Generator:
    """A generator of `config` on `mesh` from masters or other weights: global arrays on the devices of `mesh`, placed in any way, their
    vocabulary padded in any way. They are cast to `train.compute_dtype` and moved by one program; `params` themselves are left alone.

    Where `mesh.seq` cannot be shared as `train.context` says, `ContextConfig.fitted` is. Raises ValueError as `parameter_places`.
    """
    specs, partitions = parameter_places(config, mesh)
    model, tensor = config.model, mesh.shape[TENSOR]
    context = config.train.context.fitted(model.heads // tensor, max(model.kv_heads // tensor, 1), mesh.shape[SEQ])
    config = dropless(replace(config, train=replace(config.train, context=context)), mesh)
    dtype = jnp.dtype(config.train.compute_dtype)
    if dtype == jnp.float64 and not jax.config.jax_enable_x64:
        raise ValueError("train.compute_dtype: float64 needs 64-bit types; set the environment variable JAX_ENABLE_X64=1")

    def fit(path: str, array: jax.Array, parameter: Parameter) -> jax.Array:
        if parameter.rows:
            missing = parameter.shape[0] - parameter.rows
            array = jnp.pad(array[: parameter.rows], ((0, missing), *((0, 0),) * (array.ndim - 1)))
        assert array.shape == parameter.shape, f"{path}: {array.shape} is not {parameter.shape}"
        return array if parameter.role == "state" else array.astype(dtype)

    fitted = jax.jit(lambda params: map_leaves(fit, params, specs), out_shardings=shardings(partitions, mesh))(params)
    options = Options(
        attention_block=config.train.attention_block,
        context=context,
        platform=mesh.devices.flat[0].platform,
        experts=config.train.experts,
    )
    return Generator(config, mesh, fitted, partitions, decoder_functions(model, Replicated(), options))
