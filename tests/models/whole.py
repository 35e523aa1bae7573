"""A whole tiny model on a mesh, for tests: hostile configurations and values, a packed batch, loss and gradients as a step forms them.

Layers run in a plain scan that JAX differentiates, so that this is a second opinion on the layer stack, not a use of it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.config import MeshShape, ModelConfig, RopeConfig
from jaxpar.mesh import BATCH, REPLICA, SEQ, TENSOR, make_mesh
from jaxpar.models.decoder import Decoder, decoder_functions
from jaxpar.models.options import Options
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.collectives import all_reduce, vary
from jaxpar.parallel.sequence import boundary
from jaxpar.params import map_leaves, padded_vocabulary, partition_specs
from jaxpar.rules import DENSE, Rules, varying_axes

OPTIONS = Options(attention="blockwise", attention_block=4, loss_chunk=5, z_loss=0.05)


def hostile(**changes):
    """Head width that is not width / heads, odd vocabulary, every bias, large epsilon, q/k norm, a window shorter than the documents."""
    values = dict(
        vocabulary=13,
        width=12,
        layers=2,
        heads=4,
        kv_heads=2,
        head_width=6,
        mlp_width=20,
        rope=RopeConfig(theta=123.0),
        norm_eps=0.1,
        qk_norm=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        windows=(3, 0),
    )
    return ModelConfig(**{**values, **changes})


def plain(**changes):
    """A Llama without options."""
    off = dict(norm_eps=1e-5, qk_norm=False, qkv_bias=False, output_bias=False, mlp_bias=False, windows=(0,))
    return hostile(**{**off, **changes})


def gemma(**changes):
    """Tied, 1 + w norms, both soft caps, scaled embeddings, its own score scale, tanh GELU, one key head."""
    values = dict(
        tied=True,
        norm_one_plus=True,
        score_softcap=2.0,
        logit_softcap=3.0,
        embedding_scale=3.5,
        score_scale=0.3,
        activation="gelu_tanh",
        kv_heads=1,
        mlp_bias=False,
        windows=(3,),
    )
    return hostile(**{**values, **changes})


def sinks(**changes):
    """Attention sinks, a prefix of three tokens that all of a document see, values wider than keys."""
    return hostile(**{**dict(sinks=True, prefix=3, value_head_width=8, windows=(0, 4)), **changes})


def specs_of(config, tensor):
    return Decoder(config, padded_vocabulary(config.vocabulary, tensor)).specs


def values(specs, seed=0, dtype=np.float64):
    """Numbers that hide nothing: norm weights between -2 and 2, large biases; padding rows zero. The same on every mesh."""

    def leaf(path, parameter):
        random = np.random.default_rng([seed, *path.encode()])
        rows = parameter.rows or parameter.shape[0]
        shape = (rows, *parameter.shape[1:])
        if parameter.role == "norm":
            drawn = random.uniform(-2, 2, size=shape)
        else:
            fan_in = math.prod(parameter.layer_shape[parameter.matrix :]) if parameter.matrix else 1
            drawn = random.normal(size=shape) * (1.5 / fan_in**0.5)
        return np.pad(drawn, [(0, parameter.shape[0] - rows)] + [(0, 0)] * (len(shape) - 1)).astype(dtype)

    return map_leaves(leaf, specs)


def packed(config, rows=4, length=8, seed=1):
    """A batch of two documents a row and some padding; about a third of the labels ignored."""
    random = np.random.default_rng(seed)
    segments, positions = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    for row in range(rows):
        first, last = 2 + row % (length - 3), length - row % 2
        for segment, (start, stop) in enumerate([(0, first), (first, last)], 1):
            segments[row, start:stop] = segment
            positions[row, start:stop] = np.arange(stop - start)
    labels = random.integers(0, config.vocabulary, size=(rows, length)).astype(np.int32)
    labels[(segments == 0) | (random.random((rows, length)) < 0.3)] = -1
    ids = random.integers(0, config.vocabulary, size=(rows, length)).astype(np.int32)
    return {"ids": ids, "labels": labels, "positions": positions, "segments": segments, "rows": np.arange(rows, dtype=np.int32)}


def batch_specs():
    return {name: P(BATCH, SEQ) for name in ("ids", "labels", "positions", "segments")} | {"rows": P(BATCH)}


def layer_flags(config):
    windows = [config.windows[layer % len(config.windows)] for layer in range(config.layers)]
    return {"index": jnp.arange(config.layers, dtype=jnp.int32), "window": jnp.asarray(windows, jnp.int32)}


def run_layers(functions, params, batch, key=None):
    """ids to the activations before the final norm."""
    shared = {} if key is None else {"dropout": key}
    x_BSD = functions.embed(params, batch["ids"])

    def step(x_BSD, layer):
        weights, flags = layer
        return functions.block(weights, x_BSD, Context(batch, shared, flags))

    return lax.scan(step, x_BSD, (params["layers"], layer_flags(functions.config)))[0]


def compiled(function):
    """`jax.jit` without LLVM's optimizations: these programs run once, for a millisecond, and compile in half the time."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


