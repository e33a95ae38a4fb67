# SPDX-License-Identifier: Apache-2.0
"""`vllm-megamoe sync-check`: prove that a server takes new weights whole.

Ties the protocol (`sync_session`), its verdict (`sync_verdict`) and its report
(`sync_report`) into one command.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from . import sync_report
from .launch import leave_on_sigterm
from .shards import NothingToCheckError
from .sync_session import WAYS, Options, check_server


def known_ways(asked: Sequence[str]) -> tuple[str, ...]:
    """The ways asked for, all by default.

    Raises:
        NothingToCheckError: one that does not exist.
    """
    if unknown := sorted({*asked} - WAYS.keys()):
        raise NothingToCheckError(
            f"There is no way {unknown[0]!r} to update; --via takes {', '.join(WAYS)}."
        )
    return tuple(asked) or tuple(WAYS)


def run(
    options: Options, markdown: Path | None, command: str, console: Console
) -> tuple[int, dict[str, Any]]:
    """Check, print the table, write the report.

    Args:
        markdown: file to write the report to.
        command: what was typed, for the report.
        console: where the table goes; progress goes to stderr.

    Returns:
        exit code and JSON: 0 if every way compared equal, 1 if any did not, 2 if one
        that was asked for could not be compared.

    Raises:
        NothingToCheckError: nothing was compared at all.
    """
    if "://" in options.target and options.serve_options:
        raise NothingToCheckError(
            f"{options.target} runs already, so it takes no options of `vllm serve`: "
            f"{' '.join(options.serve_options)}."
        )
    _check_writable(markdown)
    leave_on_sigterm()
    errors = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn())
    try:
        with Progress(*columns, console=errors) as progress:
            report = check_server(options, progress)
    except NothingToCheckError:
        raise
    except (OSError, RuntimeError) as e:
        errors.print(f"sync-check broke off: {e}", markup=False, soft_wrap=True)
        return 1, {"target": options.target, "faults": [str(e)], "exit_code": 1}
    sync_report.show(report, console)
    if markdown is not None:
        markdown.write_text(sync_report.to_markdown(report, command))
    return report.exit_code, sync_report.to_json(report)


def _check_writable(file: Path | None) -> None:
    """Find out now, not after the check, that the report cannot be written."""
    if file is None:
        return
    try:
        file.open("a").close()
    except OSError as e:
        raise NothingToCheckError(f"The report cannot be written: {e}") from e
