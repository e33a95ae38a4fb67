# SPDX-License-Identifier: Apache-2.0
"""Every packed byte times every block scale is exact, whatever its neighbours are."""

import pytest
import torch

from vllm_megamoe_plugin.formats import decode_e2m1, decode_e4m3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_byte_with_every_scale_is_exact() -> None:
    """Neighbours have scales of their own: a layout may put any bytes in a row."""
    import triton
    import triton.language as tl

    from vllm_megamoe_plugin.kernels.portable import decode

    @triton.jit
    def kernel(scale_ptr, low_ptr, high_ptr, num_scales):
        shift = tl.program_id(0)
        byte = tl.arange(0, 256)
        scale = tl.load(scale_ptr + (byte + shift) % num_scales)
        low, high = decode.decode_codes(byte.to(tl.uint8), decode.decode_scales(scale))
        tl.store(low_ptr + shift * 256 + byte, low)
        tl.store(high_ptr + shift * 256 + byte, high)

    # all finite scales, zero and the negative ones included
    scales = torch.tensor([s for s in range(256) if s & 0x7F != 0x7F]).byte()
    low, high = torch.full((2, len(scales), 256), torch.nan).bfloat16().cuda()
    kernel[(len(scales),)](scales.cuda(), low, high, len(scales))
    got = torch.stack([low, high], dim=-1).float().mul(decode.UNSCALE.value).cpu()
    byte = torch.arange(256)
    codes = decode_e2m1(byte.byte()).view(256, 2)
    for shift, values in enumerate(got):
        scale = decode_e4m3(scales[(byte + shift) % len(scales)])
        assert torch.equal(values, codes * scale[:, None]), f"scales from {shift} on"
