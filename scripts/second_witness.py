"""Torch's own parallel training against jaxpar's: the same checkpoint, the same batches, the same losses and weights after five steps.

    python scripts/second_witness.py [DIR] [--strategies ddp,tensor]

Without DIR it is a tiny random Llama. Torch runs DDP, FSDP2, DTensor tensor parallelism and the last two together, in 2 to 4 processes over
Gloo; jaxpar runs the corresponding meshes on simulated devices. Exit code 1 where anything differs by more than 1e-10.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax

TOLERANCE = 1e-10


def tiny_llama(folder: str) -> str:
    """A Llama of two layers with grouped heads, biases and an odd vocabulary, weights far from their initial values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "attention_bias": True, "mlp_bias": True}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def main() -> int:
    from rich.console import Console
    from rich.table import Table

    from torch_bridge.parity import witness

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", nargs="?", metavar="DIR", help="a Hugging Face folder of a Llama, untied")
    arguments.add_argument("--strategies", default=",".join(witness.MESHES), help="default all: %(default)s")
    arguments.add_argument("--steps", type=int, default=5)
    args = arguments.parse_args()
    strategies = args.strategies.split(",")
    unknown = [name for name in strategies if name not in witness.MESHES]
    if unknown:
        arguments.error(f"--strategies: {', '.join(unknown)} is none of {', '.join(witness.MESHES)}")

    table = Table(title=f"jaxpar against torch.distributed, float64, {args.steps} AdamW steps: max|a−b| / max|b|", title_justify="left")
    for heading in ("torch", "processes", "held by one", "jaxpar", "losses", "final weights"):
        table.add_column(heading)
    passed = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or tiny_llama(temporary)
        for name in strategies:
            for found in witness.testify(folder, name, args.steps):
                sizes = ", ".join(f"{axis} {size}" for axis, size in vars(found.mesh).items() if size > 1)
                figures = [f"{found.losses.max_relative:.1e}", f"{found.weights.max_relative:.1e}"]
                table.add_row(name, str(found.mesh.devices), f"{found.share:.0%}", f"{sizes}, zero {found.zero}", *figures)
                passed &= max(found.losses.max_relative, found.weights.max_relative) <= TOLERANCE
    Console().print(table)
    print("passed" if passed else "FAILED", f"(tolerance {TOLERANCE:.0e})")
    return 0 if passed else 1


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 4)
    sys.exit(main())
