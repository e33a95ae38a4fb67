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
    """(elements [N, K/v], block scales [N, K/group]) -> fp32 [N, K], exact, without
    the global scale."""

    def weight_cols(self, k: int) -> int:
        """Stored elements of a row of `k` weights."""
        return k // self.values_per_element

    def scale_cols(self, k: int) -> int:
        """Block scales of a row of `k` weights."""
        return k // self.group


# Both tables hold 8-byte rows, gathered as int64 by two stored bytes at a time: one
# fast copy per row, instead of one per value.


@cache
def _quad_table() -> torch.Tensor:
    """int64 [65536]: the four fp16 values of each 16 bits of packed codes."""
    codes, pair, quad = e2m1_values(), torch.arange(256), torch.arange(65536)
    pairs = torch.stack([codes[pair & 15], codes[pair >> 4]], dim=1)
    rows = torch.cat([pairs[quad & 255], pairs[quad >> 8]], dim=1)
    return rows.half().view(torch.int64).view(-1)


@cache
def _scale_pair_table() -> torch.Tensor:
    """int64 [65536]: the two fp32 values of each pair of E4M3 bytes."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    pair = torch.arange(65536)
    rows = torch.stack([values[pair & 255], values[pair >> 8]], dim=1)
    return rows.view(torch.int64).view(-1)


def _gather_rows(table: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """int64, one row of the table for each two bytes of a tensor."""
    index = stored.contiguous().view(torch.uint8).view(-1).view(torch.uint16).int()
    return table.to(stored.device).index_select(0, index)


def e2m1_values() -> torch.Tensor:
    """fp32 [16]: the value of each E2M1 code (bit 3 is the sign)."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES)
    return torch.cat([magnitudes, -magnitudes])


def decode_e4m3(scales: torch.Tensor) -> torch.Tensor:
    """E4M3 (or the same bytes as uint8), an even number of them -> fp32, exact."""
    values = _gather_rows(_scale_pair_table(), scales).view(torch.float32)
    return values.view(scales.shape)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2], K % 4 == 0 -> fp32 [..., K], exact; low nibble is even k."""
    values = _gather_rows(_quad_table(), packed).view(torch.float16).float()
    return values.view(*packed.shape[:-1], packed.shape[-1] * 2)


def _decode_nvfp4(packed: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    assert scales is not None
    weight = decode_e2m1(packed)
    weight.view(-1, NVFP4_GROUP).mul_(decode_e4m3(scales).view(-1, 1))
    return weight


def _decode_plain(weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    assert scales is None
    return weight.float()


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to the nearest E2M1 value; ties to the even code; saturates at 6.

    Steps are 0.5 below 2, 1 below 4 and 2 above; `torch.round` is half-to-even on
    multiples of the step, which is the tie rule of the hardware conversion.
    """
    a = x.abs().clamp_(max=E2M1_MAX)
    # the step is half the power of two below a, at least 0.5: exponent arithmetic
    exponent = (a.view(torch.int32) >> 23).clamp_(127, 129)
    step = exponent.sub_(1).bitwise_left_shift_(23).view(torch.float32)
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
    t, k = x.shape
    blocks = x.view(t, k // NVFP4_GROUP, NVFP4_GROUP)
    s = global_scale.view(-1, 1, 1)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    sf = (amax / (E2M1_MAX * s)).clamp_(E4M3_TINY, E4M3_MAX)
    sf = sf.to(torch.float8_e4m3fn).float()
    return (round_to_e2m1(blocks / (sf * s)) * sf).view(t, k)


def token_scale(x: torch.Tensor) -> torch.Tensor:
    """fp32 [T, 1]: `amax / (6 * 448)` of each token, 1 for an all-zero token."""
    amax = x.abs().amax(dim=-1, keepdim=True)
    return torch.where(amax > 0, amax / NVFP4_RANGE, 1.0)


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
