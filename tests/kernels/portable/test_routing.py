# SPDX-License-Identifier: Apache-2.0
"""Blocks hold every routed slot once, in order, with one expert each."""

import pytest
import torch

from vllm_megamoe_plugin.formats import BF16

from .problems import layer, problem, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("experts", [1, 8, 384, 512])
@pytest.mark.parametrize("count", [70, 1000, 5000])
@pytest.mark.parametrize("block", [16, 64])
def test_listed_blocks_partition_the_slots(
    experts: int, count: int, block: int
) -> None:
    from vllm_megamoe_plugin.kernels.portable.launch import BoundPortable

    p = problem(BF16, "w16a16", experts, 64, 32, top_k=2)
    run = BoundPortable(p, stored(layer(p), "cuda"))
    slots = torch.randint(-1, experts, (count, 2), dtype=torch.int32)
    blocks = -(-2 * count // block) + experts
    x = torch.zeros(count, 64).bfloat16().cuda()
    _, _, routing = run._prepare(x, slots.cuda(), block, blocks, own=0)
    order, block_expert, num_blocks = (t.cpu() for t in routing)
    ids, got = slots.view(-1), []
    for index in range(int(num_blocks)):
        members = order[index * block : (index + 1) * block]
        there = members[members >= 0]
        assert len(there)
        assert (members[: len(there)] >= 0).all()
        assert (ids[there.long()] == block_expert[index]).all()
        got.append(there)
    expected = torch.argsort(ids, stable=True)[(ids < 0).sum() :]
    assert torch.equal(torch.cat(got).long(), expected)
