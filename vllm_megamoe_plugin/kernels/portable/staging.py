# SPDX-License-Identifier: Apache-2.0
"""Activations as the GEMMs read them: quantized where the mode asks, and reordered.

The GEMM multiplies the low nibbles of a tile of weights, then the high ones, in the
order in which its threads hold them. So a staged row of K values is, tile by tile, its
even columns, then its odd ones, each in the order of `staged_position`.
"""

import triton
import triton.language as tl

from ...formats import E2M1_MAX, E4M3_MAX, E4M3_TINY, NVFP4_RANGE

_E2M1_MAX = tl.constexpr(E2M1_MAX)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E4M3_TINY = tl.constexpr(E4M3_TINY)
_NVFP4_RANGE = tl.constexpr(NVFP4_RANGE)
#: Adding and subtracting it rounds to an integer, half to even, below 2^22.
_ROUND = tl.constexpr(1.5 * 2**23)


@triton.jit
def staged_position(column, width: tl.constexpr):
    """Where a column of an activation row is staged.

    A tile of `width` packed bytes of a weight row is spread over the four threads of
    a matrix instruction's row, `width / 4` bytes each; the instruction takes two
    neighbours from each thread in turn.
    """
    each: tl.constexpr = width // 4
    byte = column // 2
    thread = byte % width // each
    mine = byte % each
    place = mine % 2 + 2 * thread + mine // 2 * 8
    return (byte // width * 2 + column % 2) * width + place


@triton.jit
def _power_of_two_below(x):
    """2^floor(log2 x) of positive normal fp32."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _round_e4m3(x):
    """fp32 in [2^-9, 448] to the nearest E4M3 value, ties to even."""
    step = tl.maximum(_power_of_two_below(x), 0.015625) * 0.125
    return (tl.math.div_rn(x, step) + _ROUND - _ROUND) * step


@triton.jit
def _round_e2m1(x):
    """`formats.round_to_e2m1`."""
    a = tl.minimum(tl.abs(x), _E2M1_MAX)
    step = tl.maximum(_power_of_two_below(a), 1.0) * 0.5
    a = (tl.math.div_rn(a, step) + _ROUND - _ROUND) * step
    return tl.where(x < 0, -a, a)


@triton.jit
def quantize_blocks(blocks, axis: tl.constexpr, global_scale):
    """`formats.fake_quantize_nvfp4` of fp32 blocks of 16 along `axis`; fp32.

    `global_scale` must broadcast to the blocks.
    """
    amax = tl.max(tl.abs(blocks), axis=axis, keep_dims=True)
    scale = tl.math.div_rn(amax, _E2M1_MAX * global_scale)
    scale = tl.minimum(tl.maximum(scale, _E4M3_TINY), _E4M3_MAX)
    scale = _round_e4m3(scale)
    return _round_e2m1(tl.math.div_rn(blocks, scale * global_scale)) * scale


@triton.jit
def stage_token(
    x_ptr,
    staged_ptr,
    token_scale_ptr,
    token,
    num_columns,
    width: tl.constexpr,
    quantized: tl.constexpr,
    columns: tl.constexpr,
):
    """Stage one row of bf16 x [T, H]; its NVFP4 global scale to token_scale [T].

    Args:
        width: bytes per row of a weight tile.
        columns: a power of two, at least `num_columns`.
    """
    column = tl.arange(0, columns)
    inside = column < num_columns
    offset = token.to(tl.int64) * num_columns
    x = tl.load(x_ptr + offset + column, mask=inside, other=0.0)
    if quantized:
        x = x.to(tl.float32)
        amax = tl.max(tl.abs(x), axis=0)
        scale = tl.where(amax == 0, 1.0, tl.math.div_rn(amax, _NVFP4_RANGE))
        tl.store(token_scale_ptr + token, scale)
        blocks = tl.reshape(x, (columns // 16, 16))
        x = tl.reshape(quantize_blocks(blocks, 1, scale), (columns,)).to(tl.bfloat16)
    place = staged_position(column, width)
    tl.store(staged_ptr + offset + place, x, mask=inside)
