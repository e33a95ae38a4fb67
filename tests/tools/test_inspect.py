# SPDX-License-Identifier: Apache-2.0
"""`inspect` end to end, through the command line: healthy, and broken in every way."""

import json
from collections.abc import Callable

import pytest
import torch
from typer.testing import CliRunner

from vllm_megamoe_plugin.cli import app
from vllm_megamoe_plugin.tools import inspect as tool
from vllm_megamoe_plugin.tools.shards import NothingToCheckError

KINDS = ("modelopt", "modelopt_w4a16", "ct", "bf16", "modelopt_fused", "bf16_fused")
KEYS = {
    "checkpoint",
    "format",
    "convention",
    "mode",
    "layers",
    "experts",
    "hidden",
    "intermediate",
    "tensors",
    "bytes",
    "faults",
    "warnings",
    "gate_up",
    "input_scales",
    "block_scales",
    "kernels",
}
LAYER = "model.layers.1.mlp.experts"
INF, NAN = float("inf"), float("nan")


def run(folder: str) -> tuple[int, dict]:
    result = CliRunner().invoke(app, ["inspect", folder, "--json"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    lines = result.stdout.splitlines()
    assert len(lines) == 1, "exactly one JSON line on stdout"
    return result.exit_code, json.loads(lines[0])


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_checkpoint_passes(kind: str, checkpoint: Callable) -> None:
    whole = checkpoint(kind)
    code, report = run(whole.write())
    assert (code, report["faults"]) == (0, [])
    assert set(report) == KEYS
    assert report["format"] == ("bf16" if kind.startswith("bf16") else "nvfp4")
    sizes = [report[k] for k in ("layers", "experts", "hidden", "intermediate")]
    assert sizes == [2, 4, 64, 32]
    experts = [t for n, t in whole.tensors.items() if "experts" in n]
    assert report["tensors"] == len(experts)
    assert report["bytes"] == sum(t.numel() * t.element_size() for t in experts)
    blocks = [t for t in whole.tensors.values() if t.dtype == torch.float8_e4m3fn]
    assert report["block_scales"]["count"] == sum(t.numel() for t in blocks)
    if blocks:
        nonzero = sum(int((t.float() != 0).sum()) for t in blocks)
        assert report["block_scales"]["baking"]["compared"] == nonzero
    assert report["kernels"]["CPU"]["runs"] == "reference"
    assert set(report["kernels"]) == set(tool.DEVICES)


def test_fused_and_per_expert_forms_agree(checkpoint: Callable) -> None:
    _, fused = run(checkpoint("modelopt_fused").write())
    _, plain = run(checkpoint("modelopt").write())
    for key in ("gate_up", "input_scales", "block_scales", "mode"):
        assert fused[key] == plain[key], key


def test_weight_only_is_said_and_is_no_fault(checkpoint: Callable) -> None:
    code, report = run(checkpoint("modelopt_w4a16").write())
    assert code == 0
    assert report["mode"] == "w4a16"
    assert [w["kind"] for w in report["warnings"]] == ["weight_only"]
    assert "w4a16 only" in report["warnings"][0]["message"]


def test_different_gate_and_up_scales_are_reported_not_faulted(
    checkpoint: Callable,
) -> None:
    whole = checkpoint("modelopt")
    for name, tensor in whole.tensors.items():
        if name.endswith("weight_scale_2"):
            tensor.fill_(2.0**-14)
    whole.tensors[f"{LAYER}.2.up_proj.weight_scale_2"].fill_(2.0**-14 * 10)
    code, report = run(whole.write())
    assert code == 0
    assert report["gate_up"] == {
        "pairs": 8,
        "differ": 1,
        "largest_ratio": 10.0,
        "layer": LAYER,
        "expert": 2,
        "gate": 2.0**-14,
        "up": 2.0**-14 * 10,
    }


# --- one broken thing each: (kind of checkpoint, tensor, how) -> fault ---


def drop(tensors: dict, name: str) -> None:
    del tensors[name]


def resize(tensors: dict, name: str) -> None:
    tensors[name] = tensors[name][1:].clone()


def retype(tensors: dict, name: str) -> None:
    tensors[name] = tensors[name].view(torch.uint8).to(torch.int32)


def huge_floats(tensors: dict, name: str) -> None:
    # read as E4M3 bytes these would be NaN too; one fault says it all
    tensors[name] = torch.full(tensors[name].shape, 3e38)


def fill(value: float) -> Callable:
    def apply(tensors: dict, name: str) -> None:
        tensors[name].fill_(value)

    return apply


def poke(byte: int, *where: int) -> Callable:
    # bytes, not a cast: torch saturates 480 to 448 where older exporters wrote NaN
    def apply(tensors: dict, name: str) -> None:
        tensors[name].view(torch.uint8)[where] = byte

    return apply


def stranger(suffix: str) -> Callable:
    def apply(tensors: dict, name: str) -> None:
        tensors[name.rpartition(".")[0] + suffix] = torch.ones(1)

    return apply


BROKEN = [
    ("modelopt", "2.up_proj.weight", drop, "missing", "weight"),
    ("modelopt", "2.up_proj.weight_scale", drop, "missing", "block scale"),
    ("modelopt", "0.down_proj.weight_scale_2", drop, "missing", "global scale"),
    ("modelopt", "3.gate_proj.input_scale", drop, "missing", "input scale"),
    ("ct", "2.up_proj.weight_packed", drop, "missing", "weight"),
    ("ct", "3.down_proj.input_global_scale", drop, "missing", "input scale"),
    ("bf16", "0.gate_proj.weight", drop, "missing", "weight"),
    ("modelopt", "2.up_proj.weight", resize, "shape", [31, 32]),
    ("modelopt", "2.down_proj.weight_scale", resize, "shape", [63, 2]),
    ("bf16", "1.down_proj.weight", resize, "shape", [63, 32]),
    ("modelopt", "2.up_proj.weight", retype, "dtype", "int32"),
    ("ct", "2.up_proj.weight_scale", retype, "dtype", "int32"),
    ("ct", "2.up_proj.weight_scale", huge_floats, "dtype", "float32"),
    ("ct", "1.gate_proj.weight_scale", poke(0x7F, 3, 2), "nan_block_scale", [3, 2]),
    ("modelopt", "1.up_proj.weight_scale", poke(0xFF, 5, 0), "nan_block_scale", [5, 0]),
    ("modelopt", "1.up_proj.weight_scale_2", fill(0.0), "global_scale", 0.0),
    ("modelopt", "1.up_proj.weight_scale_2", fill(INF), "global_scale", "inf"),
    ("modelopt", "1.up_proj.weight_scale_2", fill(NAN), "global_scale", "nan"),
    ("modelopt", "1.up_proj.weight_scale_2", fill(-1.0), "global_scale", -1.0),
    ("modelopt", "1.up_proj.weight_scale_2", fill(1e-40), "global_scale", None),
    ("ct", "1.up_proj.weight_global_scale", fill(0.0), "global_scale", 0.0),
    ("ct", "1.up_proj.weight_global_scale", fill(INF), "global_scale", "inf"),
    ("ct", "1.up_proj.weight_global_scale", fill(3e38), "global_scale", None),
    ("modelopt", "3.down_proj.input_scale", fill(0.0), "input_scale", 0.0),
    ("modelopt", "3.down_proj.input_scale", fill(INF), "input_scale", "inf"),
    ("modelopt", "3.down_proj.input_scale", fill(NAN), "input_scale", "nan"),
    ("modelopt", "3.down_proj.input_scale", fill(-2.0), "input_scale", -2.0),
    ("modelopt", "3.down_proj.input_scale", fill(1e-40), "input_scale", None),
    ("ct", "3.down_proj.input_global_scale", fill(NAN), "input_scale", "nan"),
    ("ct", "3.down_proj.input_global_scale", fill(-INF), "input_scale", "-inf"),
    ("ct", "3.down_proj.input_global_scale", fill(-2.0), "input_scale", -2.0),
    ("modelopt", "3.down_proj.weight", stranger(".bias"), "unexpected", None),
    ("bf16", "3.down_proj.weight", stranger(".weight_scale"), "unexpected", None),
]


@pytest.mark.parametrize(
    ("kind", "short", "breaking", "fault", "value"),
    BROKEN,
    ids=[f"{k}-{s}-{f}-{v}" for k, s, _, f, v in BROKEN],
)
def test_broken_tensor_is_named(
    kind: str,
    short: str,
    breaking: Callable,
    fault: str,
    value: object,
    checkpoint: Callable,
) -> None:
    broken = checkpoint(kind)
    name = f"{LAYER}.{short}"
    breaking(broken.tensors, name)
    code, report = run(broken.write())
    assert code == 1
    assert len(report["faults"]) == 1, report["faults"]
    found = report["faults"][0]
    assert found["kind"] == fault
    where = name if fault != "unexpected" else name.rpartition(".")[0]
    assert found["tensor"].startswith(where)
    assert found["tensor"] in found["message"]
    assert (found["layer"], found["expert"]) == (LAYER, int(short[0]))
    missing = report["input_scales"]["missing"]
    assert missing == ((fault, value) == ("missing", "input scale"))
    shown = found["value"]
    if fault == "nan_block_scale":
        assert (shown["count"], shown["first"]) == (1, value)
        assert str(value) in found["message"]
    elif value is not None:
        assert shown == value


def test_expert_past_the_declared_count_is_unexpected(checkpoint: Callable) -> None:
    broken = checkpoint("bf16")
    extra = f"{LAYER}.4.up_proj.weight"
    broken.tensors[extra] = broken.tensors[f"{LAYER}.0.up_proj.weight"].clone()
    code, report = run(broken.write())
    assert code == 1
    assert [(f["kind"], f["tensor"], f["expert"]) for f in report["faults"]] == [
        ("unexpected", extra, 4)
    ]
    assert "declares 4 experts" in report["faults"][0]["message"]


def test_layer_without_one_expert_is_missing(checkpoint: Callable) -> None:
    broken = checkpoint("bf16")
    for name in [n for n in broken.tensors if n.startswith(LAYER)]:
        del broken.tensors[name]
    code, report = run(broken.write())
    assert code == 1
    assert [(f["kind"], f["layer"]) for f in report["faults"]] == [("missing", LAYER)]


def test_fused_tensor_names_expert_and_coordinate(checkpoint: Callable) -> None:
    broken = checkpoint("modelopt_fused")
    name = f"{LAYER}.gate_up_proj_weight_scale"
    # stored [E, K, N]: group 1 of row 34, which is row 2 of up
    broken.tensors[name].view(torch.uint8)[3, 1, 34] = 0x7F
    code, report = run(broken.write())
    assert code == 1
    [found] = report["faults"]
    assert (found["kind"], found["tensor"], found["expert"]) == (
        "nan_block_scale",
        name,
        3,
    )
    assert found["value"]["first"] == [2, 1]
    assert "expert 3 w3" in found["message"]


def test_fused_tensor_with_too_few_experts_is_missing(checkpoint: Callable) -> None:
    broken = checkpoint("bf16_fused")
    name = f"{LAYER}.down_proj_weight"
    broken.tensors[name] = broken.tensors[name][:3].clone()
    code, report = run(broken.write())
    assert code == 1
    [found] = report["faults"]
    assert (found["kind"], found["layer"], found["expert"]) == ("missing", LAYER, 3)


@pytest.mark.parametrize("stored", [0.0, INF])
def test_dead_expert_is_a_warning(stored: float, checkpoint: Callable) -> None:
    whole = checkpoint("ct")
    name = f"{LAYER}.2.down_proj.input_global_scale"
    whole.tensors[name].fill_(stored)
    code, report = run(whole.write())
    assert code == 0
    [warning] = report["warnings"]
    assert (warning["kind"], warning["tensor"]) == ("dead_expert", name)
    assert report["input_scales"]["dead"] == 1
    assert report["input_scales"]["usable"] == 23


def test_layer_of_dead_experts_is_a_fault(checkpoint: Callable) -> None:
    broken = checkpoint("ct")
    for expert in range(4):
        broken.tensors[f"{LAYER}.{expert}.down_proj.input_global_scale"].fill_(0.0)
    code, report = run(broken.write())
    assert code == 1
    [found] = report["faults"]
    assert (found["kind"], found["layer"]) == ("input_scale", LAYER)
    assert "all 4 experts" in found["message"]


@pytest.mark.parametrize("value", [NAN, INF])
def test_non_finite_weight_is_named(value: float, checkpoint: Callable) -> None:
    broken = checkpoint("bf16")
    name = f"{LAYER}.1.down_proj.weight"
    broken.tensors[name][7, 9] = value
    code, report = run(broken.write())
    assert code == 1
    [found] = report["faults"]
    assert (found["kind"], found["tensor"]) == ("non_finite_weight", name)
    assert found["value"] == {"count": 1, "first": [7, 9], "weight": str(value)}


def test_sizes_no_kernel_takes_are_a_fault(checkpoint: Callable) -> None:
    broken = checkpoint("bf16")
    broken.config["hidden_act"] = "cubic"
    code, report = run(broken.write())
    assert code == 1
    [found] = report["faults"]
    assert found["kind"] == "no_kernel"
    assert "cubic" in found["message"]


def test_ignored_layer_is_checked_as_plain(checkpoint: Callable) -> None:
    whole, plain = checkpoint("modelopt"), checkpoint("bf16")
    for name in [n for n in whole.tensors if n.startswith(LAYER)]:
        del whole.tensors[name]
    whole.tensors |= {n: t for n, t in plain.tensors.items() if n.startswith(LAYER)}
    code, _ = run(whole.write())
    assert code == 1
    quantization = {**whole.config["quantization_config"], "ignore": ["*layers.1.mlp*"]}
    whole.config["quantization_config"] = quantization
    code, report = run(whole.write())
    assert (code, report["faults"]) == (0, [])


# --- nothing that could be checked ---


def test_nothing_to_check_is_exit_code_2(checkpoint: Callable, tmp_path) -> None:
    code, report = run(str(tmp_path / "nowhere"))
    assert code == 2
    assert "no such folder" in report["error"]

    dense = checkpoint("bf16")
    dense.tensors = {"model.layers.0.mlp.down_proj.weight": torch.ones(2, 2)}
    code, report = run(dense.write())
    assert code == 2
    assert "none of its 1 tensors belongs to an expert" in report["error"]


def test_unknown_scheme_is_exit_code_2(checkpoint: Callable) -> None:
    other = checkpoint("modelopt")
    other.config["quantization_config"] = {"quant_method": "gptq"}
    code, report = run(other.write())
    assert code == 2
    assert "gptq" in report["error"]


def test_config_must_be_readable(checkpoint: Callable) -> None:
    whole = checkpoint("bf16")
    whole.write()
    path = whole.folder / "config.json"
    path.write_text("{")
    with pytest.raises(NothingToCheckError, match=r"config.json: cannot be read"):
        tool.inspect(str(whole.folder))
    path.unlink()
    with pytest.raises(NothingToCheckError, match=r"config.json: cannot be read"):
        tool.inspect(str(whole.folder))


def test_modelopt_file_and_nested_text_config_are_read(checkpoint: Callable) -> None:
    whole = checkpoint("modelopt")
    del whole.config["quantization_config"]
    whole.config = {"text_config": whole.config}
    for name in [n for n in whole.tensors if ".experts.3." in n]:
        del whole.tensors[name]
    whole.write()
    quantization = {"quantization": {"quant_algo": "NVFP4"}}
    (whole.folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    report = tool.inspect(str(whole.folder))
    assert (report.format, report.mode, report.experts) == ("nvfp4", "w4a4", 4)
    assert {(f.kind, f.expert) for f in report.faults} == {("missing", 3)}


def test_people_see_names_and_counts(checkpoint: Callable) -> None:
    broken = checkpoint("modelopt")
    del broken.tensors[f"{LAYER}.2.up_proj.weight"]
    result = CliRunner().invoke(app, ["inspect", broken.write()])
    assert result.exit_code == 1
    text = result.output.replace("\n", "")
    assert f"{LAYER}.2.up_proj.weight: missing" in text
    assert "95 expert tensors compared" in text
    assert "1 faults" in text
