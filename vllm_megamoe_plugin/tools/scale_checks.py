# SPDX-License-Identifier: Apache-2.0
"""Checks on the values of expert tensors, and the statistics `inspect` reports.

Global and input scales are collected first (`add_scalar`), block scales and weights
after them. A block scale has one of 256 bytes, so a tensor's histogram decides
everything that is asked about it, exactly. Usability of a scale is `scales.fault_of`.
"""

import math
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Convention, Role
from ..formats import E4M3_NAN_BYTES, decode_e4m3
from ..scales import fault_of
from .expert_tensors import Part
from .shards import Finding

_E4M3_NORMAL = torch.finfo(torch.float8_e4m3fn).smallest_normal
_SATURATED_BYTES = (0x7E, 0xFE)

Key = tuple[str, int, str]
"""(layer, expert, shard)."""


class ScaleChecks:
    """Accumulates what the values of a checkpoint's expert tensors show."""

    def __init__(self) -> None:
        self.faults: list[Finding] = []
        self.warnings: list[Finding] = []
        self._globals: dict[Key, float] = {}
        self._inputs: dict[tuple[str, str], list[tuple[Part, str | None]]] = (
            defaultdict(list)
        )
        self._input_values: list[float] = []
        self._bytes = torch.zeros(256, dtype=torch.float64)
        self._baked: Counter[str] = Counter()
        self._bake_error = 0.0

    def add_scalar(self, part: Part, tensor: Tensor, convention: Convention) -> None:
        """Judge a global or an input scale.

        Args:
            tensor: one value, as stored.
        """
        if tensor.numel() != 1:
            return  # reported as a shape fault
        stored = tensor.float()
        # fp32 division, as post-load processing does it
        scale = (1.0 / stored if convention.reciprocal else stored).item()
        fault = fault_of(stored.item()) or fault_of(scale)
        key = (part.layer, part.expert, part.shard)
        if part.role is Role.GLOBAL_SCALE:
            self._globals[key] = scale
            if fault:
                self._scale_fault(part, stored.item(), fault, convention.reciprocal)
            return
        dead = (
            convention.reciprocal
            and fault in ("zero", "infinite")
            and stored.item() >= 0
        )
        self._inputs[part.layer, part.shard].append((part, "dead" if dead else fault))
        if not fault:
            self._input_values.append(scale)
        elif dead:
            what = (
                f"stored {stored.item():g} marks an expert that calibration never "
                "reached; it takes no part in the layer's scale."
            )
            self.warnings.append(
                part.finding("dead_expert", json_value(stored.item()), what)
            )
        else:
            self._scale_fault(part, stored.item(), fault, convention.reciprocal)

    def _scale_fault(
        self, part: Part, stored: float, fault: str | None, reciprocal: bool
    ) -> None:
        kind = part.role.name.lower()
        of = "its reciprocal" if reciprocal and not fault_of(stored) else "it"
        what = (
            f"{part.role.value} of layer {part.layer} expert {part.expert} is "
            f"{stored:g}: {of} is {fault}; it must be finite and positive."
        )
        self.faults.append(part.finding(kind, json_value(stored), what))

    def finish_scalars(self) -> None:
        """A projection of which every expert is dead has no input scale at all."""
        for (layer, shard), entries in self._inputs.items():
            if all(state == "dead" for _, state in entries):
                what = (
                    f"and those of all {len(entries)} experts of layer {layer} mark "
                    f"dead experts, so {shard} has no usable input scale."
                )
                part = entries[0][0]
                self.faults.append(part.finding("input_scale", "all dead", what))

    def add_block_scales(self, part: Part, scales: Tensor) -> None:
        """Judge one projection's E4M3 block scales [N, G]."""
        codes = scales.view(torch.uint8)
        counts = torch.bincount(codes.reshape(-1), minlength=256).double()
        self._bytes += counts
        num_nan = int(sum(counts[byte] for byte in E4M3_NAN_BYTES))
        if num_nan:
            nan = E4M3_NAN_BYTES[0]
            where = codes.bitwise_and(nan).eq(nan).nonzero()[0].tolist()
            byte = codes[tuple(where)].item()
            what = (
                f"{num_nan} of {codes.numel()} block scales are NaN, the first at "
                f"{where} (byte 0x{byte:02X}). The exporter overflowed E4M3; re-export "
                "with scales clamped to 448."
            )
            value = {"count": num_nan, "first": where, "byte": f"0x{byte:02X}"}
            self.faults.append(part.finding("nan_block_scale", value, what))
        scale = self._globals.get((part.layer, part.expert, part.shard))
        if scale is not None and fault_of(scale) is None:
            self._bake(counts, scale)

    def _bake(self, counts: Tensor, scale: float) -> None:
        """What `e4m3(block scale * global scale)` would lose; zeros stay exact."""
        values = decode_e4m3(torch.arange(256, dtype=torch.uint8))
        asked = values.isfinite() & (values != 0)
        exact = values[asked] * scale
        baked = exact.to(torch.float8_e4m3fn).float()
        counts = counts[asked]
        self._baked["scales"] += int(counts.sum())
        self._baked["subnormal"] += int(counts[baked.abs() < _E4M3_NORMAL].sum())
        self._baked["zero"] += int(counts[baked == 0].sum())
        error = (baked.double() / exact.double() - 1).abs()
        self._bake_error += float((counts * error).sum())

    def add_weight(self, part: Part, weight: Tensor) -> None:
        """Judge an unquantized weight: every element must be finite."""
        bad = weight.isfinite().logical_not()
        num_bad = int(bad.sum())
        if not num_bad:
            return
        where = bad.nonzero()[0].tolist()
        first = weight[tuple(where)].item()
        what = (
            f"{num_bad} of {weight.numel()} weights are not finite, the first at "
            f"{where} is {first}."
        )
        value = {"count": num_bad, "first": where, "weight": json_value(first)}
        self.faults.append(part.finding("non_finite_weight", value, what))

    def gate_up(self) -> dict[str, Any]:
        """Pairs of gate and up global scales, how many differ, the widest pair."""
        pairs = [
            (gate, self._globals[layer, expert, "w3"], layer, expert)
            for (layer, expert, shard), gate in self._globals.items()
            if shard == "w1"
            and fault_of(gate) is None
            and fault_of(self._globals.get((layer, expert, "w3"), 0.0)) is None
        ]
        result: dict[str, Any] = {
            "pairs": len(pairs),
            "differ": sum(gate != up for gate, up, _, _ in pairs),
        }
        if result["differ"]:
            gate, up, layer, expert = max(
                pairs, key=lambda p: max(p[0], p[1]) / min(p[0], p[1])
            )
            result |= {
                "largest_ratio": max(gate, up) / min(gate, up),
                "layer": layer,
                "expert": expert,
                "gate": gate,
                "up": up,
            }
        return result

    def input_scales(self) -> dict[str, Any]:
        """How many input scales there are, how many in each unusable state, range."""
        states = [state for entries in self._inputs.values() for _, state in entries]
        names = ("dead", "zero", "infinite", "NaN", "negative", "denormal")
        return {
            "present": len(states),
            "usable": len(self._input_values),
            **{name.lower(): states.count(name) for name in names},
            "min": min(self._input_values, default=None),
            "max": max(self._input_values, default=None),
        }

    def block_scales(self) -> dict[str, Any]:
        """Shares of special block scales, and the damage that baking would do."""
        total = float(self._bytes.sum())
        if not total:
            return {"count": 0}
        num_baked = self._baked["scales"]
        return {
            "count": int(total),
            "nan": int(sum(self._bytes[b] for b in E4M3_NAN_BYTES)),
            "zero": int(self._bytes[0] + self._bytes[0x80]),
            "saturated": int(sum(self._bytes[b] for b in _SATURATED_BYTES)),
            "baking": {
                "compared": num_baked,
                "subnormal_share": self._baked["subnormal"] / num_baked,
                "zero_share": self._baked["zero"] / num_baked,
                "mean_relative_error": self._bake_error / num_baked,
            }
            if num_baked
            else None,
        }


def json_value(value: float) -> float | str:
    """A float as JSON can hold it: NaN and infinities as strings."""
    return value if math.isfinite(value) else str(value)
