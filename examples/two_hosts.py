# SPDX-License-Identifier: Apache-2.0
"""One model on two hosts, weights synced into both, and one host lost during a sync.

    python examples/two_hosts.py

The hosts are two network namespaces of this machine, joined by a virtual cable. Each
has its own address and interfaces, no privileges are needed (`unshare -Urn`), and both
are gone with the last process in them. On real hosts, type what is printed after `on A`
and `on B`. vLLM's own multi-node launch does all of it: host B runs `--headless`,
requests and weights go to host A.

Exit code 0: both hosts answered right, `sync-check` was equal on all ranks, no answer
came from a mixture of weights after host B was cut off in the middle of an update, and
a full update after its return repaired both.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_megamoe_plugin.sync.digest import compare
from vllm_megamoe_plugin.sync.manifest import Manifest
from vllm_megamoe_plugin.sync.sender import DirectSender, Server
from vllm_megamoe_plugin.sync.source import checkpoint_weights, expected_tensors
from vllm_megamoe_plugin.tools.demo import load_tasks
from vllm_megamoe_plugin.tools.launch import end, leave_on_sigterm
from vllm_megamoe_plugin.tools.observe import complete, digests
from vllm_megamoe_plugin.tools.scramble import scrambled

ARITH = Path(__file__).resolve().parent / "arith_moe"
ADDRESSES = {"A": "10.77.0.1", "B": "10.77.0.2"}
HTTP_PORT, RPC_PORT = 8000, 13345
STARTUP_S, SYNC_S = 600.0, 20.0
_INSIDE = "TWO_HOSTS_INSIDE"


@dataclass(frozen=True)
class Host:
    """A network namespace, and the address it has in it."""

    name: str
    pid: int
    """Of a process in it."""

    @property
    def address(self) -> str:
        return ADDRESSES[self.name]

    @property
    def cores(self) -> str:
        """This host's share of the machine, as a list."""
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2 or 1
        share = cores[:half] if self.name == "A" else cores[-half:]
        return ",".join(str(core) for core in share)

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs on this host."""
        if self.pid == os.getpid():
            return list(arguments)
        return ["nsenter", f"--target={self.pid}", "--net", *arguments]

    def link(self, state: str) -> None:
        """Plug the cable in (`up`) or pull it (`down`)."""
        _run(*self.command("ip", "link", "set", "eth0", state))


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """This process on host A, host B beside it, and a cable between them."""
    other = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        # its first output: from now on it is in its namespace
        assert other.stdout is not None
        other.stdout.readline()
        a, b = Host("A", os.getpid()), Host("B", other.pid)
        cable = ("type", "veth", "peer", "name", "eth0", "netns", str(b.pid))
        _run("ip", "link", "add", "eth0", *cable)
        for host in (a, b):
            address = f"{host.address}/24"
            _run(*host.command("ip", "address", "add", address, "dev", "eth0"))
            _run(*host.command("ip", "link", "set", "lo", "up"))
            host.link("up")
        yield a, b
    finally:
        other.kill()
        other.wait()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def serve_command(model: Path, host: Host) -> list[str]:
    """What is typed on a host."""
    command = [sys.executable, "-m", "vllm_megamoe_plugin", "serve", str(model)]
    command += ["-dp", "2", "--data-parallel-size-local", "1"]
    command += ["--data-parallel-address", ADDRESSES["A"]]
    command += ["--data-parallel-rpc-port", str(RPC_PORT), "--enable-expert-parallel"]
    command += ["--weight-transfer-config", '{"backend": "megamoe_direct"}']
    command += ["--max-model-len", "1536", "--enforce-eager"]
    if host.name == "A":
        return [*command, "--host", "127.0.0.1", "--port", str(HTTP_PORT)]
    return [*command, "--headless", "--data-parallel-start-rank", "1"]


@contextmanager
def serving(model: Path, host: Host, log: Path) -> Iterator[subprocess.Popen]:
    """A host's part of the server, ended with all its processes."""
    command = serve_command(model, host)
    print(f"on {host.name}: {shlex.join(command)}", flush=True)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        # of several interfaces, the one that leads to the other host
        "VLLM_HOST_IP": host.address,
        "GLOO_SOCKET_IFNAME": "eth0",
        # real hosts have cores of their own; here each takes a half
        "VLLM_CPU_OMP_THREADS_BIND": host.cores,
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            host.command(*command),
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process)


