"""The torch side of parity: a transformers model that runs wholly in float64, or in plain float32. Imports nothing of ours.

    wide            inside it, torch computes in float64 whatever the model's code asks for
    load            Hugging Face folder -> Reference
    Reference       logits, activations by module, loss and gradients, AdamW steps, all as numpy by torch name

Arrays in and out are numpy. A batch is `ids` and `labels` [B, S]: one document a row, labels already shifted, −1 ignored. The loss is the
sum of token losses over the labels of the whole batch; with `parts`, plus transformers' balancing loss of the routers, times its
coefficient, as the mean over that many equal parts of the rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

Arrays = dict[str, np.ndarray]
IGNORED = -1
DTYPES = {"float64": torch.float64, "float32": torch.float32}
# A loop over experts: grouped matmuls take neither float64 nor every width. Earlier versions know no other way.
EXPERTS = {"experts_implementation": "eager"} if int(transformers.__version__.split(".")[0]) >= 5 else {}


class Float64(TorchFunctionMode):
    """Widens every float32 that code names: models cast to float32 inside norms, rope and softmax, whatever their own dtype is."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """float64 throughout, new tensors included. A model must also be built inside, for its rope frequencies to be float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(before)


def precision(dtype: str) -> contextlib.AbstractContextManager[None]:
    """What to build and run a model of `dtype` in."""
    return wide() if dtype == "float64" else contextlib.nullcontext()


def load(folder: str | Path, dtype: str = "float64") -> Reference:
    """The causal language model of a Hugging Face folder, eager attention, evaluation mode. Reads local files only.

    Raises ValueError when the folder's tensors are not exactly the model's: transformers would fill gaps with random values.
    """
    with precision(dtype), _quiet():
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=DTYPES[dtype], attn_implementation="eager", local_files_only=True, output_loading_info=True, **EXPERTS
            )
        except Exception as error:  # of any type: its checks of settings are few
            text = " ".join(str(error).split())[:300]
            raise ValueError(f"{folder}: transformers cannot load it ({type(error).__name__}: {text})") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, info.get(problem) or ()))
        if names:
            raise ValueError(f"{folder}: torch finds {problem.replace('_', ' ')} {', '.join(names[:4])}; the folder is not this model's")
    return Reference(model.eval(), dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


@dataclass(frozen=True, eq=False)
class Reference:
    """A torch model and the dtype that it runs in. Parameters are named as `named_parameters` does, a tied one once."""

    model: Any
    dtype: str

    @property
    def parameters(self) -> Arrays:
        return {name: numpy(parameter) for name, parameter in self.model.named_parameters()}

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """ids [B, S] -> [B, S, V]."""
        with torch.no_grad():
            return numpy(logits(self.model, torch.from_numpy(ids), self.dtype))

    def activations(self, ids: np.ndarray) -> Arrays:
        """Outputs [B, S, D] of the embedding, of every layer's norms, attention and MLP, of every layer and of the last norm, by module
        name, in the order in which they are computed."""
        found: Arrays = {}

        def keep(name: str, module: Any, inputs: Any, output: Any) -> None:
            found[name] = numpy(output[0] if isinstance(output, tuple) else output)

        inner = self.model.get_decoder()
        names = {module: name for name, module in self.model.named_modules()}
        watched = [inner.embed_tokens, inner.norm]
        for layer in inner.layers:
            watched += [layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp, layer]
        handles = [module.register_forward_hook(functools.partial(keep, names[module])) for module in watched]
        try:
            self.logits(ids)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def gradients(self, batch: Arrays, parts: int = 0) -> tuple[float, Arrays]:
        """(loss, gradient of every parameter). Leaves no gradient behind."""
        value = loss(self.model, batch, self.dtype, parts)
        self.model.zero_grad()
        value.backward()
        found = {name: numpy(parameter.grad) for name, parameter in self.model.named_parameters()}
        self.model.zero_grad()
        return value.item(), found

    def train(self, batches: Sequence[Arrays], rule: Any, parts: int = 0) -> Trained:
        """A step of AdamW on each batch. Changes the model. `rule`: see `adamw`; `rule.clip` limits the global norm, None does not."""
        return train(self.model, rule, [functools.partial(loss, self.model, batch, self.dtype, parts) for batch in batches])


@dataclass(frozen=True)
class Trained:
    """After N steps: the loss of each, parameters, and AdamW's means of gradients and of their squares."""

    losses: list[float]
    parameters: Arrays
    mean: Arrays
    square: Arrays


def train(model: Any, rule: Any, losses: Sequence[Callable[[], torch.Tensor]]) -> Trained:
    """A step of AdamW down each loss, in this process or, where parameters are distributed, in each of many."""
    optimizer = adamw(model, rule)
    values = []
    for loss_of_step in losses:
        optimizer.zero_grad()
        value = loss_of_step()
        value.backward()
        if rule.clip is not None:
            clip([parameter.grad for parameter in model.parameters()], rule.clip)
        optimizer.step()
        values.append(value.item())
    parameters = dict(model.named_parameters())
    means, squares = (
        {name: numpy(optimizer.state[parameter][moment]) for name, parameter in parameters.items()} for moment in ("exp_avg", "exp_avg_sq")
    )
    return Trained(values, {name: numpy(parameter) for name, parameter in parameters.items()}, means, squares)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A distributed tensor gathered, on every process; any other as it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def numpy(tensor: torch.Tensor) -> np.ndarray:
    return whole(tensor).cpu().numpy().copy()


def logits(model: Any, ids: torch.Tensor, dtype: str) -> torch.Tensor:
    """ids [B, S] int -> [B, S, V], differentiable."""
    with precision(dtype):
        return model(ids.long(), use_cache=False).logits


def loss_sum(model: Any, ids: torch.Tensor, labels: torch.Tensor, dtype: str) -> torch.Tensor:
    """Sum of the token losses of rows [B, S], in `dtype`."""
    scores = logits(model, ids, dtype)
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.long().flatten(), ignore_index=IGNORED, reduction="sum")


