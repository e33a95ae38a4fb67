# SPDX-License-Identifier: Apache-2.0
"""A real engine: senders that die at any byte, ranks that disagree, draft models."""

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from vllm_megamoe_plugin.sync.digest import compare
from vllm_megamoe_plugin.sync.manifest import (
    BROKEN,
    REFUSED,
    Manifest,
    ManifestError,
)
from vllm_megamoe_plugin.sync.wire import Channel, host_store

from ..vllm_layer import engine_config, load_model, model_tensors, vllm_process
from .served_model import (
    check_refusing,
    check_unharmed,
    digests,
    outputs,
    refusing,
)
from .trainer import CPU, TIMEOUT_S, Trainer, engine_of, join, stream, update_info

KIND, DRAFT = "modelopt", "compressed-tensors"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("model")
    with vllm_process(folder, KIND) as config:
        yield folder, config


@pytest.fixture(scope="module")
def served(process: tuple[Path, Any]) -> Iterator[tuple]:
    """(model, trainer, digests, outputs)."""
    folder, config = process
    model = load_model(folder, KIND, config)
    trainer = Trainer(engine_of(model, config))
    yield model, trainer, digests(model), outputs(model)
    trainer.close()
    trainer.engine.shutdown()


def manifest_of(tensors: dict[str, Tensor], **options: Any) -> Manifest:
    return Manifest.of(tensors.items(), **options)


def push(trainer: Trainer, tensors: dict[str, Tensor], **options: Any) -> None:
    trainer.push(manifest_of(tensors, **options), tensors.items())


def test_an_update_before_init_is_refused(served: tuple) -> None:
    model, trainer, *_ = served
    engine = engine_of(model, trainer.engine.vllm_config)
    with pytest.raises(RuntimeError, match=r"init_weight_transfer_engine first\."):
        engine.update_weights({})
    check_unharmed(served)


def test_there_and_back(served: tuple) -> None:
    model, trainer, before, answers = served
    push(trainer, model_tensors(KIND, 1), digests=True)
    assert compare(before, digests(model)).moved == ()
    assert not any(map(torch.equal, answers, outputs(model)))
    push(trainer, model_tensors(KIND))
    check_unharmed(served)


def test_a_refusal_keeps_the_group(served: tuple) -> None:
    _, trainer, *_ = served
    push(trainer, model_tensors(KIND))
    channel = trainer.engine._channel
    with pytest.raises(ManifestError, match="1 missing"):
        push(trainer, dict(list(model_tensors(KIND).items())[1:]))
    push(trainer, model_tensors(KIND))
    assert trainer.engine._channel is channel
    check_unharmed(served)


def test_an_active_update_keeps_its_connection(served: tuple) -> None:
    _, trainer, *_ = served
    push(trainer, model_tensors(KIND))
    engine, channel = trainer.engine, trainer.engine._channel
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="already active; its sender keeps"):
        join(engine, 9)
    assert engine._channel is channel
    push(trainer, model_tensors(KIND))
    engine.reset_weight_update_target()  # what vLLM calls when a session ends
    trainer.close()
    other = Trainer(engine)
    push(other, model_tensors(KIND))
    stale = update_info(manifest_of(model_tensors(KIND)), session="the first one")
    with pytest.raises(ManifestError, match="another sender has connected since"):
        engine.update_weights(stale)
    push(other, model_tensors(KIND))
    other.close()
    check_unharmed(served)


# --- senders that die ---


class Mortal(Channel):
    """Kills its process at a point of the protocol.

    `point` is (what, when): the `n`th vote or the piece with byte `n` of the stream,
    before it is sent or while it is.
    """

    def set_death(self, what: str, n: int, during: bool) -> None:
        self._death = what, n, during
        self._votes = self._sent = 0

    def vote(self, ok: bool, watch: Any = None) -> bool:
        what, n, during = self._death
        self._votes += 1
        if what == "vote" and self._votes == n:
            if during:
                self._group.allreduce([torch.ones(1, dtype=torch.int32)])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().vote(ok, watch)

    def _broadcast(self, buffer: Tensor, piece: int, watch: Any = None) -> None:
        what, n, during = self._death
        for start in range(0, buffer.numel(), piece):
            part = buffer[start : start + piece]
            if what == "byte" and n < self._sent + part.numel():
                if during:
                    self._group.broadcast(part, 0)
                os.kill(os.getpid(), signal.SIGKILL)
            super()._broadcast(part, piece, watch)
            self._sent += part.numel()


