# SPDX-License-Identifier: Apache-2.0
"""Every tensor a model computes with is seen, and what it follows is known."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm_megamoe_plugin.sync.digest import compare
from vllm_megamoe_plugin.sync.direct import load_checkpoint
from vllm_megamoe_plugin.sync.live import (
    attribute_tensors,
    followers,
    live_digests,
    live_tensors,
    packed_weights,
)
from vllm_megamoe_plugin.sync.source import expected_tensors

from ..vllm_layer import load_model, model_tensors, vllm_process

EXPERTS = "model.layers.0.mlp.experts.routed_experts"


def test_attributes_are_found_in_every_container_but_the_kv_cache() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    tensor = torch.ones(2)
    model[0].absorbed = tensor
    model[0].by_name = {"k": tensor, "n": 3}
    model[0].in_order = [None, tensor]
    model[0].kv_cache = tensor
    names = [name for name, _ in attribute_tensors(model)]
    assert names == ["0.absorbed", "0.by_name[k]", "0.in_order[1]"]
    assert set(names) < {name for name, _ in live_tensors(model)}


def test_views_follow_what_they_overlap_and_neighbours_do_not() -> None:
    model = nn.Module()
    model.whole = nn.Parameter(torch.zeros(2, 4))
    model.register_buffer("row0", model.whole.data[0])
    model.register_buffer("row1", model.whole.data[1])
    model.register_buffer("other", torch.zeros(2))
    assert followers(model) == {
        "whole": ["row0", "row1"],
        "row0": ["whole"],
        "row1": ["whole"],
    }


def test_one_parameter_under_two_names_follows_itself_even_when_emptied() -> None:
    model = nn.Module()
    model.gate = nn.Parameter(torch.zeros(0))
    model.again = model.gate
    model.emptied_too = nn.Parameter(torch.zeros(0))
    assert followers(model) == {"gate": ["again"], "again": ["gate"]}


@pytest.mark.parametrize(
    ("kind", "activation", "derived"),
    [
        ("modelopt", "auto", {"l2_act_scale": "w2_input_scale"}),
        ("modelopt", "w4a16", {}),
        (
            "compressed-tensors",
            "auto",
            {
                "l2_act_scale": "w2_input_global_scale",
                "w13_alpha": "w13_weight_global_scale",
                "w2_alpha": "w2_weight_global_scale",
            },
        ),
        ("bf16", "auto", {}),
    ],
)
def test_what_changes_with_all_weights_is_what_is_written_or_follows(
    kind: str, activation: str, derived: dict, tmp_path: Path, monkeypatch
) -> None:
    """The prediction, from links alone, against a real update to other weights."""
    monkeypatch.setenv("VLLM_MEGAMOE_ACTIVATION", activation)
    weights = {seed: model_tensors(kind, seed) for seed in (0, 7)}
    with vllm_process(tmp_path, kind) as config:
        model = load_model(tmp_path, kind, config, weights[0])
        links = followers(model)
        buffers = {f"{EXPERTS}.{n}": [f"{EXPERTS}.{s}"] for n, s in derived.items()}
        for name, sources in buffers.items():
            assert set(sources) <= set(links[name])
        before = _bytes(model)
        other = tmp_path / "other"
        other.mkdir()
        save_file(weights[7], other / "model.safetensors")
        loaded = load_checkpoint(
            model, config.model_config, other, expected_tensors(tmp_path)
        )
        after = _bytes(model)
    found = set(loaded)
    while more := {n for n, s in links.items() if n not in found and found & {*s}}:
        found |= more
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed == {n for n in found if before[n].numel()}
    assert "lm_head.packed_weight" in changed


@pytest.mark.parametrize("kind", ["modelopt", "bf16"])
def test_the_same_weights_change_and_move_nothing(kind: str, tmp_path: Path) -> None:
    """vLLM makes the numbers of its attention layers anew, which is no move."""
    with vllm_process(tmp_path, kind) as config:
        model = load_model(tmp_path, kind, config)
        numbers = [
            (module, module._k_scale_cpu)
            for module in model.modules()
            if hasattr(module, "_k_scale_cpu")
        ]
        before = live_digests(model, "dp0")
        load_checkpoint(
            model, config.model_config, tmp_path, expected_tensors(tmp_path)
        )
        for module, number in numbers:
            # as its post-load processing does for some formats
            module._k_scale_cpu = number.clone()
        after = live_digests(model, "dp0")
    assert numbers
    assert compare(before, after).identical
    unplaced = {n for n, entry in before.items() if entry["address"] is None}
    assert any(n.endswith("._k_scale_cpu") for n in unplaced)
    assert "dp0:lm_head.packed_weight" in unplaced
    assert f"dp0:{EXPERTS}.w13_weight" not in unplaced


def _bytes(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(live_tensors(model)) | dict(packed_weights(model))
    return {
        n: t.detach().contiguous().reshape(-1).view(torch.uint8).clone()
        for n, t in tensors.items()
    }
