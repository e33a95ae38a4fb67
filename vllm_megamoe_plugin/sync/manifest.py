# SPDX-License-Identifier: Apache-2.0
"""What an update declares up front, and the check against what a model expects.

The expected tensors are those of the checkpoint directory that the model was loaded
from, read from the safetensors headers alone. A manifest that does not match them is
refused by name before the first byte is written. Imports torch only.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import parse_expert_name, parse_fused_name

#: Ends every message of an update that was turned away before it wrote anything.
REFUSED = "The old weights keep serving."
#: Ends every message of an update that was not finished after it began to write.
BROKEN = "The experts are incomplete and refuse to serve; send a full update."
_SAFETENSORS_DTYPES = {
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
_DTYPES = {str(d).removeprefix("torch."): d for d in _SAFETENSORS_DTYPES.values()}
_NAMES_SHOWN = 10


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
    """Whether tensors of the checkpoint may be absent: whole expert layers, and all
    other tensors together."""

    @classmethod
    def of(
        cls, weights: Iterable[tuple[str, torch.Tensor]], *, partial: bool = False
    ) -> "Manifest":
        """The manifest of tensors at hand."""
        specs = (TensorSpec(n, tuple(t.shape), t.dtype) for n, t in weights)
        return cls(tuple(specs), partial)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """The wire form: JSON values only."""
        return {
            "names": [t.name for t in self.tensors],
            "shapes": [list(t.shape) for t in self.tensors],
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in self.tensors],
            "partial": self.partial,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Manifest":
        """Read the wire form.

        Raises:
            ManifestError: not the wire form, or a dtype nobody knows.
        """
        lists = [data.get(key) for key in ("names", "shapes", "dtypes")]
        names, shapes, dtypes = lists
        if not all(isinstance(x, list) for x in lists):
            raise ManifestError(
                "A manifest needs three lists: names, shapes, dtypes. " + REFUSED
            )
        if not len(names) == len(shapes) == len(dtypes):
            raise ManifestError(
                f"The manifest lists {len(names)} names, {len(shapes)} shapes and "
                f"{len(dtypes)} dtypes; it needs as many of each. {REFUSED}"
            )
        specs = tuple(map(_spec_of_json, names, shapes, dtypes))
        return cls(specs, _bool(data.get("partial", False)))

    def check(self, expected: Mapping[str, TensorSpec]) -> None:
        """Compare with the checkpoint tensors a model expects.

        Raises:
            ManifestError: naming what is unknown, duplicate, missing, mis-shaped or
                mis-typed, with counts.
        """
        counts = Counter(t.name for t in self.tensors)
        known = [t for t in self.tensors if t.name in expected]
        wanted = expected.keys()
        if self.partial:
            groups = {_group(t.name) for t in known}
            wanted = [name for name in expected if _group(name) in groups]
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
                " A partial update holds whole expert layers, and all other tensors "
                "or none."
                if self.partial
                else " Declare partial=True to update some expert layers only."
            )
        raise ManifestError(
            f"Weight update refused: {'; '.join(found)}.{advice} {REFUSED}"
        )


def _spec_of_json(name: Any, shape: Any, dtype: Any) -> TensorSpec:
    if not isinstance(name, str):
        raise ManifestError(f"A tensor name must be text, got {name!r}. {REFUSED}")
    sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not sizes:
        raise ManifestError(
            f"{name}: a shape is a list of sizes, got {shape!r}. {REFUSED}"
        )
    if dtype not in _DTYPES:
        raise ManifestError(
            f"{name}: unknown dtype {dtype!r}, use one of {', '.join(_DTYPES)}. "
            + REFUSED
        )
    return TensorSpec(name, tuple(shape), _DTYPES[dtype])


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ManifestError(f"partial must be true or false, got {value!r}. {REFUSED}")
    return value


def expert_layer(name: str) -> str | None:
    """The layer a checkpoint tensor of an expert belongs to, None for all others."""
    if (one := parse_expert_name(name)) is not None:
        return one.layer
    if (fused := parse_fused_name(name)) is not None and fused[0]:
        return fused[0].removesuffix(".")
    return None


def _group(name: str) -> str:
    return expert_layer(name) or ""


def _describe(kind: str, items: Sequence[str]) -> str:
    shown = ", ".join(items[:_NAMES_SHOWN])
    more = len(items) - _NAMES_SHOWN
    return f"{len(items)} {kind}: {shown}" + (f" and {more} more" if more > 0 else "")


def read_header(file: Path) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of a safetensors file, without its data.

    Raises:
        ValueError: not a safetensors file, or a dtype nobody knows.
    """
    with file.open("rb") as f:
        prefix = f.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < size <= file.stat().st_size - 8:
            raise ValueError(f"{file} is not a safetensors file.")
        header = json.loads(f.read(size))
    specs = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{file}: {name} has unknown dtype {entry['dtype']}.")
        specs[name] = TensorSpec(name, tuple(entry["shape"]), dtype)
    return specs


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, those of its index if it has one.

    Raises:
        FileNotFoundError: the directory holds none.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [directory / name for name in sorted(names)]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{directory} holds no safetensors files, so there is nothing to check a "
            "weight update against. Serve from a local safetensors checkpoint."
        )
    return files


def expected_tensors(directory: Path) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint directory, by name.

    Raises:
        FileNotFoundError: no safetensors files.
        ValueError: a tensor occurs in two files.
    """
    expected: dict[str, TensorSpec] = {}
    for file in checkpoint_files(directory):
        specs = read_header(file)
        if twice := expected.keys() & specs.keys():
            raise ValueError(f"{file}: tensors of another file again: {sorted(twice)}.")
        expected |= specs
    return expected
