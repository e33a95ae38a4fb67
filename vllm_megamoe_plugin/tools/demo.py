# SPDX-License-Identifier: Apache-2.0
"""`vllm-megamoe demo`: serve the shipped model, break its weights, restore them.

The protocol: cold start; one update of the whole checkpoint, scrambled; one update of
the real checkpoint. After each, held-out problems are scored, fixed prompts are read
back with logprobs, and every tensor's SHA-256 and address is taken in the workers. The
server never restarts.
"""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from ..sync.digest import compare
from ..sync.sender import DirectSender, Server
from ..sync.source import checkpoint_weights
from . import observe
from .launch import free_port, launched, leave_on_sigterm, serve_command
from .scramble import scrambled

#: Name that the demo's server serves its model under.
SERVED_AS = "demo"
MIN_ACCURACY = 0.90
MAX_SCRAMBLED = 0.05
_STARTUP_S = 240
_REQUEST_S = 120
_MAX_TOKENS = 224
_CONCURRENCY = 16
_PROBES = 4
_PROBE_TOKENS = 48
_ANSWER = re.compile(r"####\s*(-?[\d,]+)")


def shipped_model() -> Path:
    """The small model that comes with the package, or with its source tree.

    Raises:
        FileNotFoundError: naming both places.
    """
    package = Path(__file__).resolve().parents[1]
    places = (
        package / "models" / "arith_moe" / "nvfp4",
        package.parent / "examples" / "arith_moe" / "nvfp4",
    )
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise FileNotFoundError(
        "The demo's model is not installed: neither "
        + " nor ".join(str(p) for p in places)
        + " holds a config.json. Reinstall the package, or pass a model directory."
    )


