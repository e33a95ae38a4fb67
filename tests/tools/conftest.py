# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints: 2 layers, 4 experts, hidden 64, intermediate 32, in every form."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 4, 64, 32
CONFIG = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
}
QUANTIZATION = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "modelopt_w4a16": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
    "ct": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"input_activations": {"num_bits": 4}}},
    },
    "bf16": None,
}
KINDS = ("modelopt", "modelopt_w4a16", "ct", "bf16", "modelopt_fused", "bf16_fused")


@dataclass
class Checkpoint:
    """A checkpoint in memory, to be broken before it is written."""

    folder: Path
    config: dict
    tensors: dict[str, Tensor]
    files: dict[str, list[str]] = field(default_factory=dict)
    """file -> names; empty for one file without an index."""

    def write(self) -> str:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        files = self.files or {"model.safetensors": list(self.tensors)}
        for file, names in files.items():
            save_file({n: self.tensors[n] for n in names}, self.folder / file)
        return str(self.folder)

    def split(self) -> dict[str, str]:
        """Two shards by layer; returns the index's weight map."""
        self.files = {
            f"model-0000{i + 1}-of-00002.safetensors": [
                name for name in self.tensors if f"layers.{i}." in name
            ]
            for i in range(LAYERS)
        }
        return {name: file for file, names in self.files.items() for name in names}

    def write_index(self, weight_map: dict[str, str]) -> None:
        index = {"metadata": {}, "weight_map": weight_map}
        path = self.folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index))


def _quantized(name: str, n: int, k: int, form: str) -> dict[str, Tensor]:
    scale, amax = torch.rand(2).add_(0.5).mul_(1e-4)
    per_tensor = {"weight_scale_2": scale, "input_scale": amax}
    weight = "weight"
    if form == "ct":
        weight = "weight_packed"
        per_tensor = {
            "weight_global_scale": scale.reciprocal().view(1),
            "input_global_scale": amax.reciprocal().view(1),
        }
    if form == "modelopt_w4a16":
        del per_tensor["input_scale"]
    tensors = {
        weight: torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
        "weight_scale": torch.rand(n, k // 16).mul_(400).to(torch.float8_e4m3fn),
        **per_tensor,
    }
    return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}


def _experts(layer: int, form: str) -> dict[str, Tensor]:
    tensors = {}
    for expert in range(EXPERTS):
        for proj in ("gate_proj", "up_proj", "down_proj"):
            n, k = INTERMEDIATE, HIDDEN
            if proj == "down_proj":
                n, k = k, n
            name = f"model.layers.{layer}.mlp.experts.{expert}.{proj}"
            if form == "bf16":
                tensors[f"{name}.weight"] = torch.randn(n, k).bfloat16()
            else:
                tensors |= _quantized(name, n, k, form)
    return tensors


def _fuse(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """Per-expert tensors of one layer as 3-D ones; matrices transposed to [E, K, N]."""
    prefix, first = f"model.layers.{layer}.mlp.experts", "0.gate_proj."
    fused = {}
    for suffix in [name.split(first)[1] for name in tensors if first in name]:
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{e}.{p}.{suffix}"] for e in range(EXPERTS)])
            for p in ("gate_proj", "up_proj", "down_proj")
        )
        gate_up = (
            torch.cat([gate, up], 1) if gate.dim() == 3 else torch.stack([gate, up], 1)
        )
        if gate.dim() == 3:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        fused[f"{prefix}.gate_up_proj_{suffix}"] = gate_up.contiguous()
        fused[f"{prefix}.down_proj_{suffix}"] = down.contiguous()
    return fused


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], Checkpoint]:
    """Builds a healthy checkpoint of a kind."""

    def build(kind: str) -> Checkpoint:
        torch.manual_seed(0)
        form = kind.removesuffix("_fused")
        tensors = {}
        for layer in range(LAYERS):
            experts = _experts(layer, form)
            tensors |= _fuse(experts, layer) if kind.endswith("_fused") else experts
            router = f"model.layers.{layer}.mlp.gate.weight"
            tensors[router] = torch.randn(EXPERTS, HIDDEN).bfloat16()
        config = dict(CONFIG)
        if QUANTIZATION[form]:
            config["quantization_config"] = QUANTIZATION[form]
        return Checkpoint(tmp_path / kind, config, tensors)

    return build
