# SPDX-License-Identifier: Apache-2.0
"""Names, shapes and dtypes of a set of expert tensors, from headers alone."""

import itertools
from pathlib import Path

import pytest
import torch

from vllm_megamoe_plugin.checkpoint import (
    CONVENTIONS,
    PER_TENSOR,
    Convention,
    Quantization,
    Role,
)
from vllm_megamoe_plugin.tools.expert_tensors import ExpertTensors, first_of
from vllm_megamoe_plugin.tools.shards import Stored

E, H, I = 3, 64, 32  # noqa: E741
CONFIG = {"num_experts": E, "hidden_size": H, "moe_intermediate_size": I}
PROJECTIONS = {
    "proj": ("gate_proj", "up_proj", "down_proj"),
    "w": ("w1", "w3", "w2"),
}


def stored(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Stored:
    return Stored(name=name, file=Path("a"), dtype=dtype, shape=shape, nbytes=0)


def healthy(convention: Convention, style: str = "proj") -> dict[str, Stored]:
    """One layer in a convention, every role of it."""
    fmt, tensors = convention.format, {}
    for expert, proj in itertools.product(range(E), PROJECTIONS[style]):
        n, k = (H, I) if proj in ("down_proj", "w2") else (I, H)
        for role, suffix in convention.suffixes.items():
            name = f"model.layers.0.mlp.experts.{expert}.{proj}.{suffix}"
            dtype, shape = torch.float32, ()
            if role is Role.WEIGHT:
                dtype, shape = fmt.weight_dtype, (n, fmt.weight_cols(k))
            elif role is Role.BLOCK_SCALE:
                dtype, shape = fmt.scale_dtype, (n, fmt.scale_cols(k))
            tensors[name] = stored(name, dtype, shape)
    return tensors


def check(
    tensors: dict[str, Stored], convention: Convention, **quantization: object
) -> ExpertTensors:
    settings = {"quantized_activations": True, "ignore": (), **quantization}
    experts = ExpertTensors(
        tensors, CONFIG, Quantization(convention=convention, **settings)
    )
    experts.check_coverage()
    experts.check_shapes()
    return experts


@pytest.mark.parametrize("style", PROJECTIONS)
@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.name)
def test_every_convention_is_understood(convention: Convention, style: str) -> None:
    experts = check(healthy(convention, style), convention)
    assert experts.faults == []
    assert (experts.intermediate, experts.hidden) == (I, H)
    assert len(experts.parts) == E * 3 * len(convention.suffixes)


@pytest.mark.parametrize("style", PROJECTIONS)
@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.name)
def test_every_absent_tensor_is_missing(convention: Convention, style: str) -> None:
    whole = healthy(convention, style)
    for name in whole:
        rest = {n: s for n, s in whole.items() if n != name}
        faults = check(rest, convention).faults
        assert [(f.kind, f.tensor) for f in faults] == [("missing", name)]


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.name)
def test_every_wrong_shape_and_dtype_is_named(convention: Convention) -> None:
    whole = healthy(convention)
    for name, good in whole.items():
        longer = stored(name, good.dtype, (7, *good.shape))
        faults = check({**whole, name: longer}, convention).faults
        assert [(f.kind, f.tensor) for f in faults] == [("shape", name)]
        wrong = stored(name, torch.int64, good.shape)
        faults = check({**whole, name: wrong}, convention).faults
        assert [(f.kind, f.value) for f in faults] == [("dtype", "int64")]


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.name)
def test_weight_only_needs_no_input_scales(convention: Convention) -> None:
    input_scale = convention.suffixes.get(Role.INPUT_SCALE, "none")
    rest = {
        name: s for name, s in healthy(convention).items() if input_scale not in name
    }
    assert check(rest, convention, quantized_activations=False).faults == []


def test_per_tensor_scales_may_be_scalars_or_one_element() -> None:
    for convention, shape in itertools.product(CONVENTIONS, [(), (1,)]):
        tensors = healthy(convention)
        for name, good in tensors.items():
            if good.shape == ():
                tensors[name] = stored(name, good.dtype, shape)
        assert check(tensors, convention).faults == []
    assert PER_TENSOR


@pytest.mark.parametrize(
    ("pattern", "covers"),
    [
        ("model.layers.0*", True),
        ("*mlp.experts*", True),
        ("model.layers.0.mlp.experts", True),
        ("model.layers.0", True),
        ("re:.*layers\\.0\\.mlp.*", True),
        ("model.layers.0.mlp.gate", False),
        ("model.layers.0.self_attn*", False),
        ("model.layers.0.mlp.exp", False),
        ("re:.*layers\\.1.*", False),
        ("lm_head", False),
    ],
)
def test_ignore_patterns(pattern: str, covers: bool) -> None:
    quantized, plain = CONVENTIONS[0], CONVENTIONS[-1]
    as_plain = check(healthy(plain), quantized, ignore=(pattern,))
    assert (as_plain.faults == []) is covers
    as_quantized = check(healthy(quantized), quantized, ignore=(pattern,))
    assert (as_quantized.faults == []) is not covers


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_shapes_tell_whether_they_are_transposed(transposed: bool) -> None:
    convention = CONVENTIONS[-1]
    shapes = {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}
    tensors = {}
    for proj, (n, rows, cols) in shapes.items():
        name = f"model.layers.0.mlp.experts.{proj}"
        shape = (n, cols, rows) if transposed else (n, rows, cols)
        tensors[name] = stored(name, torch.bfloat16, shape)
    experts = check(tensors, convention)
    assert experts.faults == []
    assert (experts.intermediate, experts.hidden) == (I, H)


def test_fused_tensor_that_cannot_be_split_is_a_shape_fault() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for shape in [(E, 2 * I + 1, H), (H, I)]:
        experts = ExpertTensors(
            {name: stored(name, torch.bfloat16, shape)},
            CONFIG,
            Quantization(
                convention=CONVENTIONS[-1], quantized_activations=False, ignore=()
            ),
        )
        assert [(f.kind, f.tensor) for f in experts.faults] == [("shape", name)]


def test_same_weights_fused_and_apart_are_a_duplicate() -> None:
    convention = CONVENTIONS[-1]
    tensors = healthy(convention)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = stored(name, torch.bfloat16, (E, H, I))
    kinds = {f.kind for f in check(tensors, convention).faults}
    assert kinds == {"duplicate"}


def test_layers_sort_by_number() -> None:
    convention = CONVENTIONS[-1]
    tensors = {}
    for layer in (10, 2, 0):
        for name, good in healthy(convention).items():
            moved = name.replace("layers.0", f"layers.{layer}")
            tensors[moved] = stored(moved, good.dtype, good.shape)
    layers = check(tensors, convention).layers
    assert [name.split(".")[2] for name in layers] == ["0", "2", "10"]


def test_first_of_takes_positive_counts_only() -> None:
    assert first_of({"a": None, "b": 0, "c": 8, "d": 9}, "a", "b", "c", "d") == 8
    assert first_of({"a": "8"}, "a", "z") is None
