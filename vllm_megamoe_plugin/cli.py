# SPDX-License-Identifier: Apache-2.0
"""The `vllm-megamoe` command line: one command per proof tool.

Every command takes `--json`: the report as one JSON line on stdout, and what people
read on stderr. Exit codes: 0 good, 1 a fault was found, 2 nothing could be checked or
bad usage. Commands import their tool when they run, so that starting up imports
neither torch nor vLLM.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from . import __version__

GOOD, FAULT, UNCHECKED = 0, 1, 2

Json = Annotated[bool, typer.Option("--json", help="Print one JSON line on stdout.")]

app = typer.Typer(
    help="MegaMoE experts for vLLM: serve them, and prove that they are right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


bench_app = typer.Typer(
    help="Ratios against a peer, both measured in one run.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry point of the `vllm-megamoe` script."""
    app(prog_name="vllm-megamoe")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"vllm-megamoe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    del version


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
    options_metavar="MODEL [any `vllm serve` option]...",
)
def serve(ctx: typer.Context, as_json: Json = False) -> None:
    """Run vLLM's server with the MegaMoE backend.

    Adds `--moe-backend megamoe` and `--host 127.0.0.1` unless they are given; every
    other argument goes to `vllm serve` as it is. `--help=all` shows vLLM's own.
    """
    if not ctx.args or {"--help", "-h"} & set(ctx.args):
        print(ctx.get_help())
        raise typer.Exit(GOOD if ctx.args else UNCHECKED)
    from .tools import serve as tool
    from .tools.doctor import install_faults, show_list

    plan = tool.plan(ctx.args, os.environ)
    report: dict[str, Any] = {"argv": plan.argv, "env": plan.env}
    faults = plan.faults + install_faults(needs_plugin=plan.needs_plugin)
    if faults:
        show_list(_console(stderr=True), "fault", "red", faults)
        _finish(FAULT, as_json, {**report, "faults": faults, "exit_code": None})
    _console(stderr=True).print("running:", shlex.join(plan.argv), markup=False)
    code = tool.run(plan)
    _finish(code, as_json, {**report, "faults": [], "exit_code": code})


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this machine: what is installed, what is wrong, which kernels run."""
    from .tools.doctor import diagnose, show

    report = diagnose()
    show(report, _console(stderr=as_json))
    good = report.runs() and not report.faults
    _finish(GOOD if good else FAULT, as_json, report.to_json())


@app.command()
def inspect(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder of a checkpoint, or a Hugging Face name.")
    ],
    as_json: Json = False,
) -> None:
    """Check a checkpoint's experts: whole, sane, and which kernel runs them."""
    from .tools import inspect as tool
    from .tools.shards import NothingToCheckError

    try:
        report = tool.inspect(checkpoint, track=_track)
    except NothingToCheckError as error:
        _console(stderr=True).print(
            f"inspect: nothing was checked. {error}", markup=False, soft_wrap=True
        )
        _finish(UNCHECKED, as_json, {"checkpoint": checkpoint, "error": str(error)})
    tool.show(report, _console(stderr=as_json))
    _finish(FAULT if report.faults else GOOD, as_json, report.to_json())


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder; default: the one that ships."),
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Problems to solve.")] = 60,
    port: Annotated[int | None, typer.Option(help="Port; default: a free one.")] = None,
    as_json: Json = False,
) -> None:
    """Serve a small real model here, let it solve problems, sync weights, compare."""
    from .tools.demo import run_demo, shipped_model

    try:
        folder = model or shipped_model()
    except FileNotFoundError as error:
        _console(stderr=True).print(f"demo: {error}", markup=False, soft_wrap=True)
        _finish(UNCHECKED, as_json, {"error": str(error)})
    raise typer.Exit(run_demo(folder, problems, port, as_json))


