# SPDX-License-Identifier: Apache-2.0
"""`vllm-megamoe inspect`: is a checkpoint's set of experts whole, sane and runnable?

Puts the checks of `shards`, `expert_tensors` and `scale_checks` together and asks the
kernels. Imports no vLLM. Values are read one tensor at a time (one expert of a fused
tensor), never a whole checkpoint.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..checkpoint import PER_TENSOR, Quantization, Role, read_quantization
from ..kernels.base import Problem
from ..kernels.select import probe
from .doctor import show_list
from .expert_tensors import ExpertTensors, Part, first_of
from .scale_checks import ScaleChecks
from .shards import Finding, NothingToCheckError, Shards, scan

#: What a checkpoint may be served on: name -> (torch device type, capability).
DEVICES: dict[str, tuple[str, tuple[int, int] | None]] = {
    "SM100": ("cuda", (10, 0)),
    "SM103": ("cuda", (10, 3)),
    "SM120": ("cuda", (12, 0)),
    "SM121": ("cuda", (12, 1)),
    "SM90": ("cuda", (9, 0)),
    "SM89": ("cuda", (8, 9)),
    "SM80": ("cuda", (8, 0)),
    "CPU": ("cpu", None),
}

#: Findings of one kind that are printed; JSON has all.
_SHOWN = 20

#: Passes the items of its first argument through and shows progress; the second is
#: how many there are.
Track = Callable[[Iterable[Any], int], Iterable[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What `inspect` found. The field names are the keys of its JSON line."""

    checkpoint: str
    format: str
    convention: str
    mode: str
    """Activation mode that auto runs: w4a16 for a weight-only checkpoint."""
    layers: int
    experts: int
    hidden: int
    intermediate: int
    tensors: int
    """Stored expert tensors."""
    bytes: int
    """Their size."""
    faults: list[Finding]
    warnings: list[Finding]
    gate_up: dict[str, Any]
    """pairs, differ; if any differ: largest_ratio, layer, expert, gate, up."""
    input_scales: dict[str, Any]
    """missing, present, usable, a count per unusable state, min and max multiplier."""
    block_scales: dict[str, Any]
    """count, nan, zero, saturated, baking: what b12x-style baking would do."""
    kernels: dict[str, Any]
    """device type -> {runs: name or None, reasons: {kernel: [why not]}}."""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON; findings as {kind, message, tensor, layer, expert,
        value}."""
        return asdict(self)


def inspect(checkpoint: str, track: Track = lambda items, total: items) -> Report:
    """Check the experts of a checkpoint.

    Args:
        checkpoint: a local folder, or a Hugging Face repository to download.
        track: shows progress over the tensors whose values are read.

    Raises:
        NothingToCheckError: no folder, no configuration, no experts, or a scheme
            the plugin has no format row for.
    """
    folder = locate(checkpoint)
    config = read_config(folder)
    try:
        quantization = read_quantization(config)
    except NotImplementedError as error:
        raise NothingToCheckError(f"{checkpoint}: {error}") from error
    shards = scan(folder)
    experts = ExpertTensors(shards.tensors, config, quantization)
    if not experts.stored:
        seen = " ".join(fault.message for fault in shards.faults)
        raise NothingToCheckError(
            f"{checkpoint}: none of its {len(shards.tensors)} tensors belongs to an "
            f"expert. {seen}".rstrip()
        )
    warnings = list(shards.warnings)
    if shards.unlisted:
        files = ", ".join(sorted(shards.unlisted))
        message = f"coverage was not checked: nobody knows what is in {files}."
        warnings.append(Finding(kind="unchecked", value=files, message=message))
    else:
        experts.check_coverage()
    experts.check_shapes()
    checks = ScaleChecks()
    _read_values(shards, experts, checks, track)
    kernels, unrunnable = _ask_kernels(experts, config, quantization)
    if quantization.convention.format.scale_dtype and mode_of(quantization) != "w4a4":
        message = "weight-only checkpoint, no input scales declared: runs w4a16 only."
        warnings.append(Finding(kind="weight_only", message=message))
    return Report(
        checkpoint=checkpoint,
        format=quantization.convention.format.name,
        convention=quantization.convention.name,
        mode=mode_of(quantization),
        layers=len(experts.layers),
        experts=experts.num_experts,
        hidden=experts.hidden,
        intermediate=experts.intermediate,
        tensors=len(experts.stored),
        bytes=sum(stored.nbytes for stored in experts.stored.values()),
        faults=shards.faults + experts.faults + checks.faults + unrunnable,
        warnings=warnings + checks.warnings,
        gate_up=checks.gate_up(),
        input_scales={"missing": experts.num_missing(Role.INPUT_SCALE)}
        | checks.input_scales(),
        block_scales=checks.block_scales(),
        kernels=kernels,
    )


def locate(checkpoint: str) -> Path:
    """The checkpoint's folder, downloaded if it is not a local path.

    Raises:
        NothingToCheckError: neither a folder nor something that can be downloaded.
    """
    folder = Path(checkpoint)
    if folder.is_dir():
        return folder
    if folder.exists() or checkpoint.startswith(("/", ".", "~")):
        raise NothingToCheckError(f"{checkpoint}: no such folder.")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise NothingToCheckError(
            f"{checkpoint}: no such folder, and huggingface_hub is not installed to "
            "download it. Pass the folder of a checkpoint."
        ) from error
    try:
        wanted = ["*.json", "*.safetensors"]
        return Path(snapshot_download(checkpoint, allow_patterns=wanted))
    # huggingface_hub raises OSError (no network, no repository) or a bad-name error
    except (OSError, HFValidationError) as error:
        raise NothingToCheckError(
            f"{checkpoint}: no such folder, and the download failed: {error}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`, with a nested text model's keys and ModelOpt's own file merged.

    Raises:
        NothingToCheckError: there is none, or it is not JSON.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        config = {**config, **(config.get("text_config") or {})}
        path = folder / "hf_quant_config.json"
        if not config.get("quantization_config") and path.exists():
            quantization = json.loads(path.read_text())
            config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    except (OSError, ValueError, AttributeError) as error:
        raise NothingToCheckError(
            f"{path}: cannot be read ({error}). It says how many experts there are and "
            "how they are quantized."
        ) from error
    return config


def mode_of(quantization: Quantization) -> str:
    """Activation mode that auto runs: the format's first that the checkpoint allows."""
    modes = quantization.convention.format.modes
    return modes[0] if quantization.quantized_activations else modes[-1]


