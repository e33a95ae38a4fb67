# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory: what its headers say, and its tensors one at a time.

Imports torch and safetensors only.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from .manifest import REFUSED, SAFETENSORS_DTYPES, ManifestError, TensorSpec


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
        dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
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


def checkpoint_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, one at a time, in the order of its headers."""
    for file in checkpoint_files(directory):
        with safe_open(file, framework="pt") as f:
            for name in read_header(file):
                yield name, f.get_tensor(name)


def served_tensors(
    model_config: Any, download_dir: str | None
) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint that a vLLM model was loaded from, by name.

    Args:
        model_config: vLLM's; `model` is a directory or a Hugging Face name.
        download_dir: of vLLM's load config, where such a name was downloaded to.

    Raises:
        ManifestError: it is no safetensors checkpoint on this host.
    """
    # comes with vLLM, not with torch; a trainer that only sends needs none of it
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    directory = Path(model_config.model)
    try:
        if not directory.is_dir():
            # a Hugging Face name: what the model was loaded from is in the cache
            directory = Path(
                snapshot_download(
                    model_config.model,
                    revision=model_config.revision,
                    cache_dir=download_dir,
                    local_files_only=True,
                )
            )
        return expected_tensors(directory)
    except (FileNotFoundError, HFValidationError) as e:
        raise ManifestError(
            f"{model_config.model} is no safetensors checkpoint on this host, "
            f"so there is nothing to check an update against: {e} {REFUSED}"
        ) from e
