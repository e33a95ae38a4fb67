# SPDX-License-Identifier: Apache-2.0
"""`vllm-megamoe serve`: vLLM's own `serve` with this plugin's backend.

Adds `--moe-backend megamoe` and `--host 127.0.0.1` unless they are given, completes the
options of this plugin's weight-transfer engine, and passes everything else through.
Imports vLLM only to run it.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import invalidate_caches, metadata
from pathlib import Path

from ..compat import BACKEND, is_megamoe
from .doctor import version_of

#: Set for a CPU build of vLLM unless the user has: its default takes most of the RAM.
CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1"}
#: Name of this plugin's weight-transfer engine.
DIRECT_ENGINE = "megamoe_direct"
#: What a server that uses it needs besides: answers about its tensors, and a clear
#: refusal while an update is incomplete.
DIRECT_ENGINE_OPTIONS = {
    "worker-extension-cls": (
        "vllm_megamoe_plugin.sync.worker_extension.MegaMoEWorkerExtension"
    ),
    "middleware": "vllm_megamoe_plugin.sync.gate.RefuseIncomplete",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What will be run."""

    argv: list[str]
    """vLLM's command line, `vllm serve ...`."""
    env: dict[str, str]
    """Variables to set."""
    needs_plugin: bool
    """Whether the backend is this plugin's."""


def plan(args: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Complete the arguments of `vllm serve`.

    Args:
        args: what followed `serve`, unchanged.
        environ: the user's environment, which wins over the defaults.
    """
    extra: list[str] = []
    backend = _backend(args)
    if backend is None:
        extra += ["--moe-backend", BACKEND]
        backend = BACKEND
    if _given(args, "host") is None:
        # reachable from this machine only, unless asked
        extra += ["--host", "127.0.0.1"]
    if DIRECT_ENGINE in (_given(args, "weight-transfer-config") or ""):
        for option, value in DIRECT_ENGINE_OPTIONS.items():
            if _given(args, option) is None:
                extra += [f"--{option}", value]
    defaults = CPU_DEFAULTS if is_cpu_build(environ) else {}
    return Plan(
        argv=["vllm", "serve", *args, *extra],
        env={name: v for name, v in defaults.items() if name not in environ},
        needs_plugin=is_megamoe(backend),
    )


def run(plan: Plan) -> int:
    """Run vLLM's command line in this process until the server ends.

    Returns:
        its exit code.
    """
    os.environ.update(plan.env)
    with vllm_metadata():
        from vllm.entrypoints.cli.main import main

        sys.argv = plan.argv
        try:
            main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


@contextmanager
def vllm_metadata() -> Iterator[None]:
    """Let this process and its children find metadata of a distribution `vllm`.

    Why: vllm-cpu installs the package vllm under the distribution name vllm-cpu, but
    vLLM's command line and others ask importlib.metadata for "vllm". The answer must
    contain "cpu", or vLLM will not choose its CPU platform. A folder on the path
    serves every lookup and is inherited by spawned engine processes, which a patched
    function would not be. Goes when vllm-cpu ships that metadata, or vLLM stops asking.
    """
    if version_of("vllm") is not None or version_of("vllm-cpu") is None:
        yield
        return
    found = metadata.metadata("vllm-cpu")
    version = f"{found['Version']}+cpu"
    lines = ["Metadata-Version: 2.1", "Name: vllm", f"Version: {version}"]
    for field in ("Provides-Extra", "Requires-Dist"):
        lines += [f"{field}: {value}" for value in found.get_all(field) or ()]
    with tempfile.TemporaryDirectory(prefix="vllm-metadata-") as folder:
        info = Path(folder) / f"vllm-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, before]))
        sys.path.append(folder)
        invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def is_cpu_build(environ: Mapping[str, str]) -> bool:
    vllm = version_of("vllm")
    installed = "cpu" in vllm if vllm else version_of("vllm-cpu") is not None
    return installed or environ.get("VLLM_TARGET_DEVICE") == "cpu"


def _given(args: Sequence[str], option: str) -> str | None:
    """Value of `--option V` or `--option=V` in the arguments or their config file."""
    spelled = re.compile(rf"--{option.replace('-', '[-_]')}(?:=(.*))?", re.DOTALL)
    for i, arg in enumerate(args):
        match = spelled.fullmatch(arg)
        if match is not None:
            following = args[i + 1] if i + 1 < len(args) else ""
            return following if match[1] is None else match[1]
    if option == "config":
        return None
    key = re.compile(rf"^{option.replace('-', '[-_]')}[ \t]*:[ \t]*(\S*)", re.MULTILINE)
    match = key.search(_config_text(args))
    return match[1].strip("\"'") if match else None


def _config_text(args: Sequence[str]) -> str:
    """Text of vLLM's `--config` file, whose keys are options without the dashes."""
    path = _given(args, "config")
    return Path(path).read_text() if path and Path(path).is_file() else ""


def _backend(args: Sequence[str]) -> str | None:
    """The MoE backend the arguments choose, in any of the spellings vLLM takes."""
    for option in ("moe-backend", r"kernel-config\.moe-backend"):
        name = _given(args, option)
        if name is not None:
            return name
    nested = re.search(
        r"moe_backend\W+(\w+)", _given(args, "kernel-config") or _config_text(args)
    )
    return nested[1] if nested else None
