# SPDX-License-Identifier: Apache-2.0
"""A tied output head, which no checkpoint tensor names, follows an update."""

from pathlib import Path

import torch

from vllm_megamoe_plugin.sync.direct import DirectUpdate
from vllm_megamoe_plugin.sync.manifest import Manifest, expected_tensors

from ..vllm_layer import H, load_model, model_tensors, vllm_process


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
        expected = expected_tensors(tmp_path)
        manifest = Manifest(tuple(expected[name] for name in second))
        update = DirectUpdate(model, config.model_config, manifest, expected)
        update.load(second.items())
        update.finish()
        after = head.quant_method.apply(head, x)
    want = torch.nn.functional.linear(x, second["model.embed_tokens.weight"])
    torch.testing.assert_close(after[:, : want.shape[1]], want, rtol=0.02, atol=0.02)
    assert not torch.equal(after, before)
