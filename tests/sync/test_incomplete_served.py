# SPDX-License-Identifier: Apache-2.0
"""A real server whose weights are incomplete: nothing is answered from a mixture."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress
from safetensors.torch import save_file

from vllm_megamoe_plugin.sync.digest import compare
from vllm_megamoe_plugin.sync.manifest import BROKEN
from vllm_megamoe_plugin.sync.sender import DirectSender, Server, ServerError
from vllm_megamoe_plugin.sync.source import checkpoint_weights
from vllm_megamoe_plugin.tools import demo, observe
from vllm_megamoe_plugin.tools.launch import free_port, launched, serve_command
from vllm_megamoe_plugin.tools.scramble import scrambled

pytestmark = pytest.mark.serve

PROMPTS = observe.PROMPTS[:2]


@pytest.fixture(scope="module")
def model() -> Path:
    return demo.shipped_model()


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """One that lets requests wait: what refuses at once is in test_faults_served."""
    port = free_port()
    options = {
        "served-model-name": "served",
        "max-model-len": 512,
        "max-num-seqs": 4,
        "worker-extension-cls": "tests.sync.half_reload.HalfReload",
    }
    command = [*serve_command(model, port, options), "--enforce-eager"]
    with (
        pytest.MonkeyPatch.context() as patch,
        Progress(disable=True) as progress,
    ):
        patch.setenv("VLLM_MEGAMOE_INCOMPLETE", "wait")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        with launched(command, port, progress, request_s=120, startup_s=300) as running:
            yield running


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the same names and shapes, and other values."""
    folder = tmp_path_factory.mktemp("other")
    tensors = dict(scrambled(checkpoint_weights(model)))
    save_file(
        {n: t.contiguous().clone() for n, t in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def _half(folder: Path) -> int:
    return sum(1 for _ in checkpoint_weights(folder)) // 2


def answers(server: Server) -> observe.Probe:
    return observe.probe(server, "served", PROMPTS, 16)


def state(server: Server) -> str | None:
    (rank,) = server.rpc("megamoe_state")
    assert rank["rank"] == "dp0_pp0_tp0_dcp0_ep0_rank0"
    return rank["incomplete"]


def refused(server: Server, path: str = "/health") -> str:
    with pytest.raises(ServerError, match=f"{path}: 503: ") as error:
        server.get(path)
    return str(error.value)


@pytest.fixture
def asks(server: Server) -> Iterator[Any]:
    """Ask for a completion in the background."""
    with ThreadPoolExecutor(1) as pool:

        def ask() -> Future:
            return pool.submit(
                observe.complete, server, "served", PROMPTS[0], max_tokens=16
            )

        yield ask


def test_a_reload_left_before_its_first_module_was_done_can_be_aborted(
    server: Server, other: Path, asks: Any
) -> None:
    before, digests = answers(server), observe.digests(server)
    server.rpc("megamoe_begin_reload", path=str(other), tensors=0)
    assert "A weight update is under way: 0 modules have" in refused(server)
    assert "call megamoe_abort_reload" in str(state(server))
    waits = asks()
    assert "under way" in refused(server, "/v1/models")
    assert not waits.done()
    (aborted,) = server.rpc("megamoe_abort_reload")
    assert aborted["replaced"] == []
    assert "model.embed_tokens" in aborted["restored"]
    assert waits.result(120)["text"] == before.texts[0]
    assert state(server) is None
    assert compare(digests, observe.digests(server)).identical
    assert answers(server) == before


def test_a_reload_left_half_way_is_a_mixture_until_a_full_update(
    server: Server, model: Path, other: Path, asks: Any
) -> None:
    before, digests = answers(server), observe.digests(server)
    server.rpc("megamoe_begin_reload", path=str(other), tensors=_half(other))
    assert "under way" in refused(server)
    (aborted,) = server.rpc("megamoe_abort_reload")
    assert aborted["replaced"]
    assert aborted["restored"]
    message = refused(server)
    assert "A layerwise reload was given up after " in message
    assert BROKEN in message
    waits = asks()
    with pytest.raises(ServerError, match=r"500: .*nowhere holds no safetensors"):
        server.rpc("megamoe_load", path=str(other.parent / "nowhere"))
    assert not waits.done()
    (loaded,) = server.rpc("megamoe_load", path=str(model))
    assert "model.embed_tokens.weight" in loaded["loaded"]
    server.post("/reset_prefix_cache")
    assert waits.result(120)["text"] == before.texts[0]
    assert compare(digests, observe.digests(server)).identical
    assert answers(server) == before


def test_a_reload_that_begins_after_one_was_left_does_not_go_on_from_it(
    server: Server, model: Path, other: Path
) -> None:
    """vLLM would keep the tensors that the first one has buffered."""
    before, digests = answers(server), observe.digests(server)
    server.rpc("megamoe_begin_reload", path=str(other), tensors=_half(other))
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    server.post("/collective_rpc", body)
    assert state(server) is None
    assert compare(digests, observe.digests(server)).identical
    assert answers(server) == before


def test_loading_another_checkpoint_changes_answers_and_back(
    server: Server, model: Path, other: Path
) -> None:
    before, digests = answers(server), observe.digests(server)
    server.rpc("megamoe_load", path=str(other))
    assert state(server) is None
    assert answers(server).logprobs != before.logprobs
    server.rpc("megamoe_load", path=str(model))
    assert answers(server) == before
    assert compare(digests, observe.digests(server)).identical


def test_weights_that_were_reset_do_not_serve(server: Server, model: Path) -> None:
    before = answers(server)
    server.post("/weight_checker", {"action": "reset"})
    assert "The weight checker reset the weights to zero." in refused(server)
    server.rpc("megamoe_load", path=str(model))
    assert answers(server) == before


def test_sleep_that_cpu_workers_ignore_changes_nothing(server: Server) -> None:
    before = answers(server)
    server.post("/sleep?level=2&mode=wait")
    assert state(server) is None
    server.post("/wake_up")
    assert answers(server) == before


def test_a_session_that_its_sender_left_is_ended_by_an_abort(
    server: Server, model: Path
) -> None:
    before = answers(server)
    server.post("/start_weight_update")
    server.rpc("megamoe_abort_reload")
    with DirectSender(server.url) as sender:
        sender.send(list(checkpoint_weights(model)))
    assert answers(server) == before
