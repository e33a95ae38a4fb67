# SPDX-License-Identifier: Apache-2.0
"""Train the model from scratch on one GPU; writes the BF16 checkpoint folder.

A training row is a run of problems joined like a few-shot prompt, so it covers 0-shot
to about 8-shot. Only answers are trained. The target after an answer is always EOS,
also where the row goes on with the next problem, so generation stops after one answer.
"""

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import generate
import numpy as np
import torch
import torch.nn.functional as F
from export import export_bf16
from model import ArithMoE, Config
from tokenization import EOS_ID, IGNORE, SEPARATOR, build, prompt_of
from tokenizers import Tokenizer

SEQUENCE = 1280
BALANCE_WEIGHT = 0.01


@torch.no_grad()
def spread_scales(model: ArithMoE) -> None:
    """Scale up by 2**k and down by 2**-k in every expert, k one of -2, -1, 1, 2.

    The outputs stay the same bit for bit, but gate and up of an expert, and
    neighbouring experts, get clearly different weight_scale_2, so that mixing them up
    shows.
    """
    for index, layer in enumerate(model.layers):
        experts = layer.mlp.experts
        for e in range(model.config.num_experts):
            factor = (4.0, 0.5, 2.0, 0.25)[(index + e) % 4]
            experts.up_proj[e] *= factor
            experts.down_proj[e] /= factor


class RowMaker:
    """Makes (tokens, targets) [rows, SEQUENCE] of batch number `index`; picklable."""

    def __init__(self, tokenizer: Tokenizer, rows: int, seed: int):
        self.tokenizer, self.rows, self.seed = tokenizer, rows, seed

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        stream = generate.problems("train", self.seed + index)
        tokens = np.empty((self.rows, SEQUENCE), np.int16)
        targets = np.empty((self.rows, SEQUENCE), np.int16)
        for row in range(self.rows):
            x, y = self._row(stream)
            tokens[row], targets[row] = x[:SEQUENCE], y[:SEQUENCE]
        return tokens, targets

    def _row(self, stream: Iterator[dict[str, str]]) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        targets: list[int] = []
        while len(tokens) < SEQUENCE:
            problem = next(stream)
            start = SEPARATOR if tokens else ""
            prompt = self.tokenizer.encode(start + prompt_of(problem["question"])).ids
            answer = self.tokenizer.encode(f" {problem['answer']}").ids
            tokens += prompt + answer
            targets += [IGNORE] * (len(prompt) - 1) + answer + [EOS_ID]
        return tokens, targets


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Return linear warmup, then cosine to 1% of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_of(model: ArithMoE) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def train(model: ArithMoE, batches: Iterator, args: argparse.Namespace) -> None:
    """Run args.steps optimizer steps, in place."""
    optimizer = optimizer_of(model)
    compiled = torch.compile(model)
    started = time.time()
    for step in range(args.steps):
        tokens, targets = (torch.from_numpy(a).cuda().long() for a in next(batches))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr, args.warmup)
        with torch.autocast("cuda", torch.bfloat16):
            logits, balance = compiled(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        (loss + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == args.steps - 1:
            seconds = time.time() - started
            rate = (step + 1) * tokens.numel() / seconds / 1e6
            print(
                f"step {step} loss {loss.item():.5f} balance {balance.item():.3f} "
                f"{seconds:.0f} s {rate:.2f} Mtok/s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="BF16 folder to write")
    parser.add_argument("--steps", type=int, default=9500)
    parser.add_argument(
        "--rows", type=int, default=96, help="rows of 1280 tokens a step"
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(args.seed)
    model = ArithMoE(Config())
    maker = RowMaker(build(model.config.vocab_size), args.rows, args.seed)
    # the workers must fork before this process opens the GPU
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:
        batches = pool.imap(maker, range(args.steps))
        train(model.cuda(), batches, args)
    spread_scales(model)
    export_bf16(model, args.out)


if __name__ == "__main__":
    main()
