# SPDX-License-Identifier: Apache-2.0
"""Scales: what is checked after loading, and what is derived into fixed tensors.

Runs in post-load processing, where a host read is allowed: one for all scales of a
layer (`read_together`). Checks come first and write nothing, so a refused weight set
leaves every derived tensor as it was. Both take a few numbers of device memory.

The L2 activation scale is one number for the layer: the maximum of the `down_proj`
input scales over all logical experts of all ranks, so that every rank quantizes
alike. Kernels read it from a one-element fp32 device tensor, and form
`l2_alpha = w2_weight_scale_2 * l2_activation_scale` from the same tensor, so a
captured graph can never mix an old scale with a new product.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import E4M3_NAN_BYTES
from .ledger import summarize

_FP32_TINY = torch.finfo(torch.float32).tiny
_FP32_MAX = torch.finfo(torch.float32).max
#: As `struct` names what is read from a device.
_CODES = {torch.float32: "f", torch.uint8: "B", torch.int8: "b"}


def fault_of(value: float) -> str | None:
    """Why a scale cannot be used, None when it can."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "infinite"
    if value < 0:
        return "negative"
    if value == 0:
        return "zero"
    return "denormal" if value < _FP32_TINY else None


def inverse_fault_of(value: float) -> str | None:
    """`fault_of` for a stored reciprocal, whose inverse may be denormal too."""
    return fault_of(value) or fault_of(1.0 / value)


def all_usable(values: Sequence[float], *, reciprocal: bool) -> bool:
    """Whether none has a fault: the healthy case, told fast."""
    largest = 1.0 / _FP32_TINY if reciprocal else _FP32_MAX
    total = sum(values)  # NaN if one is, which `min` and `max` would miss
    return (
        total == total
        and min(values, default=1.0) >= _FP32_TINY
        and max(values, default=1.0) <= largest
    )


