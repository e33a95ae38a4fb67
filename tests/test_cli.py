# SPDX-License-Identifier: Apache-2.0
"""The command line itself: what it imports, lists and prints."""

import json
import subprocess
import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from vllm_megamoe_plugin import __version__, cli

COMMANDS = ("serve", "doctor", "inspect", "demo", "sync-check")
HEAVY = ("torch", "vllm", "safetensors", "huggingface_hub")


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, check=False
    )


def test_starting_up_imports_nothing_heavy() -> None:
    code = (
        "import sys, vllm_megamoe_plugin.cli; "
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_what_serve_asks_before_vllm_imports_nothing_heavy() -> None:
    code = (
        "import sys; from vllm_megamoe_plugin.tools import doctor, serve; "
        "serve.plan(['M'], {}); doctor.install_faults(needs_plugin=True); "
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_module_is_the_command_line() -> None:
    done = python("-m", "vllm_megamoe_plugin", "--version")
    assert (done.returncode, done.stdout) == (0, f"vllm-megamoe {__version__}\n")


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.output for command in COMMANDS)


@pytest.mark.parametrize("args", [[], ["dance"], ["inspect"], ["doctor", "--dance"]])
def test_bad_usage_is_exit_code_2(args: list[str]) -> None:
    assert CliRunner().invoke(cli.app, args).exit_code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_json(command: str) -> None:
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output


def test_json_is_one_strict_line_and_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print("before")
    with pytest.raises(cli.typer.Exit) as end:
        cli._finish(1, True, {"text": "two\nlines"})
    assert end.value.exit_code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"text": "two\nlines"}
    # NaN is not JSON: a report must turn it into text itself
    with pytest.raises(ValueError, match="not JSON compliant"):
        cli._finish(0, True, {"value": float("nan")})


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo's module, replaced by one that only notes how it was called."""
    module = ModuleType("vllm_megamoe_plugin.tools.demo")
    module.calls = []

    def run_demo(*args: object) -> int:
        module.calls.append(args)
        return 1

    module.run_demo = run_demo
    module.shipped_model = lambda: "shipped"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_demo_gets_its_options(demo: ModuleType) -> None:
    assert CliRunner().invoke(cli.app, ["demo"]).exit_code == 1
    assert demo.calls == [("shipped", 60, None, False)]
    args = ["demo", "--model", "m", "--problems", "5", "--port", "81", "--json"]
    assert CliRunner().invoke(cli.app, args).exit_code == 1
    model, *rest = demo.calls[-1]
    assert (str(model), rest) == ("m", [5, 81, True])
    assert CliRunner().invoke(cli.app, ["demo", "--problems", "0"]).exit_code == 2


def test_demo_without_its_model_checks_nothing(demo: ModuleType) -> None:
    def absent() -> None:
        raise FileNotFoundError("The demo's model is not installed")

    demo.shipped_model = absent
    result = CliRunner().invoke(cli.app, ["demo", "--json"])
    assert result.exit_code == 2
    assert "not installed" in json.loads(result.stdout)["error"]
