# SPDX-License-Identifier: Apache-2.0
"""What a worker answers about itself, around a real model in one process."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_megamoe_plugin.reload import abort_layerwise
from vllm_megamoe_plugin.sync.digest import compare
from vllm_megamoe_plugin.sync.manifest import BROKEN, REFUSED, ManifestError
from vllm_megamoe_plugin.sync.state import discard
from vllm_megamoe_plugin.sync.worker_extension import MegaMoEWorkerExtension

from ..vllm_layer import load_model, model_tensors, vllm_process


class Worker(MegaMoEWorkerExtension):
    """As far as the extension looks at vLLM's worker."""

    def __init__(self, vllm_config: Any, model: Any, draft: Any = None) -> None:
        self.vllm_config, self.rank = vllm_config, 0
        self._weight_update_active = False
        self.get_model = lambda: model
        self.get_draft_model = lambda: draft


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with vllm_process(tmp_path, "modelopt") as config:
        model = load_model(tmp_path, "modelopt", config)
        yield Worker(config, model)
        abort_layerwise(model.modules())


def test_replicas_that_know_nothing_of_each_other_have_names_of_their_own(
    worker: Worker,
) -> None:
    """Both are the first and only rank of all their groups."""
    names = []
    for index in (0, 1):
        parallel = SimpleNamespace(data_parallel_index=index)
        replica = Worker(SimpleNamespace(parallel_config=parallel), worker.get_model())
        names.append(replica.megamoe_state()["rank"])
        (digest, *_) = replica.megamoe_digests()
        assert digest.startswith(f"{names[-1]}:")
    assert names == ["dp0_pp0_tp0_dcp0_ep0_rank0", "dp1_pp0_tp0_dcp0_ep0_rank0"]


def test_a_load_writes_the_whole_checkpoint_and_says_what(
    worker: Worker, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    save_file(model_tensors("modelopt", seed=7), folder / "model.safetensors")
    before = worker.megamoe_digests()
    loaded = worker.megamoe_load(str(folder))["loaded"]
    assert loaded == sorted(loaded)
    assert {"model.norm.weight", "lm_head.weight"} <= set(loaded)
    after = worker.megamoe_digests()
    rank = worker.megamoe_state()["rank"]
    for name in loaded:
        key = f"{rank}:{name}"
        if before[key]["shape"] != [0]:  # else a packed copy holds it
            assert after[key]["sha256"] != before[key]["sha256"], name


def test_a_load_is_checked_against_what_the_server_was_started_from(
    worker: Worker, tmp_path: Path
) -> None:
    """vLLM's own reload may have moved on to another directory since."""
    worker.megamoe_load(str(tmp_path))
    worker.vllm_config.model_config.model = str(tmp_path / "gone")
    worker.megamoe_load(str(tmp_path))
    part = tmp_path / "part"
    part.mkdir()
    tensors = model_tensors("modelopt", seed=7)
    del tensors["model.norm.weight"]
    save_file(tensors, part / "model.safetensors")
    with pytest.raises(ManifestError, match=f"1 missing: model.norm.weight.*{REFUSED}"):
        worker.megamoe_load(str(part))
    assert worker.megamoe_state()["incomplete"] is None
    worker.megamoe_load(str(part), partial=True)
    assert worker.megamoe_state()["incomplete"] is None


def test_a_load_that_breaks_off_is_told_by_state_and_repaired_by_another(
    worker: Worker, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    tensors = model_tensors("modelopt", seed=7)
    scale = next(t for n, t in tensors.items() if n.endswith("down_proj.weight_scale"))
    scale.view(torch.uint8)[0, 0] = 0x7F
    save_file(tensors, bad / "model.safetensors")
    before = worker.megamoe_digests()
    with pytest.raises(RuntimeError, match="block scales are NaN") as error:
        worker.megamoe_load(str(bad))
    incomplete = worker.megamoe_state()["incomplete"]
    assert incomplete.endswith(f": {error.value}")
    assert "Weight update broke off after " in incomplete
    assert incomplete.endswith(BROKEN)
    worker.megamoe_load(str(tmp_path))
    assert worker.megamoe_state()["incomplete"] is None
    assert compare(before, worker.megamoe_digests()).identical


def test_an_incomplete_draft_model_keeps_the_rank_from_serving(
    worker: Worker,
) -> None:
    draft = worker.get_model()
    whole = torch.nn.Linear(1, 1)
    discard(draft, "Gone.")
    for first, second in ((draft, None), (draft, whole), (whole, draft)):
        state = Worker(worker.vllm_config, first, second).megamoe_state()
        assert "Gone." in state["incomplete"]
