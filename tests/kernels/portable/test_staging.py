# SPDX-License-Identifier: Apache-2.0
"""Staged activations: the reference's codes, bit for bit, in the operand's order."""

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin.formats import NVFP4, quantize_tokens_nvfp4
from vllm_megamoe_plugin.kernels.base import Tensors

from ...helpers import assert_equal
from .problems import layer, problem, stored, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def _stage(x: Tensor, mode: str, hidden: int) -> tuple[Tensor, Tensor | None]:
    from vllm_megamoe_plugin.kernels.portable.launch import BoundPortable

    p = problem(NVFP4, mode, 4, hidden, 64, top_k=2)
    there: Tensors = stored(layer(p), "cuda")
    slots = torch.zeros(x.shape[0], 2, dtype=torch.int32, device="cuda")
    staged, scale, _ = BoundPortable(p, there)._prepare(x.cuda(), slots, 16, 1, own=32)
    return staged.cpu(), None if scale is None else scale.cpu()


def _order(hidden: int) -> Tensor:
    """Column -> staged place, written out from the layout's description."""
    width = next(w for w in (64, 32, 16, 8) if (hidden // 2) % w == 0)
    place = torch.empty(hidden, dtype=torch.long)
    at = 0
    for tile in range(0, hidden // 2, width):
        for half in (0, 1):  # low nibbles are even columns
            for pair in range(0, width // 4, 2):
                for thread in range(4):
                    for byte in (pair, pair + 1):
                        column = 2 * (tile + thread * (width // 4) + byte) + half
                        place[column] = at
                        at += 1
    return place


@pytest.mark.parametrize("hidden", [64, 192, 208, 2048])
def test_without_quantization_columns_only_move(hidden: int) -> None:
    x = torch.randn(7, hidden).bfloat16()
    staged, scale = _stage(x, "w4a16", hidden)
    assert scale is None
    assert_equal(staged[:, _order(hidden)], x)


@pytest.mark.parametrize("hidden", [64, 208, 2048])
@pytest.mark.parametrize("spread", [0, 8])
def test_codes_and_scales_are_the_reference_s(hidden: int, spread: int) -> None:
    """Over many octaves, so that block scales reach their smallest and subnormals."""
    x = torch.randn(513, hidden) * 2.0 ** torch.randint(
        -spread, spread + 1, (513, hidden)
    )
    x[5] = 0
    x[6] *= 2.0**-100
    x[7, ::3] = 0
    x = x.bfloat16()
    staged, scale = _stage(x, "w4a4", hidden)
    # the definition must be the same on either device
    for device in ("cpu", "cuda"):
        values, expected_scale = quantize_tokens_nvfp4(x.float().to(device))
        assert_equal(scale, expected_scale.view(-1).cpu())
        # exact in bf16: six significant bits; the sign of a zero is nobody's business
        assert_equal(staged[:, _order(hidden)].float() + 0.0, values.cpu() + 0.0)


def test_ties_go_to_the_even_code() -> None:
    p = problem(NVFP4, "w4a4", 4, 64, 64, top_k=2)
    x, _, _ = tokens(p, 4)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8)
    x[0], x[1] = ties, -ties
    staged, _ = _stage(x, "w4a4", 64)
    expected, _ = quantize_tokens_nvfp4(x.float())
    assert_equal(staged[:, _order(64)].float() + 0.0, expected + 0.0)