class Outcome(NamedTuple):
    """Sums over the whole batch, logits [B, S, V] and gradients, both without padding entries."""

    loss: float
    aux: dict
    logits: np.ndarray
    grads: dict


class Whole:
    """A model on `data` × `tensor` devices."""

    def __init__(self, config, data=1, tensor=1, sequence_parallel=False, options=OPTIONS):
        self.config = config
        self.mesh = make_mesh(MeshShape(data=data, tensor=tensor), jax.devices()[: data * tensor])
        self.specs = specs_of(config, tensor)
        self.partitions = partition_specs(self.specs, Rules(dict(self.mesh.shape), DENSE))
        self.varying = map_leaves(lambda path, p, spec: varying_axes(p, spec, sequence_parallel), self.specs, self.partitions)
        self.functions = decoder_functions(config, boundary(sequence_parallel), options)
        self.params = values(self.specs)

    def step(self, params, batch, dropout_seed=None):
        """Outcome: parameters marked varying before, gradients reduced once after, sums over the whole batch."""

        def local(params, batch):
            key = None if dropout_seed is None else jax.random.key(dropout_seed)

            def loss(params):
                x_BSD = run_layers(self.functions, params, batch, key)
                total, aux = self.functions.loss(params, x_BSD, batch["labels"])
                return total, (aux, self.functions.logits(params, x_BSD))

            params = map_leaves(lambda path, a, axes: vary(a, axes), params, self.varying)
            (total, (aux, logits)), grads = jax.value_and_grad(loss, has_aux=True)(params)
            grads = map_leaves(lambda path, a, axes: all_reduce(a, axes), grads, self.varying)
            return *jax.tree.map(lambda a: all_reduce(a, REPLICA), (total, aux)), logits, grads

        outs = (P(), P(), P(BATCH, SEQ, TENSOR), self.partitions)
        run = jax.shard_map(local, mesh=self.mesh, in_specs=(self.partitions, batch_specs()), out_specs=outs)
        loss, aux, logits, grads = jax.device_get(compiled(run)(params, batch))
        return Outcome(float(loss), jax.tree.map(float, aux), logits[..., : self.config.vocabulary], self.without_padding(grads))

    def logits(self, params, batch):
        """[B, S, V], padding entries cut off."""

        def local(params, batch):
            return self.functions.logits(params, run_layers(self.functions, params, batch))

        outs = P(BATCH, SEQ, TENSOR)
        run = jax.shard_map(local, mesh=self.mesh, in_specs=(self.partitions, batch_specs()), out_specs=outs)
        return np.asarray(compiled(run)(params, batch))[..., : self.config.vocabulary]

    def without_padding(self, tree):
        """Cuts the padding rows off the tables; they must be zero."""

        def cut(path, a, parameter):
            if not parameter.rows:
                return a
            assert not a[parameter.rows :].any(), f"{path} has values in its padding"
            return a[: parameter.rows]

        return map_leaves(cut, tree, self.specs)


def gaps(ours, theirs):
    """{path: max|a-b| / max|b|} of two trees."""
    found = {}

    def leaf(path, a, b):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, (path, a.shape, b.shape)
        assert np.isfinite(a).all(), path
        found[path] = float(np.abs(a - b).max() / np.abs(b).max())

    map_leaves(leaf, ours, theirs)
    return found


def assert_close(ours, theirs, tolerance):
    wrong = {path: gap for path, gap in gaps(ours, theirs).items() if not gap <= tolerance}
    assert not wrong, wrong
