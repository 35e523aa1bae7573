"""The torch side: really in float64, refuses to invent weights, loss and AdamW as jaxpar defines them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bridge import hostile
from torch_bridge import reference

RULE = SimpleNamespace(learning_rate=1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.5, decay="matrices", clip=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hostile.save(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


def batch(seed=0, rows=3):
    random = np.random.default_rng(seed)
    ids = random.integers(0, hostile.SIZES["vocab_size"], (rows, hostile.SEQUENCE), dtype=np.int32)
    return {"ids": ids, "labels": np.where(random.random(ids.shape) < 0.5, ids, -1).astype(np.int32)}


class Dtypes(TorchDispatchMode):
    """Collects the floating point dtypes that any operation puts out."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen |= {a.dtype for a in (out if isinstance(out, tuple | list) else [out]) if isinstance(a, torch.Tensor)}
        return out


@pytest.mark.parametrize("name", hostile.NAMES)
def test_no_operation_is_narrower_than_float64(name, tmp_path):
    hostile.save(tmp_path, name, num_hidden_layers=2)
    with Dtypes() as dtypes:
        loaded = reference.load(tmp_path)
        loss, gradients = loaded.gradients(batch())
    assert all(gradient.dtype == np.float64 for gradient in gradients.values())
    assert {dtype for dtype in dtypes.seen if dtype.is_floating_point} <= {torch.float64, torch.float32}
    with Dtypes() as dtypes:
        again, _ = loaded.gradients(batch())
    assert {dtype for dtype in dtypes.seen if dtype.is_floating_point} == {torch.float64}
    assert loss == again
    with Dtypes() as dtypes:
        loaded.model(torch.from_numpy(batch()["ids"]).long())
    assert torch.float32 in dtypes.seen, "without the mode the model narrows by itself"
    buffers = [buffer.dtype for name, buffer in loaded.model.named_buffers() if "inv_freq" in name]
    assert buffers and set(buffers) == {torch.float64}


def test_wide_ends():
    def ambient():
        return torch.get_default_dtype(), torch.zeros(1, dtype=torch.float64).float().dtype

    with pytest.raises(KeyError), reference.wide():
        assert ambient() == (torch.float64, torch.float64)
        raise KeyError
    assert ambient() == (torch.float32, torch.float32)


def test_loss_is_over_the_labels_of_the_whole_batch(folder):
    loaded = reference.load(folder)
    whole = batch()
    scores = loaded.logits(whole["ids"])
    token = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, np.maximum(whole["labels"], 0)[..., None], -1)[..., 0]
    valid = whole["labels"] >= 0
    loss, _ = loaded.gradients(whole)
    assert loss == pytest.approx((token * valid).sum() / valid.sum(), rel=1e-12)
    means = [(t * v).sum() / v.sum() for t, v in zip(token, valid)]
    assert abs(loss - np.mean(means)) > 1e-4, "rows have as many labels each: a mean of means would pass"


def test_gradients_are_differences_of_the_loss(folder):
    loaded = reference.load(folder)
    _, gradients = loaded.gradients(batch())
    parameters = dict(loaded.model.named_parameters())
    for name in ("model.layers.1.self_attn.k_proj.bias", "model.layers.0.input_layernorm.weight", "lm_head.weight"):
        flat, place = parameters[name].data.view(-1), int(np.abs(gradients[name]).argmax())
        losses = []
        for step in (1e-5, -2e-5):
            flat[place] += step
            losses.append(loaded.gradients(batch())[0])
        flat[place] += 1e-5
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradients[name].flat[place], rel=1e-6)


def test_activations_are_in_order_and_lead_to_the_logits(folder):
    loaded = reference.load(folder)
    found = loaded.activations(batch()["ids"])
    assert list(found)[:7] == [
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn",
        "model.layers.0.post_attention_layernorm",
        "model.layers.0.mlp",
        "model.layers.0",
        "model.layers.1.input_layernorm",
    ]
    assert list(found)[-1] == "model.norm" and len(found) == 2 + 5 * 2
    np.testing.assert_allclose(found["model.norm"] @ loaded.parameters["lm_head.weight"].T, loaded.logits(batch()["ids"]), rtol=1e-12)
    assert not any(module._forward_hooks for module in loaded.model.modules())


def test_weight_decay_spares_norms_and_biases(folder):
    """With no gradient at all AdamW only decays."""
    loaded = reference.load(folder)
    before = loaded.parameters
    zero = lambda: sum((parameter * 0).sum() for parameter in loaded.model.parameters())  # noqa: E731
    trained = reference.train(loaded.model, RULE, [zero])
    for name, parameter in trained.parameters.items():
        shrunk = 1 - RULE.learning_rate * RULE.weight_decay if before[name].ndim > 1 else 1
        np.testing.assert_allclose(parameter, before[name] * shrunk, rtol=1e-14)


def test_clip_is_of_the_global_norm():
    gradients = [torch.tensor([3.0], dtype=torch.float64), torch.tensor([[4.0, 12.0]], dtype=torch.float64)]
    reference.clip(gradients, 20.0)
    assert gradients[0].item() == 3
    reference.clip(gradients, 6.5)
    np.testing.assert_allclose(np.concatenate([gradient.numpy().ravel() for gradient in gradients]), [1.5, 2.0, 6.0], rtol=1e-15)


@pytest.mark.parametrize("what", ["missing", "unexpected"])
def test_a_folder_that_is_not_the_model_s_is_refused(what, folder, tmp_path):
    """transformers would go on with random weights, or leave a tensor out."""
    tensors = load_file(folder / "model.safetensors")
    if what == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    else:
        tensors["model.layers.1.mlp.odd.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=rf"{what} keys model\.layers\.1\.mlp"):
        reference.load(tmp_path)


def test_hostile_checkpoints_hide_nothing(folder):
    raw = json.loads((folder / "config.json").read_text())
    assert raw["head_dim"] * raw["num_attention_heads"] != raw["hidden_size"] and raw["vocab_size"] % 2
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "norm" in name:
            assert (tensor - 1).abs().mean() > 0.3
        if name.endswith("bias"):
            assert tensor.abs().mean() > 0.2
    square = hostile.model("llama-tied").get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert square.shape[0] == square.shape[1]
