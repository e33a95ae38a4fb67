# SPDX-License-Identifier: Apache-2.0
"""What a model in this process holds and answers, before and after an update."""

from typing import Any

import torch
from torch import Tensor

from vllm_megamoe_plugin.sync.digest import compare, digest_all
from vllm_megamoe_plugin.sync.direct import expert_layers

from ..vllm_layer import TOP_K, E, H


def digests(model: Any) -> dict[str, Any]:
    from vllm_megamoe_plugin.sync.live import live_tensors, packed_weights

    packed = digest_all(packed_weights(model), "packed")
    for entry in packed.values():
        entry["address"] = None
    return digest_all(live_tensors(model), "live") | packed


def outputs(model: Any) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(5, H, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=g)[:TOP_K] for _ in range(5)]).int()
    share = torch.full((5, TOP_K), 0.5)
    return [layer.experts.forward(x, share, ids) for layer in expert_layers(model)]


def check_unharmed(served: tuple) -> None:
    """Every byte, address and output is what it was."""
    model, _, before, answers = served
    assert compare(before, digests(model)).identical
    assert all(map(torch.equal, answers, outputs(model)))


def check_refusing(model: Any) -> None:
    assert refusing(model) == [layer.prefix for layer in expert_layers(model)]


def refusing(model: Any) -> list[str]:
    """Layers that refuse to serve."""
    found = []
    for layer in expert_layers(model):
        try:
            layer.experts.ledger.check_ready()
        except RuntimeError as e:
            if "incomplete" in str(e):
                found.append(layer.prefix)
    return found
