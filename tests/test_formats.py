# SPDX-License-Identifier: Apache-2.0
"""Formats decode and round exactly as the hardware does, value by value."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_megamoe_plugin import formats
from vllm_megamoe_plugin.formats import (
    FORMATS,
    NVFP4,
    NVFP4_RANGE,
    WeightFormat,
    decode_e2m1,
    decode_e4m3,
    fake_quantize_nvfp4,
    quantize_tokens_nvfp4,
    round_to_e2m1,
)

from .helpers import assert_equal

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: halfway points and where a tie goes: always to the even code
TIES = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def _nearest(x: Tensor, grid: Tensor) -> Tensor:
    """Independent rounding: the nearest point of an ascending grid that starts at
    code 0; a tie goes to the even code. Distances are exact in fp64."""
    distance = (x.double().abs().unsqueeze(-1) - grid.double()).abs()
    best = distance == distance.amin(-1, keepdim=True)
    even = 2 - torch.arange(len(grid)) % 2
    chosen = grid[(best * even).argmax(-1)]
    return chosen.copysign(x)


def _fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Independent, block by block, from the docstring's formula."""
    e4m3 = ALL_BYTES[:0x7F].view(torch.float8_e4m3fn).float()
    e2m1 = torch.tensor(POSITIVE)
    rows = []
    for row, s in zip(x, scale.expand(x.shape[0], 1).flatten(), strict=True):
        out = []
        for block in row.split(16):
            sf = (block.abs().max() / (6.0 * s)).clamp(2.0**-9, 448.0)
            sf = _nearest(sf, e4m3)
            out.append(_nearest((block / (sf * s)).clamp(-6.0, 6.0), e2m1) * sf)
        rows.append(torch.cat(out))
    return torch.stack(rows) if rows else torch.empty(0, x.shape[1])


# --- decoding ---


def test_all_256_e4m3_bytes_decode_like_torch() -> None:
    expected = ALL_BYTES.view(torch.float8_e4m3fn).float()
    assert_equal(decode_e4m3(ALL_BYTES), expected)
    # a decoder once read this one as 0.0087890625
    assert decode_e4m3(ALL_BYTES)[1].item() == 2.0**-9


def test_every_code_and_the_low_nibble_comes_first() -> None:
    values = torch.tensor([*POSITIVE, *(-v for v in POSITIVE)])
    for low in range(16):
        for high in range(16):
            packed = torch.tensor([low | high << 4, 0x21], dtype=torch.uint8)
            expected = torch.tensor([values[low], values[high], 0.5, 1.0])
            assert_equal(decode_e2m1(packed), expected, f"{low}, {high}")
    assert_equal(formats.e2m1_values(), values)


def test_nvfp4_weight_is_code_times_the_scale_of_its_16() -> None:
    codes = torch.arange(16).repeat(2)
    packed = (codes[::2] | codes[1::2] << 4).to(torch.uint8)
    scales = torch.tensor([0x01, 0x7E], dtype=torch.uint8)  # 2^-9 and 448
    values = torch.tensor([*POSITIVE, *(-v for v in POSITIVE)])
    expected = torch.cat([values * 2.0**-9, values * 448.0])
    assert_equal(NVFP4.decode(packed, scales), expected)


# --- the table ---


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_row_decodes_what_it_says_it_stores(fmt: WeightFormat) -> None:
    n, k = 5, 64
    scales = None
    if fmt.scale_dtype is not None:
        scales = torch.randint(0, 0x7F, (n * fmt.scale_cols(k),), dtype=torch.uint8)
    bits = torch.randint(0, 256, (n, fmt.weight_cols(k) * fmt.weight_dtype.itemsize))
    stored = bits.to(torch.uint8).view(fmt.weight_dtype)
    if fmt.weight_dtype.is_floating_point:
        stored = torch.randn(stored.shape).to(fmt.weight_dtype)
    values = fmt.decode(stored.view(-1), scales)
    assert values.shape == (n * k,)
    assert values.dtype == torch.float32
    # "exact in bf16 and fp32": nothing is lost where a kernel holds weights in bf16
    assert_equal(values.bfloat16().float(), values)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_row_is_consistent(fmt: WeightFormat) -> None:
    assert FORMATS[fmt.name] is fmt
    assert hash(fmt) == hash(FORMATS[fmt.name])
    assert fmt.modes
    assert (fmt.group == 1) == (fmt.scale_dtype is None)
    assert fmt.weight_cols(128) * fmt.values_per_element == 128
    assert fmt.scale_cols(128) * fmt.group == 128


