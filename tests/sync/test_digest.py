# SPDX-License-Identifier: Apache-2.0
"""Digests see every byte, and the comparison names what became of each tensor."""

import json

import pytest
import torch
from torch import nn

from vllm_megamoe_plugin.sync.digest import (
    compare,
    digest,
    digest_all,
    registered_tensors,
)

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4)], ids=str)
def test_one_flipped_bit_changes_the_digest(dtype: torch.dtype, shape: tuple) -> None:
    raw = torch.zeros(shape, dtype=torch.uint8).new_zeros(
        (*shape, dtype.itemsize) if shape else (dtype.itemsize,)
    )
    tensor = raw.view(dtype).reshape(shape)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    if tensor.numel():
        raw.view(-1)[-1] ^= 1
        assert digest(raw.view(dtype).reshape(shape)) != before


def test_shape_and_dtype_are_part_of_it() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    assert digest(tensor) != digest(tensor.view(2, 2))
    assert digest(tensor) != digest(tensor.view(torch.int8))


def test_strided_views_digest_as_their_values() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())


def test_shared_parameters_appear_under_both_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("scale", torch.ones(()), persistent=False)
    assert set(registered_tensors(model)) == {"0.weight", "1.weight", "scale"}


def test_compare_names_every_kind() -> None:
    tensors = {name: torch.full((2,), i) for i, name in enumerate("abcd")}
    before = digest_all(tensors.items(), "tp0")
    assert compare(before, digest_all(tensors.items(), "tp0")).identical

    tensors["a"][0] = 9
    tensors["b"] = tensors["b"].clone()
    tensors["e"] = tensors.pop("c")
    result = compare(before, digest_all(tensors.items(), "tp0"))
    assert result.changed == ("tp0:a",)
    assert result.moved == ("tp0:b",)
    assert result.missing == ("tp0:c",)
    assert result.added == ("tp0:e",)
    assert result.equal == ("tp0:b", "tp0:d")
    assert result.total == 3
    assert not result.identical
    assert result.first_difference.startswith("tp0:a: int64[2] ")


def test_ranks_do_not_overwrite_each_other() -> None:
    one = [("w", torch.zeros(1))]
    assert len(digest_all(one, "tp0") | digest_all(one, "tp1")) == 2


def test_nothing_compared_is_not_identical() -> None:
    assert not compare({}, {}).identical


def test_digests_are_json() -> None:
    found = digest_all([("w", torch.zeros(2, dtype=torch.bfloat16))], "tp0")
    assert json.loads(json.dumps(found)) == found
