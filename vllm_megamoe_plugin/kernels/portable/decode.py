# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights to bf16 in registers: packed nibbles times their block scale.

A code's three magnitude bits, put where bf16 has its lowest exponent bits and its
highest mantissa bit, are a bf16 that is exactly 2^-126 times the E2M1 value,
subnormals included. One bf16 multiplication by `block scale * 2^118` makes it
`e2m1 * block_scale * 2^-8`: exact, since that has six significant bits, and in range
for every E4M3 scale. `UNSCALE` = 2^8 belongs to the accumulator's factor.
"""

import triton
import triton.language as tl

#: What an accumulator of decoded weights must be multiplied by.
UNSCALE = tl.constexpr(256.0)


@triton.jit
def decode_scales(scales):
    """uint8, bytes of E4M3 -> bf16(scale * 2^118)."""
    bits = scales.to(tl.int32)
    # as fp32 bits, the byte's exponent and mantissa are 2^-120 times the value
    value = ((bits & 0x7F) << 20 | (bits & 0x80) << 24).to(tl.float32, bitcast=True)
    value = value * 1.329227995784916e36 * 3.323069989462290e35  # 2^120, 2^118
    return value.to(tl.bfloat16)


@triton.jit
def decode_codes(packed, scales):
    """(uint8, `decode_scales` of each byte's block) -> (low, high nibble), bf16.

    Four bytes go through at once, whichever four the layout has in a row: often two
    of each of two weight rows, so every byte is multiplied by a scale of its own.
    """
    # p and q hold two bytes each, in the upper byte of their 16-bit halves.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 p, q, a, b, minus_zero;
        mov.b32 minus_zero, 0x80008000;
        prmt.b32 p, $4, 0, 0x1404;
        prmt.b32 q, $4, 0, 0x3424;

        shl.b32 a, p, 4;
        shr.u32 b, p, 2;
        or.b32 a, a, b;
        and.b32 a, a, 0x81C081C0;
        fma.rn.bf16x2 $0, a, $5, minus_zero;

        shl.b32 a, q, 4;
        shr.u32 b, q, 2;
        or.b32 a, a, b;
        and.b32 a, a, 0x81C081C0;
        fma.rn.bf16x2 $1, a, $6, minus_zero;

        shr.u32 a, p, 6;
        and.b32 a, a, 0x01C001C0;
        and.b32 b, p, 0x80008000;
        or.b32 a, a, b;
        fma.rn.bf16x2 $2, a, $5, minus_zero;

        shr.u32 a, q, 6;
        and.b32 a, a, 0x01C001C0;
        and.b32 b, q, 0x80008000;
        or.b32 a, a, b;
        fma.rn.bf16x2 $3, a, $6, minus_zero;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r",
        [packed, scales],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