def loss(model: Any, batch: Arrays, dtype: str, parts: int = 0) -> torch.Tensor:
    """Sum of token losses over the labels of the batch, and where `parts` asks for it the balancing loss."""
    labels = torch.from_numpy(batch["labels"])
    value = loss_sum(model, torch.from_numpy(batch["ids"]), labels, dtype) / (labels != IGNORED).sum()
    return value + balance(model, torch.from_numpy(batch["ids"]), dtype, parts) if parts else value


def balance(model: Any, ids: torch.Tensor, dtype: str, parts: int) -> torch.Tensor:
    """transformers' own balancing loss of each of `parts` equal parts of the rows, their mean, times the model's coefficient."""
    with precision(dtype):
        found = [model(rows.long(), use_cache=False, output_router_logits=True).aux_loss for rows in ids.chunk(parts)]
    assert len(found) == parts, f"{len(ids)} rows are not {parts} parts"
    return model.router_aux_loss_coef * torch.stack(found).mean()


def adamw(model: Any, rule: Any) -> torch.optim.AdamW:
    """torch.optim.AdamW over all parameters at a constant rate. `rule` has learning_rate, b1, b2, eps, weight_decay and decay.

    With `decay` "matrices" weight decay spares what has fewer than two dims: norms and biases.
    """
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[rule.decay == "all" or parameter.ndim >= 2].append(parameter)
    settings = [{"params": groups[True], "weight_decay": rule.weight_decay}, {"params": groups[False], "weight_decay": 0.0}]
    # One tensor at a time: the fused loops refuse models of which only some parameters are distributed.
    return torch.optim.AdamW(
        [group for group in settings if group["params"]], lr=rule.learning_rate, betas=(rule.b1, rule.b2), eps=rule.eps, foreach=False
    )


def clip(gradients: Sequence[torch.Tensor], limit: float) -> None:
    """Scale down to global norm `limit`, by exactly limit / norm: torch's own clip_grad_norm_ adds 1e-6 to the norm."""
    norm = torch.stack([whole(gradient).norm() for gradient in gradients]).norm().item()
    if norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / norm)
