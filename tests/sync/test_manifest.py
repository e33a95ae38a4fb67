# SPDX-License-Identifier: Apache-2.0
"""A manifest that does not fit is refused by name, before anything is written."""

import json
import re
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

from vllm_megamoe_plugin.sync.manifest import (
    REFUSED,
    Manifest,
    ManifestError,
    TensorSpec,
    expected_tensors,
    expert_layer,
)

BF16, U8 = torch.bfloat16, torch.uint8


def _expected() -> dict[str, TensorSpec]:
    specs = [TensorSpec("embed.weight", (8, 4), BF16), TensorSpec("norm", (4,), BF16)]
    specs += [
        TensorSpec(f"layers.{layer}.experts.{e}.up_proj.weight", (4, 2), U8)
        for layer in range(2)
        for e in range(6)
    ]
    return {spec.name: spec for spec in specs}


def _drop(specs: list[TensorSpec], *names: str) -> list[TensorSpec]:
    return [spec for spec in specs if spec.name not in names]


def _swap(specs: list[TensorSpec], new: TensorSpec) -> list[TensorSpec]:
    return [new if spec.name == new.name else spec for spec in specs]


EXPERT = "layers.1.experts.3.up_proj.weight"
REFUSALS: dict[str, tuple[Callable[[list[TensorSpec]], list[TensorSpec]], str]] = {
    "unknown": (lambda s: [*s, TensorSpec("new", (1,), BF16)], "1 unknown: new"),
    "missing": (lambda s: _drop(s, EXPERT), f"1 missing: {EXPERT}. Declare partial"),
    "duplicate": (lambda s: [*s, s[0]], r"1 duplicate: embed.weight \(2 times\)"),
    "shape": (
        lambda s: _swap(s, TensorSpec("norm", (5,), BF16)),
        r"1 mis-shaped: norm \(bfloat16\[5\], expected bfloat16\[4\]\)",
    ),
    "0-d": (
        lambda s: _swap(s, TensorSpec("norm", (), BF16)),
        r"1 mis-shaped: norm \(bfloat16\[\], expected bfloat16\[4\]\)",
    ),
    "dtype": (
        lambda s: _swap(s, TensorSpec(EXPERT, (4, 2), torch.int8)),
        rf"1 mis-typed: {EXPERT} \(int8\[4, 2\], expected uint8\[4, 2\]\)",
    ),
    "empty": (lambda s: [], "14 missing: .* and 4 more; the manifest is empty"),
    "two faults": (
        lambda s: [*_drop(s, "norm"), TensorSpec("new", (1,), BF16)],
        "1 unknown: new; 1 missing: norm",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_refused_by_name(kind: str) -> None:
    change, message = REFUSALS[kind]
    manifest = Manifest(tuple(change(list(_expected().values()))))
    with pytest.raises(ManifestError, match=message) as error:
        manifest.check(_expected())
    assert str(error.value).endswith(REFUSED)


def test_any_order_is_accepted() -> None:
    Manifest(tuple(reversed(_expected().values()))).check(_expected())


@pytest.mark.parametrize("group", ["layers.0.experts", "layers.1.experts", None])
def test_partial_takes_whole_groups(group: str | None) -> None:
    specs = [s for s in _expected().values() if expert_layer(s.name) == group]
    Manifest(tuple(specs), partial=True).check(_expected())
    with pytest.raises(ManifestError, match="missing"):
        Manifest(tuple(specs)).check(_expected())
    with pytest.raises(ManifestError, match=f"1 missing: {re.escape(specs[0].name)}"):
        Manifest(tuple(specs[1:]), partial=True).check(_expected())


def test_wire_form_round_trips_through_json() -> None:
    manifest = Manifest(tuple(_expected().values()), partial=True)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": None}, "three lists"),
        ({"names": ["a", "b"]}, "2 names, 1 shapes and 1 dtypes"),
        ({"names": [7]}, "must be text, got 7"),
        ({"shapes": [[-1]]}, r"list of sizes, got \[-1\]"),
        ({"shapes": [[True]]}, "list of sizes"),
        ({"shapes": ["3"]}, "list of sizes"),
        ({"dtypes": ["object"]}, "unknown dtype 'object'"),
        ({"partial": "no"}, "partial must be true or false"),
    ],
)
def test_malformed_wire_form_is_refused(change: dict, message: str) -> None:
    good = {"names": ["a"], "shapes": [[2]], "dtypes": ["bfloat16"], "partial": False}
    with pytest.raises(ManifestError, match=message):
        Manifest.from_json(good | change)


def test_expected_comes_from_headers(tmp_path) -> None:
    weights = {
        "a": torch.zeros(2, 3, dtype=BF16),
        "b": torch.zeros((), dtype=torch.float32),
        "c": torch.zeros(4, dtype=torch.float8_e4m3fn),
    }
    save_file({k: weights[k] for k in "ab"}, tmp_path / "x-1.safetensors")
    save_file({"c": weights["c"]}, tmp_path / "x-2.safetensors")
    expected = expected_tensors(tmp_path)
    assert expected == {s.name: s for s in Manifest.of(weights.items()).tensors}

    (tmp_path / "x-3.safetensors").write_bytes(b"no such header")
    with pytest.raises(ValueError, match=r"x-3\.safetensors is not a safetensors file"):
        expected_tensors(tmp_path)


def test_index_decides_which_files_count(tmp_path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ValueError, match="of another file again: \\['a'\\]"):
        expected_tensors(tmp_path)
    index = {"weight_map": {"a": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(expected_tensors(tmp_path)) == ["a"]


def test_no_safetensors_is_an_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        expected_tensors(tmp_path)