def read_together(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The values of small tensors of one device, flat, after one wait for it."""
    if all(t.device.type == "cpu" for t in tensors):
        return [t.flatten().tolist() for t in tensors]
    return _unpacked(_packed(tensors).cpu(), tensors)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one after another."""
    return torch.cat([t.flatten().view(torch.uint8) for t in tensors])


def _unpacked(packed: Tensor, tensors: Sequence[Tensor]) -> list[list[float]]:
    """The values of each tensor out of their `_packed` bytes."""
    raw, start, values = packed.numpy().tobytes(), 0, []
    for tensor in tensors:
        form = f"={tensor.numel()}{_CODES[tensor.dtype]}"
        values.append(list(struct.unpack_from(form, raw, start)))
        start += tensor.nbytes
    return values


def gist(values: Tensor) -> Tensor:
    """As few of some scales as tell whether `all_usable` of them, and their extremes.

    On a GPU the smallest and the largest, NaN if one is; Python would take longer to
    look at all of them than an update takes to copy. On CPU they are at hand.
    """
    return torch.stack(torch.aminmax(values)) if values.is_cuda else values


def check_global_scales(
    values: Sequence[float],
    name: str,
    label: Callable[[int], str],
    *,
    reciprocal: bool = False,
) -> None:
    """Refuse global weight scales that cannot multiply a weight.

    Args:
        values: as the checkpoint holds them.
        label: what the n-th value belongs to, for the message.
        reciprocal: values are 1/scale.

    Raises:
        ValueError: naming every unusable value.
    """
    if all_usable(values, reciprocal=reciprocal):
        return
    judge = inverse_fault_of if reciprocal else fault_of
    bad = [
        f"{label(n)} = {value:g} ({fault})"
        for n, value in enumerate(values)
        if (fault := judge(value))
    ]
    raise ValueError(
        f"{name}: unusable global scales: {summarize(bad)}. Each must be a "
        "finite positive number; re-export the checkpoint."
    )


def largest_byte(scales: Tensor) -> Tensor:
    """uint8 scalar on the device. Scales with `may_hold_nan` of it need a second look.

    One pass and no memory: a block scale that is no NaN and not negative is a byte
    below 0x7F.
    """
    return scales.view(torch.uint8).amax()


def may_hold_nan(largest: float) -> bool:
    """Whether scales with this `largest_byte` hold a NaN, or a negative scale."""
    return largest >= E4M3_NAN_BYTES[0]


def check_block_scales(scales: Tensor, name: str, experts: Sequence[int]) -> None:
    """Refuse E4M3 block scales that hold NaN bytes (0x7F, 0xFF).

    Args:
        scales: E4M3 [E, ...], in any kernel layout; scanned expert by expert, unless
            they are found healthy as a whole.
        experts: logical id of each of the E slots, for the message.

    Raises:
        ValueError: naming tensor, experts and counts.
    """
    nan, negative_nan = E4M3_NAN_BYTES
    # as signed bytes 0x7F is the largest, as unsigned ones 0xFF
    extremes = [scales.view(torch.int8).amax(), scales.view(torch.uint8).amax()]
    (signed,), (unsigned,) = read_together(extremes)
    if signed < nan and unsigned < negative_nan:
        return
    counts = [(one.view(torch.uint8).bitwise_and(nan) == nan).sum() for one in scales]
    found = torch.stack(counts).tolist()
    bad = [
        f"expert {expert}: {n} of {scales[0].numel()}"
        for expert, n in zip(experts, found, strict=True)
        if n
    ]
    raise ValueError(
        f"{name}: block scales are NaN (bytes 0x7F or 0xFF): {summarize(bad)}. "
        "The exporter overflowed E4M3; `vllm-megamoe inspect` finds the "
        "coordinates. Re-export with scales clamped to 448."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class InputScales:
    """What the stored input scales of one projection amount to."""

    maximum: float
    """Largest usable scale over all logical experts."""
    dead: tuple[int, ...]
    """Experts whose calibration saw only zeros; they do not take part."""
    filled: tuple[int, ...]
    """Experts without a usable scale that take the maximum instead."""


def judge_input_scales(
    values: Sequence[float], name: str, *, reciprocal: bool, fill_missing: bool
) -> InputScales:
    """Judge the stored input scales of a layer and take their maximum.

    A stored reciprocal of inf or 0 is how compressed-tensors writes an expert that
    calibration never reached: it takes no part in the maximum. Where scales are
    stored as they are, the same expert would be a zero, which is indistinguishable
    from a broken export and is refused unless `fill_missing`.

    Args:
        values: one per logical expert, as the checkpoint holds them.
        reciprocal: values are 1/scale.
        fill_missing: let unusable experts take the maximum instead of refusing.

    Raises:
        ValueError: naming every unusable value, or that none is usable.
    """
    if all_usable(values, reciprocal=reciprocal):
        return InputScales(maximum=_largest(values, reciprocal), dead=(), filled=())
    usable: list[float] = []
    dead: list[int] = []
    filled: list[int] = []
    bad: list[str] = []
    judge = inverse_fault_of if reciprocal else fault_of
    for expert, value in enumerate(values):
        fault = judge(value)
        if fault is None:
            usable.append(value)
        elif reciprocal and fault in ("zero", "infinite") and value >= 0:
            dead.append(expert)
        elif fill_missing and fault in ("zero", "NaN", "infinite"):
            filled.append(expert)
        else:
            bad.append(f"expert {expert} = {value:g} ({fault})")
    if bad:
        raise ValueError(
            f"{name}: unusable input scales: {summarize(bad)}. Re-calibrate, set "
            "VLLM_MEGAMOE_MISSING_INPUT_SCALE=max to give missing ones the layer's "
            "maximum, or run weight-only with VLLM_MEGAMOE_ACTIVATION=w4a16."
        )
    if not usable:
        raise ValueError(
            f"{name}: no expert has a usable input scale, so activations cannot be "
            "quantized. Run weight-only with VLLM_MEGAMOE_ACTIVATION=w4a16."
        )
    return InputScales(
        maximum=_largest(usable, reciprocal), dead=tuple(dead), filled=tuple(filled)
    )


def _largest(stored: Sequence[float], reciprocal: bool) -> float:
    """The largest scale of usable stored values, as fp32 division gives it."""
    if not reciprocal:
        return max(stored)
    # a double quotient rounded to fp32 is the fp32 quotient
    return struct.unpack("f", struct.pack("f", 1.0 / min(stored)))[0]


def check_l2_scale_tensor(scale: Tensor | None, device: torch.device) -> None:
    """The contract of the L2 activation scale at a kernel's boundary.

    Looks at type, dtype, size and device only: a look at the value would need a
    device sync. None means a unit scale.

    Raises:
        TypeError: not a tensor, or not float32.
        ValueError: not one element, or on another device than the output.
    """
    if scale is None:
        return
    if not isinstance(scale, Tensor):
        raise TypeError(
            f"l2_activation_scale must be a float32 device tensor, got "
            f"{type(scale).__name__}; a Python number would be baked into a captured "
            "graph. Pass torch.full((1,), scale, device=...)."
        )
    if scale.dtype != torch.float32:
        raise TypeError(f"l2_activation_scale must be float32, got {scale.dtype}.")
    if scale.numel() != 1:
        raise ValueError(
            f"l2_activation_scale must have one element, got {tuple(scale.shape)}."
        )
    if scale.device != device:
        raise ValueError(
            f"l2_activation_scale is on {scale.device}, the output on {device}."
        )


def invert_into(out: Tensor, stored: Tensor) -> None:
    """The multiplier of a stored reciprocal, `1 / stored`, into the bytes of `out`."""
    torch.reciprocal(stored, out=out)
