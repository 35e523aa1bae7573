"""A decoder in plain jax.numpy on one device: dense attention, dense logits, its own rope. Shares no code with jaxpar, reads a ModelConfig.

`params` is jaxpar's nested dict in global shapes, padding rows included. Dims as in the package; no dropout, rope `default` only.
"""

import jax
import jax.numpy as jnp
import numpy as np


def rms(x, weight, config):
    scale = 1 / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + config.norm_eps)
    return x * scale * (1 + weight if config.norm_one_plus else weight)


def rope(x_BSNH, positions_BS, config):
    """Rotates pair (i, i + half) of the first `fraction` of the head by position · theta^(-i/half), as a product of complex numbers."""
    rotated = int(config.head_width * config.rope.fraction)
    half = rotated // 2
    angle = positions_BS[:, :, None, None] * np.power(float(config.rope.theta), -np.arange(half) / half)
    pairs = (x_BSNH[..., :half] + 1j * x_BSNH[..., half:rotated]) * jnp.exp(1j * angle)
    return jnp.concatenate([pairs.real, pairs.imag, x_BSNH[..., rotated:]], axis=-1)


def attention(p, x_BSD, batch, window, config):
    def project(name):
        y = jnp.einsum("bsd,nhd->bsnh", x_BSD, p[name])
        return y + p[f"{name}_bias"] if config.qkv_bias else y

    q, k, v = project("query"), project("key"), project("value")
    if config.qk_norm:
        q, k = rms(q, p["query_norm"], config), rms(k, p["key_norm"], config)
    q, k = (rope(a, batch["positions"], config) for a in (q, k))
    k, v = (jnp.repeat(a, config.heads // config.kv_heads, axis=2) for a in (k, v))
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k)
    scores = scores * config.score_scale if config.score_scale is not None else scores / np.sqrt(config.head_width)
    if config.score_softcap is not None:
        scores = config.score_softcap * jnp.tanh(scores / config.score_softcap)
    positions, segments = batch["positions"], batch["segments"]
    distance = positions[:, :, None] - positions[:, None, :]
    seen = (distance >= 0) | (positions < config.prefix)[:, None, :]
    seen &= (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)
    if window:
        seen &= distance < window
    seen = seen[:, None]
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    if config.sinks:
        total = total + jnp.exp(p["sinks"])[:, None, None]
    weights = weights / jnp.where(total == 0, 1, total)
    y = jnp.einsum("bnqk,bknh,dnh->bqd", weights, v, p["output"])
    return y + p["output_bias"] if config.output_bias else y


def mlp(p, x_BSD, config):
    gate, up = x_BSD @ p["gate"].T, x_BSD @ p["up"].T
    if config.mlp_bias:
        gate, up = gate + p["gate_bias"], up + p["up_bias"]
    if config.activation == "silu":
        gate = gate / (1 + jnp.exp(-gate))
    else:
        gate = 0.5 * gate * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    y = (gate * up) @ p["down"].T
    return y + p["down_bias"] if config.mlp_bias else y


def moe(p, x_BSD, batch, config):
    """(y, balancing loss of each sequence [B], z-loss [B], load [B, E]): every token through every expert, times a matrix of weights."""
    moe = config.moe
    valid = batch["segments"] != 0
    logits = jnp.einsum("bsd,ed->bse", x_BSD, p["router"]) + (p["router_bias"] if moe.biases else 0)
    score = 1 / (1 + jnp.exp(-logits)) if moe.router == "sigmoid" else jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
    rank = (logits[..., None, :] > logits[..., :, None]).sum(-1)
    chosen = (rank < moe.per_token) & valid[..., None]
    if moe.router == "expert_choice":  # each expert ranks the sequence's valid tokens
        before = (score[:, None] > score[:, :, None]) & valid[:, None, :, None]
        chosen = (before.sum(2) < x_BSD.shape[1] * moe.per_token // moe.experts) & valid[..., None]
    weight = jnp.where(chosen, jnp.exp(logits) if moe.router == "topk_softmax" else score, 0)
    if moe.router == "topk_softmax" or (moe.normalise and moe.router != "expert_choice"):
        weight = weight / jnp.where(valid[..., None], weight.sum(-1, keepdims=True), 1)
    gate, up = (jnp.einsum("bsd,efd->bsef", x_BSD, p[name]) + (p[f"{name}_bias"] if moe.biases else 0) for name in ("gate", "up"))
    if moe.activation == "clamped_swiglu":  # gpt-oss: modeling_gpt_oss.py of transformers, in our words
        gate, up = jnp.where(gate > 7, 7, gate), jnp.where(up > 7, 7, jnp.where(up < -7, -7, up))
        hidden = gate / (1 + jnp.exp(-1.702 * gate)) * (1 + up)
    else:
        hidden = gate / (1 + jnp.exp(-gate)) * up
    out = jnp.einsum("bsef,edf->bsed", hidden, p["down"]) + (p["down_bias"] if moe.biases else 0)
    y = jnp.einsum("bsed,bse->bsd", out, weight * moe.scale)
    if moe.shared_width:
        y = y + mlp(p["shared"], x_BSD, config)
    count = jnp.maximum(valid.sum(1), 1)[:, None]
    share = score / score.sum(-1, keepdims=True) * valid[..., None]
    load = chosen.sum(1)
    balance = (load * moe.experts / moe.per_token / count * share.sum(1) / count).sum(-1)
    z = (jnp.log(jnp.exp(logits).sum(-1)) ** 2 * valid).sum(1) / count[:, 0]
    return y, balance, z, load


def logits(params, batch, config):
    """[B, S, V] over the real vocabulary."""
    return logits_and_balance(params, batch, config)[0]


def of_layer(layers, layer, config):
    """(one layer's parameters, whether it has experts), however its model stacks them."""
    dense, every = (config.moe.dense_layers, config.moe.every) if config.moe.experts else (0, 1)
    if layer < dense:
        return jax.tree.map(lambda a: a[layer], layers["first"]), False
    layers = layers["rest"] if dense else layers
    group, place = divmod(layer - dense, every)
    if every > 1:
        layers = layers["sparse" if place == every - 1 else f"dense{place}"]
    return jax.tree.map(lambda a: a[group], layers), bool(config.moe.experts) and place == every - 1


def logits_and_balance(params, batch, config):
    """(logits, balancing loss and z-loss summed over layers and sequences, load [L, B, E]); the last three are empty sums when dense."""
    balance, z, loads = 0.0, 0.0, []
    x_BSD = params["embedding"]["table"][batch["ids"]]
    if config.embedding_scale is not None:
        x_BSD = x_BSD * config.embedding_scale
    for layer in range(config.layers):
        p, has_experts = of_layer(params["layers"], layer, config)
        window = config.windows[layer % len(config.windows)]
        x_BSD = x_BSD + attention(p["attention"], rms(x_BSD, p["attention_norm"]["weight"], config), batch, window, config)
        normed = rms(x_BSD, p["mlp_norm"]["weight"], config)
        if has_experts:
            y_BSD, more, more_z, load = moe(p["mlp"], normed, batch, config)
            x_BSD, balance, z, loads = x_BSD + y_BSD, balance + more.sum(), z + more_z.sum(), [*loads, load]
        else:
            x_BSD = x_BSD + mlp(p["mlp"], normed, config)
    table = params["embedding" if config.tied else "head"]["table"][: config.vocabulary]
    out = rms(x_BSD, params["norm"]["weight"], config) @ table.T
    if config.logit_softcap is not None:
        out = config.logit_softcap * jnp.tanh(out / config.logit_softcap)
    return out, balance, z, loads


def loss(params, batch, config, z_loss=0.0):
    """Sum over valid tokens of cross entropy and z-loss."""
    out_BSV = logits(params, batch, config)
    log_z = jnp.log(jnp.exp(out_BSV).sum(-1))
    label = jnp.take_along_axis(out_BSV, jnp.maximum(batch["labels"], 0)[..., None], axis=-1)[..., 0]
    return jnp.where(batch["labels"] >= 0, log_z - label + z_loss * log_z**2, 0).sum()
