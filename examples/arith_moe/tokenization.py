# SPDX-License-Identifier: Apache-2.0
"""The tokenizer: byte-level BPE over the problems' words, each digit its own token.

Any text round-trips, because every byte has a token. Nothing is added in front of a
prompt; `<|endoftext|>` (id 0) ends an answer and `<|pad|>` (id 1) only fills batches.
"""

import itertools
import json
from pathlib import Path

import generate
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

EOS, PAD = "<|endoftext|>", "<|pad|>"
EOS_ID, PAD_ID = 0, 1
IGNORE = -100
SEPARATOR = "\n\n"


def prompt_of(question: str, examples: list[dict[str, str]] | None = None) -> str:
    """Return the few-shot prompt; the model continues it with ` {answer}`."""
    shots = [
        f"Question: {x['question']}\nAnswer: {x['answer']}" for x in examples or []
    ]
    return SEPARATOR.join([*shots, f"Question: {question}\nAnswer:"])


def build(vocab_size: int, num_problems: int = 20000, seed: int = 1) -> Tokenizer:
    """Return the tokenizer trained on generated problems; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stream = itertools.islice(generate.problems("train", seed), num_problems)
    texts = (f"{prompt_of(x['question'])} {x['answer']}" for x in stream)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` for AutoTokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
