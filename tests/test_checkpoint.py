# SPDX-License-Identifier: Apache-2.0
"""Names, conventions and configurations of real checkpoints."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin.checkpoint import (
    COMPRESSED_TENSORS_NVFP4,
    CONVENTIONS,
    MODELOPT_NVFP4,
    PER_TENSOR,
    PLAIN_BF16,
    Convention,
    ExpertTensor,
    Role,
    parse_expert_name,
    parse_fused_name,
    read_quantization,
    unfuse,
)

from .helpers import assert_equal

LAYER = "model.layers.3.mlp.experts"
E, H, I = 3, 32, 16  # noqa: E741


# --- names ---


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        f"{LAYER}.17.gate_proj.weight": ExpertTensor(LAYER, 17, "w1", "weight"),
        f"{LAYER}.0.up_proj.weight_scale_2": ExpertTensor(
            LAYER, 0, "w3", "weight_scale_2"
        ),
        f"{LAYER}.5.down_proj.input_scale": ExpertTensor(LAYER, 5, "w2", "input_scale"),
        "layers.0.ffn.experts.383.w2.weight_packed": ExpertTensor(
            "layers.0.ffn.experts", 383, "w2", "weight_packed"
        ),
        "experts.1.w3.weight": ExpertTensor("experts", 1, "w3", "weight"),
    }.items(),
)
def test_expert_names_come_apart(name: str, expected: ExpertTensor) -> None:
    assert parse_expert_name(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.shared_experts.gate_proj.weight",
        f"{LAYER}.gate_up_proj",
        f"{LAYER}.1.router.weight",
        f"{LAYER}.x.gate_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "lm_head.weight",
    ],
)
def test_other_names_are_not_expert_names(name: str) -> None:
    assert parse_expert_name(name) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        f"{LAYER}.gate_up_proj": (f"{LAYER}.", "gate_up_proj", "weight"),
        f"{LAYER}.down_proj.weight": (f"{LAYER}.", "down_proj", "weight"),
        f"{LAYER}.gate_up_proj_scale": (f"{LAYER}.", "gate_up_proj", "weight_scale"),
        f"{LAYER}.gate_up_proj_weight_scale_2": (
            f"{LAYER}.",
            "gate_up_proj",
            "weight_scale_2",
        ),
        f"{LAYER}.w13.weight_packed": (f"{LAYER}.", "w13", "weight_packed"),
        "w2_input_scale": ("", "w2", "input_scale"),
        f"{LAYER}.0.down_proj.weight": None,
        "model.layers.3.mlp.down_proj.weight": None,
    }.items(),
)
def test_fused_names_come_apart(
    name: str, expected: tuple[str, str, str] | None
) -> None:
    assert parse_fused_name(name) == expected


# --- conventions ---


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.name)
def test_convention_names_every_tensor_its_format_stores(
    convention: Convention,
) -> None:
    fmt, roles = convention.format, set(convention.suffixes)
    assert Role.WEIGHT in roles
    assert (Role.BLOCK_SCALE in roles) == (fmt.scale_dtype is not None)
    assert (Role.GLOBAL_SCALE in roles) == fmt.global_scale
    for role, suffix in convention.suffixes.items():
        assert convention.role_of(suffix) is role
    assert convention.role_of("bias") is None


def test_a_stored_reciprocal_is_known_by_its_name() -> None:
    assert COMPRESSED_TENSORS_NVFP4.reciprocal
    assert COMPRESSED_TENSORS_NVFP4.role_of("weight_global_scale") is Role.GLOBAL_SCALE
    assert not MODELOPT_NVFP4.reciprocal
    assert MODELOPT_NVFP4.role_of("weight_global_scale") is None


# --- fused tensors ---


def _unfused(
    name: str, tensor: Tensor, convention: Convention, transposed: bool = False
) -> dict[str, Tensor]:
    return dict(unfuse([(name, tensor)], convention, transposed))


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


@pytest.mark.parametrize("transposed", [False, True])
def test_gate_up_splits_into_views(transposed: bool) -> None:
    stored = torch.randn(E, H, 2 * I) if transposed else torch.randn(E, 2 * I, H)
    name = f"{LAYER}.gate_up_proj"
    parts = _unfused(name, stored, PLAIN_BF16, transposed)
    assert list(parts) == [
        f"{LAYER}.{e}.{p}.weight" for e in range(E) for p in ("gate_proj", "up_proj")
    ]
    for e in range(E):
        rows = stored[e].t() if transposed else stored[e]
        for half, part in enumerate(("gate_proj", "up_proj")):
            view = parts[f"{LAYER}.{e}.{part}.weight"]
            assert torch.equal(view, rows[half * I : (half + 1) * I])
            assert _storage(view) == _storage(stored)


def test_down_and_block_scales_and_w13_names() -> None:
    down = torch.randn(E, H, I)
    parts = _unfused(f"{LAYER}.down_proj.weight", down, MODELOPT_NVFP4)
    assert_equal(parts[f"{LAYER}.2.down_proj.weight"], down[2])
    scales = torch.randn(E, 2 * I, 2)
    parts = _unfused(f"{LAYER}.w13_scale", scales, MODELOPT_NVFP4)
    assert_equal(parts[f"{LAYER}.1.w3.weight_scale"], scales[1, I:])


@pytest.mark.parametrize(
    ("shape", "gate_of", "up_of"),
    [((E,), 0, 0), ((E, 1), 0, 0), ((E, 2), 0, 1)],
    ids=["[E]", "[E, 1]", "[E, 2]"],
)
def test_per_tensor_scales(shape: tuple[int, ...], gate_of: int, up_of: int) -> None:
    stored = torch.randn(shape)
    name = f"{LAYER}.gate_up_proj_weight_scale_2"
    parts = _unfused(name, stored, MODELOPT_NVFP4)
    for e in range(E):
        for part, column in (("gate_proj", gate_of), ("up_proj", up_of)):
            value = parts[f"{LAYER}.{e}.{part}.weight_scale_2"]
            assert value.shape == ()
            assert value == stored.view(E, -1)[e, column]
            assert _storage(value) == _storage(stored)


@pytest.mark.parametrize(
    ("name", "tensor"),
    {
        "model.embed_tokens.weight": torch.ones(4, 4),
        f"{LAYER}.gate_up_proj.zero_point": torch.ones(E, 4, 4),
        f"{LAYER}.gate_up_proj.bias": torch.ones(E, 4),
        f"{LAYER}.0.down_proj.weight": torch.ones(4, 4),
        # a per-tensor suffix without a value per expert
        f"{LAYER}.down_proj.input_scale": torch.ones(()),
        # a matrix that is not one per expert
        f"{LAYER}.down_proj.weight": torch.ones(4, 4),
    }.items(),
)
def test_what_is_not_a_known_fused_tensor_passes_through(
    name: str, tensor: Tensor
) -> None:
    (passed,) = unfuse([(name, tensor)], MODELOPT_NVFP4, False)
    assert passed[0] == name
    assert passed[1] is tensor


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            f"{LAYER}.gate_up_proj_input_scale",
            torch.ones(E, 3),
            "gate_up_proj_input_scale: expected 1 or 2 values per expert, got 3",
        ),
        (
            f"{LAYER}.down_proj_input_scale",
            torch.ones(E, 2),
            "down_proj_input_scale: expected 1 values per expert, got 2",
        ),
        (
            f"{LAYER}.gate_up_proj",
            torch.ones(E, 5, 4),
            "gate_up_proj: 5 rows do not split into gate and up",
        ),
    ],
)
def test_impossible_splits_are_refused(name: str, tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _unfused(name, tensor, MODELOPT_NVFP4)


def test_roles_with_one_value_per_projection() -> None:
    assert set(PER_TENSOR) == {Role.GLOBAL_SCALE, Role.INPUT_SCALE}


# --- config.json, in the shapes that exporters write ---

_FP4 = {"num_bits": 4, "type": "float", "group_size": 16}
MODELOPT_IGNORE = ["lm_head", "model.layers.0.mlp.gate"]
MODELOPT_FLAT = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, **_FP4},
            "weights": {"dynamic": False, **_FP4},
            "targets": ["Linear"],
        }
    },
    "ignore": MODELOPT_IGNORE,
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "quant_method": "modelopt",
}
MODELOPT_NESTED = {
    "quant_method": "modelopt_fp4",
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {
        "quant_algo": "nvfp4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": MODELOPT_IGNORE,
    },
}
MODELOPT_WEIGHT_ONLY = {
    "quant_method": "modelopt",
    "quant_algo": "W4A16_NVFP4",
    "exclude_modules": MODELOPT_IGNORE,
}
CT_IGNORE = ["lm_head", "re:.*mlp.gate$"]
_CT_GROUP = {
    "targets": ["Linear"],
    "weights": {**_FP4, "strategy": "tensor_group", "symmetric": True},
    "input_activations": {**_FP4, "strategy": "tensor_group", "dynamic": "local"},
    "output_activations": None,
}
CT = {
    "config_groups": {"group_0": {**_CT_GROUP, "format": "nvfp4-pack-quantized"}},
    "format": "nvfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": CT_IGNORE,
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
CT_OLD = CT | {"config_groups": {"group_0": _CT_GROUP}}
CT_WEIGHT_ONLY = CT | {
    "config_groups": {"group_0": {**_CT_GROUP, "input_activations": None}}
}
CT_MIXED = CT | {"format": "mixed-precision"}


@pytest.mark.parametrize(
    ("config", "convention", "activations", "ignore"),
    [
        pytest.param(MODELOPT_FLAT, MODELOPT_NVFP4, True, MODELOPT_IGNORE, id="flat"),
        pytest.param(
            MODELOPT_NESTED, MODELOPT_NVFP4, True, MODELOPT_IGNORE, id="nested"
        ),
        pytest.param(
            MODELOPT_WEIGHT_ONLY, MODELOPT_NVFP4, False, MODELOPT_IGNORE, id="w4a16"
        ),
        pytest.param(CT, COMPRESSED_TENSORS_NVFP4, True, CT_IGNORE, id="ct"),
        pytest.param(CT_OLD, COMPRESSED_TENSORS_NVFP4, True, CT_IGNORE, id="ct old"),
        pytest.param(
            CT_WEIGHT_ONLY, COMPRESSED_TENSORS_NVFP4, False, CT_IGNORE, id="ct w4a16"
        ),
        pytest.param(
            CT_MIXED, COMPRESSED_TENSORS_NVFP4, True, CT_IGNORE, id="ct mixed"
        ),
        pytest.param(None, PLAIN_BF16, False, [], id="bf16"),
        pytest.param({}, PLAIN_BF16, False, [], id="empty"),
    ],
)
def test_read_quantization(
    config: dict[str, Any] | None,
    convention: Convention,
    activations: bool,
    ignore: list[str],
) -> None:
    found = read_quantization({"hidden_size": 64, "quantization_config": config})
    assert found.convention is convention
    assert found.quantized_activations is activations
    assert found.ignore == tuple(ignore)


def test_an_unquantized_config_has_no_quantization_entry() -> None:
    assert read_quantization({"hidden_size": 64}).convention is PLAIN_BF16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "ModelOpt quant_algo 'FP8' is not supported; this version reads NVFP4",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "quant_algo 'MIXED_PRECISION'",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            "compressed-tensors format 'float-quantized' is not supported",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "quant_method 'fp8' is not supported",
        ),
        ({"bits": 4}, "quant_method '' is not supported"),
    ],
)
def test_other_schemes_are_refused_by_name(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        read_quantization({"quantization_config": config})
