# SPDX-License-Identifier: Apache-2.0
"""The protocol of a sync check, driven against a real server.

Each way to update is run three times on one server: with the weights it serves, with
scrambled ones, and with the real ones again. After each, every rank's tensors, fixed
prompts and the ranks' state are compared with the cold start.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ..sync.digest import compare
from ..sync.manifest import REFUSED, Manifest
from ..sync.sender import DirectSender, Server, ServerError
from ..sync.source import checkpoint_files, checkpoint_weights, expected_tensors
from .launch import free_port, launched, serve_command
from .observe import PROMPTS, digests, probe
from .scramble import scrambled, scrambled_copy
from .shards import NothingToCheckError
from .sync_verdict import (
    STEPS,
    Expectation,
    Observation,
    Report,
    Way,
    expect,
    judge,
)

#: Ways to update, in the order in which they are run, and what each does.
WAYS = {
    "direct": "each worker loads a checkpoint directory in place (megamoe_load)",
    "layerwise": "vLLM's own reload_weights from a checkpoint directory",
    "transfer": "DirectSender streams the tensors to the megamoe_direct engine",
}
_STARTUP_S = 900.0
_HOW_TO_SERVE = (
    "Start it with VLLM_SERVER_DEV_MODE=1 vllm-megamoe serve MODEL "
    '--weight-transfer-config \'{"backend": "megamoe_direct"}\'.'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to check, and how."""

    target: str
    """URL of a running server, or the checkpoint directory to serve for the check."""
    ways: tuple[str, ...] = tuple(WAYS)
    checkpoint: Path | None = None
    """Default: the directory that the server was started from."""
    address: str = "127.0.0.1"
    """Of this host, where the workers find the trainer of the transfer."""
    scratch: Path | None = None
    """Where the scrambled checkpoint is written; every worker must see it."""
    probe_tokens: int = 16
    timeout_s: float = 600.0
    """Longest wait for one answer of the server."""
    api_key: str | None = None
    serve_options: tuple[str, ...] = ()


def check_server(options: Options, progress: Progress) -> Report:
    """Run the check.

    Raises:
        NothingToCheckError: nothing could be compared: the server, its workers, its
            layers or the checkpoint are not what the check needs.
    """
    with _server(options, progress) as (server, command):
        served = _greet(server)
        checkpoint = options.checkpoint or _checkpoint_of(served.root)
        _look_at(checkpoint)
        with ExitStack() as stack:
            copy = None
            if {"direct", "layerwise"} & {*options.ways}:
                task = progress.add_task("writing the scrambled checkpoint", total=1)
                writing = scrambled_copy(checkpoint, options.scratch)
                try:
                    copy = stack.enter_context(writing)
                except OSError as e:
                    raise NothingToCheckError(
                        f"The scrambled checkpoint cannot be written: {e}. Choose a "
                        "folder with --scratch."
                    ) from e
                progress.advance(task)
            check = _Check(server, served, checkpoint, copy, options, progress)
            return check.run(command)


@contextmanager
def _server(
    options: Options, progress: Progress
) -> Iterator[tuple[Server, list[str] | None]]:
    """The target's server; started, and ended, if the target is a directory."""
    if "://" in options.target:
        yield Server(options.target, options.timeout_s, options.api_key), None
        return
    model, port = Path(options.target), free_port()
    _look_at(model)
    command = [*serve_command(model, port, {}), *options.serve_options]
    started = False
    try:
        with launched(
            command,
            port,
            progress,
            request_s=options.timeout_s,
            startup_s=_STARTUP_S,
        ) as server:
            started = True
            yield server, command
    except RuntimeError as e:
        if started:
            raise
        raise NothingToCheckError(str(e)) from e


def _look_at(checkpoint: Path) -> None:
    try:
        checkpoint_files(checkpoint)
    except FileNotFoundError as e:
        raise NothingToCheckError(str(e)) from e


@dataclass(frozen=True, kw_only=True, slots=True)
class _Served:
    """What a server says about itself."""

    model: str
    """Name in requests."""
    root: str
    """Directory, or Hugging Face name, that it was started from."""
    vllm: str


