# SPDX-License-Identifier: Apache-2.0
"""The report of a sync check: as JSON, as a table, as Markdown."""

import shlex
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__
from .observe import PROMPTS
from .sync_session import WAYS
from .sync_verdict import Counts, Report, Step, Way, count

_COLUMNS = ("tensors", "expected", "changed", "restored", "moved")
_VERDICTS = {
    0: "EQUAL: every way changed exactly what it should and restored every byte.",
    1: "FAULT: an update did not do what it should.",
    2: "NOT CHECKED: something that was asked for could not be compared.",
}


def to_json(report: Report) -> dict[str, Any]:
    """The whole report, JSON values only."""
    return {
        "target": report.target,
        "url": report.url,
        "checkpoint": report.checkpoint,
        "served_with": report.served_with,
        "versions": _versions(report),
        "ranks": report.ranks,
        "layers": report.layers,
        "tensors": len(report.cold.digests),
        "expected": len(report.expectation.fed),
        "attributes": sorted(report.expectation.free),
        "first_update_in_place": _step_json(report.first),
        "ways": {way.name: _way_json(report, way) for way in report.ways},
        "faults": report.faults(),
        "not_checked": report.unchecked(),
        "exit_code": report.exit_code,
    }


def show(report: Report, console: Console) -> None:
    """A table with a row per way and rank, and every fault in words.

    `changed` counts against what the scrambled weights must change, `restored` against
    all tensors.
    """
    columns = ("way", "rank", "changed", "restored", "moved", "probe")
    table = Table(*columns, box=None, padding=(0, 1), pad_edge=False)
    for way in report.ways:
        for rank in report.ranks if way.steps else ():
            n = _count(report, way, rank)
            changed, restored = f"{n.changed}/{n.expected}", f"{n.restored}/{n.tensors}"
            cells = (way.name, rank, changed, restored, str(n.moved), _probe(way))
            table.add_row(*cells)
    if table.row_count:
        console.print(table)
    for way in report.ways:
        if way.steps:
            console.print(f"{way.name}: {_seconds(way)}", markup=False)
    for line in (*report.faults(), *report.unchecked(), *_aftermath(report)):
        console.print(line, markup=False, soft_wrap=True)
    console.print(_VERDICTS[report.exit_code], markup=False)


def to_markdown(report: Report, command: str) -> str:
    """The report as a document.

    Args:
        command: what was typed.
    """
    return "\n".join(_markdown(report, command)) + "\n"


def _markdown(report: Report, command: str) -> Iterator[str]:
    yield "# Weight sync check"
    yield f"\n**{_VERDICTS[report.exit_code]}**\n"
    versions = ", ".join(f"{name} {v}" for name, v in _versions(report).items())
    yield f"* Command: `{command}`"
    if report.served_with:
        yield f"* Server: `{shlex.join(report.served_with)}`"
    yield f"* Server at {report.url}, ranks: {len(report.ranks)}; {versions}"
    yield f"* Checkpoint: `{report.checkpoint}`"
    yield f"* {report.layers} MegaMoE layers over all ranks"
    yield (
        f"* {len(report.cold.digests)} tensors digested over all ranks (SHA-256 of "
        f"type, shape and bytes); the checkpoint feeds {len(report.expectation.fed)} "
        "of them, directly or through what is derived; the others must not change"
    )
    yield (
        "* Each way: an update with the same weights, one with every element of every "
        "tensor changed, one with the real weights; compared with the cold start. "
        f"Probe: {len(PROMPTS)} fixed prompts on each replica, greedy, one at a time, "
        "from an empty prefix cache, texts and log probabilities."
    )
    yield "\n| way | rank | " + " | ".join(_COLUMNS) + " | probe |"
    yield "|" + "---|" * (len(_COLUMNS) + 3)
    for way in report.ways:
        for rank in report.ranks if way.steps else ():
            cells = " | ".join(str(n) for n in _cells(_count(report, way, rank)))
            yield f"| {way.name} | {rank} | {cells} | {_probe(way)} |"
    yield (
        "\n`changed`: by the scrambled weights, against `expected`. Seconds below are "
        "those of each update, from pausing the server to resuming it.\n"
    )
    for way in report.ways:
        took = f"; {_seconds(way)}" if way.steps else ""
        yield f"* {way.name} ({WAYS[way.name]}): **{way.verdict}**{took}"
    for title, lines in (
        ("Faults", report.faults()),
        ("Not checked", report.unchecked()),
        ("Afterwards", _aftermath(report)),
    ):
        if lines:
            yield f"\n## {title}\n"
            yield from (f"* {line}" for line in lines)
    names = sorted({n for step in _steps(report) for n in _failed(step)})
    if names:
        yield "\n## Every name that failed\n"
        yield from (f"* `{name}`" for name in names)


def _versions(report: Report) -> dict[str, str]:
    return {
        "vllm_megamoe_plugin (here)": __version__,
        "vLLM": report.vllm,
        "torch (here)": torch.__version__,
    }


def _way_json(report: Report, way: Way) -> dict[str, Any]:
    return {
        "verdict": way.verdict,
        "reasons": way.faults(),
        "not_checked": way.unchecked,
        "aftermath": way.aftermath,
        **_counts_json(_count(report, way, None)),
        "ranks": {
            rank: _counts_json(_count(report, way, rank)) for rank in report.ranks
        },
        "steps": {step.name: _step_json(step) for step in way.steps},
    }


def _counts_json(counts: Counts) -> dict[str, int]:
    return dict(zip(_COLUMNS, _cells(counts), strict=True))


def _step_json(step: Step) -> dict[str, Any]:
    return {
        "seconds": round(step.seconds, 3),
        "changed": len(step.changed),
        "did_not_change": step.stale,
        "unexpected": step.unexpected,
        "moved": step.moved,
        "missing": step.missing,
        "added": step.added,
        "probe_equal": step.probe_equal,
        "incomplete": step.incomplete,
        "faults": step.faults(),
    }


def _count(report: Report, way: Way, rank: str | None) -> Counts:
    return count(way, report.cold.digests, report.expectation.fed, rank)


def _cells(counts: Counts) -> list[int]:
    return [getattr(counts, column) for column in _COLUMNS]


def _steps(report: Report) -> Iterator[Step]:
    yield report.first
    for way in report.ways:
        yield from way.steps


def _failed(step: Step) -> set[str]:
    return {*step.stale, *step.unexpected, *step.moved, *step.missing, *step.added}


def _probe(way: Way) -> str:
    """Whether the probe changed with the scramble and came back bit for bit."""
    equal = {step.name: step.probe_equal for step in way.steps}
    if "restore" not in equal:
        return "-"
    if equal["scramble"]:
        return "UNCHANGED"
    return "restored" if equal["restore"] else "DIFFERS"


def _seconds(way: Way) -> str:
    """Of each update, from pausing the server to resuming it."""
    return ", ".join(f"{step.name} {step.seconds:.2f} s" for step in way.steps)


def _aftermath(report: Report) -> list[str]:
    return [f"{way.name}: {way.aftermath}" for way in report.ways if way.aftermath]
