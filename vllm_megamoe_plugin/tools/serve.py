# SPDX-License-Identifier: Apache-2.0
"""`vllm-megamoe serve`: vLLM's own `serve` with this plugin's backend.

Adds `--moe-backend megamoe` and `--host 127.0.0.1` unless they are given, guards a
server whose weights can be changed, and passes everything else through. Imports vLLM
only to run it.
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
#: In every worker of a server whose weights can be changed: answers about its tensors.
WORKER_EXTENSION = "vllm_megamoe_plugin.sync.worker_extension.MegaMoEWorkerExtension"
#: In front of such a server's endpoints: no answer from incomplete weights.
GATE = "vllm_megamoe_plugin.sync.gate.RefuseIncomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What will be run."""

    argv: list[str]
    """vLLM's command line, `vllm serve ...`."""
    env: dict[str, str]
    """Variables to set."""
    needs_plugin: bool
    """Whether the backend is this plugin's."""
    faults: list[str]
    """Why it must not be run; each says what to do."""


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
    headless = (_given(args, "headless") or "").lower() not in ("", "false")
    if not headless and _given(args, "host") is None:
        # reachable from this machine only, unless asked
        extra += ["--host", "127.0.0.1"]
    faults: list[str] = []
    if is_megamoe(backend) and _weights_can_change(args, environ):
        if _given(args, "worker-extension-cls") is None:
            extra += ["--worker-extension-cls", WORKER_EXTENSION]
        # the API server is on another node
        if not headless:
            extra += _gate(args)
            faults += _gate_faults(args, environ)
    defaults = _cpu_defaults(args) if is_cpu_build(environ) else {}
    return Plan(
        argv=["vllm", "serve", *args, *extra],
        env={name: v for name, v in defaults.items() if name not in environ},
        needs_plugin=is_megamoe(backend),
        faults=faults,
    )


def _cpu_defaults(args: Sequence[str]) -> dict[str, str]:
    """Variables of a CPU server.

    vLLM gives each rank a NUMA node of its own and ends if there are too few; then the
    cores are shared out. Replicas (data parallel) bind themselves.
    """
    ranks = _size(args, "tensor-parallel-size", "tp")
    ranks *= _size(args, "pipeline-parallel-size", "pp")
    cores = sorted(os.sched_getaffinity(0))
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    if not nodes < ranks <= len(cores) or _size(args, "data-parallel-size", "dp") > 1:
        return CPU_DEFAULTS
    share = len(cores) // ranks
    groups = [cores[i * share : (i + 1) * share] for i in range(ranks)]
    bind = "|".join(",".join(map(str, group)) for group in groups)
    return {**CPU_DEFAULTS, "VLLM_CPU_OMP_THREADS_BIND": bind}


def _size(args: Sequence[str], option: str, short: str) -> int:
    given = [*_all_given(args, short, dashes="-")] or [_given(args, option)]
    return int(given[-1]) if given[-1] and given[-1].isdigit() else 1


def _weights_can_change(args: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the server will have endpoints that change weights."""
    developer = environ.get("VLLM_SERVER_DEV_MODE", "0") not in ("", "0")
    return developer or _given(args, "weight-transfer-config") is not None


def _gate(args: Sequence[str]) -> list[str]:
    """Options that put the gate before the one API server process it works for.

    It learns about the weights from the requests that change them, so every request
    has to pass it; under data parallelism vLLM starts a process per replica.
    """
    gate = [] if GATE in _all_given(args, "middleware") else ["--middleware", GATE]
    one = [] if _api_servers(args) is not None else ["--api-server-count", "1"]
    return gate + one


def _gate_faults(args: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    faults = []
    count = _api_servers(args)
    if count not in (None, "0", "1"):
        faults.append(
            f"--api-server-count {count}: a server whose weights can be changed needs "
            "one API server process, or another one would answer from incomplete "
            "weights. Use --api-server-count 1; for more front ends start servers "
            "with --data-parallel-external-lb."
        )
    if environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        faults.append(
            "VLLM_USE_RUST_FRONTEND: vLLM's Rust front end runs no middleware, so it "
            "would answer from incomplete weights. Unset it."
        )
    return faults


def _api_servers(args: Sequence[str]) -> str | None:
    short = _all_given(args, "asc", dashes="-")
    return short[-1] if short else _given(args, "api-server-count")


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
    if values := _all_given(args, option):
        return values[-1]  # as argparse decides
    if option == "config":
        return None
    key = re.compile(rf"^{option.replace('-', '[-_]')}[ \t]*:[ \t]*(\S*)", re.MULTILINE)
    match = key.search(_config_text(args))
    return match[1].strip("\"'") if match else None


def _all_given(args: Sequence[str], option: str, dashes: str = "--") -> list[str]:
    """Every value an option has in the arguments; of a last flag, "true"."""
    spelled = re.compile(rf"{dashes}{option.replace('-', '[-_]')}(?:=(.*))?", re.DOTALL)
    following = [*args[1:], "true"]
    return [
        after if match[1] is None else match[1]
        for arg, after in zip(args, following, strict=False)
        if (match := spelled.fullmatch(arg)) is not None
    ]


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