def _die(port_to: Connection, tensors: dict[str, Any], death: tuple) -> None:
    """The child: connects, sends, and is killed."""
    store, port = host_store("127.0.0.1", TIMEOUT_S)
    port_to.send(port)
    channel = Mortal(store, 0, 2, CPU, TIMEOUT_S)
    channel.set_death(*death)
    weights = {name: torch.from_numpy(raw).view(dt).view(shape)
               for name, (raw, dt, shape) in tensors.items()}  # fmt: skip
    stream(channel, Manifest.of(weights.items()), weights.items())


def _receive(engine: Any, port: int, manifest: Manifest) -> str:
    """What came of an update whose sender dies."""
    try:
        join(engine, port)  # it may be dead as early as here
        engine.update_weights(update_info(manifest))
    except RuntimeError as e:
        return "broken" if BROKEN in str(e) else "refused"
    return "committed"


def _plain(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Tensors as values that travel to a process without sharing memory."""
    return {
        name: (t.reshape(-1).view(torch.uint8).numpy(), t.dtype, tuple(t.shape))
        for name, t in tensors.items()
    }


def deaths(count: int, nbytes: int) -> list[tuple[str, int, bool]]:
    """Before and in both votes, at both ends of the stream, and anywhere in it."""
    rng = random.Random(0)
    found = [("vote", n, during) for n in (1, 2) for during in (False, True)]
    found += [("byte", n, True) for n in (0, nbytes - 1)]
    while len(found) < count:
        found.append(("byte", rng.randrange(nbytes), rng.random() < 0.5))
    return found


def test_a_sender_killed_at_fifty_points(served: tuple) -> None:
    model, trainer, *_ = served
    engine, new = trainer.engine, model_tensors(KIND, 1)
    push(trainer, new)
    answers = outputs(model)
    push(trainer, model_tensors(KIND))
    trainer.close()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    outcomes = []
    for death in deaths(50, manifest_of(new).nbytes):
        mine, theirs = context.Pipe()
        child = context.Process(target=_die, args=(theirs, _plain(new), death))
        child.start()
        outcome = _receive(engine, mine.recv(), manifest_of(new))
        child.join(TIMEOUT_S)
        assert child.exitcode == -signal.SIGKILL
        if outcome == "broken":
            check_refusing(model)
        elif outcome == "committed":
            assert all(map(torch.equal, outputs(model), answers))
        if outcome != "refused":
            push(trainer, model_tensors(KIND))
        check_unharmed(served)
        outcomes.append((death, outcome))
    # before the second bucket nothing is written; the first holds one tensor
    early = {("vote", 1, False), ("vote", 1, True), ("byte", 0, True)}
    assert {outcome for death, outcome in outcomes if death in early} == {"refused"}
    # its vote may have left the sender before it died: then all have what it wanted
    committed = {death for death, outcome in outcomes if outcome == "committed"}
    assert committed <= {("vote", 2, True)}
    assert [outcome for _, outcome in outcomes].count("broken") >= 30


# --- two workers ---


def _scenarios(tensors: dict[str, Tensor]) -> list[tuple[str, dict[str, Tensor], bool]]:
    """(name, what is sent, with digests) in order; the workers run along."""
    bad = model_tensors(KIND, 2)
    # expert 3 lives on the second rank only
    scale = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    bad[scale].view(torch.uint8)[0, 0] = 0x7F
    return [
        ("good", tensors, False),
        ("one rank refuses", tensors, False),
        ("one rank cannot commit", bad, False),
        ("repaired", tensors, True),
        ("first tensor corrupted", tensors, True),
    ]


def _corrupt(manifest: Manifest) -> Manifest:
    assert manifest.sha256 is not None
    return Manifest(manifest.tensors, False, ("0" * 64, *manifest.sha256[1:]))


def _worker(rank: int, folder: Path, port: int) -> None:
    """One of two ranks: takes part in every scenario, and writes down what it saw."""
    os.environ["VLLM_DIST_IDENT"] = folder.name  # a CPU worker sets it
    seen = []
    with vllm_process(folder, KIND, rank=rank, ranks=2) as config:
        config.parallel_config.rank = rank  # a worker sets it
        model = load_model(folder, KIND, config)
        engine = engine_of(model, config)
        join(engine, port, 3)
        for name, tensors, with_digests in _scenarios(model_tensors(KIND, 1)):
            manifest = manifest_of(tensors, digests=with_digests)
            if name == "first tensor corrupted":
                manifest = _corrupt(manifest)
            expected = engine._expected_tensors()
            lacks = name == "one rank refuses" and rank == 1
            if lacks:
                engine._expected = {config.model_config.model: dict(
                    [x for x in expected.items() if x[0] != "lm_head.weight"]
                )}  # fmt: skip
            error = None
            try:
                engine.update_weights(update_info(manifest))
            except (RuntimeError, ValueError) as e:
                error = str(e)
            engine._expected = {config.model_config.model: expected}
            refuses = len(refusing(model))
            held = digests(model)
            seen.append(
                {"name": name, "error": error, "refuses": refuses, "held": held}
            )
        engine.shutdown()
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))


def test_no_rank_commits_what_another_refuses(tmp_path: Path) -> None:
    store, port = host_store("127.0.0.1", TIMEOUT_S)
    workers = mp.spawn(_worker, (tmp_path, port), 2, join=False)
    trainer = Channel(store, 0, 3, CPU, TIMEOUT_S)
    committed = []
    for name, tensors, with_digests in _scenarios(model_tensors(KIND, 1)):
        manifest = manifest_of(tensors, digests=with_digests)
        if name == "first tensor corrupted":
            with pytest.raises(RuntimeError):
                stream(trainer, manifest, tensors.items())
        else:
            committed.append(stream(trainer, manifest, tensors.items()))
    trainer.close()
    while not workers.join():
        pass
    assert committed == [True, False, False, True]

    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(2)]
    by_name = [{step["name"]: step for step in rank} for rank in ranks]

    def errors(name: str) -> list[str]:
        return [rank[name]["error"] for rank in by_name]

    assert errors("good") == errors("repaired") == [None, None]
    first, second = errors("one rank refuses")
    assert first == f"Weight update refused: another rank refused it. {REFUSED}"
    assert second == f"Weight update refused: 1 unknown: lm_head.weight. {REFUSED}"
    first, second = errors("one rank cannot commit")
    begin = "Weight update broke off after 117 of 117 tensors:"
    assert first == f"{begin} Another rank could not commit the update. {BROKEN}"
    assert second.startswith(f"{begin} model.layers.1.mlp.experts.w13_weight_scale: ")
    assert "expert 3: 1 of 256" in second
    for error in errors("first tensor corrupted"):
        # neither can know what the other has written
        assert "after 0 of 117 tensors: model.embed_tokens.weight has SHA-256" in error
        assert error.endswith(BROKEN)
    for rank in by_name:
        assert {name: step["refuses"] for name, step in rank.items()} == {
            "good": 0,
            "one rank refuses": 0,
            "one rank cannot commit": 2,
            "repaired": 0,
            "first tensor corrupted": 2,
        }
        good = rank["good"]["held"]
        assert compare(good, rank["one rank refuses"]["held"]).identical
        assert compare(good, rank["repaired"]["held"]).identical
        assert compare(good, rank["one rank cannot commit"]["held"]).changed


# --- draft models ---


def test_a_draft_model_is_checked_against_its_own_checkpoint(
    served: tuple, tmp_path: Path
) -> None:
    from vllm.config import set_current_vllm_config

    _, trainer, *_ = served
    engine = trainer.engine
    config = engine_config(tmp_path, DRAFT, moe_backend="megamoe")
    with set_current_vllm_config(config):
        draft = load_model(tmp_path, DRAFT, config)
        before, answers = digests(draft), outputs(draft)
        assert engine.supports_draft_weight_update
        engine.set_weight_update_target(draft, config.model_config)
        push(trainer, model_tensors(DRAFT, 1))
        assert len(compare(before, digests(draft)).changed) > 10
        with pytest.raises(
            ManifestError, match=r"unknown: model\.layers\.0\.mlp\.experts\.0"
        ):
            push(trainer, model_tensors(KIND))
        push(trainer, model_tensors(DRAFT))
        check_unharmed((draft, trainer, before, answers))
        engine.reset_weight_update_target()
    check_unharmed(served)
    push(trainer, model_tensors(KIND))
    check_unharmed(served)
    with pytest.raises(ManifestError, match="unknown"):
        push(trainer, model_tensors(DRAFT))
