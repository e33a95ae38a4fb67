# SPDX-License-Identifier: Apache-2.0
"""NVFP4 values and scales in plain torch: round, scale, pack, unpack.

A block of 16 values along K shares one E4M3 scale; a tensor (or a token) has one FP32
scale on top: value = e2m1 * e4m3 * global. Rounding is to nearest, ties to even code.
"""

import torch
from torch import Tensor

GROUP = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
FULL_RANGE = E2M1_MAX * E4M3_MAX
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_e2m1(x: Tensor) -> Tensor:
    """Return x rounded to the nearest E2M1 value, ties to even; saturates at 6."""
    a = x.abs().clamp(max=E2M1_MAX)
    # spacing of E2M1 is 0.5 below 2, 1 below 4 and 2 above; torch.round ties to even,
    # which is the even code in each of the three ranges
    spacing = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.copysign(torch.round(a / spacing) * spacing, x)


def global_scale(amax: Tensor) -> Tensor:
    """Return amax / (6 * 448), and 1 where amax is 0."""
    return torch.where(amax == 0, 1.0, amax.float() / FULL_RANGE)


def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return (E2M1 values, E4M3 block scales), both as FP32.

    Args:
        x: [..., K], K a multiple of 16.
        scale: FP32 global scale, broadcastable to [..., K / 16].
    """
    blocks = x.float().unflatten(-1, (-1, GROUP))
    block_scale = blocks.abs().amax(-1) / (E2M1_MAX * scale)
    block_scale = block_scale.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn).float()
    values = round_e2m1(blocks / (block_scale * scale).unsqueeze(-1))
    return values.flatten(-2), block_scale


def dequantize(values: Tensor, block_scale: Tensor) -> Tensor:
    """Return values * block scales, FP32, without the global scale."""
    return (values.unflatten(-1, (-1, GROUP)) * block_scale.unsqueeze(-1)).flatten(-2)


def pack(values: Tensor) -> Tensor:
    """Return E2M1 values [..., K] as uint8 [..., K / 2], even k in the low nibble."""
    table = torch.tensor(E2M1_VALUES, device=values.device)
    codes = torch.bucketize(values.abs(), table).to(torch.uint8)
    codes |= torch.signbit(values).to(torch.uint8) << 3
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def unpack(packed: Tensor) -> Tensor:
    """Return uint8 [..., K / 2] as E2M1 values [..., K], FP32."""
    table = torch.tensor(E2M1_VALUES, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    magnitude = table[(codes & 7).long()]
    return torch.where(codes >= 8, -magnitude, magnitude)