def _greet(server: Server) -> _Served:
    """What the server serves, once it has shown that it can be asked."""
    try:
        model = server.get("/v1/models")["data"][0]
        version = server.get("/version")["version"]
    except (OSError, ServerError, LookupError, TypeError, ValueError) as e:
        raise NothingToCheckError(f"No vLLM server answers at {server.url}: {e}") from e
    try:
        server.get("/get_world_size")
    except ServerError as e:
        raise NothingToCheckError(
            f"{server.url} does not let its weights be changed: {e} {_HOW_TO_SERVE}"
        ) from e
    try:
        server.rpc("megamoe_state")
    except ServerError as e:
        raise NothingToCheckError(
            f"{server.url} runs without this plugin's worker extension or middleware: "
            f"{e} {_HOW_TO_SERVE}"
        ) from e
    return _Served(model=model["id"], root=model["root"], vllm=version)


def _checkpoint_of(root: str) -> Path:
    """The directory of the model that a server names, as this host sees it."""
    if Path(root).is_dir():
        return Path(root)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(root, local_files_only=True))
    except (FileNotFoundError, HFValidationError) as e:
        raise NothingToCheckError(
            f"The server was started from {root}, which is no directory here and not "
            f"in the Hugging Face cache ({e}). Pass --checkpoint."
        ) from e