def wait_until_healthy(server: Server, parts: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + STARTUP_S
    while True:
        ended = [part.returncode for part in parts if part.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"The server did not start; exit codes {ended}.")
        try:
            return server.get("/health")
        except OSError:
            time.sleep(0.5)


def solved(server: Server, model: Path, problems: int, replica: int) -> int:
    """How many held-out problems a host's replica answers right."""
    name = server.get("/v1/models")["data"][0]["id"]
    options: dict[str, Any] = {"max_tokens": 224, "stop": ["\n\n", "Question:"]}
    options["headers"] = {"X-data-parallel-rank": str(replica)}
    right = 0
    for task in load_tasks(model.parent, problems):
        text = complete(server, name, task.prompt, **options)["text"]
        right += text.rpartition("####")[2].strip().replace(",", "") == task.answer
    return right


def sync_check(server: Server, host: Host) -> dict[str, Any]:
    """`vllm-megamoe sync-check` from a host; its JSON."""
    command = [sys.executable, "-m", "vllm_megamoe_plugin", "sync-check", server.url]
    # the other ways need a checkpoint folder that every host sees
    command += ["--via", "transfer", "--address", host.address, "--json"]
    print(f"on {host.name}: {shlex.join(command)}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1])


def lose_host(server: Server, model: Path, here: Host, lost: Host) -> dict[str, Any]:
    """Cut a host off in the middle of an update; what the sender and clients see."""
    specs = tuple(expected_tensors(model).values())
    half = len(specs) // 2

    def stream() -> Iterator[tuple[str, Tensor]]:
        for i, item in enumerate(scrambled(checkpoint_weights(model))):
            if i == half:
                lost.link("down")
            yield item

    began = time.monotonic()
    sender = DirectSender(
        server.url, address=here.address, bucket_bytes=1 << 16, timeout_s=SYNC_S
    )
    try:
        sender.send(stream(), Manifest(specs))
        failure = "none"
    except (OSError, RuntimeError) as e:
        failure = str(e)
    finally:
        sender.close()
    failed_after = time.monotonic() - began
    answers = []
    # what clients of either replica, and of neither in particular, are told
    for headers in ({"X-data-parallel-rank": "0"}, {"X-data-parallel-rank": "1"}, None):
        try:
            name = server.get("/v1/models")["data"][0]["id"]
            answers.append(complete(server, name, "1 + 1 =", headers=headers)["text"])
        except (OSError, RuntimeError) as e:
            answers.append(e)
    return {
        "sender": failure,
        "sender_seconds": round(failed_after, 1),
        "refusals": [str(e) for e in answers if isinstance(e, Exception)],
        "answered": [a for a in answers if isinstance(a, str)],
        "answered_after_seconds": round(time.monotonic() - began, 1),
    }


def repair(server: Server, model: Path, here: Host, lost: Host) -> float:
    """Bring the host back and send everything; seconds of the update."""
    lost.link("up")
    with DirectSender(server.url, address=here.address) as sender:
        report = sender.send(
            checkpoint_weights(model), Manifest(tuple(expected_tensors(model).values()))
        )
    return report.seconds


def run(model: Path, problems: int, logs: Path) -> dict[str, Any]:
    """The whole demonstration; its findings."""
    server = Server(f"http://127.0.0.1:{HTTP_PORT}", 240)
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        a, b = stack.enter_context(two_hosts())
        parts = [
            stack.enter_context(serving(model, host, logs / f"host_{host.name}.log"))
            for host in (a, b)
        ]
        began = time.monotonic()
        wait_until_healthy(server, parts)
        found["startup_seconds"] = round(time.monotonic() - began, 1)
        _say(f"two hosts serve after {found['startup_seconds']} s")
        found["solved"] = [solved(server, model, problems, rank) for rank in (0, 1)]
        _say(f"right answers by host A and host B: {found['solved']} of {problems}")
        checked = sync_check(server, a)
        found["sync_check"] = checked
        before = digests(server)
        found["lost"] = lose_host(server, model, a, b)
        _say(f"host B lost in mid-update: {json.dumps(found['lost'], indent=1)}")
        found["repair_seconds"] = round(repair(server, model, a, b), 2)
        found["restored"] = compare(before, digests(server)).identical
        found["solved_again"] = [
            solved(server, model, problems, rank) for rank in (0, 1)
        ]
        _say(
            f"host B back, full update in {found['repair_seconds']} s, every tensor "
            f"restored: {found['restored']}; right answers: {found['solved_again']}"
        )
    return found


def _say(text: str) -> None:
    print(text, flush=True)


def faults(found: dict[str, Any], problems: int) -> list[str]:
    """Everything that is not as it must be."""
    checks = {
        "a host answered wrong": found["solved"] == [problems] * 2,
        "sync-check was not equal": found["sync_check"].get("exit_code") == 0,
        "the sender did not notice": found["lost"]["sender"] != "none",
        "an answer came from a mixture": not found["lost"]["answered"],
        "not every tensor was restored": found["restored"],
        "a host answered wrong after the repair": found["solved_again"]
        == [problems] * 2,
    }
    return [what for what, ok in checks.items() if not ok]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ARITH / "nvfp4")
    parser.add_argument("--problems", type=int, default=3, help="to solve, per host")
    parser.add_argument("--logs", type=Path, default=Path(), help="of the servers")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    args = parser.parse_args()
    if _INSIDE not in os.environ:
        os.environ[_INSIDE] = "1"
        here = ["unshare", "--user", "--map-root-user", "--net", sys.executable]
        os.execvp(here[0], [*here, *sys.argv])
    leave_on_sigterm()
    found = run(args.model.resolve(), args.problems, args.logs)
    wrong = faults(found, args.problems)
    for what in wrong:
        print(f"two hosts: {what}.", file=sys.stderr)
    if args.json:
        print(json.dumps({**found, "faults": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
