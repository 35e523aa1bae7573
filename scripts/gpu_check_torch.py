"""The torch side of `gpu_check.py`: the same Llama, float32 masters under bf16 autocast, fused AdamW, torch.compile; a JSON line a model.

    python scripts/gpu_check_torch.py '{"llama-1b": {"width": 2048, ..., "sequence": 4096, "batch": 4}}' [--cpu]

Written plainly, with torch's own fused attention: what one gets without a training framework. Where memory does not suffice, the batch is
halved, and the line says so.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

STEPS, WARM = 12, 4
THETA, EPS = 500000.0, 1e-5


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, mlp_width: int):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, EPS), nn.RMSNorm(width, EPS)
        sizes = {"query": heads * self.head, "key": kv_heads * self.head, "value": kv_heads * self.head, "gate": mlp_width, "up": mlp_width}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(width, size, bias=False))
        self.output, self.down = nn.Linear(heads * self.head, width, bias=False), nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.attention_norm(x)
        q, k, v = (part(y).view(batch, length, -1, self.head).transpose(1, 2) for part in (self.query, self.key, self.value))
        o = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + self.output(o.transpose(1, 2).reshape(batch, length, -1))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Llama(nn.Module):
    """Embedding tied to the head, as in the models of `gpu_check.py`."""

    def __init__(self, width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, vocabulary: int):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width, EPS)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, mlp_width) for _ in range(layers))
        self.head = width // heads

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        half = torch.arange(self.head // 2, device=ids.device, dtype=torch.float32)
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * THETA ** (-2 * half / self.head)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin())
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def measure(name: str, size: dict[str, Any], device: str) -> dict[str, Any]:
    """A few steps of one model: median seconds, tokens/s, peak bytes, first and last loss."""
    shape, length, batch = dict(size), size["sequence"], size["batch"]
    for key in ("sequence", "batch", "tied"):
        shape.pop(key, None)
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(**shape)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device == "cuda")
    step = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager")  # inductor needs a C++ compiler on a CPU
    ids = torch.randint(0, size["vocabulary"], (batch, length + 1), device=device)
    seconds, losses = [], []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = step(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[WARM:])
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    rates = {"median_seconds": median, "tokens_per_second": batch * length / median, "peak": peak}
    return {"model": name, "torch": torch.__version__, "sequences": batch, "sequence": length, **rates, "losses": [losses[0], losses[-1]]}


def main(argv: list[str]) -> int:
    sizes, device = json.loads(argv[0]), "cpu" if "--cpu" in argv else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU", file=sys.stderr)
        return 1
    for name, size in sizes.items():
        while size["batch"]:
            try:
                print(json.dumps(measure(name, size, device)), flush=True)
                break
            except torch.cuda.OutOfMemoryError:
                size = {**size, "batch": size["batch"] // 2}
                torch._dynamo.reset()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        else:
            print(json.dumps({"model": name, "left_out": "out of memory with one sequence"}), flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
