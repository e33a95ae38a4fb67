# SPDX-License-Identifier: Apache-2.0
"""Scales: unusable values are refused by name, the maximum is exact."""

import math
import re
from typing import Any

import pytest
import torch

from vllm_megamoe_plugin import scales
from vllm_megamoe_plugin.scales import (
    all_usable,
    check_block_scales,
    check_global_scales,
    check_l2_scale_tensor,
    fault_of,
    gist,
    inverse_fault_of,
    invert_into,
    judge_input_scales,
    largest_byte,
    may_hold_nan,
    read_together,
)

from .helpers import assert_equal

INF, NAN, DENORMAL = math.inf, math.nan, 1e-39
FAULTS = {
    NAN: "NaN",
    INF: "infinite",
    -INF: "infinite",
    -0.5: "negative",
    0.0: "zero",
    DENORMAL: "denormal",
}
faults = pytest.mark.parametrize(
    ("value", "fault"), FAULTS.items(), ids=[f"{v:g}" for v in FAULTS]
)
CPU = torch.device("cpu")


@faults
def test_faults(value: float, fault: str) -> None:
    assert fault_of(value) == fault


@pytest.mark.parametrize("value", [1.0, 2.0**-126, 448.0, 3e38])
def test_usable_scales(value: float) -> None:
    assert fault_of(value) is None


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize("value", [*FAULTS, 1.0, 2.0**-126, 2.0**126, 3e38, 2.0**127])
def test_the_fast_look_agrees_with_the_judge(value: float, reciprocal: bool) -> None:
    judge = inverse_fault_of if reciprocal else fault_of
    healthy = judge(value) is None
    assert all_usable([value], reciprocal=reciprocal) is healthy
    for place in range(3):
        values = [1.0, 2.0]
        values.insert(place, value)
        assert all_usable(values, reciprocal=reciprocal) is healthy


def test_values_are_read_flat_and_in_order() -> None:
    square, byte = torch.tensor([[1.5, 2.5], [3.5, 4.5]]), torch.tensor(7).byte()
    assert read_together([square, byte]) == [[1.5, 2.5, 3.5, 4.5], [7]]
    assert read_together([]) == []