class _Check:
    """One check of one server."""

    def __init__(
        self,
        server: Server,
        served: _Served,
        checkpoint: Path,
        copy: Path | None,
        options: Options,
        progress: Progress,
    ) -> None:
        self._server = server
        self._served = served
        self._checkpoint = checkpoint.resolve()
        self._copy = copy
        self._options = options
        self._progress = progress
        self._scrambled = False
        self._replicas = 1

    def run(self, command: list[str] | None) -> Report:
        """Every way in turn; real weights are put back whatever happens."""
        task = self._progress.add_task("cold start", total=2)
        ranks = self._ranks()
        layers = sum(len(of_rank) for of_rank in self._server.rpc("megamoe_layers"))
        if not layers:
            raise NothingToCheckError(
                f"No rank of {self._server.url} has a layer of this plugin. Start the "
                "server with --moe-backend megamoe, on a mixture-of-experts model."
            )
        cold = self.observe()
        self._progress.advance(task)
        loaded, seconds = self._feed()
        followers = self._server.rpc("megamoe_followers")
        expectation = expect(loaded, followers, cold.digests)
        self._progress.advance(task)
        for rank in ranks:
            if not any(key.startswith(f"{rank}:") for key in expectation.fed):
                raise NothingToCheckError(
                    f"Nothing would be compared on rank {rank}: the checkpoint feeds "
                    "none of its tensors."
                )
        report = Report(
            target=self._options.target,
            checkpoint=str(self._checkpoint),
            url=self._server.url,
            vllm=self._served.vllm,
            served_with=command,
            ranks=ranks,
            layers=layers,
            cold=cold,
            expectation=expectation,
            first=judge("identity", seconds, cold, self.observe(), expectation),
        )
        blocked = None
        if report.first.faults():
            blocked = (
                "the checkpoint does not give the weights that the server had: it was "
                f"started from another one than {self._checkpoint} or updated since, "
                "or an update in place is wrong; the server now holds what is there"
            )
        for name in (w for w in WAYS if w in self._options.ways):
            way = Way(name=name, unchecked=blocked)
            report.ways.append(way)
            if blocked is None:
                blocked = self._run_way(way, cold, expectation)
        return report

    def observe(self) -> Observation:
        """Digests, answers and state, with the server idle."""
        states = self._server.rpc("megamoe_state")
        incomplete = tuple(
            f"{s['rank']}: {s['incomplete']}" for s in states if s["incomplete"]
        )
        tokens = self._options.probe_tokens
        return Observation(
            digests=digests(self._server),
            # a server with incomplete weights refuses to answer
            probes=tuple(
                probe(self._server, self._served.model, PROMPTS, tokens, replica)
                for replica in range(self._replicas)
                if not incomplete
            ),
            incomplete=incomplete,
        )

    def _ranks(self) -> list[str]:
        """Names of all ranks; counts the replicas."""
        ranks = [state["rank"] for state in self._server.rpc("megamoe_state")]
        size, per_replica = (
            self._server.get(f"/get_world_size?include_dp={dp}")["world_size"]
            for dp in ("true", "false")
        )
        if len(ranks) != size:
            raise NothingToCheckError(
                f"{len(ranks)} of {size} ranks answer {self._server.url}: {ranks}. Ask "
                "a server that drives all replicas, not one behind a load balancer."
            )
        self._replicas = size // per_replica
        return ranks

    def _feed(self) -> tuple[list[dict[str, Any]], float]:
        """Load the real checkpoint in place; what each rank took of it, and seconds."""
        began = time.monotonic()
        try:
            with self._paused():
                loaded = self._server.rpc("megamoe_load", path=str(self._checkpoint))
        except ServerError as e:
            if REFUSED not in str(e):
                raise
            raise NothingToCheckError(
                f"{self._checkpoint} does not fit the served model: {e}"
            ) from e
        return loaded, time.monotonic() - began

    def _run_way(
        self, way: Way, cold: Observation, expectation: Expectation
    ) -> str | None:
        """Run the steps of a way; why no other may follow, or None."""
        try:
            with ExitStack() as stack:
                sender = None
                if way.name == "transfer":
                    sender = stack.enter_context(self._sender())
                    try:
                        sender.connect()
                    except (OSError, RuntimeError) as e:
                        way.unchecked = f"the workers did not join: {e}"
                        return None
                self._run_steps(way, sender, cold, expectation)
        except BaseException:
            if self._scrambled:
                self._progress.console.print(self._restore(), markup=False)
            raise
        if way.error or way.steps[-1].faults():
            way.aftermath = self._restore()
            if not self._holds(cold):
                return f"after {way.name} the weights are not those of the cold start"
        self._scrambled = False
        return None

    def _run_steps(
        self,
        way: Way,
        sender: DirectSender | None,
        cold: Observation,
        expectation: Expectation,
    ) -> None:
        task = self._progress.add_task(way.name, total=len(STEPS))
        for step, scrambles in STEPS.items():
            self._progress.update(task, description=f"{way.name}: {step}")
            self._scrambled |= scrambles
            began = time.monotonic()
            try:
                self._update(way.name, scrambles, sender)
                seconds = time.monotonic() - began
                now = self.observe()
            except (OSError, RuntimeError, ValueError) as e:
                way.error = f"{step} broke off: {e}"
                return
            way.steps.append(judge(step, seconds, cold, now, expectation))
            self._progress.advance(task)

    def _holds(self, cold: Observation) -> bool:
        """Whether the server's tensors are those of the cold start."""
        with suppress(OSError, RuntimeError):
            return compare(cold.digests, digests(self._server)).identical
        return False

    def _sender(self) -> DirectSender:
        return DirectSender(
            self._server.url,
            address=self._options.address,
            timeout_s=self._options.timeout_s,
            api_key=self._options.api_key,
        )

    def _update(self, way: str, scrambles: bool, sender: DirectSender | None) -> None:
        if sender is not None:
            weights = checkpoint_weights(self._checkpoint)
            specs = expected_tensors(self._checkpoint)
            sender.send(
                scrambled(weights) if scrambles else weights,
                Manifest(tuple(specs.values())),
            )
            return
        path = str(self._copy if scrambles else self._checkpoint)
        with self._paused():
            if way == "direct":
                self._server.rpc("megamoe_load", path=path)
            else:
                arguments = {"weights_path": path}
                body = {"method": "reload_weights", "kwargs": arguments}
                self._server.post("/collective_rpc", body)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """No request runs; resumed unless the weights may be a mixture."""
        ran = self._server.pause("wait")
        try:
            yield
        except ServerError as e:
            if ran and REFUSED in str(e):
                self._server.post("/resume")
            raise
        self._server.post("/reset_prefix_cache")
        self._server.post("/resume")

    def _restore(self) -> str:
        """Try to put the real weights back; what came of it, in words."""
        try:
            self._server.rpc("megamoe_abort_reload")
            self._feed()
        except (OSError, RuntimeError) as e:
            return (
                f"The real weights could not be put back: {e} Restart the server; it "
                "may hold scrambled weights."
            )
        self._scrambled = False
        return f"The real weights were put back from {self._checkpoint}."