@dataclass(frozen=True, slots=True)
class Task:
    """One held-out problem as a prompt, and the number that answers it."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What a server shows of the weights it serves."""

    accuracy: float
    probe: observe.Probe
    digests: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The figures of one demo."""

    problems: int
    accuracy: float
    scrambled_accuracy: float
    restored_accuracy: float
    tensors_total: int
    tensors_changed: int
    tensors_restored: int
    tensors_moved: int
    texts_equal: bool
    logprobs_equal: bool
    sync_seconds: float
    seconds: float
    kernel: str

    def faults(self) -> list[str]:
        """Every reason why this is not a success."""
        checks = (
            (
                self.accuracy >= MIN_ACCURACY,
                f"accuracy {self.accuracy:.3f} is below {MIN_ACCURACY}",
            ),
            (
                self.scrambled_accuracy <= MAX_SCRAMBLED,
                f"scrambled weights still score {self.scrambled_accuracy:.3f}",
            ),
            (
                self.restored_accuracy >= MIN_ACCURACY,
                f"restored accuracy {self.restored_accuracy:.3f} is too low",
            ),
            (self.tensors_changed > 0, "the scrambled update changed no tensor"),
            (
                0 < self.tensors_restored == self.tensors_total,
                f"{self.tensors_restored} of {self.tensors_total} tensors restored",
            ),
            (self.tensors_moved == 0, f"{self.tensors_moved} tensors moved"),
            (self.texts_equal, "generated texts differ"),
            (self.logprobs_equal, "logprobs differ"),
        )
        return [reason for ok, reason in checks if not ok]


def load_tasks(folder: Path, problems: int) -> list[Task]:
    """Five-shot prompts of the first `problems` held-out problems.

    Raises:
        FileNotFoundError: the folder lacks problems.jsonl or fewshot.jsonl.
        ValueError: it has fewer problems.
    """
    held_out = _read_jsonl(folder / "problems.jsonl")
    if not 0 < problems <= len(held_out):
        raise ValueError(
            f"--problems must be between 1 and {len(held_out)}, got {problems}."
        )
    shots = "".join(
        f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n"
        for shot in _read_jsonl(folder / "fewshot.jsonl")
    )
    return [
        Task(
            f"{shots}Question: {item['question']}\nAnswer:",
            item["answer"].rsplit("####", 1)[1].strip().replace(",", ""),
        )
        for item in held_out[:problems]
    ]


def _read_jsonl(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


@contextmanager
def serving(model: Path, port: int, progress: Progress) -> Iterator[Server]:
    """A real server for the model, gone when the block is left for any reason.

    Raises:
        RuntimeError: it died or did not come up; with the last lines of its log.
    """
    options = {
        "served-model-name": SERVED_AS,
        "max-model-len": 1536,
        "max-num-seqs": _CONCURRENCY,
    }
    command = [*serve_command(model, port, options), "--enforce-eager"]
    with launched(
        command, port, progress, request_s=_REQUEST_S, startup_s=_STARTUP_S
    ) as server:
        yield server


def complete(server: Server, prompt: str, **options: Any) -> dict[str, Any]:
    """The one choice of a greedy completion."""
    return observe.complete(server, SERVED_AS, prompt, **options)


def _is_right(server: Server, task: Task) -> bool:
    stop = ["\n\n", "Question:"]
    choice = complete(server, task.prompt, max_tokens=_MAX_TOKENS, stop=stop)
    found = _ANSWER.search(choice["text"])
    return found is not None and found[1].replace(",", "") == task.answer


def observed(
    server: Server, tasks: list[Task], progress: Progress, label: str
) -> Observation:
    """Score, then read fixed prompts and digests."""
    bar = progress.add_task(f"{label}: problems", total=len(tasks))
    right = 0
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        for ok in pool.map(lambda task: _is_right(server, task), tasks):
            right += ok
            progress.advance(bar)
    prompts = [task.prompt for task in tasks[:_PROBES]]
    return Observation(
        accuracy=right / len(tasks),
        probe=observe.probe(server, SERVED_AS, prompts, _PROBE_TOKENS),
        digests=observe.digests(server),
    )


def _measure(
    model: Path, tasks: list[Task], server: Server, progress: Progress, began: float
) -> Result:
    kernel = server.rpc("megamoe_layers")[0][0]["kernel"]
    cold = observed(server, tasks, progress, "cold start")
    with DirectSender(server.url, timeout_s=_REQUEST_S) as sender:
        bar = progress.add_task("sending scrambled weights", total=1)
        sender.send(list(scrambled(checkpoint_weights(model))))
        progress.advance(bar)
        broken = observed(server, tasks, progress, "scrambled")
        bar = progress.add_task("sending the real weights", total=1)
        report = sender.send(list(checkpoint_weights(model)))
        progress.advance(bar)
    restored = observed(server, tasks, progress, "restored")
    away = compare(cold.digests, broken.digests)
    back = compare(cold.digests, restored.digests)
    return Result(
        problems=len(tasks),
        accuracy=cold.accuracy,
        scrambled_accuracy=broken.accuracy,
        restored_accuracy=restored.accuracy,
        tensors_total=len(cold.digests),
        tensors_changed=len(away.changed),
        tensors_restored=len(back.equal),
        tensors_moved=len({*away.moved, *back.moved}),
        texts_equal=cold.probe.texts == restored.probe.texts,
        logprobs_equal=cold.probe.logprobs == restored.probe.logprobs,
        sync_seconds=round(report.seconds, 3),
        seconds=round(time.monotonic() - began, 1),
        kernel=kernel,
    )


def _show(result: Result) -> None:
    table = Table("stage", "accuracy", "tensors", title="vllm-megamoe demo")
    total = result.tensors_total
    table.add_row("cold start", f"{result.accuracy:.3f}", f"{total} digested")
    table.add_row(
        "scrambled update",
        f"{result.scrambled_accuracy:.3f}",
        f"{result.tensors_changed} of {total} changed",
    )
    table.add_row(
        "real update",
        f"{result.restored_accuracy:.3f}",
        f"{result.tensors_restored} of {total} restored, {result.tensors_moved} moved",
    )
    console = Console()
    console.print(table)
    console.print(
        f"kernel {result.kernel}, {result.problems} problems, update in "
        f"{result.sync_seconds:.2f} s; texts "
        f"{'equal' if result.texts_equal else 'DIFFER'}, logprobs "
        f"{'bit-equal' if result.logprobs_equal else 'DIFFER'}."
    )


def run_demo(model: Path, problems: int, port: int | None, json_output: bool) -> int:
    """Run the demo; 0 when every figure is as it must be, else 1 with the reasons.

    Args:
        model: checkpoint directory; problems.jsonl and fewshot.jsonl lie beside it.
        problems: held-out problems to score at each stage.
        port: of the server; None takes a free one.
        json_output: end stdout with one JSON line.
    """
    errors = Console(stderr=True)
    leave_on_sigterm()
    began = time.monotonic()
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn())
    try:
        tasks = load_tasks(model.parent, problems)
        with (
            Progress(*columns, console=errors) as progress,
            serving(model, port or free_port(), progress) as server,
        ):
            result = _measure(model, tasks, server, progress, began)
    except (RuntimeError, OSError, ValueError) as e:
        errors.print(f"demo failed: {e}", markup=False, soft_wrap=True)
        return 1
    _show(result)
    faults = result.faults()
    if json_output:
        print(json.dumps({**asdict(result), "faults": faults}))
    for fault in faults:
        errors.print(f"demo failed: {fault}.", markup=False)
    return 1 if faults else 0
