# SPDX-License-Identifier: Apache-2.0
"""Layouts are bijections, invertible, made of views, and what the kernels want."""

import importlib.util
import itertools

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin.layouts import DEEP_GEMM, LAYOUTS, PLAIN, Layout, read_back

from .helpers import as_bytes, assert_equal

#: (E, H, I), every side a multiple of the largest `row_multiple`.
SIZES = [(1, 128, 128), (2, 256, 128), (3, 128, 384)]
NAMES = ("w13", "w2", "w13_scale", "w2_scale")
#: Values and scales need not share a column count; 16 weights per scale, 2 per byte.
PER_BYTE, GROUP = 2, 16

HAS_VENDORED_DEEP_GEMM = (
    importlib.util.find_spec("vllm") is not None
    and importlib.util.find_spec("vllm.third_party.deep_gemm") is not None
)

cases = pytest.mark.parametrize(
    ("layout", "size", "name"),
    [
        pytest.param(layout, size, name, id=f"{layout.name}-{size}-{name}")
        for layout, size, name in itertools.product(LAYOUTS.values(), SIZES, NAMES)
    ],
)


def _shapes(
    layout: Layout, hidden: int, intermediate: int, name: str
) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, ...]]:
    """(one expert's parameter shape, shard shape, halves)."""
    w13 = name.startswith("w13")
    rows, k = (intermediate, hidden) if w13 else (hidden, intermediate)
    cols = k // GROUP if name.endswith("_scale") else k // PER_BYTE
    stored = 2 * rows if w13 else rows
    shape = layout.scale_shape(stored, cols) if "scale" in name else (stored, cols)
    return shape, (rows, cols), (0, 1) if w13 else (0,)


@cases
def test_load_then_read_back_is_identity(
    layout: Layout, size: tuple[int, int, int], name: str
) -> None:
    e, hidden, intermediate = size
    shape, shard_shape, halves = _shapes(layout, hidden, intermediate, name)
    view = layout.view(name)
    param = torch.zeros(e, *shape, dtype=torch.uint8)
    shards = {
        (x, h): torch.randint(0, 256, shard_shape, dtype=torch.uint8)
        for x in range(e)
        for h in halves
    }
    for (x, half), shard in shards.items():
        stored, plain = view(param[x], shard, half)
        stored.copy_(plain)
    for (x, half), shard in shards.items():
        assert_equal(read_back(view, param[x], shard_shape, half), shard, f"{x}/{half}")


@cases
def test_every_element_is_written_exactly_once(
    layout: Layout, size: tuple[int, int, int], name: str
) -> None:
    _, hidden, intermediate = size
    shape, shard_shape, halves = _shapes(layout, hidden, intermediate, name)
    ids = torch.arange(len(halves) * shard_shape[0] * shard_shape[1])
    expert = torch.full(shape, -1)
    for half, part in zip(halves, ids.view(len(halves), *shard_shape), strict=True):
        stored, plain = layout.view(name)(expert, part, half)
        assert stored.shape == plain.shape
        stored.copy_(plain)
    assert_equal(expert.flatten().sort().values, ids)


@cases
def test_both_sides_are_views(
    layout: Layout, size: tuple[int, int, int], name: str
) -> None:
    _, hidden, intermediate = size
    shape, shard_shape, halves = _shapes(layout, hidden, intermediate, name)
    expert = torch.empty(shape)
    rows, cols = shard_shape
    sources = {
        "contiguous": torch.empty(rows, cols),
        "narrowed rows": torch.empty(2 * rows, cols).narrow(0, rows, rows),
        "narrowed columns": torch.empty(rows, 2 * cols).narrow(1, cols, cols),
        "transposed": torch.empty(cols, rows).t(),
    }
    for what, source in sources.items():
        for half in halves:
            stored, plain = layout.view(name)(expert, source, half)
            for view, base in ((stored, expert), (plain, source)):
                assert _storage(view) == _storage(base), what


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


# --- index maps, written a second time as plain arithmetic ---


