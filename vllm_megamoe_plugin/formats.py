# SPDX-License-Identifier: Apache-2.0
"""THE TABLE: what an expert weight format stores, and the exact numbers behind it.

One frozen row per precision. Nothing else derives a format's facts: code that
would ask `if fmt.name == ...` asks for a field of the row instead. Imports torch
only.

NVFP4: 4-bit E2M1 codes, two per byte (low nibble = even k), one E4M3 scale per 16
values along K, one fp32 global scale per tensor:
`weight = e2m1 * block_scale * global_scale`. `e2m1 * block_scale` has at most six
significant bits, so it is exact in bf16 and fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

E2M1_MAX = 6.0
E4M3_MAX = 448.0
#: Smallest positive E4M3 value; block scales of activations never fall below it.
E4M3_TINY = 2.0**-9
#: A global scale maps the largest magnitude to the largest code and block scale.
NVFP4_RANGE = E2M1_MAX * E4M3_MAX
NVFP4_GROUP = 16
E4M3_NAN_BYTES = (0x7F, 0xFF)

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """One precision, as a checkpoint stores it."""

    name: str
    weight_dtype: torch.dtype
    """dtype of the stored elements."""
    values_per_element: int
    """Weights packed along K into one stored element."""
    scale_dtype: torch.dtype | None
    """dtype of the block scales; None when the format has none."""
    group: int
    """Weights along K that share a block scale (1 without block scales)."""
    global_scale: bool
    """Whether each projection of each expert has an fp32 scale of its own."""
    modes: tuple[str, ...]
    """Activation modes the format can run in, the default first."""
    decode: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    """(elements, block scales as bytes) of whole rows, both flat -> fp32, flat, exact,
    without the global scale."""

    def weight_cols(self, k: int) -> int:
        """Stored elements of a row of `k` weights."""
        return k // self.values_per_element

    def scale_cols(self, k: int) -> int:
        """Block scales of a row of `k` weights."""
        return k // self.group


@cache
def _code_pairs(device: torch.device) -> torch.Tensor:
    """int64 [256]: the two fp32 values of each byte of packed codes, as one element.

    Gathering 8-byte elements is one fast copy per byte; gathering rows of two is not.
    """
    codes, byte = e2m1_values(), torch.arange(256)
    pairs = torch.stack([codes[byte & 15], codes[byte >> 4]], dim=1)
    return pairs.view(torch.int64).view(-1).to(device)


@cache
def _e4m3_values(device: torch.device) -> torch.Tensor:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return values.to(device)


def e2m1_values() -> torch.Tensor:
    """fp32 [16]: the value of each E2M1 code (bit 3 is the sign)."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES)
    return torch.cat([magnitudes, -magnitudes])


def decode_e4m3(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [n], the bytes of E4M3 values -> fp32 [n], exact, NaN bytes included."""
    return _e4m3_values(scales.device).index_select(0, scales.int())


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n] -> fp32 [2n], exact; the low nibble is the first of a pair."""
    return _code_pairs(packed.device).index_select(0, packed.int()).view(torch.float32)


def _decode_nvfp4(packed: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    assert scales is not None
    blocks = decode_e2m1(packed).view(-1, NVFP4_GROUP)
    return blocks.mul_(decode_e4m3(scales).view(-1, 1)).view(-1)


def _decode_plain(weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    assert scales is None
    return weight.float()


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 to the nearest E2M1 value; ties to the even code; saturates at 6.

    Steps are 0.5 below 2, 1 below 4 and 2 above; `torch.round` is half-to-even on
    multiples of the step, which is the tie rule of the hardware conversion.
    """
    a = x.abs().clamp_(max=E2M1_MAX)
    # the step is half the power of two below a, at least 0.5: a's exponent alone
    power = (a.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = power.clamp_(min=1.0).mul_(0.5)
    return a.div_(step).round_().mul_(step).copysign_(x)


def fake_quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """NVFP4 activations as the kernels see them, without the global scale.

    Args:
        x: fp32 [T, K], K % 16 == 0.
        global_scale: fp32, broadcastable to [T, 1]; one per token or one for all.

    Returns:
        fp32 [T, K] `q * sf` with `sf = e4m3(clamp(amax16(x) / (6 * global_scale),
        2^-9, 448))` and `q = e2m1(x / (sf * global_scale))`; multiply by
        `global_scale` to approximate `x`. Values past `6 * sf` saturate.
    """
    blocks = x.view(x.shape[0], x.shape[1] // NVFP4_GROUP, NVFP4_GROUP)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    return _quantize_blocks(blocks, amax, global_scale.view(-1, 1, 1)).view(x.shape)


def quantize_tokens_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`fake_quantize_nvfp4` with one global scale per token, and those scales.

    Args:
        x: fp32 [T, K], K % 16 == 0.

    Returns:
        fp32 [T, K], and fp32 [T, 1]: `amax / (6 * 448)` of each token, 1 for an
        all-zero token.
    """
    blocks = x.view(x.shape[0], x.shape[1] // NVFP4_GROUP, NVFP4_GROUP)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    largest = amax.amax(dim=1, keepdim=True)
    # by a tensor: CUDA multiplies by the inverse of a number, which may round otherwise
    scale = largest / torch.full_like(largest, NVFP4_RANGE)
    scale.masked_fill_(largest == 0, 1.0)
    return _quantize_blocks(blocks, amax, scale).view(x.shape), scale.view(-1, 1)


def _quantize_blocks(
    blocks: torch.Tensor, amax: torch.Tensor, s: torch.Tensor
) -> torch.Tensor:
    sf = (amax / (E2M1_MAX * s)).clamp_(E4M3_TINY, E4M3_MAX)
    sf = sf.to(torch.float8_e4m3fn).float()
    return round_to_e2m1(blocks / (sf * s)).mul_(sf)


NVFP4 = WeightFormat(
    name="nvfp4",
    weight_dtype=torch.uint8,
    values_per_element=2,
    scale_dtype=torch.float8_e4m3fn,
    group=NVFP4_GROUP,
    global_scale=True,
    modes=("w4a4", "w4a16"),
    decode=_decode_nvfp4,
)
BF16 = WeightFormat(
    name="bf16",
    weight_dtype=torch.bfloat16,
    values_per_element=1,
    scale_dtype=None,
    group=1,
    global_scale=False,
    modes=("w16a16",),
    decode=_decode_plain,
)
FORMATS: dict[str, WeightFormat] = {f.name: f for f in (NVFP4, BF16)}
