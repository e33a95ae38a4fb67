# SPDX-License-Identifier: Apache-2.0
"""Start a real server for a tool, and end every process of it whatever happens."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.progress import Progress

from ..sync.sender import Server
from .serve import DIRECT_ENGINE

_TAIL_LINES = 25


def serve_command(model: Path, port: int, options: Mapping[str, Any]) -> list[str]:
    """`vllm-megamoe serve` on loopback with this plugin's weight-transfer engine."""
    given = {
        "host": "127.0.0.1",
        "port": port,
        "moe-backend": "megamoe",
        "weight-transfer-config": json.dumps({"backend": DIRECT_ENGINE}),
        **options,
    }
    command = [sys.executable, "-m", "vllm_megamoe_plugin", "serve", str(model)]
    for name, value in given.items():
        command += [f"--{name}", str(value)]
    return command


def leave_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that the blocks which end servers are left.

    Once: `timeout` sends it twice, and the second would break those blocks off.
    """

    def leave(signum: int, frame: object) -> None:
        signal.signal(signum, signal.SIG_IGN)
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def launched(
    command: Sequence[str],
    port: int,
    progress: Progress,
    *,
    request_s: float,
    startup_s: float,
) -> Iterator[Server]:
    """A server in a process group of its own, gone when the block is left.

    Args:
        command: what listens on `port` of 127.0.0.1 and answers GET /health.
        progress: shows that the server is starting.
        request_s: longest wait for an answer.
        startup_s: longest wait for the server to become healthy.

    If it has ended when the block does, the last lines of its log are printed.

    Raises:
        RuntimeError: it did not come up, or had ended when the block raised an error;
            with the last lines of its log.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
        try:
            server = Server(f"http://127.0.0.1:{port}", request_s)
            _wait_until_healthy(server, process, progress, startup_s)
            yield server
        except (RuntimeError, OSError) as e:
            if process.poll() is None:
                raise
            raise RuntimeError(_end_of(process, f" ({e})", log)) from e
        else:
            if process.poll() is not None:
                progress.console.print(_end_of(process, "", log), markup=False)
        finally:
            end(process)


def _environment() -> dict[str, str]:
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {**defaults, **os.environ, "VLLM_SERVER_DEV_MODE": "1"}


def _wait_until_healthy(
    server: Server, process: subprocess.Popen, progress: Progress, startup_s: float
) -> None:
    task = progress.add_task("starting the server", total=None)
    deadline = time.monotonic() + startup_s
    while True:
        if process.poll() is not None:
            raise RuntimeError("it never became healthy")
        try:
            server.get("/health")
        except OSError:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"The server was not healthy within {startup_s:g} s."
                ) from None
            time.sleep(0.5)
            continue
        return progress.update(task, total=1, completed=1)


def _end_of(process: subprocess.Popen, why: str, log: IO[str]) -> str:
    return (
        f"The server ended with code {process.returncode}{why}. Its last lines:\n"
        + _tail(log)
    )


def _tail(log: IO[str]) -> str:
    """The first error, which is the cause, and the last lines."""
    log.seek(0)
    text = log.readlines()
    errors = (x for x in text if re.search(r" ERROR .*(Error|Exception): ", x))
    return "".join([next(errors, ""), "...\n", *text[-_TAIL_LINES:]])


def end(process: subprocess.Popen) -> None:
    """End a process group of its own: the API server, the engine and its workers."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
