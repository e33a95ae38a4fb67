# SPDX-License-Identifier: Apache-2.0
"""Arrows point one way, vLLM stays at the edge, files stay small, tests mirror them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_megamoe_plugin import envs

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vllm_megamoe_plugin"
TESTS = ROOT / "tests"
MAX_LINES = 450

#: Who may import whom: only a room of a lower level, or the same room. Adding a file
#: means giving it a level here.
LEVELS = {
    "envs": 0,
    "formats": 0,
    "compat": 0,
    "layouts": 1,
    "checkpoint": 1,
    "eplb": 0,
    "ledger": 1,
    "reload": 1,
    "loader": 2,
    "scales": 3,
    "kernels": 4,
    "experts": 5,
    "moe_method": 6,
    "native": 6,
    "sync": 7,
    "registration": 8,
    "tools": 9,
    "evals": 10,
    "bench": 10,
    "cli": 11,
    "__main__": 12,
}
#: Rooms that may import vLLM; all others work with torch alone.
MAY_IMPORT_VLLM = {
    "compat",
    "reload",
    "registration",
    "moe_method",
    "native",
    "sync",
    "tools",
    "evals",
    "bench",
}
#: Package files without a test file of their own, and who tests them.
TESTED_ELSEWHERE = {
    "__init__.py": "test_package.py",
    "__main__.py": "test_cli.py",
    "kernels/portable/combine.py": "kernels/portable/test_launch.py",
    "kernels/portable/gemm.py": "kernels/portable/test_launch.py",
    "kernels/portable/prepare.py": "kernels/portable/test_launch.py",
    "registration.py": "test_package.py",
    "sync/state.py": "test_reload.py",
}
#: Test files about more than one package file.
ABOUT_THE_WHOLE = {
    "test_architecture.py",
    "test_package.py",
    "test_placements.py",
    "test_served.py",
    "test_whole_model.py",
    "sync/test_faults_served.py",
    "sync/test_incomplete_served.py",
    "sync/test_ranks_served.py",
    "sync/test_malformed.py",
    "sync/test_wire_gpu.py",
    "sync/test_gpu_served.py",
    "sync/test_tied_head.py",
}

FILES = sorted(PACKAGE.rglob("*.py"))
files = pytest.mark.parametrize(
    "path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES]
)


def _room(path: Path) -> str:
    """Top-level name below the package: `formats`, `kernels`, `sync`, ..."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, at any depth of its code."""
    package = path.relative_to(ROOT).with_suffix("").parts
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: -node.level]) if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def _rooms_imported(path: Path) -> set[str]:
    parts = [name.split(".") for name in _imports(path)]
    return {p[1] for p in parts if p[0] == PACKAGE.name and len(p) > 1}


@files
def test_arrows_point_down(path: Path) -> None:
    room = _room(path)
    if room == "__init__":
        return  # imports its rooms inside functions, see test_package.py
    imported = _rooms_imported(path) - {room, "__version__"}
    unknown = {r for r in {room} | imported if r not in LEVELS}
    assert not unknown, f"give {unknown} a level"
    upward = {r for r in imported if LEVELS[r] >= LEVELS[room]}
    assert not upward, f"{room} (level {LEVELS[room]}) imports {upward}"


@files
def test_only_the_edge_imports_vllm(path: Path) -> None:
    imports_vllm = any(name.split(".")[0] == "vllm" for name in _imports(path))
    assert not imports_vllm or _room(path) in MAY_IMPORT_VLLM


def test_the_imports_are_found() -> None:
    """The checks above see relative, absolute and lazy imports."""
    assert "vllm_megamoe_plugin.registration.register_all" in _imports(
        PACKAGE / "__init__.py"
    )
    assert {"formats", "layouts", "scales"} <= _rooms_imported(
        PACKAGE / "kernels" / "reference.py"
    )
    assert "vllm.config.get_current_vllm_config" in _imports(PACKAGE / "moe_method.py")


#: Imported, with everything they need, in an interpreter that has no vLLM.
PURE = ("envs", "formats", "layouts", "checkpoint", "loader", "scales", "experts")
PURE += ("kernels.base", "kernels.reference", "kernels.select")


def test_pure_modules_work_without_vllm() -> None:
    code = "import sys; sys.modules['vllm'] = None\n" + "\n".join(
        f"import {PACKAGE.name}.{name}" for name in PURE
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


@files
def test_files_stay_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines, split the file"


@files
def test_every_file_is_licensed_and_says_what_it_owns(path: Path) -> None:
    text = path.read_text()
    if not text:
        return
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(ast.parse(text)), "needs a module docstring"


# --- tests mirror the package ---


@files
def test_every_file_has_its_test(path: Path) -> None:
    name = str(path.relative_to(PACKAGE))
    if path.name == "__init__.py" and name not in TESTED_ELSEWHERE:
        return
    mirror = Path(name).with_name(f"test_{path.name}")
    expected = TESTED_ELSEWHERE.get(name, str(mirror))
    assert (TESTS / expected).exists(), f"{name} needs tests/{expected}"


def test_every_test_is_about_a_file() -> None:
    stray = [
        name
        for path in TESTS.rglob("test_*.py")
        if (name := str(path.relative_to(TESTS))) not in ABOUT_THE_WHOLE
        and not name.startswith("examples/")
        and not (PACKAGE / name).with_name(path.name.removeprefix("test_")).exists()
    ]
    assert not stray, f"no package file for {stray}"


def test_exceptions_are_still_needed() -> None:
    assert all((PACKAGE / name).exists() for name in TESTED_ELSEWHERE)
    assert all((TESTS / name).exists() for name in ABOUT_THE_WHOLE)


# --- environment variables ---


@pytest.mark.parametrize("name", envs.VARIABLES)
def test_readme_lists_the_environment_variable(name: str) -> None:
    assert f"`{name}`" in (ROOT / "README.md").read_text()


def test_no_other_file_reads_our_environment_variables() -> None:
    for path in FILES:
        if path.name == "envs.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript | ast.Call):
                source = ast.unparse(node)
                if source.startswith(("os.environ", "os.getenv")):
                    assert "VLLM_MEGAMOE_" not in source, f"{path.name}: {source}"
