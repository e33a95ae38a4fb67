# SPDX-License-Identifier: Apache-2.0
"""Where a kernel wants each shard: pairs of views, one set per kernel family.

A layout is four functions `(expert, shard, half) -> (destination, source)`, both
results views of equal shape. Loading is `destination.copy_(source)`; reading back
is the same call with the copy turned round, so no second description of a layout
exists. Sources must stay traceable by vLLM's load planner, which allows only view,
reshape, narrow, transpose and indexing on them.

Letters: E experts, H hidden, I intermediate, N rows, K columns (stored elements),
G block scales per row. `half` is 0 for gate (w1), 1 for up (w3), 0 for down (w2).
Parameters keep the checkpoint's element type, in the byte order of the kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

View = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Index maps from checkpoint shards to one kernel family's parameters."""

    name: str
    w13: View
    """values: shard [I, K] of one expert's [2I, K]."""
    w2: View
    """values: shard [H, K] of one expert's [H, K]."""
    w13_scale: View
    """block scales: shard [I, G] of one expert's scale parameter."""
    w2_scale: View
    """block scales: shard [H, G] of one expert's scale parameter."""
    scale_shape: Callable[[int, int], tuple[int, ...]]
    """(N, G) -> shape of one expert's scale parameter, N * G elements."""
    row_multiple: int
    """I and H must be multiples of this."""
    scale_col_multiple: int
    """Block scales per row must be a multiple of this."""

    def view(self, name: str) -> View:
        """The view function of `w13`, `w2`, `w13_scale` or `w2_scale`."""
        return {
            "w13": self.w13,
            "w2": self.w2,
            "w13_scale": self.w13_scale,
            "w2_scale": self.w2_scale,
        }[name]


def read_back(view: View, expert: Tensor, shape: tuple[int, ...], half: int) -> Tensor:
    """Inverse of loading: the checkpoint shard that `expert` holds, as a new tensor."""
    shard = torch.empty(shape, dtype=expert.dtype, device=expert.device)
    stored, plain = view(expert, shard, half)
    plain.copy_(stored)
    return shard


# --- plain: [gate; up] rows, checkpoint order. The reference. ---


def _plain_w13(expert: Tensor, shard: Tensor, half: int) -> tuple[Tensor, Tensor]:
    # gate row r -> r, up row r -> I + r
    rows = shard.shape[0]
    return expert.narrow(0, half * rows, rows), shard


def _plain_w2(expert: Tensor, shard: Tensor, half: int) -> tuple[Tensor, Tensor]:
    return expert, shard


PLAIN = Layout(
    name="plain",
    w13=_plain_w13,
    w2=_plain_w2,
    w13_scale=_plain_w13,
    w2_scale=_plain_w2,
    scale_shape=lambda n, g: (n, g),
    row_multiple=1,
    scale_col_multiple=1,
)


# --- deep_gemm: the SM100 mega kernels of vLLM's DeepGEMM (contract: proven against
# `transform_weights_for_mega_moe`). Gate and up rows alternate in runs of 8. A scale
# parameter is the kernel's int32 [N, G/4] tensor, MN-major, as bytes [G/4, N, 4];
# within each 128 rows, row 32b + c sits at 4c + b (the UTCCP order). ---


def _deep_gemm_w13(expert: Tensor, shard: Tensor, half: int) -> tuple[Tensor, Tensor]:
    # row r of gate/up -> 16 * (r // 8) + 8 * half + r % 8
    rows = shard.shape[0]
    cols = shard.shape[1:]
    return (
        expert.view(rows // 8, 2, 8, *cols)[:, half],
        shard.reshape(rows // 8, 8, *cols),
    )


def _deep_gemm_w13_scale(
    expert: Tensor, shard: Tensor, half: int
) -> tuple[Tensor, Tensor]:
    # Row r of gate/up lands on interleaved row n = 128a + 32b + 16p + 8*half + j with
    # r = 64a + 16b + 8p + j; n sits at 128a + 4 * (16p + 8*half + j) + b.
    rows, groups = shard.shape
    q = groups // 4
    # [Q, N, 4] -> Q, a, p, half, j, b, byte
    stored = expert.view(q, rows // 64, 2, 2, 8, 4, 4)[:, :, :, half]
    return (
        stored.permute(1, 4, 2, 3, 0, 5),  # a, b, p, j, Q, byte
        shard.reshape(rows // 64, 4, 2, 8, q, 4),
    )


def _deep_gemm_w2_scale(
    expert: Tensor, shard: Tensor, half: int
) -> tuple[Tensor, Tensor]:
    # row 128a + 32b + c -> 128a + 4c + b
    rows, groups = shard.shape
    q = groups // 4
    stored = expert.view(q, rows // 128, 32, 4, 4)  # Q, a, c, b, byte
    return (
        stored.permute(1, 3, 2, 0, 4),  # a, b, c, Q, byte
        shard.reshape(rows // 128, 4, 32, q, 4),
    )


DEEP_GEMM = Layout(
    name="deep_gemm",
    w13=_deep_gemm_w13,
    w2=_plain_w2,
    w13_scale=_deep_gemm_w13_scale,
    w2_scale=_deep_gemm_w2_scale,
    scale_shape=lambda n, g: (g // 4, n, 4),
    row_multiple=128,
    scale_col_multiple=4,
)


# --- portable: our Triton kernels. [gate; up] rows in groups of 8; a group's columns in
# tiles of 64 bytes of values and their 8 scales (less where the row is no multiple of
# that): [N/8, tiles, 8, width], so that what a warp loads at once is one run. ---


def portable_width(columns: int, element_size: int) -> int:
    """Elements of a row in one tile of values."""
    return gcd(columns, 64 // element_size)


def _tiled(half_of_expert: Tensor, shard: Tensor, width: int) -> tuple[Tensor, Tensor]:
    # (8a + b, width * c + d) -> a, c, b, d
    rows, columns = shard.shape
    return (
        half_of_expert.view(rows // 8, columns // width, 8, width),
        shard.reshape(rows // 8, 8, columns // width, width).transpose(1, 2),
    )


# `half` is 0 for w2, whose rows are then the whole of it.
def _portable(expert: Tensor, shard: Tensor, half: int) -> tuple[Tensor, Tensor]:
    width = portable_width(shard.shape[1], expert.element_size())
    return _tiled(*_plain_w13(expert, shard, half), width)


def _portable_scale(expert: Tensor, shard: Tensor, half: int) -> tuple[Tensor, Tensor]:
    return _tiled(*_plain_w13(expert, shard, half), gcd(shard.shape[1], 8))


PORTABLE = Layout(
    name="portable",
    w13=_portable,
    w2=_portable,
    w13_scale=_portable_scale,
    w2_scale=_portable_scale,
    scale_shape=lambda n, g: (n, g),
    row_multiple=16,
    scale_col_multiple=1,
)

LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (PLAIN, DEEP_GEMM, PORTABLE)
}