def _read_values(
    shards: Shards, experts: ExpertTensors, checks: ScaleChecks, track: Track
) -> None:
    """Per-tensor scales first: what baking does to block scales depends on them."""
    bad_dtype = {fault.tensor for fault in experts.faults if fault.kind == "dtype"}
    scalars: list[Part] = []
    others: list[Part] = []
    for part in experts.parts.values():
        packed = experts.convention(part.layer).format.scale_dtype is not None
        if part.stored.name in bad_dtype or (packed and part.role is Role.WEIGHT):
            continue  # every packed code is a number
        (scalars if part.role in PER_TENSOR else others).append(part)
    reads = chain(_read(shards, experts, scalars), _read(shards, experts, others))
    for part, tensor in track(reads, len(scalars) + len(others)):
        if part.role in PER_TENSOR:
            checks.add_scalar(part, tensor, experts.convention(part.layer))
        elif part.role is Role.BLOCK_SCALE:
            checks.add_block_scales(part, tensor)
        else:
            checks.add_weight(part, tensor)
    checks.finish_scalars()


def _read(
    shards: Shards, experts: ExpertTensors, parts: list[Part]
) -> Iterator[tuple[Part, Tensor]]:
    """Each part with its values, file by file; a fused tensor one expert at a time."""
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        by_name.setdefault(part.stored.name, []).append(part)
    for stored, file in shards.read(same[0].stored for same in by_name.values()):
        same = by_name[stored.name]
        if not same[0].fused:
            yield same[0], file.get_tensor(stored.name)
            continue
        slices = file.get_slice(stored.name)
        of = {(part.expert, part.shard): part for part in same}
        for expert in sorted({part.expert for part in same}):
            for shard, view in experts.split(stored, slices[expert : expert + 1]):
                yield of[expert, shard], view


