# SPDX-License-Identifier: Apache-2.0
"""Files and index: each way a download or an export goes wrong is named."""

import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_megamoe_plugin.tools import inspect as tool
from vllm_megamoe_plugin.tools.shards import NothingToCheckError, scan

LAYER = "model.layers.1.mlp.experts"
SECOND = "model-00002-of-00002.safetensors"


def test_two_shards_with_an_index_are_whole(checkpoint: Callable) -> None:
    whole = checkpoint("modelopt")
    weight_map = whole.split()
    whole.write()
    whole.write_index(weight_map)
    shards = scan(whole.folder)
    assert (shards.faults, shards.warnings) == ([], [])
    assert set(shards.tensors) == set(whole.tensors)
    for name, stored in shards.tensors.items():
        tensor = whole.tensors[name]
        assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape))
        assert stored.nbytes == tensor.numel() * tensor.element_size()
        assert stored.file.name == weight_map[name]


def test_tensor_in_two_shards_is_a_duplicate(checkpoint: Callable) -> None:
    broken = checkpoint("modelopt")
    broken.split()
    name = "model.layers.0.mlp.experts.2.up_proj.weight_scale_2"
    broken.files[SECOND].append(name)
    broken.write()
    [fault] = tool.inspect(str(broken.folder)).faults
    assert (fault.kind, fault.tensor) == ("duplicate", name)
    assert fault.value == ["model-00001-of-00002.safetensors", SECOND]


def test_truncated_file_names_both_sizes(checkpoint: Callable) -> None:
    broken = checkpoint("modelopt")
    broken.split()
    broken.write()
    path = broken.folder / SECOND
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size - 100])
    report = tool.inspect(str(broken.folder))
    [fault] = report.faults  # its tensors are there, only their values are not
    assert (fault.kind, fault.value) == ("unreadable", size - 100)
    for part in (SECOND, "truncated", f"{size:,}", f"{size - 100:,}"):
        assert part in fault.message
    assert report.input_scales["present"] == 12, "the other file was still checked"


@pytest.mark.parametrize("content", [b"", b"abc", b"version https://git-lfs.github"])
def test_file_without_a_header_is_named(content: bytes, checkpoint: Callable) -> None:
    broken = checkpoint("modelopt")
    broken.split()
    broken.write()
    (broken.folder / SECOND).write_bytes(content)
    report = tool.inspect(str(broken.folder))
    [fault] = report.faults  # no flood of missing tensors
    assert fault.kind == "unreadable"
    assert SECOND in fault.message
    assert f"has {len(content)}" in fault.message
    assert [w.kind for w in report.warnings] == ["unchecked"]


@pytest.mark.parametrize("header", [b"[1]", b"{{{{", b'{"a": 1}'])
def test_header_that_is_not_one_is_named(header: bytes, checkpoint: Callable) -> None:
    broken = checkpoint("modelopt")
    broken.split()
    broken.write()
    data = len(header).to_bytes(8, "little") + header
    (broken.folder / SECOND).write_bytes(data)
    [fault] = scan(broken.folder).faults
    assert fault.kind == "unreadable"
    assert "not a safetensors header" in fault.message


def test_header_the_library_rejects_is_named(checkpoint: Callable) -> None:
    broken = checkpoint("bf16")
    broken.write()
    # the sizes add up, but 3 bytes are not one F32
    entry = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}}
    header = json.dumps(entry).encode()
    data = len(header).to_bytes(8, "little") + header + b"123"
    (broken.folder / "extra.safetensors").write_bytes(data)
    [fault] = scan(broken.folder).faults
    assert fault.kind == "unreadable"
    assert "extra.safetensors: cannot be opened" in fault.message


def test_index_names_a_missing_file(checkpoint: Callable) -> None:
    broken = checkpoint("modelopt")
    weight_map = broken.split()
    broken.write()
    broken.write_index(weight_map)
    (broken.folder / SECOND).unlink()
    report = tool.inspect(str(broken.folder))
    [fault] = report.faults
    assert (fault.kind, fault.value) == ("index", SECOND)
    held = len(broken.files[SECOND])
    assert f"names {SECOND} for {held} tensors" in fault.message


def test_index_disagrees_with_the_shards(checkpoint: Callable) -> None:
    broken = checkpoint("modelopt")
    weight_map = broken.split()
    broken.write()
    moved, gone = f"{LAYER}.0.up_proj.weight", f"{LAYER}.1.up_proj.weight"
    weight_map[moved] = "model-00001-of-00002.safetensors"
    weight_map["model.norm.weight"] = SECOND
    del weight_map[gone]
    broken.write_index(weight_map)
    found = {f.tensor: (f.kind, f.message) for f in scan(broken.folder).faults}
    assert set(found) == {moved, gone, "model.norm.weight"}
    assert {kind for kind, _ in found.values()} == {"index"}
    assert f"but {SECOND} holds it" in found[moved][1]
    assert "does not hold it" in found["model.norm.weight"][1]
    assert "but not in" in found[gone][1]


def test_file_outside_the_index_is_a_warning(checkpoint: Callable) -> None:
    whole = checkpoint("modelopt")
    weight_map = whole.split()
    whole.write()
    whole.write_index(weight_map)
    save_file(
        {"x": whole.tensors[f"{LAYER}.0.up_proj.weight"]},
        whole.folder / "consolidated.safetensors",
    )
    shards = scan(whole.folder)
    assert shards.faults == []
    assert [w.value for w in shards.warnings] == ["consolidated.safetensors"]
    assert "x" not in shards.tensors


def test_nothing_to_scan(checkpoint: Callable) -> None:
    whole = checkpoint("bf16")
    whole.write()
    (whole.folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(NothingToCheckError, match="not an index"):
        scan(whole.folder)
    (whole.folder / "model.safetensors.index.json").unlink()
    (whole.folder / "model.safetensors").unlink()
    with pytest.raises(NothingToCheckError, match=r"no \.safetensors file"):
        scan(whole.folder)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_prefix_of_a_file_is_unreadable(data: st.DataObject, checkpoint) -> None:
    """However a download breaks off, it is one named fault and never an exception."""
    broken = checkpoint("bf16")
    broken.write()
    path = broken.folder / "model.safetensors"
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:cut])
    shards = scan(broken.folder)
    assert [f.kind for f in shards.faults] == ["unreadable"]
    assert shards.broken == {path}