def test_values_of_other_devices_come_in_one_piece() -> None:
    tensors = [torch.tensor(7).byte(), torch.rand(2, 3), torch.tensor([1, 2]).byte()]
    packed = scales._packed(tensors)
    assert packed.shape == (1 + 24 + 2,)
    assert scales._unpacked(packed, tensors) == read_together(tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_values_on_a_gpu() -> None:
    for value in (*FAULTS, 3e38):
        for place in range(3):
            values = [1.0, 2.0]
            values.insert(place, value)
            on_gpu = torch.tensor(values, device="cuda")
            (few,) = read_together([gist(on_gpu)])
            assert len(few) == 2
            for flip in (False, True):
                assert all_usable(few, reciprocal=flip) is all_usable(
                    on_gpu.tolist(), reciprocal=flip
                )
    tensors = [torch.tensor(7).byte(), torch.rand(2, 3), torch.tensor([1, 2]).byte()]
    assert read_together([t.cuda() for t in tensors]) == read_together(tensors)


# --- weights ---


@faults
def test_global_scales_are_refused_by_name(value: float, fault: str) -> None:
    stored = [0.5, value, 0.5, 0.25]
    labels = [f"expert {e} {s}" for s in ("w1", "w3") for e in (4, 6)]
    with pytest.raises(ValueError, match=re.escape(fault)) as error:
        check_global_scales(
            stored, "layers.3.experts.w13_weight_scale_2", labels.__getitem__
        )
    message = str(error.value)
    assert message.startswith(
        f"layers.3.experts.w13_weight_scale_2: unusable global scales: "
        f"expert 6 w1 = {value:g} ({fault}). Each must be"
    )


def test_all_unusable_global_scales_are_counted() -> None:
    labels = [f"expert {e} w2" for e in range(9)]
    with pytest.raises(ValueError, match=r"expert 5 w2 = 0 \(zero\) and 3 more\."):
        check_global_scales([0.0] * 9, "w2", labels.__getitem__)


def test_usable_global_scales_pass() -> None:
    check_global_scales([0.5, 2e-5], "w2", ["a", "b"].__getitem__)


def test_a_reciprocal_is_refused_when_its_inverse_is_denormal() -> None:
    """1 / 3e38 is no normal fp32 number, though 3e38 is one."""
    stored = [2.0, 3e38]
    label = ["expert 0 w2", "expert 1 w2"].__getitem__
    check_global_scales(stored, "p.w2", label)
    with pytest.raises(ValueError, match=r"expert 1 w2 = 3e\+38 \(denormal\)\."):
        check_global_scales(stored, "p.w2", label, reciprocal=True)
    with pytest.raises(ValueError, match=r"expert 1 = 3e\+38 \(denormal\)\."):
        _read([2.0, 3e38], reciprocal=True)
    assert inverse_fault_of(2.0) is None
    for value, fault in FAULTS.items():
        assert inverse_fault_of(value) == fault


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("shape", [(3, 8, 4), (3, 1, 8, 4)])
def test_nan_block_scales_are_refused_by_name(
    byte: int, shape: tuple[int, ...]
) -> None:
    scales = torch.full(shape, 0x7E, dtype=torch.uint8)
    scales[1, 0, 2] = byte
    scales[2].view(-1)[:2] = byte
    count = scales[1].eq(byte).sum().item()
    with pytest.raises(ValueError, match="bytes 0x7F or 0xFF") as error:
        check_block_scales(scales.view(torch.float8_e4m3fn), "p.w2_scale", [5, 0, 7])
    assert str(error.value).startswith(
        f"p.w2_scale: block scales are NaN (bytes 0x7F or 0xFF): "
        f"expert 0: {count} of 32; expert 7: 2 of 32. "
    )


@pytest.mark.parametrize("byte", range(256))
def test_the_largest_byte_tells_healthy_scales_in_one_pass(byte: int) -> None:
    scales = torch.full((2, 8, 4), 0x38, dtype=torch.uint8)
    scales[1, 3, 2] = byte
    suspect = may_hold_nan(largest_byte(scales.view(torch.float8_e4m3fn)).item())
    # negative scales are suspect, too, and looked at again
    assert suspect is (byte >= 0x7F)


def test_every_other_byte_is_a_block_scale() -> None:
    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[(scales & 0x7F) != 0x7F].view(1, -1)
    assert scales.numel() == 254
    check_block_scales(scales.view(torch.float8_e4m3fn), "w2", [0])


# --- input scales ---


def _read(values: list[float], reciprocal: bool = False, fill: bool = False) -> Any:
    return judge_input_scales(
        torch.tensor(values, dtype=torch.float32).tolist(),
        "p.w2_input_scale",
        reciprocal=reciprocal,
        fill_missing=fill,
    )


def test_the_maximum_is_one_of_the_stored_values() -> None:
    values = torch.rand(64)
    found = _read(values.tolist())
    assert_equal(torch.tensor(found.maximum), values.max())
    assert (found.dead, found.filled) == ((), ())


def test_the_maximum_of_reciprocals_is_the_fp32_inverse_of_the_smallest() -> None:
    values = torch.rand(64) * 5000 + 1
    found = _read(values.tolist(), reciprocal=True)
    assert_equal(torch.tensor(found.maximum), values.min().reciprocal())


@pytest.mark.parametrize("dead", [0.0, INF])
@pytest.mark.parametrize("fill", [False, True])
def test_dead_experts_of_a_reciprocal_take_no_part(dead: float, fill: bool) -> None:
    found = _read([8.0, dead, 4.0, dead], reciprocal=True, fill=fill)
    assert found.maximum == 0.25
    assert found.dead == (1, 3)
    assert found.filled == ()


@pytest.mark.parametrize("dead", [0.0, INF])
def test_all_dead_is_refused(dead: float) -> None:
    message = "p.w2_input_scale: no expert has a usable input scale"
    with pytest.raises(ValueError, match=message):
        _read([dead, dead], reciprocal=True)


@faults
def test_unusable_scales_are_refused_by_name(value: float, fault: str) -> None:
    with pytest.raises(ValueError, match="unusable") as error:
        _read([1.0, value, 2.0])
    message = str(error.value)
    assert message.startswith(
        f"p.w2_input_scale: unusable input scales: expert 1 = {value:g} ({fault}). "
    )
    assert "VLLM_MEGAMOE_MISSING_INPUT_SCALE=max" in message
    assert "VLLM_MEGAMOE_ACTIVATION=w4a16" in message


@pytest.mark.parametrize("value", [NAN, -0.5, -INF, DENORMAL])
def test_unusable_reciprocals_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="expert 1 = "):
        _read([1.0, value], reciprocal=True)


@pytest.mark.parametrize("value", [NAN, 0.0, INF])
def test_fill_missing_gives_them_the_maximum(value: float) -> None:
    found = _read([1.0, value, 2.0], fill=True)
    assert (found.maximum, found.filled) == (2.0, (1,))


@pytest.mark.parametrize("value", [-0.5, DENORMAL])
def test_fill_missing_does_not_hide_broken_values(value: float) -> None:
    with pytest.raises(ValueError, match="expert 1 = "):
        _read([1.0, value], fill=True)


def test_fill_missing_needs_one_usable_value() -> None:
    with pytest.raises(ValueError, match="no expert has a usable input scale"):
        _read([NAN, NAN], fill=True)


# --- the tensor that kernels take ---


def test_contract_of_the_l2_scale_tensor() -> None:
    check_l2_scale_tensor(None, CPU)
    check_l2_scale_tensor(torch.ones(1), CPU)
    check_l2_scale_tensor(torch.ones(()), CPU)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0.5, TypeError, "must be a float32 device tensor, got float; a Python number"),
        (torch.ones(1, dtype=torch.float64), TypeError, "must be float32, got torch.f"),
        (torch.ones(1, dtype=torch.int32), TypeError, "must be float32, got torch.int"),
        (torch.ones(2), ValueError, "must have one element, got (2,)"),
        (torch.ones(0), ValueError, "must have one element, got (0,)"),
        (torch.ones(1, device="meta"), ValueError, "is on meta, the output on cpu"),
    ],
    ids=["float", "float64", "int32", "two", "none", "device"],
)
def test_other_l2_scales_are_refused(
    scale: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        check_l2_scale_tensor(scale, CPU)


def test_inverting_writes_in_place() -> None:
    stored, out = torch.tensor([[2.0, 3.0], [0.5, 7.0]]), torch.zeros(2, 2)
    address = out.data_ptr()
    invert_into(out, stored)
    assert_equal(out, 1.0 / stored)
    assert out.data_ptr() == address
