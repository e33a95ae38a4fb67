# SPDX-License-Identifier: Apache-2.0
"""Exact match of a checkpoint on the held-out problems, greedy, N-shot.

Reads a BF16 or a ModelOpt NVFP4 folder; the latter runs as `w4a4.py` defines. Prints
one JSON line a shot count: exact match (only `#### N` counts, as in lm-eval's GSM8K
strict match) and the mean negative log-likelihood of the right answers' tokens, which
still tells two models apart when both solve every problem.
"""

import argparse
import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from model import ArithMoE, Config, from_checkpoint
from safetensors.torch import load_file
from tokenization import EOS_ID, IGNORE, PAD_ID, prompt_of
from tokenizers import Tokenizer
from w4a4 import load_w4a4

HERE = Path(__file__).parent
MAX_NEW_TOKENS = 384
FINAL = re.compile(r"#### (-?[0-9]+)")


def read_jsonl(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def final_answer(text: str) -> str | None:
    """Return the number after the first `####`, or None."""
    match = FINAL.search(text)
    return match[1] if match else None


def load(folder: Path, device: str) -> ArithMoE:
    """Return the model of a BF16 or ModelOpt NVFP4 checkpoint folder, ready to run.

    Raises:
        ValueError: another quantization.
    """
    content = json.loads((folder / "config.json").read_text())
    method = content.get("quantization_config", {}).get("quant_method")
    config, tensors = Config.from_hf(content), load_file(folder / "model.safetensors")
    if method is None:
        return from_checkpoint(config, tensors).to(device, torch.bfloat16)
    if method == "modelopt":
        return load_w4a4(config, tensors).to(device)
    raise ValueError(
        f"{folder}: quant_method {method!r}; score the BF16 or ModelOpt folder"
    )


@torch.no_grad()
def generate_greedy(
    model: ArithMoE, prompts: list[list[int]], max_new_tokens: int = MAX_NEW_TOKENS
) -> list[list[int]]:
    """Return the greedy continuation of each prompt, up to EOS or max_new_tokens."""
    c, device = model.config, model.embed_tokens.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    width = int(lengths.max())
    tokens = torch.tensor(
        [p + [PAD_ID] * (width - len(p)) for p in prompts], device=device
    )
    shape = (2, len(prompts), width + max_new_tokens, c.num_key_value_heads, c.head_dim)
    cache = [
        torch.zeros(shape, dtype=torch.bfloat16, device=device)
        for _ in range(c.num_hidden_layers)
    ]
    # padding is on the right: its cache entries are overwritten before a row gets there
    positions = torch.arange(width, device=device).expand(len(prompts), -1)
    logits = model(tokens, cache, positions)[0][torch.arange(len(prompts)), lengths - 1]
    new, done = [], torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for step in range(max_new_tokens):
        token = logits.argmax(-1).masked_fill(done, EOS_ID)
        new.append(token)
        done |= token == EOS_ID
        if step % 8 == 7 and done.all():
            break
        logits = model(token[:, None], cache, (lengths + step)[:, None])[0][:, 0]
    rows = torch.stack(new, 1).tolist()
    return [row[: row.index(EOS_ID)] if EOS_ID in row else row for row in rows]


def answer(
    model: ArithMoE,
    tokenizer: Tokenizer,
    problems: list[dict[str, str]],
    examples: list[dict[str, str]],
    batch: int,
) -> list[str]:
    """Return the answer text to each problem."""
    prompts = [
        tokenizer.encode(prompt_of(p["question"], examples)).ids for p in problems
    ]
    texts: list[str] = []
    for start in range(0, len(prompts), batch):
        rows = generate_greedy(model, prompts[start : start + batch])
        texts += tokenizer.decode_batch(rows)
    return texts


@torch.no_grad()
def answer_nll(
    model: ArithMoE,
    tokenizer: Tokenizer,
    problems: list[dict[str, str]],
    examples: list[dict[str, str]],
    batch: int,
) -> float:
    """Return the mean -log p of the right answers' tokens, EOS included."""
    device = model.embed_tokens.weight.device
    total, count = 0.0, 0
    for start in range(0, len(problems), batch):
        rows = []
        for problem in problems[start : start + batch]:
            prompt = tokenizer.encode(prompt_of(problem["question"], examples)).ids
            answer_ids = tokenizer.encode(f" {problem['answer']}").ids
            rows.append((prompt, [*answer_ids, EOS_ID]))
        width = max(len(p) + len(a) for p, a in rows)
        tokens = torch.full((len(rows), width), PAD_ID, device=device)
        targets = torch.full((len(rows), width), IGNORE, device=device)
        for row, (prompt, right) in enumerate(rows):
            end = len(prompt) + len(right)
            tokens[row, :end] = torch.tensor(prompt + right)
            targets[row, len(prompt) - 1 : end - 1] = torch.tensor(right)
        logits = model(tokens)[0].flatten(0, 1).float()
        total += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
        count += int((targets != IGNORE).sum())
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, required=True, help="BF16 or ModelOpt folder"
    )
    parser.add_argument("--problems", type=Path, default=HERE / "problems.jsonl")
    parser.add_argument(
        "--shots", type=int, nargs="+", default=[5, 0], choices=range(6)
    )
    parser.add_argument("--batch", type=int, default=125)
    parser.add_argument(
        "--wrong", type=Path, help="append the wrong answers to this JSONL"
    )
    parser.add_argument("--limit", type=int, help="score only the first N problems")
    args = parser.parse_args()
    model = load(args.model, "cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    problems = read_jsonl(args.problems)[: args.limit]
    examples = read_jsonl(HERE / "fewshot.jsonl")
    for shots in args.shots:
        texts = answer(model, tokenizer, problems, examples[:shots], args.batch)
        wrong = [
            {**problem, "text": text}
            for text, problem in zip(texts, problems, strict=True)
            if final_answer(text) != final_answer(problem["answer"])
        ]
        result = {
            "model": str(args.model),
            "shots": shots,
            "n": len(texts),
            "exact_match": 1 - len(wrong) / len(texts),
            "answer_nll": answer_nll(
                model, tokenizer, problems, examples[:shots], args.batch
            ),
        }
        print(json.dumps(result), flush=True)
        if args.wrong:
            with args.wrong.open("a") as out:
                out.writelines(json.dumps({**result, **row}) + "\n" for row in wrong)


if __name__ == "__main__":
    main()
