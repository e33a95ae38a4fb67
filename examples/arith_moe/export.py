# SPDX-License-Identifier: Apache-2.0
"""Write a model as a BF16 Hugging Face checkpoint folder, tokenizer included."""

import argparse
from pathlib import Path

import torch
from model import ArithMoE, Config, to_checkpoint
from quantize import write_json
from safetensors.torch import save_file
from tokenization import EOS_ID, PAD_ID, build, save


def export_bf16(model: ArithMoE, folder: Path) -> None:
    """Write config, generation config, tokenizer and weights; overwrites."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    write_json(folder / "config.json", config.to_hf())
    write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
    )
    save(build(config.vocab_size), folder, config.max_position_embeddings)
    save_file(
        to_checkpoint(model), folder / "model.safetensors", metadata={"format": "pt"}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write an untrained BF16 checkpoint.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    export_bf16(ArithMoE(Config()), args.out)
    print(f"{args.out}: untrained checkpoint, seed {args.seed}")


if __name__ == "__main__":
    main()
