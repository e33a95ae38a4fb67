# SPDX-License-Identifier: Apache-2.0
"""A tied output head, which no tensor names, follows an update; others do not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin.sync.direct import DirectUpdate
from vllm_megamoe_plugin.sync.manifest import Manifest
from vllm_megamoe_plugin.sync.source import expected_tensors

from ..vllm_layer import H, load_model, model_tensors, vllm_process


def update(
    folder: Path, model: Any, config: Any, new: dict[str, Tensor], **options: Any
) -> None:
    """One direct update of the model that `folder` holds the checkpoint of."""
    manifest = Manifest.of(new.items(), **options)
    expected = expected_tensors(folder)
    direct = DirectUpdate(model, config.model_config, manifest, expected)
    direct.load(new.items())
    direct.finish()


def test_a_tied_head_takes_the_new_embedding(tmp_path: Path) -> None:
    first, second = (
        {
            n: t
            for n, t in model_tensors("modelopt", seed).items()
            if n != "lm_head.weight"
        }
        for seed in (0, 7)
    )
    x = torch.randn(3, H).bfloat16()
    tied = {"hf_overrides": {"tie_word_embeddings": True}}
    with vllm_process(tmp_path, "modelopt", **tied) as config:
        model = load_model(tmp_path, "modelopt", config, first)
        head = model.lm_head
        before = head.quant_method.apply(head, x)
        update(tmp_path, model, config, second)
        after = head.quant_method.apply(head, x)
    want = torch.nn.functional.linear(x, second["model.embed_tokens.weight"])
    torch.testing.assert_close(after[:, : want.shape[1]], want, rtol=0.02, atol=0.02)
    assert not torch.equal(after, before)


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
def test_a_head_of_its_own_takes_its_own_tensor_or_none(
    kind: str, tmp_path: Path
) -> None:
    """Whichever way vLLM keeps it: packed only, or packed beside the weight."""
    new, x = model_tensors(kind, 7), torch.randn(3, H).bfloat16()
    with vllm_process(tmp_path, kind) as config:
        model = load_model(tmp_path, kind, config)
        head = model.lm_head
        update(tmp_path, model, config, new)
        after = head.quant_method.apply(head, x)
        others = {n: t for n, t in new.items() if not n.startswith("lm_head")}
        update(tmp_path, model, config, others, partial=True)
        assert torch.equal(head.quant_method.apply(head, x), after)
    want = torch.nn.functional.linear(x, new["lm_head.weight"])
    torch.testing.assert_close(after[:, : want.shape[1]], want, rtol=0.02, atol=0.02)