# --- rounding ---


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_go_to_the_even_code(sign: float) -> None:
    x = torch.tensor(list(TIES)) * sign
    assert_equal(round_to_e2m1(x), torch.tensor(list(TIES.values())) * sign)
    up, down = x.nextafter(x * 8), x.nextafter(x * 0)
    grid = torch.tensor(POSITIVE)
    assert_equal(round_to_e2m1(up), grid[1:] * sign)
    assert_equal(round_to_e2m1(down), grid[:-1] * sign)


def test_codes_are_fixed_points_and_signs_survive() -> None:
    values = torch.tensor([*POSITIVE, *(-v for v in POSITIVE)])
    assert_equal(round_to_e2m1(values), values)
    assert_equal(
        round_to_e2m1(torch.tensor([1e-30, -1e-30])), torch.tensor([0.0, -0.0])
    )


def test_saturates_at_six() -> None:
    x = torch.tensor([5.0001, 6.5, 448.0, 1e30, float("inf")])
    assert_equal(round_to_e2m1(x), torch.full((5,), 6.0))
    assert_equal(round_to_e2m1(-x), torch.full((5,), -6.0))


def test_rounding_has_no_one_sided_bias() -> None:
    x = torch.rand(200_000) * 12 - 6
    error = round_to_e2m1(x).double() - x.double()
    share = (error > 0).double().mean().item()
    # 200,000 fair coins: standard deviation 0.0011
    assert abs(share - 0.5) < 0.006
    assert abs(error.mean().item()) < 0.004


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_rounds_to_the_nearest_code(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    expected = _nearest(x.clamp(-6.0, 6.0), torch.tensor(POSITIVE))
    assert_equal(round_to_e2m1(x), expected)


# --- activation quantization ---

#: Factors on normal data: block scales that are subnormal E4M3, ordinary, past 448.
MAGNITUDES = [2.0**-20, 2.0**-12, 2.0**-6, 1.0, 300.0, 2.0**14]


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("scale", [1.0, 0.125, 0.0371])
def test_fake_quantization_is_the_formula(magnitude: float, scale: float) -> None:
    x = torch.randn(5, 64) * magnitude
    x[2, :16] = 0.0
    s = torch.tensor([scale])
    assert_equal(fake_quantize_nvfp4(x, s), _fake_quantize(x, s.view(1, 1)))


def test_fake_quantization_takes_one_scale_per_token() -> None:
    x = torch.randn(7, 48) * torch.logspace(-3, 3, 7).unsqueeze(1)
    values, s = quantize_tokens_nvfp4(x)
    assert_equal(values, _fake_quantize(x, s))
    assert_equal(values, fake_quantize_nvfp4(x, s))


def test_no_tokens() -> None:
    assert fake_quantize_nvfp4(torch.empty(0, 32), torch.ones(1)).shape == (0, 32)
    values, scale = quantize_tokens_nvfp4(torch.empty(0, 32))
    assert (values.shape, scale.shape) == ((0, 32), (0, 1))


def test_block_scale_never_falls_below_the_smallest_e4m3() -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = 2.0**-12  # wants a block scale of 2^-12 / 6; code 0.5 is 2^-10
    assert_equal(fake_quantize_nvfp4(x, torch.ones(1)), torch.zeros(1, 32))
    x[0, 0] = 2.0**-9
    assert_equal(fake_quantize_nvfp4(x, torch.ones(1)), x)


def test_values_past_the_range_of_the_scale_saturate() -> None:
    s = torch.tensor([0.5])
    limit = NVFP4_RANGE * 0.5
    x = torch.tensor([[limit, -limit, 2 * limit, -4 * limit] + [0.0] * 12])
    expected = torch.tensor([[1.0, -1.0, 1.0, -1.0] + [0.0] * 12]) * NVFP4_RANGE
    assert_equal(fake_quantize_nvfp4(x, s), expected.copysign(x))


def test_representable_activations_survive_unchanged() -> None:
    codes = torch.randint(0, 16, (4, 4, 16))
    codes[..., 0] = 7  # each block's largest is 6, so its scale is found again
    values = formats.e2m1_values()[codes]
    scales = torch.randint(8, 0x7F, (4, 4, 1), dtype=torch.uint8)
    x = (values * decode_e4m3(scales.view(-1)).view(4, 4, 1)).view(4, 64)
    for s in (1.0, 0.25):
        assert_equal(fake_quantize_nvfp4(x * s, torch.tensor([s])), x)


def test_token_scale_maps_the_largest_value_to_the_range() -> None:
    x = torch.zeros(3, 16)
    x[0, 3], x[1, 5] = -NVFP4_RANGE, 1.0
    expected = torch.tensor([[1.0], [1.0 / NVFP4_RANGE], [1.0]])
    assert_equal(quantize_tokens_nvfp4(x)[1], expected)