@app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": True}
)
def sync_check(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Argument(help="URL of a server, or a checkpoint folder to serve.")
    ],
    via: Annotated[
        list[str], typer.Option(help="direct, layerwise, transfer; default: all.")
    ] = [],  # noqa: B006
    checkpoint: Annotated[
        Path | None, typer.Option(help="Default: the one the server was started from.")
    ] = None,
    address: Annotated[
        str, typer.Option(help="Of this host, where the workers find it.")
    ] = "127.0.0.1",
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder for scrambled weights that every worker can read."),
    ] = None,
    probe_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds per answer.")] = 600.0,
    api_key: Annotated[str | None, typer.Option(help="Of the server.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a Markdown report here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove that a server takes new weights whole: scramble, restore, compare.

    Options of `vllm serve` for a server that this command starts follow after `--`.
    Use a server that serves nobody else meanwhile: its answers are scrambled.
    """
    from .tools import sync_check as tool

    try:
        options = tool.Options(
            target=target,
            ways=tool.known_ways(via),
            checkpoint=checkpoint,
            address=address,
            scratch=scratch,
            probe_tokens=probe_tokens,
            timeout_s=timeout,
            api_key=api_key,
            serve_options=tuple(ctx.args),
        )
        command = shlex.join(["vllm-megamoe", *sys.argv[1:]])
        code, result = tool.run(options, report, command, _console(stderr=as_json))
    except tool.NothingToCheckError as error:
        _console(stderr=True).print(
            f"sync-check: nothing was checked. {error}", markup=False, soft_wrap=True
        )
        code, result = UNCHECKED, {"target": target, "error": str(error)}
    _finish(code, as_json, result)


@bench_app.command()
def throughput(
    model: Annotated[str, typer.Argument(help="Checkpoint served by this plugin.")],
    peer: Annotated[str, typer.Option(help="Checkpoint of the peer.")],
    peer_backend: Annotated[str, typer.Option(help="Its --moe-backend.")] = "auto",
    batch: Annotated[list[int], typer.Option(help="Requests at once.")] = [1, 32],  # noqa: B006
    turns: Annotated[int, typer.Option(min=1, help="Processes per arm.")] = 2,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager")] = False,
    as_json: Json = False,
) -> None:
    """Compare output tokens/s of this plugin with another backend or checkpoint."""
    from .bench import throughput as tool

    def arm(name: str, path: str, backend: str) -> tool.Arm:
        return tool.Arm(
            name=name,
            model=path,
            moe_backend=backend,
            batches=tuple(batch),
            enforce_eager=enforce_eager,
        )

    ours = arm("megamoe", model, "megamoe")
    theirs = arm(f"peer ({peer_backend})", peer, peer_backend)
    console = _console(stderr=True)
    try:
        with console.status("measuring") as status:
            rows, ratios = tool.compare(ours, theirs, turns, status.update)
    except RuntimeError as error:
        console.print(f"bench: {error}", markup=False, soft_wrap=True)
        _finish(UNCHECKED, as_json, {"error": str(error)})
    tool.show(rows, ratios, _console(stderr=as_json))
    _finish(GOOD, as_json, tool.to_json(rows, ratios))


@bench_app.command()
def reload(
    device: Annotated[
        str, typer.Option(help="cpu or cuda; default: what is here.")
    ] = "",
    shape: Annotated[str, typer.Option(help="qwen3, dsv3 or tiny.")] = "qwen3",
    repeats: Annotated[int, typer.Option(min=1, help="Timed turns of each case.")] = 7,
    cycles: Annotated[int, typer.Option(min=0, help="Updates there and back.")] = 10,
    peers: Annotated[bool, typer.Option(help="Measure vLLM's own loaders too.")] = True,
    peer_limit: Annotated[
        float, typer.Option(min=1, help="Seconds for each process of vLLM.")
    ] = 120,
    as_json: Json = False,
) -> None:
    """Compare a layer's weight update with a plain copy of the same bytes."""
    from .bench import measure
    from .bench import reload as tool

    console = _console(stderr=True)
    try:
        rows = []
        for row in tool.run(
            device, shape, repeats, cycles, peers, peer_limit, partial(_say, console)
        ):
            rows.append(row)
            _say(console, measure.line(row))
    except ValueError as error:
        console.print(f"bench: {error}", markup=False, soft_wrap=True)
        _finish(UNCHECKED, as_json, {"error": str(error)})
    measure.show(rows, _console(stderr=as_json))
    _finish(GOOD, as_json, measure.to_json(rows))


def _track(items: Iterable[Any], total: int) -> Iterable[Any]:
    """A progress bar on stderr when that is a terminal."""
    from rich.progress import track

    console = _console(stderr=True)
    return track(
        items,
        total=total,
        console=console,
        description="reading expert tensors",
        disable=not console.is_terminal,
        transient=True,
    )


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _console(*, stderr: bool) -> Console:
    return Console(stderr=stderr, highlight=False)


def _finish(code: int, as_json: bool, report: dict[str, Any]) -> NoReturn:
    """End the command; the JSON line is the last thing on stdout."""
    if as_json:
        sys.stdout.flush()
        print(json.dumps(report, allow_nan=False), flush=True)
    raise typer.Exit(code)
