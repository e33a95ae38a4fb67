# SPDX-License-Identifier: Apache-2.0
"""Scrambling changes every element, and nothing that a check after loading reads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_megamoe_plugin.sync.source import checkpoint_weights, expected_tensors
from vllm_megamoe_plugin.tools.scramble import scramble, scrambled_copy

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
#: name, tensor: every type a checkpoint holds, with what rolling alone cannot change.
TENSORS = {
    "bf16 weight": ("w", torch.randn(4, 6).bfloat16()),
    "constant": ("norm.weight", torch.ones(8, dtype=torch.bfloat16)),
    "zeros": ("bias", torch.zeros(8)),
    "alternating": ("w", torch.tensor([1.0, -1.0] * 4)),
    "fp16 weight": ("w", torch.randn(5).half()),
    "fp64 weight": ("w", torch.randn(5).double()),
    "packed": ("w", ALL_BYTES.view(16, 16)),
    "packed, alternating": ("w", torch.tensor([0, 0x88] * 4, dtype=torch.uint8)),
    "packed int8": ("w", ALL_BYTES.view(torch.int8)),
    "e4m3": ("weight_scale", ALL_BYTES.view(torch.float8_e4m3fn)),
    "e8m0": ("weight_scale", ALL_BYTES.view(torch.float8_e8m0fnu)),
    "e8m0 as uint8": ("weight_scale", ALL_BYTES),
    "one scale": ("weight_scale_2", torch.tensor(3e-3)),
    "one scale of shape 1": ("weight_global_scale", torch.tensor([512.0])),
    "zero scale": ("input_scale", torch.zeros(())),
    "infinite scale": ("input_scale", torch.tensor([float("inf"), 1.0, float("nan")])),
    "largest scale": ("input_scale", torch.tensor([torch.finfo(torch.float32).max])),
    "scales of two to one": ("w_scale", torch.tensor([1.0, 2.0, 4.0, 8.0])),
    "bf16 scales": ("w_scale", torch.rand(7).bfloat16()),
    "bool": ("mask", torch.tensor([True, False, False])),
    "int32": ("w", torch.arange(4, dtype=torch.int32)),
    "int64, one": ("n", torch.tensor(7)),
    "empty": ("w", torch.zeros(0, 4)),
}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, 1).view(torch.uint8)


@pytest.mark.parametrize(("name", "tensor"), TENSORS.values(), ids=TENSORS)
def test_no_element_stays_as_it_was(name: str, tensor: Tensor) -> None:
    before = tensor.clone()
    out = scramble(name, tensor)
    assert (out.shape, out.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(_bytes(tensor), _bytes(before)), "the source is only read"
    assert (_bytes(out) != _bytes(tensor)).any(dim=1).all()


@pytest.mark.parametrize("name", ["e4m3", "e8m0"])
def test_no_new_nan_among_block_scales(name: str) -> None:
    _, tensor = TENSORS[name]
    finite = tensor[~tensor.float().isnan()]
    assert not scramble("weight_scale", finite).float().isnan().any()


@pytest.mark.parametrize(
    "name", ["one scale", "zero scale", "infinite scale", "largest scale"]
)
def test_scales_stay_usable(name: str) -> None:
    out = scramble(*TENSORS[name])
    assert out.isfinite().all()
    assert (out > 0).all()


def test_weights_are_rolled_and_change_sign() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(scramble("w", tensor), torch.tensor([-3.0, -1.0, -2.0]))


@pytest.fixture
def folder(checkpoint) -> Path:
    whole = checkpoint("modelopt")
    index = whole.split()
    whole.write()
    whole.write_index(index)
    return whole.folder


def test_a_copy_holds_the_same_tensors_and_files(folder: Path, tmp_path: Path) -> None:
    with scrambled_copy(folder, tmp_path) as copy:
        assert copy.parent == tmp_path
        assert expected_tensors(copy) == expected_tensors(folder)
        config = json.loads((copy / "config.json").read_text())
        assert config == json.loads((folder / "config.json").read_text())
        other = dict(checkpoint_weights(copy))
        for name, tensor in checkpoint_weights(folder):
            assert torch.equal(_bytes(other[name]), _bytes(scramble(name, tensor)))
    assert not copy.exists()
    assert list(tmp_path.glob("scrambled-*")) == []


def test_metadata_of_the_files_is_kept(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("*.safetensors"):
        save_file(load_file(file), file, {"format": "pt"})
    with scrambled_copy(folder, tmp_path) as copy:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as a, safe_open(copy / file.name, "pt") as b:
                assert a.metadata() == b.metadata()
