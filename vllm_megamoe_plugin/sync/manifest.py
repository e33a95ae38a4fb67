# SPDX-License-Identifier: Apache-2.0
"""What an update declares up front, and the check against what a model expects.

Wire form, one JSON object: `names`, `shapes`, `dtypes` (lists of equal length, in the
order of sending), `partial` (default false), and `sha256`, absent or one digest per
tensor. The expected tensors are those of the checkpoint that the model was loaded from
(`source`). A manifest that does not match them is refused by name before the first
byte is written; a partial one holds whole units (`unit`). Imports torch only.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpoint import parse_expert_name, parse_fused_name
from .digest import sha256

#: Ends every message of an update that was turned away before it wrote anything.
REFUSED = "The old weights keep serving."
#: Ends every message of an update that was not finished after it began to write.
BROKEN = "The experts are incomplete and refuse to serve; send a full update."
#: Largest size, in elements or bytes, that a tensor can have anywhere.
MAX_SIZE = 2**63 - 1
SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
_DTYPES = {str(d).removeprefix("torch."): d for d in SAFETENSORS_DTYPES.values()}
_NAMES_SHOWN = 10
_KEYS = ("names", "shapes", "dtypes", "partial", "sha256")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUMBERED = re.compile(r"^(.*?\.)??\w+\.\d+(?=\.)")


class ManifestError(ValueError):
    """An update does not fit the model; nothing was written."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of one checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of one update, in the order they will be sent."""

    tensors: tuple[TensorSpec, ...]
    partial: bool = False
    """Whether units of the checkpoint (see `unit`) may be absent."""
    sha256: tuple[str, ...] | None = None
    """Digest of each tensor's bytes, see `digest.sha256`; None when not declared."""

    @classmethod
    def of(
        cls,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        partial: bool = False,
        digests: bool = False,
    ) -> "Manifest":
        """The manifest of tensors at hand; with digests, all their bytes are read."""
        specs: list[TensorSpec] = []
        found: list[str] = []
        for name, tensor in weights:
            specs.append(TensorSpec(name, tuple(tensor.shape), tensor.dtype))
            if digests:
                found.append(sha256(tensor))
        return cls(tuple(specs), partial, tuple(found) if digests else None)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """The wire form: JSON values only."""
        data: dict[str, Any] = {
            "names": [t.name for t in self.tensors],
            "shapes": [list(t.shape) for t in self.tensors],
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in self.tensors],
            "partial": self.partial,
        }
        return data if self.sha256 is None else data | {"sha256": list(self.sha256)}

    @classmethod
    def from_json(cls, data: Any) -> "Manifest":
        """Read the wire form.

        Raises:
            ManifestError: not the wire form, or a dtype nobody knows.
        """
        if not isinstance(data, Mapping):
            raise refused(f"a manifest is a JSON object, got {_short(data)}.")
        if unknown := sorted(str(key) for key in data if key not in _KEYS):
            raise refused(
                f"the manifest has unknown keys {unknown}, known are {list(_KEYS)}."
            )
        columns = [
            key for key in ("names", "shapes", "dtypes", "sha256") if key in data
        ]
        for key in ("names", "shapes", "dtypes"):
            if key not in data:
                raise refused(f"the manifest has no {key}; it needs a list of them.")
        for key in columns:
            if not isinstance(data[key], list):
                raise refused(
                    f"{key} of the manifest must be a list, got {_short(data[key])}."
                )
        if len({len(data[key]) for key in columns}) > 1:
            counts = ", ".join(f"{len(data[key])} {key}" for key in columns)
            raise refused(f"the manifest lists {counts}; it needs as many of each.")
        partial = data.get("partial", False)
        if not isinstance(partial, bool):
            raise refused(f"partial must be true or false, got {_short(partial)}.")
        specs = tuple(map(_spec_of_json, data["names"], data["shapes"], data["dtypes"]))
        for spec, text in zip(specs, data.get("sha256", ()), strict=False):
            if not (isinstance(text, str) and _SHA256.fullmatch(text)):
                raise refused(
                    f"{spec.name}: a SHA-256 is 64 lower-case hex digits, got "
                    f"{_short(text)}."
                )
        return cls(specs, partial, tuple(data["sha256"]) if "sha256" in data else None)

    def check(self, expected: Mapping[str, TensorSpec]) -> None:
        """Compare with the checkpoint tensors a model expects.

        Raises:
            ManifestError: naming what is unknown, duplicate, missing, mis-shaped or
                mis-typed, with counts.
        """
        counts = Counter(t.name for t in self.tensors)
        known = [t for t in self.tensors if t.name in expected]
        wanted: Iterable[str] = expected
        if self.partial:
            begun = {unit(t.name) for t in known}
            wanted = [name for name in expected if unit(name) in begun]
        problems = {
            "unknown": [n for n in counts if n not in expected],
            "duplicate": [f"{n} ({c} times)" for n, c in counts.items() if c > 1],
            "missing": [n for n in wanted if n not in counts],
            "mis-shaped": [
                f"{t.name} ({t}, expected {expected[t.name]})"
                for t in known
                if t.shape != expected[t.name].shape
            ],
            "mis-typed": [
                f"{t.name} ({t}, expected {expected[t.name]})"
                for t in known
                if t.dtype != expected[t.name].dtype
            ],
        }
        found = [_describe(kind, items) for kind, items in problems.items() if items]
        if not self.tensors:
            found.append("the manifest is empty")
        if not found:
            return
        advice = ""
        if problems["missing"]:
            advice = (
                " A partial update holds whole units: an expert, a fused expert layer, "
                "the other tensors of a numbered layer, or a module outside of them."
                if self.partial
                else " Declare partial=True to update some layers or experts only."
            )
        raise refused(f"{'; '.join(found)}.{advice}")


