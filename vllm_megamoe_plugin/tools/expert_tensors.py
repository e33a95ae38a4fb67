# SPDX-License-Identifier: Apache-2.0
"""The expert tensors of a checkpoint by layer, expert, shard and role; are all there?

Judges names, shapes and dtypes, which headers alone tell. What the names mean comes
from `checkpoint`, which dtypes load from `loader`.

Letters: E experts, H hidden, I intermediate. Shards: w1 gate, w3 up, w2 down.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import (
    PER_TENSOR,
    PLAIN_BF16,
    Convention,
    Quantization,
    Role,
    parse_expert_name,
    parse_fused_name,
    unfuse,
)
from ..formats import WeightFormat
from ..loader import CASTABLE, SAME_BYTES
from .shards import Finding, Stored

_SHARDS = ("w1", "w3", "w2")
_EXPERT_TENSOR = re.compile(r"\bexperts\.\w")
_ROUTER = re.compile(r"^(?P<parent>.*)\.(gate|router)\.weight$")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One projection of one expert in one role, and the tensor that holds it."""

    layer: str
    """Name up to and including `experts`."""
    expert: int
    shard: str
    role: Role
    stored: Stored
    shape: tuple[int, ...]
    """Of this part, as the per-expert tensor it amounts to."""
    fused: bool
    """Stored as one expert of a 3-D tensor."""

    def finding(self, kind: str, value: Any, what: str) -> Finding:
        """A finding about this part; `what` continues its name."""
        where = f" (expert {self.expert} {self.shard})" if self.fused else ""
        return Finding(
            kind=kind,
            tensor=self.stored.name,
            layer=self.layer,
            expert=self.expert,
            value=value,
            message=f"{self.stored.name}{where}: {what}",
        )


