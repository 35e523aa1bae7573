"""What decoders of the Llama kind share: pieces of rule tables, and what of a configuration their torch classes read.

BEGIN, ATTENTION, QKV_BIAS, OUTPUT_BIAS, QK_NORM, MLP, MLP_BIAS, END    rules, in the order of an export
Traits     how a family's torch class reads config.json
Family     name, architecture, rules, traits; `read` and `write` configurations
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.config import ModelConfig
from torch_bridge.families.experts import ExpertTraits, read_experts, write_experts
from torch_bridge.families.layers import spread
from torch_bridge.families.rope import THETA, read_rope, write_rope
from torch_bridge.families.settings import CONFIG, Settings
from torch_bridge.mapping import Ignored, Rule

BLOCK = "model.layers.{layer}."
MOST_LAYERS = 10_000  # every layer has keys of its own, which a wrong number must not make without end

EMBEDDING = "model.embed_tokens.weight"
BEGIN = (
    Rule("embedding/table", EMBEDDING),
    Rule("layers/attention_norm/weight", BLOCK + "input_layernorm.weight"),
)
ATTENTION = (
    Rule("layers/attention/query", BLOCK + "self_attn.q_proj.weight", "(heads head_dim) embed"),
    Rule("layers/attention/key", BLOCK + "self_attn.k_proj.weight", "(kv_heads head_dim) embed"),
    Rule("layers/attention/value", BLOCK + "self_attn.v_proj.weight", "(kv_heads head_dim) embed"),
    Rule("layers/attention/output", BLOCK + "self_attn.o_proj.weight", "embed (heads head_dim)"),
)
QKV_BIAS = (
    Rule("layers/attention/query_bias", BLOCK + "self_attn.q_proj.bias", "(heads head_dim)"),
    Rule("layers/attention/key_bias", BLOCK + "self_attn.k_proj.bias", "(kv_heads head_dim)"),
    Rule("layers/attention/value_bias", BLOCK + "self_attn.v_proj.bias", "(kv_heads head_dim)"),
)
OUTPUT_BIAS = (Rule("layers/attention/output_bias", BLOCK + "self_attn.o_proj.bias"),)
QK_NORM = (
    Rule("layers/attention/query_norm", BLOCK + "self_attn.q_norm.weight"),
    Rule("layers/attention/key_norm", BLOCK + "self_attn.k_norm.weight"),
)
MLP = (
    Rule("layers/mlp_norm/weight", BLOCK + "post_attention_layernorm.weight"),
    Rule("layers/mlp/gate", BLOCK + "mlp.gate_proj.weight"),
    Rule("layers/mlp/up", BLOCK + "mlp.up_proj.weight"),
    Rule("layers/mlp/down", BLOCK + "mlp.down_proj.weight"),
)
MLP_BIAS = (
    Rule("layers/mlp/gate_bias", BLOCK + "mlp.gate_proj.bias"),
    Rule("layers/mlp/up_bias", BLOCK + "mlp.up_proj.bias"),
    Rule("layers/mlp/down_bias", BLOCK + "mlp.down_proj.bias"),
)
HEAD = "lm_head.weight"
END = (Rule("norm/weight", "model.norm.weight"), Rule("head/table", HEAD))

IGNORED = (
    Ignored(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq", "a buffer of older versions, computed from the configuration"),
)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """How a torch class reads its configuration. A bias is always there (True), never (False), or as the named key says.

    `kv_heads`, `head_width`, `norm_eps`, `theta`, `window` are the class's defaults for absent keys, None where it derives them. `windows`:
    none at all, one for all layers ("uniform"; "switched" where use_sliding_window turns it on), or layers that have it and layers that
    have not ("by layer"). `experts` None is a dense model. `inert`: values of keys that change nothing, others are refused.
    """

    kv_heads: int | None
    head_width: int | None = None
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    theta: float = THETA
    windows: str = "none"
    window: int | None = None
    experts: ExpertTraits | None = None
    inert: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of transformers. `rules` are the tensors of files, `stacked` those of a layer's experts in one tensor, which files
    may hold as well and torch's modules do; empty where that is no difference. `dense` are those of a layer without experts, where a model
    may have some."""

    name: str
    architecture: str
    rules: tuple[Rule, ...]
    traits: Traits
    stacked: tuple[Rule, ...] = ()
    dense: tuple[Rule, ...] = ()
    ignored: tuple[Ignored, ...] = field(default=IGNORED)

    def table(self, model: ModelConfig, stacked: bool) -> tuple[Rule, ...]:
        """The rules of a model."""
        return spread(self.stacked or self.rules if stacked else self.rules, self.dense, model)

    @property
    def library(self) -> str:
        return self.architecture.replace("ForCausalLM", "Config")

    def read(self, raw: dict[str, Any], rope_length: int | None, ignore: frozenset[str]) -> tuple[ModelConfig | None, Settings]:
        """config.json -> (model, settings with provenance and problems). The model is None where there are problems."""
        settings, traits = Settings(raw, self.library), self.traits
        heads = settings.take("model.heads", "num_attention_heads", int)
        layers = settings.take("model.layers", "num_hidden_layers", int)
        if layers is not None and layers > MOST_LAYERS:
            settings.refuse("num_hidden_layers", f"at most {MOST_LAYERS}", str(layers))
            layers = None
        fields: dict[str, Any] = {
            "vocabulary": settings.take("model.vocabulary", "vocab_size", int),
            "width": settings.take("model.width", "hidden_size", int),
            "layers": layers,
            "heads": heads,
            "kv_heads": settings.take("model.kv_heads", "num_key_value_heads", int, traits.kv_heads or heads, null=heads),
            "mlp_width": settings.take("model.mlp_width", "intermediate_size", int),
            "norm_eps": settings.take("model.norm_eps", "rms_norm_eps", float, traits.norm_eps),
            "tied": settings.take("model.tied", "tie_word_embeddings", bool, False),
            "qk_norm": traits.qk_norm,
        }
        settings.provenance["model.qk_norm"] = f"the family {self.name}"
        fields["head_width"] = settings.take("model.head_width", "head_dim", int, traits.head_width or 0, null=0)
        if fields["head_width"] == 0:
            settings.provenance["model.head_width"] = "derived: hidden_size / num_attention_heads"
        for name in ("qkv_bias", "output_bias", "mlp_bias"):
            fields[name] = self._bias(settings, name)
        activation = settings.take("model.activation", "hidden_act", str, "silu")
        if activation not in ("silu", "swish"):
            settings.refuse("hidden_act", "silu", repr(activation))
        std = settings.raw.get("initializer_range")
        if isinstance(std, int | float) and not isinstance(std, bool) and 0 <= std < 1e9:
            fields["init_std"] = float(std)
            settings.provenance["model.init_std"] = f"{CONFIG}: initializer_range"
        dropout = settings.raw.get("attention_dropout")
        if "attention_dropout" in ignore or dropout in (None, 0):
            settings.used.add("attention_dropout")
        fields["rope"] = read_rope(settings, rope_length, traits.theta)
        if traits.experts is not None:
            fields["moe"] = read_experts(settings, traits.experts, layers, fields["mlp_width"])
        fields["windows"] = self._windows(settings, fields["layers"])
        never = {key: False for key in ("attention_bias", "mlp_bias", "use_sliding_window") if key not in settings.used}
        settings.finish({**never, "attention_dropout": 0.0, **traits.inert}, ignore)
        return self._build(fields, settings), settings

    def _build(self, fields: dict[str, Any], settings: Settings) -> ModelConfig | None:
        if settings.problems:
            return None
        try:
            return ModelConfig(**fields)
        except ValueError as error:
            settings.refuse("", "a model that can be built", str(error))
            return None

    def _bias(self, settings: Settings, name: str) -> bool:
        key = getattr(self.traits, name)
        if isinstance(key, bool):
            settings.provenance[f"model.{name}"] = f"the family {self.name}"
            return key
        return settings.take(f"model.{name}", key, bool, False, null=False)

    def _windows(self, settings: Settings, layers: int | None) -> tuple[int, ...]:
        """The window of each layer, one entry where all are equal."""
        traits, where = self.traits, "model.windows"
        window, sliding = None, traits.windows == "uniform"
        if traits.windows == "by layer":
            sliding = settings.take(where, "use_sliding_window", bool, False, null=False)
            first = settings.take(where, "max_window_layers", int, 28)
            settings.used.add("sliding_window")
        if traits.windows == "switched":
            sliding = settings.take(where, "use_sliding_window", bool, False, null=False)
            settings.used |= {"sliding_window", "max_window_layers"}  # torch reads no layer from which on
        one = traits.windows in ("uniform", "switched")
        if sliding:
            window = settings.take(where, "sliding_window", int, traits.window, null=None)
            if window is not None and window < 1:
                settings.refuse("sliding_window", "at least 1 key, or null", repr(window))
        settings.provenance.setdefault(where, f"the family {self.name}")
        types = settings.take(where, "layer_types", list, None) if "layer_types" in settings.raw else None
        if types is None:
            if not window or layers is None:
                return (0,)
            if one or first == 0:
                return (window,)
            return tuple(window if layer >= first else 0 for layer in range(layers)) if first < layers else (0,)
        settings.provenance[where] = f"{CONFIG}: layer_types and sliding_window"
        known = {"full_attention": 0, "sliding_attention": window or 0}
        for place, kind in enumerate(types):
            if not isinstance(kind, str) or kind not in known:
                settings.refuse(f"layer_types[{place}]", "full_attention or sliding_attention", repr(kind))
                return (0,)
        if layers is not None and len(types) != layers:
            settings.refuse("layer_types", f"num_hidden_layers entries, {layers}", str(len(types)))
        if "sliding_attention" in types and not window:
            settings.refuse(
                "layer_types", "a sliding_window in use for its sliding_attention layers", f"{settings.raw.get('sliding_window')!r}"
            )
            return (0,)
        windows = tuple(known[kind] for kind in types)
        if one and set(windows) != {window or 0}:
            settings.refuse("layer_types", f"one kind: torch's {self.name} gives all layers sliding_window", repr(sorted(set(types))))
        return (windows[0],) if len(set(windows)) == 1 else windows

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The architecture part of config.json. Raises ValueError naming the field of `model` that this family cannot say."""
        traits = self.traits
        _refuse_unsaid(model, self.name)
        raw: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.name,
            "vocab_size": model.vocabulary,
            "hidden_size": model.width,
            "intermediate_size": model.mlp_width,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_width,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.tied,
            "initializer_range": model.init_std,
            **write_rope(model.rope),
        }
        for name in ("qkv_bias", "output_bias", "mlp_bias"):
            wanted, key = getattr(model, name), getattr(traits, name)
            said = key if isinstance(key, bool) else raw.setdefault(key, wanted)
            if said != wanted:
                raise ValueError(f"model.{name}: {wanted} cannot be said, {self.name} has {said} there")
        if model.qk_norm != traits.qk_norm:
            raise ValueError(f"model.qk_norm: {model.qk_norm} cannot be said, {self.name} has {traits.qk_norm} there")
        if traits.experts is not None:
            raw |= write_experts(model, traits.experts, self.name)
        elif model.moe.experts:
            raise ValueError(f"model.moe.experts: {model.moe.experts} cannot be said, {self.name} has one dense MLP a layer")
        return {**raw, **self._write_windows(model)}

    def _write_windows(self, model: ModelConfig) -> dict[str, Any]:
        windows = [model.windows[layer % len(model.windows)] for layer in range(model.layers)]
        sizes = sorted(set(windows) - {0})
        if self.traits.windows == "none":
            if sizes:
                raise ValueError(f"model.windows: {model.windows} cannot be said, {self.name} sees all keys")
            return {}
        if len(sizes) > 1 or (self.traits.windows != "by layer" and len(set(windows)) > 1):
            raise ValueError(f"model.windows: {model.windows} cannot be said by {self.name}")
        window = sizes[0] if sizes else None
        if self.traits.windows == "uniform":
            return {"sliding_window": window}
        if self.traits.windows == "switched":
            return {"use_sliding_window": bool(sizes), "sliding_window": window}
        first = next((layer for layer, size in enumerate(windows) if size), model.layers)
        types = ["sliding_attention" if size else "full_attention" for size in windows]
        return {"use_sliding_window": bool(sizes), "sliding_window": window, "max_window_layers": first, "layer_types": types}


def _refuse_unsaid(model: ModelConfig, name: str) -> None:
    """What no family here can say."""
    plain = ModelConfig(vocabulary=1, width=2, heads=1, kv_heads=1, mlp_width=1)
    for key in ("norm_one_plus", "activation", "score_softcap", "logit_softcap", "embedding_scale", "sinks", "prefix"):
        if getattr(model, key) != getattr(plain, key):
            raise ValueError(f"model.{key}: {getattr(model, key)} cannot be said by {name}")
    if model.value_head_width != model.head_width:
        raise ValueError(f"model.value_head_width: {model.value_head_width} cannot be said by {name}, whose values are as wide as its keys")
    if model.score_scale not in (None, model.head_width**-0.5):
        raise ValueError(f"model.score_scale: {model.score_scale} cannot be said by {name}, which divides by the root of the head width")
    if model.head_width and model.width % model.heads and name == "llama":
        raise ValueError(f"model.width: {model.width} must be a multiple of model.heads {model.heads} for torch's llama")
