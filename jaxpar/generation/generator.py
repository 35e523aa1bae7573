"""Prompts of any lengths in a batch, a key/value cache, one program from them to tokens.

    Generator         a model on a mesh; `generate(prompts, tokens, ...)`

Dims: B rows, P tokens of the longest prompt, M tokens that the cache holds, D model width, V vocabulary, L layers, K key/value heads, H
head width, W value width. P and M are powers of two and so are the rows of a device, so that few programs serve all calls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.compilation import anew
from jaxpar.config import Config
from jaxpar.config.checks import require
from jaxpar.mesh import BATCH, SEQ, TENSOR
from jaxpar.models import pattern
from jaxpar.models.decoder import DecoderFunctions, cache_shapes
from jaxpar.parallel import context as context_parallel
from jaxpar.parallel import runs, sampling
from jaxpar.parallel.block_context import Context
from jaxpar.parallel.collectives import all_reduce, all_reduce_max, vary
from jaxpar.parallel.context.cache import slot_positions
from jaxpar.parallel.context.layout import layout
from jaxpar.parallel.stacked import pick
from jaxpar.params import Tree

SHORTEST = 16  # of prompt and cache; below that programs are cheap and need not be many
EMPTY = -1  # where no token was written


class Prompts(NamedTuple):
    """A batch of prompts, right-padded. `stop_B` is the position that a row's last token may not reach; a row that only fills the batch
    has one that it has reached already. `row_B` numbers the rows of the whole batch."""

    ids_BP: Any
    length_B: Any
    stop_B: Any
    row_B: Any


class Choice(NamedTuple):
    """How a token is chosen, scalars: see `parallel/sampling.py`. `end` stops a row, `EMPTY` never."""

    end: Any
    seed: Any
    temperature: Any
    top_k: Any
    top_p: Any


class State(NamedTuple):
    """Between two tokens. `token_B`, of position `position_B`, is chosen but not yet in the cache; `alive_B` rows want another one, and
    `going` says whether any row of any device does. `cache` is {key, value}, [L, B, M, K_tensor, H or W]."""

    token_B: jax.Array
    position_B: jax.Array
    alive_B: jax.Array
    going: jax.Array
    written_BM: jax.Array
    cache: dict[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Generator:
    """A model on a mesh, ready to generate. `params` are in the compute dtype, split over `tensor` (columns of experts too, where it
    divides them) and experts over `expert`, equal over `data` and `seq`. Prompts and the cache are split over `data` and `expert`, and over
    `seq`."""

    config: Config
    mesh: Mesh
    params: Tree
    partitions: Tree
    functions: DecoderFunctions

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        end: int | None = None,
    ) -> list[list[int]]:
        """At most `tokens` ids that follow each prompt; a row stops before `end`. Temperature 0 takes the likeliest token.

        A row's tokens depend on its prompt, and when sampled on `seed`, its number and the position, never on mesh or batch; where two
        logits are equal within the rounding of the compute dtype, meshes may choose differently. Sends, a token: two all-reduces of
        B·D values a layer and one for the embedding, and what `parallel/context/cache.py` and `parallel/sampling.py` say; with experts all
        tokens to all devices of `expert` and back. No choice of an expert is ever dropped.

        Raises ValueError naming the argument. Every process calls it with the same arguments and gets all rows.
        """
        vocabulary = self.config.model.vocabulary
        sampling.check_choice(tokens, temperature, top_k, top_p, seed)
        require(len(prompts) > 0, "prompt: none given; give at least one")
        for number, prompt in enumerate(prompts):
            require(len(prompt) > 0, f"prompt: number {number} is empty; give at least one token")
            wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
            require(wrong is None, f"prompt: token id {wrong} is outside the model's vocabulary, 0 to {vocabulary - 1}")
            least = self.config.model.prefix
            require(
                len(prompt) >= least,
                f"prompt: number {number} has {len(prompt)} tokens, but the model sees its first {least} (model.prefix) from both sides "
                f"and predicts none of them; give at least {least}",
            )
        batch, length = self._batch(prompts, tokens)
        choice = Choice(
            np.int32(EMPTY if end is None else end),
            np.uint32(seed),
            np.float32(max(temperature, float(np.finfo(np.float32).tiny))),
            np.int32(vocabulary if top_k is None else min(top_k, vocabulary)),
            np.float32(2 if top_p is None else top_p),
        )
        how = "likeliest" if temperature == 0 else "sample" if top_k is None and top_p is None else "sample_cut"
        with anew(self.mesh, self.config.train):
            written_BM = np.asarray(self._program(self.params, batch, choice, length=length, how=how))
        found = [row[len(prompt) : len(prompt) + tokens] for row, prompt in zip(written_BM, prompts, strict=False)]
        if any((row == sampling.NO_TOKEN).any() for row in found):
            raise ValueError("checkpoint: its logits are not finite, so the run has diverged; choose an earlier step")
        return [[int(token) for token in row if token != EMPTY] for row in found]

    def _batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[Prompts, int]:
        """Prompts on the host, filled up to a power of two a device, and the length of the cache."""
        data, longest, devices = math.prod(self.mesh.shape[axis] for axis in BATCH), max(map(len, prompts)), self.mesh.shape[SEQ]
        unit = math.lcm(self.config.train.context.unit(devices), 2 * devices)  # a device with one token would take it for a new one
        width = -(-_bucket(longest, SHORTEST) // unit) * unit
        rows = data * _bucket(-(-len(prompts) // data), 1)
        ids_BP = np.zeros((rows, width), np.int32)
        length_B, stop_B = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        for row, prompt in enumerate(prompts):
            ids_BP[row, : len(prompt)] = prompt
            length_B[row], stop_B[row] = len(prompt), len(prompt) + tokens
        if devices > 1:
            ids_BP = ids_BP[:, layout(self.config.train.context, devices, width).order(width)]
        return Prompts(ids_BP, length_B, stop_B, np.arange(rows, dtype=np.int32)), _bucket(longest + tokens, SHORTEST)

    @functools.cached_property
    def _program(self) -> Any:
        """(params, Prompts, Choice, length=M, how) -> tokens by position [B, M], `EMPTY` where none was generated."""

        def run(params: Tree, prompts: Prompts, choice: Choice, length: int, how: str) -> jax.Array:
            whole, rows = PartitionSpec(), PartitionSpec(BATCH)
            ids = PartitionSpec(BATCH, SEQ) if self.mesh.shape[SEQ] > 1 else rows
            local = jax.shard_map(
                functools.partial(self._local, length=length, how=how),
                mesh=self.mesh,
                in_specs=(self.partitions, Prompts(ids, rows, rows, rows), Choice(*[whole] * 5)),
                out_specs=rows,
            )
            return local(params, prompts, choice)

        return jax.jit(run, static_argnames=("length", "how"), out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    def _local(self, params: Tree, prompts: Prompts, choice: Choice, *, length: int, how: str) -> jax.Array:
        """The program of one device: the prompts at once, then token by token until no row of any device wants another."""

        def body(state: State) -> State:
            segment_B1 = state.alive_B.astype(jnp.int32)[:, None]
            slots = self._slots(prompts.ids_BP.shape[1], state.cache)
            x_B1D, cache = self._layers(params, state.token_B[:, None], state.position_B[:, None], segment_B1, state.cache, slots)
            return self._chosen(self.functions.logits(params, x_B1D), state._replace(cache=cache), prompts, choice, how)

        return lax.while_loop(lambda state: state.going, body, self._prefill(params, prompts, choice, length, how)).written_BM

    def _prefill(self, params: Tree, prompts: Prompts, choice: Choice, length: int, how: str) -> State:
        """The state after the prompts, with the first token chosen."""
        rows, width = prompts.ids_BP.shape
        model, tensor, devices = self.config.model, self.mesh.shape[TENSOR], self.mesh.shape[SEQ]
        over = (*BATCH, *([SEQ] if devices > 1 else []), TENSOR)
        empty = {
            name: vary(jnp.zeros((model.layers, rows, width, heads // tensor, head), self.config.train.compute_dtype), over)
            for name, (_, _, heads, head) in cache_shapes(model, tensor, rows, width).items()
        }
        tokens_P = context_parallel.row_tokens(self.config.train.context, jnp.arange(width, dtype=jnp.int32), width)
        positions_BP = jnp.broadcast_to(tokens_P, prompts.ids_BP.shape)
        segments_BP = (positions_BP < prompts.length_B[:, None]).astype(jnp.int32)
        x_BPD, cache = self._layers(params, prompts.ids_BP, positions_BP, segments_BP, empty, self._slots(width, empty))
        last_B = prompts.length_B - 1
        x_B1D = jnp.where((positions_BP == last_B[:, None])[..., None], x_BPD, 0).sum(1, keepdims=True, dtype=x_BPD.dtype)
        x_B1D = all_reduce(x_B1D, SEQ) if devices > 1 else x_B1D  # one device has it
        more = -(-max(length - devices * width, 0) // devices)
        grown = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, more), (0, 0), (0, 0))), cache)
        state = State(
            token_B=last_B,
            position_B=last_B,
            alive_B=prompts.length_B < prompts.stop_B,
            going=jnp.bool_(True),
            written_BM=vary(jnp.full((rows, length), EMPTY, jnp.int32), BATCH),
            cache=grown,
        )
        return self._chosen(self.functions.logits(params, x_B1D), state, prompts, choice, how)

    def _slots(self, width: int, cache: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The positions of a cache's slots, of which `width` held the prompt."""
        if self.mesh.shape[SEQ] == 1:
            return {}
        return {"slots": slot_positions(self.config.train.context, width, cache["key"].shape[2])}

    def _layers(
        self,
        params: Tree,
        ids_BS: jax.Array,
        positions_BS: jax.Array,
        segments_BS: jax.Array,
        cache: dict[str, jax.Array],
        slots: dict[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Embedding and layers on new tokens: (x[B, S, D], cache). The cache is carried whole, so that a loop updates it in place."""
        found, flags = pattern.segments(self.config.model), pattern.flags(self.config.model, {})
        batch = {"positions": positions_BS, "segments": segments_BS, **slots}

        def layer(carry: Any, block: Any, own: Tree) -> Any:
            x_BSD, cache = carry
            x_BSD, mine = block.cached(x_BSD, Context(batch, {}, own), pick(cache, own["index"]))
            return x_BSD, jax.tree.map(lambda a, b: lax.dynamic_update_index_in_dim(a, b, own["index"], 0), cache, mine)

        carry = self.functions.embed(params, ids_BS, Context(batch, {}, flags)), cache
        for segment in found:
            layers, own = (params["layers"], flags) if len(found) == 1 else (params["layers"][segment.name], flags[segment.name])
            kinds = list(dict.fromkeys(segment.windows))

            def unit(
                carry: Any, at: runs.Place, segment: pattern.Segment = segment, layers: Tree = layers, own: Tree = own, kinds: Any = kinds
            ) -> tuple[Any, None]:
                flags = {**pick(own, at.layer), "window": kinds[at.kind]}
                for block, flag in self.functions.bound(segment.name, pick(layers, at.layer), flags):
                    carry = layer(carry, block, flag)
                return carry, None

            carry, _ = runs.walk(runs.fold(runs.number(segment.windows)), unit, carry)
        return carry

    def _chosen(self, logits_B1V: jax.Array, state: State, prompts: Prompts, choice: Choice, how: str) -> State:
        """`state` with the next token of each row chosen and written down, where the row wants one."""
        logits_BV, position_B = logits_B1V[:, 0], state.position_B + state.alive_B
        draw = sampling.Draw(choice.seed, prompts.row_B, position_B)
        if how == "likeliest":
            token_B = sampling.likeliest(logits_BV)
        elif how == "sample":
            token_B = sampling.sample(logits_BV, choice.temperature, draw)
        else:
            token_B = sampling.sample_cut(logits_BV, choice.temperature, choice.top_k, choice.top_p, draw)
        alive_B = state.alive_B & (token_B != choice.end)
        rows, length = state.written_BM.shape
        slot_B = jnp.where(alive_B, position_B, length)  # out of range, hence dropped
        written_BM = state.written_BM.at[jnp.arange(rows), slot_B].set(token_B, mode="drop")
        alive_B &= (position_B + 1 < prompts.stop_B) & (token_B != sampling.NO_TOKEN)
        going = all_reduce_max(alive_B.any().astype(jnp.int32), BATCH) > 0
        return State(token_B, position_B, alive_B, going, written_BM, state.cache)


def _bucket(size: int, least: int) -> int:
    """The smallest power of two that holds `size`, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())
