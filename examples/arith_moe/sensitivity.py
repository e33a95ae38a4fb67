# SPDX-License-Identifier: Apache-2.0
"""Damage one kind of scale at a time and score: shows which loader faults are visible.

Reads a ModelOpt NVFP4 folder, prints one JSON line a damage with the exact match on the
held-out problems.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from model import Config
from safetensors.torch import load_file
from score import HERE, answer, answer_nll, final_answer, read_jsonl
from tokenizers import Tokenizer
from torch import Tensor
from w4a4 import load_w4a4

Tensors = dict[str, Tensor]


def replaced(tensors: Tensors, kind: str, change: Callable[[str], Tensor]) -> Tensors:
    """Return the tensors, those whose name ends in `kind` replaced by change(name)."""
    return {n: change(n) if n.endswith(kind) else t for n, t in tensors.items()}


def neighbour(name: str, num_experts: int) -> str:
    """Return the same tensor's name in the next expert of the layer."""
    prefix, rest = name.split(".experts.")
    expert, rest = rest.split(".", 1)
    return f"{prefix}.experts.{(int(expert) + 1) % num_experts}.{rest}"


def damages(t: Tensors, num_experts: int) -> dict[str, Tensors]:
    """Return the damaged checkpoints by description, the sound one first."""

    def rolled(name: str) -> Tensor:
        return t[neighbour(name, num_experts)]

    return {
        "none": t,
        "up uses gate's weight_scale_2": replaced(
            t, "up_proj.weight_scale_2", lambda n: t[n.replace("up_proj", "gate_proj")]
        ),
        "all weight_scale_2 of the next expert": replaced(t, "weight_scale_2", rolled),
        "up's weight_scale_2 of the next expert": replaced(
            t, "up_proj.weight_scale_2", rolled
        ),
        "block scales of the next expert": replaced(t, "weight_scale", rolled),
        "down weights of the next expert": replaced(t, "down_proj.weight", rolled),
        "weight_scale_2 left at 1e-3": replaced(
            t, "weight_scale_2", lambda n: torch.full_like(t[n], 1e-3)
        ),
        "down input_scale left at 1": replaced(
            t, "down_proj.input_scale", lambda n: torch.ones_like(t[n])
        ),
        "down input_scale 64 times too small": replaced(
            t, "down_proj.input_scale", lambda n: t[n] / 64
        ),
        "nibbles swapped": replaced(
            t,
            "proj.weight",
            lambda n: (t[n] << 4 | t[n] >> 4) if t[n].dtype == torch.uint8 else t[n],
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="ModelOpt folder")
    parser.add_argument("--batch", type=int, default=125)
    parser.add_argument("--limit", type=int, help="score only the first N problems")
    args = parser.parse_args()
    config = Config.from_hf(json.loads((args.model / "config.json").read_text()))
    tensors = load_file(args.model / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    problems = read_jsonl(HERE / "problems.jsonl")[: args.limit]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, damaged in damages(tensors, config.num_experts).items():
        model = load_w4a4(config, damaged).to(device)
        texts = answer(model, tokenizer, problems, [], args.batch)
        right = sum(
            final_answer(text) == final_answer(problem["answer"])
            for text, problem in zip(texts, problems, strict=True)
        )
        result = {
            "damage": name,
            "n": len(texts),
            "exact_match": right / len(texts),
            "answer_nll": answer_nll(model, tokenizer, problems, [], args.batch),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
