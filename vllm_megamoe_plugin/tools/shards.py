# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a checkpoint folder: what is in them, and are they whole.

Knows nothing about experts. Headers are read without touching a tensor; a file whose
size does not match its header is a finding, not an exception, so that one broken file
does not hide what is wrong with the others.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX_FILE = "model.safetensors.index.json"

#: dtype names of safetensors headers; one that is not here stays a string.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class NothingToCheckError(RuntimeError):
    """There is no checkpoint here that could be checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something wrong with a checkpoint, or worth saying about it."""

    kind: str
    message: str
    tensor: str | None = None
    layer: str | None = None
    expert: int | None = None
    value: Any = None
    """What was found: a number, a shape, a dtype; JSON-safe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor of one file, from its header."""

    name: str
    file: Path
    dtype: torch.dtype | str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(slots=True)
class Shards:
    """All tensors of a checkpoint folder."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    faults: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    """Files whose values cannot be read."""
    unlisted: set[str] = field(default_factory=set)
    """Files that are absent or without a readable header: what they hold is unknown,
    so a tensor that is nowhere else is not known to be missing."""

    def read(self, wanted: Iterable[Stored]) -> Iterator[tuple[Stored, Any]]:
        """(tensor, its open file) for every readable tensor, file by file."""
        by_file: dict[Path, list[Stored]] = {}
        for stored in wanted:
            by_file.setdefault(stored.file, []).append(stored)
        for file, group in by_file.items():
            if file in self.broken:
                continue
            with safe_open(file, framework="pt") as opened:
                for stored in group:
                    yield stored, opened


def scan(folder: Path) -> Shards:
    """Read the headers and the index of the safetensors files vLLM would load.

    Raises:
        NothingToCheckError: no safetensors file, or an index that is not one.
    """
    shards = Shards()
    weight_map = _read_index(folder)
    present = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    names = set(present) if weight_map is None else set(weight_map.values())
    if not names:
        raise NothingToCheckError(
            f"{folder}: no .safetensors file. Other weight files are not read; "
            "convert the checkpoint to safetensors."
        )
    for name in sorted(set(present) - names):
        shards.warnings.append(
            Finding(
                kind="index",
                value=name,
                message=f"{name}: not in {INDEX_FILE}; vLLM does not load it.",
            )
        )
    for name in sorted(names):
        if name in present:
            _add_file(shards, present[name])
            continue
        shards.unlisted.add(name)
        held = sum(file == name for file in (weight_map or {}).values())
        shards.faults.append(
            Finding(
                kind="index",
                value=name,
                message=f"{INDEX_FILE}: names {name} for {held} tensors, but the file "
                "does not exist. Download it again.",
            )
        )
    if weight_map is not None:
        _check_index(shards, weight_map)
    return shards


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX_FILE
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise NothingToCheckError(
            f"{path}: not an index of safetensors files ({error!r}). Download it again."
        ) from error


def _add_file(shards: Shards, path: Path) -> None:
    try:
        header, expected = _read_header(path)
    except ValueError as error:
        shards.unlisted.add(path.name)
        shards.broken.add(path)
        shards.faults.append(
            Finding(kind="unreadable", value=path.name, message=f"{path.name}: {error}")
        )
        return
    actual = path.stat().st_size
    if actual != expected:
        shards.broken.add(path)
        what = "truncated" if actual < expected else "has bytes past its last tensor"
        shards.faults.append(
            Finding(
                kind="unreadable",
                value=actual,
                message=f"{path.name}: {what}: expected {expected:,} bytes, has "
                f"{actual:,}. Download it again; its values were not checked.",
            )
        )
    else:
        _check_opens(shards, path)
    for name, info in header.items():
        begin, end = info["data_offsets"]
        stored = Stored(
            name=name,
            file=path,
            dtype=DTYPES.get(info["dtype"], info["dtype"]),
            shape=tuple(info["shape"]),
            nbytes=end - begin,
        )
        first = shards.tensors.setdefault(name, stored)
        if first is not stored:
            shards.faults.append(_duplicate(first, stored))


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(tensor name -> header entry, size the file must have)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ValueError(
                f"truncated, or not safetensors (a Git LFS pointer?): expected at "
                f"least {8 + length:,} bytes for the header, has {size:,}."
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [info["data_offsets"][1] for info in header.values()]
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a safetensors header ({error!r}).") from error
    return header, 8 + length + max(ends, default=0)


def _check_opens(shards: Shards, path: Path) -> None:
    """Sizes agree; let the library judge what else a header can get wrong."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        shards.broken.add(path)
        shards.faults.append(
            Finding(
                kind="unreadable",
                value=path.name,
                message=f"{path.name}: cannot be opened: {error}",
            )
        )


def _duplicate(first: Stored, again: Stored) -> Finding:
    return Finding(
        kind="duplicate",
        tensor=again.name,
        value=[first.file.name, again.file.name],
        message=f"{again.name}: stored in {first.file.name} and again in "
        f"{again.file.name}; which one is loaded depends on file order.",
    )


def _check_index(shards: Shards, weight_map: dict[str, str]) -> None:
    for name, file in weight_map.items():
        stored = shards.tensors.get(name)
        if stored is None:
            # an unlisted file was reported as a whole
            if file not in shards.unlisted:
                shards.faults.append(_index_fault(name, file, "which does not hold it"))
        elif stored.file.name != file:
            shards.faults.append(
                _index_fault(name, file, f"but {stored.file.name} holds it")
            )
    for name, stored in shards.tensors.items():
        if name not in weight_map:
            message = f"{name}: in {stored.file.name} but not in {INDEX_FILE}."
            shards.faults.append(Finding(kind="index", tensor=name, message=message))


def _index_fault(name: str, file: str, what: str) -> Finding:
    return Finding(
        kind="index",
        tensor=name,
        value=file,
        message=f"{name}: {INDEX_FILE} places it in {file}, {what}.",
    )
