"""The torch side of scripts/gpu_check.py is the same model: its loss on jaxpar's weights is jaxpar's."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxpar.mesh import make_mesh
from jaxpar.train.step import build_training
from scripts import gpu_check, gpu_check_torch

SIZE = {**gpu_check.TINY, "sequence": 128, "batch": 4}


def test_the_same_weights_give_the_same_loss():
    with jax.enable_x64(False):
        config = gpu_check.config_of(gpu_check.TINY, 128, 4, "matmuls")
        training = build_training(config, make_mesh(config.mesh, jax.devices()[:1]))
        state, batch = training.init(), gpu_check.random_batch(training)
        params = jax.device_get(state["params"])
        loss = float(jax.jit(training.gradients)(jax.tree.map(jnp.asarray, params), batch, jnp.int32(0))[0]["loss"])
    model = gpu_check_torch.Llama(**{name: SIZE[name] for name in ("width", "layers", "heads", "kv_heads", "mlp_width", "vocabulary")})
    layers = params["layers"]
    with torch.no_grad():
        model.embedding.weight.copy_(torch.tensor(params["embedding"]["table"]))
        model.norm.weight.copy_(torch.tensor(params["norm"]["weight"]))
        for n, layer in enumerate(model.layers):
            for part in ("attention_norm", "mlp_norm"):
                getattr(layer, part).weight.copy_(torch.tensor(layers[part]["weight"][n]))
            for part, names in (("attention", ("query", "key", "value", "output")), ("mlp", ("gate", "up", "down"))):
                for name in names:
                    weight = getattr(layer, name).weight
                    weight.copy_(torch.tensor(layers[part][name][n]).reshape(weight.shape))
        ids, labels = (torch.tensor(np.asarray(batch[name])[0], dtype=torch.int64) for name in ("ids", "labels"))
        assert float(model(ids, labels)) == pytest.approx(loss, rel=2e-3), "bf16 compute there, float32 here"
        model.layers[0].query.weight.mul_(3)  # negative control
        assert float(model(ids, labels)) != pytest.approx(float(loss), rel=1e-6)


def test_it_prints_a_line_a_model(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check_torch, "STEPS", 2)
    monkeypatch.setattr(gpu_check_torch.torch, "compile", lambda model, backend: model)
    assert gpu_check_torch.main([json.dumps({"tiny": SIZE}), "--cpu"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["sequences"] == 4 and found["tokens_per_second"] > 0 and found["losses"][1] < found["losses"][0]