class ExpertTensors:
    """Every part of every expert, and what is wrong with the set of them."""

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        config: Mapping[str, Any],
        quantization: Quantization,
    ) -> None:
        self.quantization = quantization
        self.faults: list[Finding] = []
        self.parts: dict[tuple[str, int, str, Role], Part] = {}
        self.stored: dict[str, Stored] = {}
        self.declared_experts = first_of(config, *_EXPERT_COUNTS)
        self._config = config
        self._names = tensors
        self._projections = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        self._conventions: dict[str, Convention] = {}
        self._transposed: dict[str, bool] = {}
        for stored in tensors.values():
            if _EXPERT_TENSOR.search(stored.name):
                self.stored[stored.name] = stored
                self._add(stored)
        self.layers = sorted({part.layer for part in self.parts.values()}, key=_natural)
        seen = (part.expert for part in self.parts.values())
        self.num_experts: int = self.declared_experts or 1 + max(seen, default=-1)
        self.intermediate, self.hidden = self._sizes()

    def convention(self, layer: str) -> Convention:
        """The checkpoint's convention, or plain for a layer it leaves unquantized."""
        if layer not in self._conventions:
            plain = _is_ignored(layer, self.quantization.ignore)
            self._conventions[layer] = (
                PLAIN_BF16 if plain else self.quantization.convention
            )
        return self._conventions[layer]

    def roles(self, layer: str) -> list[Role]:
        """Roles that every projection of the layer must store."""
        return [
            role
            for role in self.convention(layer).suffixes
            if role is not Role.INPUT_SCALE or self.quantization.quantized_activations
        ]

    def split(self, stored: Stored, one: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(shard, view) for one expert's slice [1, ...] of a fused tensor."""
        parsed = parse_fused_name(stored.name)
        assert parsed is not None
        convention = self.convention(parsed[0].removesuffix("."))
        transposed = self._transposed[stored.name]
        for name, view in unfuse([(stored.name, one)], convention, transposed):
            expert = parse_expert_name(name)
            assert expert is not None
            yield expert.shard, view

    def check_coverage(self) -> None:
        """Fault every tensor that a whole set of experts has and this one has not."""
        for layer in self.layers:
            suffixes = self.convention(layer).suffixes
            whole = product(range(self.num_experts), _SHARDS, self.roles(layer))
            for expert, shard, role in whole:
                if (layer, expert, shard, role) not in self.parts:
                    proj = f"{layer}.{expert}.{self._projections[shard]}"
                    what = f"missing ({role.value} of {shard}); no file holds it."
                    name = f"{proj}.{suffixes[role]}"
                    self._fault("missing", name, what, layer, expert, role.value)
        self._check_layers()

    def num_missing(self, role: Role) -> int:
        """How many tensors of a role `check_coverage` found missing."""
        return sum(f.kind == "missing" and f.value == role.value for f in self.faults)

    def _check_layers(self) -> None:
        """A layer with a router like that of a MoE layer must have experts too."""
        parents = [layer.removesuffix(".experts") for layer in self.layers]
        shapes = {re.sub(r"\d+", "*", parent) for parent in parents}
        for name in self._names:
            match = _ROUTER.match(name)
            if match is None or match["parent"] in parents:
                continue
            if re.sub(r"\d+", "*", match["parent"]) in shapes:
                layer = f"{match['parent']}.experts"
                what = f"missing: the layer has a router ({name}) but not one expert."
                self._fault("missing", f"{layer}.*", what, layer)

    def check_shapes(self) -> None:
        """Fault every part whose shape or dtype could not be loaded."""
        i, h = self.intermediate, self.hidden
        for part in self.parts.values():
            fmt = self.convention(part.layer).format
            rows, k = (h, i) if part.shard == "w2" else (i, h)
            cols = fmt.weight_cols(k) if part.role is Role.WEIGHT else fmt.scale_cols(k)
            if part.role in PER_TENSOR:
                if part.shape not in ((), (1,)):
                    what = f"has shape {part.shape}, expected one value per projection."
                    self.faults.append(part.finding("shape", list(part.shape), what))
            elif part.shape != (rows, cols):
                what = (
                    f"has shape {part.shape}, expected {(rows, cols)} for {fmt.name} "
                    f"with hidden {h} and intermediate {i}."
                )
                self.faults.append(part.finding("shape", list(part.shape), what))
            accepted = _accepted_dtypes(part.role, fmt)
            if part.stored.dtype not in accepted:
                found = _name_of(part.stored.dtype)
                needed = " or ".join(map(_name_of, accepted))
                what = f"has dtype {found}, {part.role.value} needs {needed}."
                self.faults.append(part.finding("dtype", found, what))

    def _add(self, stored: Stored) -> None:
        fused = parse_fused_name(stored.name)
        if fused is not None and fused[0].endswith("experts."):
            self._add_fused(stored, *fused)
            return
        name = parse_expert_name(stored.name)
        if name is None:
            self._unexpected(stored, None, None)
            return
        role = self.convention(name.layer).role_of(name.suffix)
        if role is None:
            self._unexpected(stored, name.layer, name.expert)
            return
        self._projections[name.shard] = stored.name.split(".")[-2]
        self._put(
            Part(
                layer=name.layer,
                expert=name.expert,
                shard=name.shard,
                role=role,
                stored=stored,
                shape=stored.shape,
                fused=False,
            )
        )

    def _add_fused(self, stored: Stored, dotted: str, proj: str, suffix: str) -> None:
        layer = dotted.removesuffix(".")
        convention = self.convention(layer)
        role = convention.role_of(suffix)
        if role is None:
            self._unexpected(stored, layer, None)
            return
        transposed = self._is_transposed(stored.shape, proj, role, convention.format)
        self._transposed[stored.name] = transposed
        meta = torch.empty(stored.shape, device="meta")
        try:
            views = list(unfuse([(stored.name, meta)], convention, transposed))
        except ValueError as error:
            what = str(error).removeprefix(f"{stored.name}: ")
            self._fault("shape", stored.name, what, layer, value=list(stored.shape))
            return
        for unfused, view in views:
            name = parse_expert_name(unfused)
            if name is None:
                what = (
                    f"has shape {stored.shape}, expected one with an expert dimension."
                )
                self._fault("shape", stored.name, what, layer, value=list(stored.shape))
                return
            self._put(
                Part(
                    layer=layer,
                    expert=name.expert,
                    shard=name.shard,
                    role=role,
                    stored=stored,
                    shape=tuple(view.shape),
                    fused=True,
                )
            )

    def _put(self, part: Part) -> None:
        count = self.declared_experts
        if count and part.expert >= count:
            what = f"unexpected: the configuration declares {count} experts."
            self.faults.append(part.finding("unexpected", part.expert, what))
            return
        key = (part.layer, part.expert, part.shard, part.role)
        first = self.parts.setdefault(key, part)
        if first is not part:
            what = f"the same weights are also stored as {first.stored.name}."
            self.faults.append(part.finding("duplicate", first.stored.name, what))

    def _unexpected(
        self, stored: Stored, layer: str | None, expert: int | None
    ) -> None:
        convention = self.convention(layer or stored.name)
        known = ", ".join(convention.suffixes.values())
        what = (
            f"unexpected: {convention.name} {convention.format.name} experts store "
            f"{known} per projection."
        )
        self._fault("unexpected", stored.name, what, layer, expert)

    def _fault(
        self,
        kind: str,
        tensor: str,
        what: str,
        layer: str | None,
        expert: int | None = None,
        value: Any = None,
    ) -> None:
        self.faults.append(
            Finding(
                kind=kind,
                tensor=tensor,
                layer=layer,
                expert=expert,
                value=value,
                message=f"{tensor}: {what}",
            )
        )

    def _sizes(self) -> tuple[int, int]:
        """(I, H) that most gate projections have; the odd ones out are faults."""
        sizes = Counter(
            (
                part.shape[0],
                part.shape[1] * self.convention(part.layer).format.values_per_element,
            )
            for (_, _, shard, role), part in self.parts.items()
            if shard == "w1" and role is Role.WEIGHT and len(part.shape) == 2
        )
        if sizes:
            return sizes.most_common(1)[0][0]
        intermediate = first_of(
            self._config, "moe_intermediate_size", "intermediate_size"
        )
        return intermediate or 0, first_of(self._config, "hidden_size") or 0

    def _is_transposed(
        self, shape: tuple[int, ...], proj: str, role: Role, fmt: WeightFormat
    ) -> bool:
        """Whether a fused tensor is stored [E, K, N]; `hidden_size` tells which."""
        hidden = first_of(self._config, "hidden_size")
        if role in PER_TENSOR or len(shape) != 3 or not hidden:
            return False
        if proj in ("down_proj", "w2"):
            return shape[1] != hidden and shape[2] == hidden
        cols = fmt.weight_cols if role is Role.WEIGHT else fmt.scale_cols
        return shape[2] != cols(hidden) and shape[1] == cols(hidden)


def first_of(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first of a configuration's keys that holds a positive count."""
    values = (config.get(key) for key in keys)
    return next((v for v in values if isinstance(v, int) and v > 0), None)


def _is_ignored(layer: str, patterns: tuple[str, ...]) -> bool:
    """Whether the quantizer's ignore list covers a layer's experts.

    `re:` patterns are regular expressions, `*` makes a glob, and anything else is the
    name of a module or of one above it.
    """
    module = f"{layer}.0.down_proj"
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], module):
                return True
        elif "*" in pattern:
            if fnmatchcase(module, pattern) or fnmatchcase(layer, pattern):
                return True
        elif module == pattern or module.startswith(f"{pattern}."):
            return True
    return False


def _accepted_dtypes(role: Role, fmt: WeightFormat) -> tuple[torch.dtype, ...]:
    """What the layer's loader takes for a role, by the loader's own tables."""
    if role in PER_TENSOR:
        return (torch.float32,)
    dtype = fmt.weight_dtype if role is Role.WEIGHT else fmt.scale_dtype
    assert dtype is not None
    return SAME_BYTES.get(dtype, CASTABLE)


def _name_of(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _natural(name: str) -> list[Any]:
    """Sort key that puts layer 2 before layer 10."""
    return [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)]
