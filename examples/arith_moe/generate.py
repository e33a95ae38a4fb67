# SPDX-License-Identifier: Apache-2.0
"""Generate multi-step arithmetic word problems in GSM8K's JSONL format.

Every problem is `{"question": ..., "answer": ...}`. An answer is one line per step,
with a calculator annotation such as `<<12*3=36>>`, and ends in `#### N`. Operands and
results are integers from 1 to 99999 and every division is exact.

The splits are disjoint by construction: the hash of the question text decides which
split a problem belongs to, and a split keeps only its own problems. The output depends
on split, count and seed alone. Needs the standard library only.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from stories import STORIES, Draft, Unsuitable

SPLITS = ("train", "test", "fewshot")
HASH_BUCKETS = 64
ASIDES = [
    "{} is {} years old.", "It is day {1} of the month.",
    "The shop opens {1} days a month.",
    "{} lives at number {} on a quiet street.", "The walk home takes {1} minutes.",
    "{} wears shirt number {}.", "Bus {1} stops nearby.",
]  # fmt: skip


def split_of(question: str) -> str:
    """Return the one split that may contain this question."""
    bucket = int(hashlib.sha256(question.encode()).hexdigest(), 16) % HASH_BUCKETS
    return {0: "test", 1: "fewshot"}.get(bucket, "train")


def draw(rng: random.Random) -> dict[str, str]:
    """Return one problem of any split."""
    story = STORIES[int(rng.random() * len(STORIES))]
    while True:
        d = Draft(rng)
        try:
            result = story(d)
        except Unsuitable:
            continue
        if d.number(1, 5) == 1:
            name = d.people(1)[0][0]
            aside = d.pick(ASIDES).format(name, d.number(3, 30))
            # a sentence about somebody else must not separate a name and its pronoun
            last = 0 if aside.startswith(name) else len(d.sentences) - 1
            d.sentences.insert(d.number(0, last), aside)
        answer = "\n".join([*d.lines, f"#### {result}"])
        return {"question": " ".join(d.sentences), "answer": answer}


def problems(split: str, seed: int) -> Iterator[dict[str, str]]:
    """Yield the endless problem sequence of one split and seed.

    No question repeats, except in `train`, where that is not checked.

    Raises:
        ValueError: unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; use one of {', '.join(SPLITS)}")
    rng = random.Random(f"{split}-{seed}")
    seen: set[str] = set()
    while True:
        problem = draw(rng)
        question = problem["question"]
        if split_of(question) != split:
            continue
        if split != "train":
            if question in seen:
                continue
            seen.add(question)
        yield problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    stream = problems(args.split, args.seed)
    lines = [json.dumps(next(stream)) + "\n" for _ in range(args.count)]
    args.out.write_text("".join(lines))
    print(f"{args.out}: {len(lines)} problems, split {args.split}, seed {args.seed}")


if __name__ == "__main__":
    main()