def _ask_kernels(
    experts: ExpertTensors, config: Mapping[str, Any], quantization: Quantization
) -> tuple[dict[str, Any], list[Finding]]:
    """(what runs on each device type and why the rest cannot, fault if nothing can)."""
    answers: dict[str, Any] = {}
    for name, (device, capability) in DEVICES.items():
        problem = Problem(
            format=quantization.convention.format,
            mode=mode_of(quantization),
            num_experts=experts.num_experts,
            hidden=experts.hidden,
            intermediate=experts.intermediate,
            top_k=first_of(config, "num_experts_per_tok", "moe_topk") or 1,
            activation=config.get("hidden_act") or "silu",
            swiglu_limit=config.get("swiglu_limit"),
            device=device,
            capability=capability,
            graphs=device == "cuda",
        )
        supports = probe(problem)
        answers[name] = {
            "runs": next((kernel for kernel, s in supports.items() if s), None),
            "reasons": {k: list(s.reasons) for k, s in supports.items() if not s},
        }
    if any(answer["runs"] for answer in answers.values()):
        return answers, []
    reasons = {
        f"{k}: {r}"
        for a in answers.values()
        for k in a["reasons"]
        for r in a["reasons"][k]
    }
    message = f"no kernel runs these sizes on any device: {'; '.join(sorted(reasons))}."
    value = {"hidden": experts.hidden, "intermediate": experts.intermediate}
    return answers, [Finding(kind="no_kernel", value=value, message=message)]


def show(report: Report, console: Console) -> None:
    """Print the report for people: the numbers, then every kind of finding."""
    for line in _summary(report):
        console.print(line, markup=False, soft_wrap=True)
    table = Table("device", "runs", "why the other kernels do not")
    for (runs, why), devices in _by_answer(report.kernels).items():
        table.add_row(", ".join(devices), runs, why)
    console.print(table)
    for label, style, findings in (
        ("warning", "yellow", report.warnings),
        ("fault", "red", report.faults),
    ):
        for kind, count in Counter(f.kind for f in findings).items():
            shown = [f.message for f in findings if f.kind == kind][:_SHOWN]
            if count > len(shown):
                shown.append(f"and {count - len(shown)} more; --json has them all.")
            show_list(console, f"{label} [{kind}]", style, shown)
    console.print(
        f"inspect: {report.tensors:,} expert tensors compared with the "
        f"{report.convention} {report.format} layout, {len(report.faults)} faults, "
        f"{len(report.warnings)} warnings.",
        soft_wrap=True,
    )


def _by_answer(kernels: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    """(what runs, why not the others) -> the devices of which that is true."""
    groups: dict[tuple[str, str], list[str]] = {}
    for device, answer in kernels.items():
        why = "\n".join(f"{k}: {', '.join(r)}" for k, r in answer["reasons"].items())
        key = (answer["runs"] or "none", why.replace(f", found {device}", ""))
        groups.setdefault(key, []).append(device)
    return groups


def _summary(report: Report) -> Iterator[str]:
    gate_up, scales, blocks = report.gate_up, report.input_scales, report.block_scales
    yield (
        f"{report.checkpoint}: {report.format} ({report.convention}), runs "
        f"{report.mode}; {report.layers} MoE layers of {report.experts} experts, "
        f"hidden {report.hidden}, intermediate {report.intermediate}; "
        f"{report.tensors:,} expert tensors, {report.bytes / 2**30:.3f} GiB."
    )
    if gate_up["pairs"]:
        line = f"{gate_up['differ']} of {gate_up['pairs']} pairs differ"
        if gate_up["differ"]:
            line += (
                f", by up to {gate_up['largest_ratio']:.4g}x ({gate_up['layer']} "
                f"expert {gate_up['expert']}: {gate_up['gate']:.4g} and "
                f"{gate_up['up']:.4g}); each half keeps its own, exactly"
            )
        yield f"gate/up global scales: {line}."
    if scales["present"] or scales["missing"]:
        states = ("missing", "dead", "zero", "infinite", "nan", "negative", "denormal")
        counts = ", ".join(f"{scales[state]} {state}" for state in states)
        yield (
            f"input scales: {scales['usable']} of {scales['present']} usable "
            f"({counts}), {scales['min'] or 0:.4g} to {scales['max'] or 0:.4g}."
        )
    if blocks["count"]:
        yield (
            f"block scales: {blocks['count']:,}; {blocks['nan']} NaN, "
            f"{blocks['zero']:,} zero, {blocks['saturated']:,} at 448."
        )
    if blocks.get("baking"):
        baking = blocks["baking"]
        yield (
            "baking global scales into them, as b12x does in stock vLLM, would make "
            f"{baking['subnormal_share']:.2%} subnormal and {baking['zero_share']:.2%} "
            f"zero, mean weight error {baking['mean_relative_error']:.2%}; here they "
            "stay as stored."
        )
