# SPDX-License-Identifier: Apache-2.0
"""Decode throughput of two arms, each a vLLM engine of its own, as a ratio.

The arms take turns in fresh processes, A B A B ..., one at a time, so that a drift of
the machine meets both. Each process warms up, then times whole generations with fixed
output lengths. Imports vLLM only in the processes that measure.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..tools.serve import CPU_DEFAULTS, is_cpu_build, vllm_metadata

MARK = "megamoe-bench:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One side of the comparison."""

    name: str
    model: str
    moe_backend: str
    enforce_eager: bool = False
    batches: tuple[int, ...] = (1, 32)
    input_len: int = 64
    output_len: int = 64
    repeats: int = 5
    """Timed generations per batch size in each process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Output tokens per second of one arm at one batch size."""

    arm: str
    batch: int
    tokens_per_s: float
    """Median over every timed generation of every process."""
    slowest: float
    fastest: float
    samples: int


def compare(
    first: Arm, second: Arm, turns: int, progress: Callable[[str], None]
) -> tuple[list[Row], dict[int, float]]:
    """Measure both arms in turns.

    Args:
        turns: processes per arm.
        progress: told what is about to run.

    Returns:
        a row per arm and batch size, and the ratio first / second of the medians by
        batch size.

    Raises:
        RuntimeError: an arm's engine failed; with the end of its log.
    """
    samples: dict[tuple[str, int], list[float]] = {}
    for turn in range(turns):
        for arm in (first, second):
            progress(f"{arm.name}, turn {turn + 1} of {turns}")
            for batch, rates in _measure(arm).items():
                samples.setdefault((arm.name, int(batch)), []).extend(rates)
    rows = [_row(arm, batch, rates) for (arm, batch), rates in samples.items()]
    median = {(row.arm, row.batch): row.tokens_per_s for row in rows}
    ratios = {
        batch: median[first.name, batch] / median[second.name, batch]
        for batch in first.batches
    }
    return rows, ratios


def to_json(rows: Sequence[Row], ratios: dict[int, float]) -> dict[str, Any]:
    """The report as one object."""
    return {"rows": [asdict(row) for row in rows], "ratios": ratios}


def show(rows: Sequence[Row], ratios: dict[int, float], console: Console) -> None:
    """Print the table people read."""
    table = Table("arm", "requests", "tokens/s", "slowest", "fastest", "samples")
    for row in rows:
        rates = (row.tokens_per_s, row.slowest, row.fastest)
        figures = [f"{rate:.1f}" for rate in rates]
        table.add_row(row.arm, str(row.batch), *figures, str(row.samples))
    console.print(table)
    for batch, ratio in ratios.items():
        console.print(f"{batch} at once: {ratio:.2f}x the peer's tokens/s")


def _row(arm: str, batch: int, rates: Sequence[float]) -> Row:
    return Row(
        arm=arm,
        batch=batch,
        tokens_per_s=statistics.median(rates),
        slowest=min(rates),
        fastest=max(rates),
        samples=len(rates),
    )


def _measure(arm: Arm) -> dict[str, list[float]]:
    """Run one arm in a process of its own; batch size -> tokens/s of each repeat."""
    command = [sys.executable, "-m", __name__, json.dumps(asdict(arm))]
    with vllm_metadata():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
    raise RuntimeError(f"{arm.name}: the engine failed ({done.returncode}):\n{tail}")


def _arm_process(arm: Arm) -> None:
    import os

    defaults = CPU_DEFAULTS if is_cpu_build(os.environ) else {}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)

    import torch
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=arm.model,
        moe_backend=arm.moe_backend,
        enforce_eager=arm.enforce_eager,
        max_model_len=arm.input_len + arm.output_len,
        max_num_seqs=max(arm.batches),
        enable_prefix_caching=False,
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    sampling = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=arm.output_len, detokenize=False
    )
    rates: dict[int, list[float]] = {}
    for batch in arm.batches:
        shape = (batch, arm.input_len)
        ids = torch.randint(vocabulary, shape, generator=generator).tolist()
        prompts = [TokensPrompt(prompt_token_ids=row) for row in ids]
        for repeat in range(arm.repeats + 1):
            start = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - start
            if repeat:  # the first one warms up
                rate = batch * arm.output_len / seconds
                rates.setdefault(batch, []).append(rate)
    print(MARK + json.dumps(rates), flush=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    _arm_process(Arm(**{**given, "batches": tuple(given["batches"])}))
