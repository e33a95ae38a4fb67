# SPDX-License-Identifier: Apache-2.0
"""The policy of `../rl_weight_sync.py`: trained in FP32 on a CPU, exported as NVFP4."""

from pathlib import Path
from typing import Any

import quantize
import torch
import torch.nn.functional as F
from model import from_checkpoint, to_checkpoint
from score import load
from tokenizers import Tokenizer
from torch import Tensor


class Actor:
    """A BF16 checkpoint as FP32 master weights, with an optimizer."""

    def __init__(self, folder: Path, learning_rate: float) -> None:
        self.model = load(folder, "cpu").float()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.calibration = quantize.calibration_rows(tokenizer, num_rows=16)

    def update(
        self,
        choices: list[dict[str, Any]],
        advantages: Tensor,
        temperature: float,
        minibatch: int,
    ) -> float:
        """Take one policy-gradient step a minibatch; return the mean loss.

        Args:
            choices: what a server sampled: `prompt_token_ids` and `token_ids`.
            advantages: FP32 [len(choices)].
            temperature: of the sampling; the policy is the distribution it drew from.
        """
        batches = torch.arange(len(choices)).split(minibatch)
        total = 0.0
        for batch in batches:
            num_tokens = sum(len(choices[i]["token_ids"]) for i in batch)
            # the others have no gradient
            for i in batch[advantages[batch] != 0]:
                prompt, answer = choices[i]["prompt_token_ids"], choices[i]["token_ids"]
                logits = self.model(torch.tensor([prompt + answer[:-1]]))[0][0]
                logits = logits[len(prompt) - 1 :] / temperature
                nll = F.cross_entropy(logits, torch.tensor(answer), reduction="sum")
                loss = advantages[i] * nll / num_tokens
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return total / len(batches)

    def export(self) -> dict[str, Tensor]:
        """Return every tensor a server needs, under its ModelOpt name.

        Packed weights, block scales and global scales follow from the weights. Input
        scales follow from activations, which new weights change too, so they are
        calibrated again: with old ones, 4-bit activations clip or waste their range.
        """
        weights = to_checkpoint(self.model)
        served = from_checkpoint(self.model.config, weights)
        amax = quantize.calibrate(served, self.calibration)
        return quantize.to_modelopt(weights, amax)
