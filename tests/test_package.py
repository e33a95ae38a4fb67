# SPDX-License-Identifier: Apache-2.0
"""Importing does nothing; `register()` does everything, twice safely, and raises."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_megamoe_plugin
from vllm_megamoe_plugin import compat, registration

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "vllm", "flashinfer", "deep_gemm", "triton", "safetensors")


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    out = _python(
        "import sys; import vllm_megamoe_plugin\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert out == "[]\n"


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    out = _python(
        "import sys; import vllm_megamoe_plugin.cli\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert out == "[]\n"


def test_version_and_entry_points_are_what_pyproject_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", vllm_megamoe_plugin.__version__)
    points = project["entry-points"]
    for group, function in (
        ("vllm.general_plugins", "register"),
        ("vllm.platform_plugins", "register_early"),
    ):
        (target,) = points[group].values()
        assert target == f"vllm_megamoe_plugin:{function}"
        assert callable(getattr(vllm_megamoe_plugin, function))


class _Factory:
    """vLLM's transfer engine factory: a second registration of a name raises."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, cls: str) -> None:
        if name in self._registry:
            raise ValueError(f"{name} is registered")
        self._registry[name] = (module, cls)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`register()` with vLLM's side replaced by recorders."""
    factory, patches = _Factory(), []
    module = SimpleNamespace(WeightTransferEngineFactory=factory)
    monkeypatch.setattr(compat, "apply_patches", lambda **k: patches.append(k))

    def on_import(name: str, hook: Any, marker: str) -> None:
        if hasattr(module, marker):
            hook(module)

    monkeypatch.setattr(compat, "on_import", on_import)
    return SimpleNamespace(factory=factory, patches=patches)


def test_register_twice_registers_once(fakes: SimpleNamespace) -> None:
    vllm_megamoe_plugin.register()
    vllm_megamoe_plugin.register()
    (engine,) = fakes.factory._registry.values()
    assert len(fakes.patches) == 2  # idempotent, see test_compat.py
    module, cls = engine
    path = ROOT / Path(*module.split(".")).with_suffix(".py")
    assert f"class {cls}" in path.read_text()


def test_register_raises_what_goes_wrong(
    fakes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**hooks: Any) -> None:
        raise RuntimeError("vLLM changed")

    monkeypatch.setattr(compat, "apply_patches", broken)
    with pytest.raises(RuntimeError, match="vLLM changed"):
        vllm_megamoe_plugin.register()


def test_only_our_method_is_ours(fakes: SimpleNamespace) -> None:
    vllm_megamoe_plugin.register()
    is_ours = fakes.patches[0]["is_ours"]
    assert not is_ours(object())
    assert is_ours(type("MegaMoEMethod", (), {})())
    assert is_ours is registration._is_ours


def test_register_early_offers_no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(compat, "install_early_hook", lambda: calls.append("hook"))
    assert vllm_megamoe_plugin.register_early() is None
    assert calls == ["hook"]


if importlib.util.find_spec("vllm") is not None:

    def test_register_in_a_real_vllm_twice() -> None:
        out = _python(
            "import vllm_megamoe_plugin as p\n"
            "p.register(); p.register()\n"
            "from vllm.distributed.weight_transfer.factory import (\n"
            "    WeightTransferEngineFactory as f)\n"
            "print(sorted(n for n in f._registry if 'megamoe' in n))"
        )
        assert out.splitlines()[-1] == "['megamoe_direct']"
