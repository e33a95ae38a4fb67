# SPDX-License-Identifier: Apache-2.0
"""Statistics from histograms equal the same ones computed element by element."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_megamoe_plugin.checkpoint import (
    COMPRESSED_TENSORS_NVFP4,
    MODELOPT_NVFP4,
    Role,
)
from vllm_megamoe_plugin.tools.expert_tensors import Part
from vllm_megamoe_plugin.tools.scale_checks import ScaleChecks, json_value
from vllm_megamoe_plugin.tools.shards import Stored

LAYER = "model.layers.0.mlp.experts"


def part(role: Role, shard: str = "w1", expert: int = 0) -> Part:
    name = f"{LAYER}.{expert}.{shard}.{role.name}"
    stored = Stored(name=name, file=Path("a"), dtype="x", shape=(), nbytes=0)
    return Part(
        layer=LAYER,
        expert=expert,
        shard=shard,
        role=role,
        stored=stored,
        shape=(),
        fused=False,
    )


def with_global(scale: float) -> ScaleChecks:
    checks = ScaleChecks()
    checks.add_scalar(part(Role.GLOBAL_SCALE), torch.tensor(scale), MODELOPT_NVFP4)
    return checks


@settings(max_examples=40)
@given(
    codes=st.lists(st.integers(0, 255), min_size=1, max_size=64),
    log2_scale=st.floats(-20, 2),
)
def test_block_scale_statistics_are_exact(codes: list[int], log2_scale: float) -> None:
    scale = torch.tensor(2.0**log2_scale)
    scales = (
        torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, -1)
    )
    checks = with_global(scale.item())
    checks.add_block_scales(part(Role.BLOCK_SCALE), scales)
    found = checks.block_scales()

    values = scales.float()
    assert found["count"] == len(codes)
    assert found["nan"] == int(values.isnan().sum())
    assert found["zero"] == int((values == 0).sum())
    assert found["saturated"] == int((values.abs() == 448).sum())
    exact = (values[values.isfinite() & (values != 0)] * scale).double()
    if not len(exact):
        assert found["baking"] is None
        return
    baked = exact.float().to(torch.float8_e4m3fn).double()
    assert found["baking"] == {
        "compared": len(exact),
        "subnormal_share": pytest.approx((baked.abs() < 2**-6).double().mean().item()),
        "zero_share": pytest.approx((baked == 0).double().mean().item()),
        "mean_relative_error": pytest.approx(
            (baked / exact - 1).abs().mean().item(), abs=1e-12
        ),
    }


def test_baking_of_a_typical_checkpoint_loses_what_the_field_measured() -> None:
    """Scales 40..448 with 2.05e-5: about 15.5% mean error, nearly all subnormal."""
    torch.manual_seed(0)
    scales = (40 + 408 * torch.rand(64, 64)).to(torch.float8_e4m3fn)
    checks = with_global(2.05e-5)
    checks.add_block_scales(part(Role.BLOCK_SCALE), scales)
    baking = checks.block_scales()["baking"]
    assert baking["subnormal_share"] == 1.0
    assert 0.10 < baking["mean_relative_error"] < 0.20


def test_baking_by_one_is_free() -> None:
    scales = torch.arange(8, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    checks = with_global(1.0)
    checks.add_block_scales(part(Role.BLOCK_SCALE), scales.view(1, -1))
    baking = checks.block_scales()["baking"]
    assert (baking["subnormal_share"], baking["mean_relative_error"]) == (0.0, 0.0)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_bytes_give_count_first_coordinate_and_byte(byte: int) -> None:
    codes = torch.full((4, 4), 0x38, dtype=torch.uint8)
    codes[2, 1] = codes[3, 3] = byte
    checks = ScaleChecks()
    checks.add_block_scales(part(Role.BLOCK_SCALE), codes.view(torch.float8_e4m3fn))
    [fault] = checks.faults
    assert fault.value == {"count": 2, "first": [2, 1], "byte": f"0x{byte:02X}"}
    assert "2 of 16" in fault.message


def test_no_other_byte_is_nan() -> None:
    codes = torch.tensor([[b for b in range(256) if b not in (0x7F, 0xFF)]])
    scales = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    checks = ScaleChecks()
    checks.add_block_scales(part(Role.BLOCK_SCALE), scales)
    assert checks.faults == []
    assert checks.block_scales()["nan"] == 0


def test_reciprocals_are_compared_as_multipliers() -> None:
    """compressed-tensors stores 1/scale: the larger stored value is the smaller one."""
    checks = ScaleChecks()
    for shard, stored in (("w1", 4096.0), ("w3", 1024.0)):
        checks.add_scalar(
            part(Role.GLOBAL_SCALE, shard),
            torch.tensor([stored]),
            COMPRESSED_TENSORS_NVFP4,
        )
    found = checks.gate_up()
    assert (found["gate"], found["up"]) == (1 / 4096, 1 / 1024)
    assert found["largest_ratio"] == 4.0


def test_unusable_pairs_take_no_part_in_the_ratio() -> None:
    checks = with_global(1.0)
    checks.add_scalar(part(Role.GLOBAL_SCALE, "w3"), torch.tensor(0.0), MODELOPT_NVFP4)
    assert checks.gate_up() == {"pairs": 0, "differ": 0}


def test_values_are_json_safe() -> None:
    assert json_value(1.5) == 1.5
    assert json_value(float("inf")) == "inf"
    assert json_value(float("nan")) == "nan"