def _interleaved(row: int, half: int) -> int:
    return 16 * (row // 8) + 8 * half + row % 8


def _utccp(row: int) -> int:
    block, b, c = row // 128, row % 128 // 32, row % 32
    return 128 * block + 4 * c + b


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_deep_gemm_index_map(name: str, size: tuple[int, int, int]) -> None:
    _, hidden, intermediate = size
    shape, (rows, cols), halves = _shapes(DEEP_GEMM, hidden, intermediate, name)
    expert = torch.empty(shape, dtype=torch.uint8)
    for half in halves:
        shard = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
        stored, plain = DEEP_GEMM.view(name)(expert, shard, half)
        stored.copy_(plain)
        for row in range(rows):
            n = _interleaved(row, half) if name.startswith("w13") else row
            if name.endswith("_scale"):
                # byte g of a row is byte g % 4 of int32 g // 4, MN-major
                got = expert[:, _utccp(n), :].reshape(cols)
            else:
                got = expert[n]
            assert torch.equal(got, shard[row]), f"{name} half {half} row {row}"


@pytest.mark.parametrize("name", NAMES)
def test_plain_index_map(name: str) -> None:
    shape, shard_shape, halves = _shapes(PLAIN, 128, 384, name)
    expert = torch.empty(shape)
    shards = [torch.randn(shard_shape) for _ in halves]
    for half, shard in enumerate(shards):
        stored, plain = PLAIN.view(name)(expert, shard, half)
        stored.copy_(plain)
    assert_equal(expert, torch.cat(shards))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda x: x.name)
def test_scale_parameter_holds_every_block_scale(layout: Layout) -> None:
    assert LAYOUTS[layout.name] is layout
    shape = layout.scale_shape(256, 24)
    assert torch.Size(shape).numel() == 256 * 24


# --- against the library's own transform, where vLLM ships it ---

if HAS_VENDORED_DEEP_GEMM:

    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_deep_gemm_layout_is_what_its_own_transform_makes(
        size: tuple[int, int, int],
    ) -> None:
        from vllm.third_party.deep_gemm import transform_weights_for_mega_moe

        e, hidden, intermediate = size
        loaded, plain = _loaded(e, hidden, intermediate)
        (w13, sf13), (w2, sf2) = transform_weights_for_mega_moe(
            (plain["w13"].view(torch.int8), _mn_major(plain["w13_scale"])),
            (plain["w2"].view(torch.int8), _mn_major(plain["w2_scale"])),
        )
        assert_equal(loaded["w13"].view(torch.int8), w13)
        assert_equal(loaded["w2"].view(torch.int8), w2)
        assert_equal(_as_kernel_scales(loaded["w13_scale"]), sf13)
        assert_equal(_as_kernel_scales(loaded["w2_scale"]), sf2)

    def _loaded(
        e: int, hidden: int, intermediate: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(parameters loaded in the deep_gemm layout, the same in checkpoint order)."""
        loaded, plain = {}, {}
        for name in NAMES:
            shape, shard_shape, halves = _shapes(DEEP_GEMM, hidden, intermediate, name)
            shards = torch.randint(
                0, 256, (e, len(halves), *shard_shape), dtype=torch.uint8
            )
            loaded[name] = torch.zeros(e, *shape, dtype=torch.uint8)
            for x in range(e):
                for half in halves:
                    stored, source = DEEP_GEMM.view(name)(
                        loaded[name][x], shards[x, half], half
                    )
                    stored.copy_(source)
            plain[name] = shards.flatten(1, 2).contiguous()
        return loaded, plain

    def _mn_major(scales: Tensor) -> Tensor:
        """uint8 [E, N, G] -> int32 [E, N, G/4] with strides (N * G/4, 1, N)."""
        packed = scales.contiguous().view(torch.int32)
        return packed.transpose(1, 2).contiguous().transpose(1, 2)

    def _as_kernel_scales(param: Tensor) -> Tensor:
        """uint8 [E, G/4, N, 4] as the kernel reads it, sharing the storage."""
        view = param.view(torch.int32).squeeze(-1).transpose(1, 2)
        assert _storage(view) == _storage(param)
        assert len(as_bytes(param)) == 4 * view.numel()
        return view
