# SPDX-License-Identifier: Apache-2.0
"""Two ranks, vLLM's own load balancer: moves carry whole experts, reloads follow them.

Real processes: what vLLM moves, and where a reload writes, differs between ranks.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from .vllm_layer import E, load_model, model_tensors, vllm_process

RANKS, REPLICAS = 2, 2
#: physical id -> logical id of two layers, after moves.
MOVED = [[3, 1, 0, 2, 1, 0], [2, 2, 1, 0, 3, 2]]
Experts = dict[tuple[int, int, int], bytes]


def _rank(rank: int, kind: str, folder: Path, check: Any) -> None:
    """One rank: a model of weights 0 that EPLB has taken on; then `check`."""
    os.environ["VLLM_DIST_IDENT"] = folder.name  # a CPU worker sets it
    options = {"rank": rank, "ranks": RANKS, "replicas": REPLICAS}
    with vllm_process(folder, kind, **options) as config:
        from vllm.distributed.eplb.eplb_state import EplbState

        model = load_model(folder, kind, config)
        balancer = EplbState(config.parallel_config, torch.device("cpu"))
        balancer.add_model(model, config.model_config)
        check(kind, model, config, balancer)


def _methods(model: Any) -> list[tuple[Any, Any]]:
    """(layer, our method) of each MoE layer."""
    from vllm_megamoe_plugin.sync.direct import expert_layers

    return [(x.module, x.module.quant_method) for x in expert_layers(model)]


def _held(model: Any) -> Experts:
    """(layer, tensor, logical expert) -> bytes, of all ranks; replicas must agree."""
    mine: Experts = {}
    for number, (layer, method) in enumerate(_methods(model)):
        logical = method.experts.spec.placement.slot_logical
        for i, tensor in enumerate(method.experts.expert_weights(layer)):
            for slot, row in enumerate(
                tensor.view(torch.uint8).reshape(len(logical), -1)
            ):
                data = row.numpy().tobytes()
                assert mine.setdefault((number, i, logical[slot]), data) == data
    ranks: list[Experts] = [{} for _ in range(RANKS)]
    dist.all_gather_object(ranks, mine)
    found: Experts = {}
    for held in ranks:
        for key, data in held.items():
            assert found.setdefault(key, data) == data, f"ranks differ in {key}"
    assert {e for _, _, e in found} == set(range(E))
    return found


def _move(model: Any, balancer: Any, placement: list[list[int]]) -> None:
    """What vLLM does at the end of a rearrangement it has decided on."""
    from vllm.distributed import get_ep_group
    from vllm.distributed.eplb.eplb_state import _commit_eplb_maps
    from vllm.distributed.eplb.rebalance_execute import (
        rearrange_expert_weights_inplace,
    )

    (state,) = balancer.model_states.values()
    new = torch.tensor(placement)
    rearrange_expert_weights_inplace(
        state.physical_to_logical_map,
        new,
        model.expert_weights,
        state.expert_buffer,
        get_ep_group().device_group,
        state.communicator,
    )
    _commit_eplb_maps(state, new)


def _layerwise(model: Any, config: Any, tensors: dict[str, Tensor]) -> None:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(model)
    model.load_weights(tensors.items())
    finalize_layerwise_reload(model, config.model_config)


def _direct(model: Any, config: Any, tensors: dict[str, Tensor]) -> None:
    from vllm_megamoe_plugin.sync.direct import DirectUpdate
    from vllm_megamoe_plugin.sync.manifest import Manifest

    manifest = Manifest.of(tensors.items())
    expected = {spec.name: spec for spec in manifest.tensors}
    update = DirectUpdate(model, config.model_config, manifest, expected)
    update.load(tensors.items())
    update.finish()


def _bare(model: Any, config: Any, tensors: dict[str, Tensor]) -> None:
    del config
    model.load_weights((n, t) for n, t in tensors.items() if ".experts." in n)
    for layer, method in _methods(model):
        method.process_weights_after_loading(layer)


def _follows(kind: str, model: Any, config: Any, balancer: Any) -> None:
    sets = [model_tensors(kind, seed) for seed in (0, 1)]
    expected = [_held(model)]
    _direct(model, config, sets[1])
    expected.append(_held(model))
    assert not expected[0].items() & expected[1].items()
    addresses = [m.experts.addresses(layer) for layer, m in _methods(model)]
    _move(model, balancer, MOVED)
    for _, method in _methods(model):
        method.before_update()  # only to read the slots under their new names
    assert _held(model) == expected[1], "EPLB moved less than whole experts"
    _move(model, balancer, [MOVED[1], MOVED[0]])
    for number, update in enumerate((_layerwise, _direct, _bare, _layerwise, _direct)):
        update(model, config, sets[number % 2])
        assert _held(model) == expected[number % 2], update.__name__
        for _, method in _methods(model):
            method.experts.ledger.check_ready()
    assert [m.experts.addresses(layer) for layer, m in _methods(model)] == addresses


def _refuses_in_flight(kind: str, model: Any, config: Any, balancer: Any) -> None:
    (state,) = balancer.model_states.values()
    before, tensors = _held(model), model_tensors(kind, 1)
    _move(model, balancer, MOVED)
    # as an asynchronous rearrangement leaves it whose last layer is yet to be put in
    # place; its worker thread itself needs a GPU
    acknowledged = []
    balancer.is_async = state.rebalanced = True
    state.pending_result = SimpleNamespace(
        layer_idx=len(MOVED) - 1,
        consumed_event=SimpleNamespace(record=lambda: acknowledged.append(1)),
    )
    with pytest.raises(RuntimeError, match="EPLB is moving experts"):
        _bare(model, config, tensors)
    for _, method in _methods(model):
        method.experts.spec.placement.follow(method.moves.current())
    assert _held(model) == before
    _direct(model, config, tensors)
    assert acknowledged == [1]
    assert not state.rebalanced
    assert not _held(model).items() & before.items()


def _all(kind: str, model: Any, config: Any, balancer: Any) -> None:
    _refuses_in_flight(kind, model, config, balancer)
    _direct(model, config, model_tensors(kind, 0))
    _follows(kind, model, config, balancer)


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
def test_a_reload_ends_moves_and_writes_every_replica_where_it_is_now(
    kind: str, tmp_path: Path
) -> None:
    mp.spawn(_rank, (kind, tmp_path, _all), RANKS)
