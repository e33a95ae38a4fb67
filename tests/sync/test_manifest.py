# SPDX-License-Identifier: Apache-2.0
"""A manifest that does not fit is refused by name, before anything is written."""

import hashlib
import json
import re
from collections.abc import Callable

import pytest
import torch

from vllm_megamoe_plugin.sync.manifest import (
    REFUSED,
    Manifest,
    ManifestError,
    TensorSpec,
    unit,
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


UNITS = {
    "model.layers.3.mlp.experts.12.up_proj.weight": "model.layers.3.mlp.experts.12",
    "model.layers.3.mlp.experts.gate_up_proj": "model.layers.3.mlp.experts",
    "model.layers.3.self_attn.q_proj.weight": "model.layers.3",
    "model.layers.3.mlp.shared_experts.up_proj.weight": "model.layers.3",
    "visual.blocks.0.attn.qkv.bias": "visual.blocks.0",
    "layers.0.norm.weight": "layers.0",
    "model.embed_tokens.weight": "model.embed_tokens",
    "lm_head.weight": "lm_head",
    "norm": "",
}


@pytest.mark.parametrize("name", UNITS)
def test_units(name: str) -> None:
    assert unit(name) == UNITS[name]


@pytest.mark.parametrize("group", ["layers.0.experts.2", "layers.1", "embed", "head"])
def test_partial_takes_whole_units(group: str) -> None:
    everything = {
        spec.name: spec
        for name in ("embed.weight", "head.weight", "head.bias")
        for spec in [TensorSpec(name, (8, 4), BF16)]
    }
    for layer in range(2):
        names = [f"layers.{layer}.experts.{e}.{p}_proj.weight" for e in range(6)
                 for p in ("up", "down")]  # fmt: skip
        names += [f"layers.{layer}.{x}.weight" for x in ("q_proj", "norm")]
        everything |= {name: TensorSpec(name, (4, 2), U8) for name in names}
    specs = [s for s in everything.values() if unit(s.name) == group]
    assert specs
    Manifest(tuple(specs), partial=True).check(everything)
    with pytest.raises(ManifestError, match="missing"):
        Manifest(tuple(specs)).check(everything)
    if len(specs) > 1:
        missing = f"1 missing: {re.escape(specs[0].name)}. A partial update holds whole"
        with pytest.raises(ManifestError, match=missing):
            Manifest(tuple(specs[1:]), partial=True).check(everything)


def test_digests_travel_and_cover_the_bytes() -> None:
    tensor = torch.arange(12, dtype=torch.int16).view(3, 4)
    weights = [("a", tensor), ("b", tensor.t())]
    manifest = Manifest.of(weights, digests=True)
    raw = [t.contiguous().numpy().tobytes() for _, t in weights]
    assert manifest.sha256 == tuple(hashlib.sha256(r).hexdigest() for r in raw)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert "sha256" not in Manifest.of(weights).to_json()


def test_wire_form_round_trips_through_json() -> None:
    manifest = Manifest(tuple(_expected().values()), partial=True)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
