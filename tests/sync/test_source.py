# SPDX-License-Identifier: Apache-2.0
"""Headers say what a checkpoint holds; a served model's checkpoint is found by name."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from vllm_megamoe_plugin.sync.manifest import Manifest, ManifestError
from vllm_megamoe_plugin.sync.source import (
    checkpoint_weights,
    expected_tensors,
    served_tensors,
)


def test_expected_comes_from_headers(tmp_path) -> None:
    weights = {
        "a": torch.zeros(2, 3, dtype=torch.bfloat16),
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


def test_tensors_come_in_file_order(tmp_path) -> None:
    weights = {"b": torch.arange(3.0), "a": torch.ones(2, dtype=torch.float8_e4m3fn)}
    save_file({"b": weights["b"]}, tmp_path / "x-1.safetensors")
    save_file({"a": weights["a"]}, tmp_path / "x-2.safetensors")
    got = list(checkpoint_weights(tmp_path))
    assert [name for name, _ in got] == ["b", "a"]
    assert all(torch.equal(t.float(), weights[n].float()) for n, t in got)


def test_a_served_checkpoint_is_found_by_folder_and_by_name(tmp_path) -> None:
    repo = tmp_path / "models--org--tiny"
    folder = repo / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")

    def found(model: str) -> list[str]:
        config = SimpleNamespace(model=model, revision=None)
        return list(served_tensors(config, str(tmp_path)))

    assert found(str(folder)) == found("org/tiny") == ["w"]
    for absent in ("org/other", "/no/such/folder"):
        with pytest.raises(ManifestError, match=f"{absent} is no safetensors"):
            found(absent)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ManifestError, match="holds no safetensors files"):
        found(str(folder))