def refused(problem: str) -> ManifestError:
    """The error for an update that is turned away before it wrote anything."""
    return ManifestError(f"Weight update refused: {problem} {REFUSED}")


def _short(value: Any) -> str:
    """A wrong value for a message, cut where it gets long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _spec_of_json(name: Any, shape: Any, dtype: Any) -> TensorSpec:
    if not isinstance(name, str):
        raise refused(f"a tensor name must be text, got {_short(name)}.")
    sizes = isinstance(shape, list) and all(
        type(n) is int and 0 <= n <= MAX_SIZE for n in shape
    )
    if not sizes:
        raise refused(
            f"{name:.80}: a shape is a list of whole numbers from 0 to 2^63 - 1, "
            f"got {_short(shape)}."
        )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise refused(
            f"{name:.80}: unknown dtype {_short(dtype)}, use one of "
            f"{', '.join(_DTYPES)}."
        )
    spec = TensorSpec(name, tuple(shape), _DTYPES[dtype])
    if spec.nbytes > MAX_SIZE:
        raise refused(f"{name:.80}: {spec} has more than 2^63 - 1 bytes.")
    return spec


def expert_layer(name: str) -> str | None:
    """The layer a checkpoint tensor of an expert belongs to, None for all others."""
    if (one := parse_expert_name(name)) is not None:
        return one.layer
    if (fused := parse_fused_name(name)) is not None and fused[0]:
        return fused[0].removesuffix(".")
    return None


def unit(name: str) -> str:
    """The smallest part of a checkpoint that a partial update may hold by itself.

    One expert of one layer; a layer of fused expert tensors; everything else of one
    numbered layer (`model.layers.3`); any other module. Modules are not split further,
    since a live one may fuse several tensors (q, k, v) and is renewed as a whole.
    """
    if (one := parse_expert_name(name)) is not None:
        return f"{one.layer}.{one.expert}"
    if (layer := expert_layer(name)) is not None:
        return layer
    if (numbered := _NUMBERED.match(name)) is not None:
        return numbered[0]
    return name.rpartition(".")[0]


def _describe(kind: str, items: Sequence[str]) -> str:
    shown = ", ".join(items[:_NAMES_SHOWN])
    more = len(items) - _NAMES_SHOWN
    return f"{len(items)} {kind}: {shown}" + (f" and {more} more" if more > 0 else "")
