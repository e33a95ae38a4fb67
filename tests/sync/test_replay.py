# SPDX-License-Identifier: Apache-2.0
"""Replayed copies equal those that are run one by one, whatever buffer comes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin.bench.reload import SHAPES, Layers
from vllm_megamoe_plugin.layouts import LAYOUTS, PLAIN, Layout
from vllm_megamoe_plugin.sync import replay as replay_module
from vllm_megamoe_plugin.sync.replay import MAX_GRAPHS

from ..helpers import assert_same, snapshot, tensors_of

TINY = SHAPES["tiny"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda x: x.name)


def healthy_bytes(like: Tensor) -> Tensor:
    return torch.empty_like(like).random_(1, 0x7F)


def check_load(layers: Layers, buffer: Tensor) -> None:
    """One update out of `buffer`, by its bucket, equals the loaders'."""
    bucket, hosts = layers.bucket, [host for host, _ in layers.layers.values()]
    views = list(bucket.views(buffer))

    def loaded(load: Callable[[], None]) -> list[dict[str, Tensor]]:
        for host in hosts:
            for tensor in tensors_of(host).values():
                tensor.data.view(torch.uint8).fill_(0xA5)
        layers.begin()
        load()
        return [snapshot(host) for host in hosts]

    want = loaded(lambda: layers.load_weights(views))
    plan = layers.plan.bucket(bucket)
    got = loaded(lambda: plan.load(buffer))
    for one, other in zip(got, want, strict=True):
        assert_same(one, other)


@layouts
@pytest.mark.parametrize("inference", [False, True])
def test_on_cpu_copies_are_run_as_they_are(layout: Layout, inference: bool) -> None:
    layers = Layers(TINY, layout, torch.device("cpu"), layers=2)
    with torch.inference_mode(inference):
        for _ in range(3):
            layers.buffer.copy_(healthy_bytes(layers.buffer))
            check_load(layers, layers.buffer)
    assert layers.plan.bucket(layers.bucket)._replay._graphs == {}


@needs_gpu
@pytest.mark.gpu
class TestOnGpu:
    @layouts
    @pytest.mark.parametrize("inference", [False, True])
    def test_new_bytes_in_an_old_buffer(self, layout: Layout, inference: bool) -> None:
        layers = Layers(TINY, layout, torch.device("cuda"), layers=2)
        with torch.inference_mode(inference):
            for _ in range(5):  # as they are, captured, replayed
                layers.buffer.copy_(healthy_bytes(layers.buffer))
                check_load(layers, layers.buffer)
        graphs = layers.plan.bucket(layers.bucket)._replay._graphs
        assert list(graphs) == [layers.buffer.data_ptr()]
        assert None not in graphs.values()

    def test_two_buffers_take_turns(self) -> None:
        layers = Layers(TINY, PLAIN, torch.device("cuda"))
        buffers = [layers.buffer, layers.buffer.clone()]
        for _ in range(4):
            for buffer in buffers:
                buffer.copy_(healthy_bytes(buffer))
                check_load(layers, buffer)
        graphs = layers.plan.bucket(layers.bucket)._replay._graphs
        assert list(graphs) == [buffer.data_ptr() for buffer in buffers]

    def test_a_parameter_that_moved_is_captured_anew(self) -> None:
        layers = Layers(TINY, PLAIN, torch.device("cuda"))
        (host, _), *_ = layers.layers.values()
        plan = layers.plan.bucket(layers.bucket)
        for _ in range(3):
            check_load(layers, layers.buffer)
        old = plan._replay
        left = host.w2_weight.data
        host.w2_weight.data = torch.zeros_like(left)
        left.fill_(0x22)
        for _ in range(3):
            layers.buffer.copy_(healthy_bytes(layers.buffer))
            check_load(layers, layers.buffer)
        assert plan._replay is not old
        assert left.eq(0x22).all()

    def test_replaying_takes_no_memory(self) -> None:
        layers = Layers(TINY, PLAIN, torch.device("cuda"))
        plan = layers.plan.bucket(layers.bucket)
        for _ in range(3):
            plan.load(layers.buffer)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        plan.load(layers.buffer)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() == before

    def test_graphs_are_bounded(self) -> None:
        layers = Layers(TINY, PLAIN, torch.device("cuda"))
        buffers = [layers.buffer.clone() for _ in range(MAX_GRAPHS + 1)]
        for buffer in [buffer for buffer in buffers for _ in range(2)]:
            check_load(layers, buffer)
        graphs = layers.plan.bucket(layers.bucket)._replay._graphs
        assert list(graphs) == [buffer.data_ptr() for buffer in buffers[1:]]

    @pytest.mark.parametrize("lanes", [1, 2, 8])
    def test_any_number_of_lanes(
        self, monkeypatch: pytest.MonkeyPatch, lanes: int
    ) -> None:
        monkeypatch.setattr(replay_module, "_LANES", lanes)
        layers = Layers(TINY, PLAIN, torch.device("cuda"))
        for _ in range(3):
            layers.buffer.copy_(healthy_bytes(layers.buffer))
            check_load(layers, layers.buffer)
