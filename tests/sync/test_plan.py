# SPDX-License-Identifier: Apache-2.0
"""A replayed plan leaves what the loaders would: bytes, ledger, and nothing else."""

import gc
import random
import re
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vllm_megamoe_plugin.bench.measure import Allocations
from vllm_megamoe_plugin.checkpoint import (
    CONVENTIONS,
    MODELOPT_NVFP4,
    PLAIN_BF16,
    Convention,
    Role,
)
from vllm_megamoe_plugin.experts import MegaMoE
from vllm_megamoe_plugin.layouts import DEEP_GEMM, LAYOUTS, PLAIN, Layout
from vllm_megamoe_plugin.loader import Placement
from vllm_megamoe_plugin.sync import plan as plan_module
from vllm_megamoe_plugin.sync.manifest import Manifest
from vllm_megamoe_plugin.sync.plan import CopyPlan, plan_of
from vllm_megamoe_plugin.sync.wire import cut_buckets

from ..helpers import (
    PLACEMENTS,
    Checkpoint,
    addresses,
    assert_equal,
    assert_same,
    build,
    load,
    load_one,
    make_checkpoint,
    place,
    snapshot,
    tensors_of,
)
from ..vllm_layer import load_model, model_tensors, vllm_process

conventions = pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.name)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda x: x.name)
placements = pytest.mark.parametrize(
    "placement", PLACEMENTS.values(), ids=PLACEMENTS.keys()
)
Weights = list[tuple[str, Tensor]]


def named(checkpoint: Checkpoint) -> Weights:
    return [(f"{e} {s} {role.name}", t) for (e, s, role), t in checkpoint.items()]


def loader_of(host: nn.Module, experts: MegaMoE) -> Callable[[Iterable], None]:
    """`load_weights` of a layer: the calls vLLM makes for each tensor."""

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            e, shard, role = name.split()
            key = (int(e), shard, Role[role])
            for physical, logical in enumerate(experts.spec.placement.logical):
                if logical == key[0]:
                    load_one(host, experts, physical, key, tensor)

    return load_weights


def build_plan(convention: Convention, **options: Any) -> tuple[Any, MegaMoE, CopyPlan]:
    host, experts = build(convention, **options)
    for tensor in tensors_of(host).values():
        tensor.data.view(torch.uint8).fill_(0xA5)
    return host, experts, CopyPlan(loader_of(host, experts), host.parameters)


def in_one_buffer(weights: Weights, start: int = 0) -> Weights:
    """The same tensors in one storage, as a sender packs them."""
    (bucket,) = cut_buckets(Manifest.of(weights), 1 << 40)
    buffer = torch.empty(start + bucket.nbytes, dtype=torch.uint8)[start:]
    packed = []
    for (name, tensor), at in zip(weights, bucket.offsets, strict=True):
        view = buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        packed.append((name, view.copy_(tensor)))
    return packed


def reference(
    convention: Convention, checkpoint: Checkpoint, **options: Any
) -> tuple[dict[str, Tensor], MegaMoE]:
    host, experts = build(convention, **options)
    for tensor in tensors_of(host).values():
        tensor.data.view(torch.uint8).fill_(0xA5)
    load(host, experts, checkpoint)
    return snapshot(host), experts


def loads(experts: MegaMoE) -> dict[str, bytes]:
    return {name: bytes(slots) for name, slots in experts.ledger._loads.items()}


@conventions
@layouts
@placements
def test_replay_equals_the_loaders(
    convention: Convention, layout: Layout, placement: Placement
) -> None:
    options = {"hidden": 256, "intermediate": 256, "layout": layout}
    checkpoint = make_checkpoint(convention, 3, 256, 256)
    want, by_loaders = reference(convention, checkpoint, placement=placement, **options)
    weights = named(checkpoint)
    random.Random(0).shuffle(weights)
    (bucket,) = cut_buckets(Manifest.of(weights), 1 << 40)
    for way in ("separate", "one buffer", "bucket"):
        host, experts, plan = build_plan(convention, placement=placement, **options)
        before = addresses(host)
        for _ in range(2):  # traced, then replayed
            experts.ledger.begin_update()
            if way == "bucket":
                first = in_one_buffer(weights)[0][1]
                raw = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
                copies = plan.bucket(bucket)
                copies.load(raw)
            else:
                plan.load(weights if way == "separate" else in_one_buffer(weights))
            assert_same(tensors_of(host), want)
            assert loads(experts) == loads(by_loaders)
            assert addresses(host) == before


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_order_split_and_memory(data: st.DataObject) -> None:
    convention = data.draw(st.sampled_from(CONVENTIONS))
    layout = data.draw(st.sampled_from(list(LAYOUTS.values())))
    placement = data.draw(st.sampled_from(list(PLACEMENTS.values())))
    options = {"hidden": 256, "intermediate": 256, "layout": layout}
    checkpoint = make_checkpoint(convention, 3, 256, 256)
    want, by_loaders = reference(convention, checkpoint, placement=placement, **options)
    host, experts, plan = build_plan(convention, placement=placement, **options)
    weights = data.draw(st.permutations(named(checkpoint)))
    while weights:
        count = data.draw(st.integers(1, len(weights)))
        part, weights = list(weights[:count]), weights[count:]
        memory = data.draw(st.sampled_from(["own", "buffer", "odd buffer", "turned"]))
        if "buffer" in memory:
            part = in_one_buffer(part, 16 if memory == "buffer" else 4)
        elif memory == "turned":
            part = [(n, t.t().contiguous().t() if t.dim() == 2 else t) for n, t in part]
        plan.load(part)
    assert_same(tensors_of(host), want)
    assert loads(experts) == loads(by_loaders)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_unquantized_weights_are_cast(dtype: torch.dtype) -> None:
    checkpoint = {k: t.to(dtype) for k, t in make_checkpoint(PLAIN_BF16).items()}
    want, _ = reference(PLAIN_BF16, checkpoint)
    for pack in (list, in_one_buffer):
        host, _, plan = build_plan(PLAIN_BF16)
        plan.load(pack(named(checkpoint)))
        assert_same(tensors_of(host), want)


@layouts
def test_bytes_may_come_under_another_name_of_their_type(layout: Layout) -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    want, _ = reference(MODELOPT_NVFP4, checkpoint, layout=layout)
    alias = {Role.WEIGHT: torch.int8, Role.BLOCK_SCALE: torch.uint8}
    aliased = {k: t.view(alias.get(k[2], t.dtype)) for k, t in checkpoint.items()}
    for pack in (list, in_one_buffer):
        host, _, plan = build_plan(MODELOPT_NVFP4, layout=layout)
        plan.load(pack(named(aliased)))
        assert_same(tensors_of(host), want)


@pytest.mark.parametrize("layout", [PLAIN, DEEP_GEMM], ids=lambda x: x.name)
def test_replay_allocates_nothing_and_keeps_nothing(layout: Layout) -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    host, _, plan = build_plan(MODELOPT_NVFP4, layout=layout)
    weights = in_one_buffer(named(checkpoint))
    plan.load(weights)
    with Allocations() as replay:
        plan.load(weights)
    assert replay.total == 0
    with Allocations() as copied:
        again = in_one_buffer(named(checkpoint))
    assert copied.total >= sum(t.nbytes for _, t in again)
    plan.load(again)
    storage = weakref.ref(again[0][1].untyped_storage())
    loaded = snapshot(host)
    for _, tensor in again:
        tensor.view(-1).view(torch.uint8).fill_(0x11)
    assert_same(tensors_of(host), loaded)
    again.clear()
    del tensor
    gc.collect()
    assert storage() is None


def test_processing_after_a_replay_allocates_scalars_only() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    host, experts, plan = build_plan(MODELOPT_NVFP4)
    for _ in range(2):
        experts.ledger.begin_update()
        plan.load(named(checkpoint))
        with Allocations() as processing:
            experts.process(host)
    assert processing.total <= 16


def test_what_another_rank_holds_costs_no_copy() -> None:
    placement = place(8, rank=1, ranks=4)
    checkpoint = make_checkpoint(MODELOPT_NVFP4, 8)
    host, experts, plan = build_plan(MODELOPT_NVFP4, placement=placement)
    foreign = [
        (name, t)
        for name, t in named(checkpoint)
        if name[0] not in "23" and not name.endswith("INPUT_SCALE")
    ]
    before = snapshot(host)
    plan.load(foreign)
    plan.load(in_one_buffer(foreign))
    assert_same(tensors_of(host), before)
    assert not any(map(any, loads(experts).values()))
    plan.load(in_one_buffer(named(checkpoint)))
    assert experts.ledger.missing() == experts.ledger.duplicates() == []


def test_loading_twice_is_counted() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    _, experts, plan = build_plan(MODELOPT_NVFP4)
    weights = named(checkpoint)
    plan.load(weights)
    plan.load(in_one_buffer(weights[:3]))
    plan.load([weights[5], weights[5]])
    assert len(experts.ledger.duplicates()) == 4
    assert sorted({n for slots in loads(experts).values() for n in slots}) == [1, 2, 3]
    buckets = list(cut_buckets(Manifest.of(weights[:3]), 1 << 40))
    plan.bucket(buckets[0]).load(torch.zeros(1 << 20, dtype=torch.uint8))
    assert loads(experts)["w13_weight"][0] == 3


def test_a_misfit_is_refused_by_its_loader_and_writes_nothing() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    host, experts, plan = build_plan(MODELOPT_NVFP4)
    plan.load(named(checkpoint))
    before, marked = snapshot(host), loads(experts)
    wrong = [("0 w2 GLOBAL_SCALE", torch.ones(())), ("1 w1 WEIGHT", torch.ones(3, 3))]
    with pytest.raises(TypeError, match=r"expert 1 w1 .*got dtype torch\.float32"):
        plan.load(wrong)
    bad_shape = ("1 w1 WEIGHT", torch.ones(3, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=re.escape("got shape (3, 3), need")):
        plan.load([bad_shape])
    assert_same(tensors_of(host), before)
    assert loads(experts) == marked


def test_a_tensor_may_come_with_other_strides_next_time() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    want, _ = reference(MODELOPT_NVFP4, checkpoint, layout=DEEP_GEMM)
    host, _, plan = build_plan(MODELOPT_NVFP4, layout=DEEP_GEMM)
    straight = named(checkpoint)
    turned = [(n, t.t().contiguous().t() if t.dim() == 2 else t) for n, t in straight]
    for weights in (straight, turned, [*straight, *turned], [*turned, *straight]):
        for tensor in tensors_of(host).values():
            tensor.data.view(torch.uint8).fill_(0xA5)
        plan.load(weights)
        assert_same(tensors_of(host), want)


def test_a_buffer_that_comes_again_is_not_compiled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    _, _, plan = build_plan(MODELOPT_NVFP4)
    weights = named(checkpoint)
    plan.load(in_one_buffer(weights))

    def compile_copies(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(plan_module, "compile_copies", compile_copies)
    plan.load(in_one_buffer(weights))
    with pytest.raises(AssertionError, match="compiled again"):
        plan.load(in_one_buffer(weights[1:]))


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream is not gathered whole before the first copy."""
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    want, _ = reference(MODELOPT_NVFP4, checkpoint)
    host, _, plan = build_plan(MODELOPT_NVFP4)
    weights = named(checkpoint)
    limit = 2 * max(t.nbytes for _, t in weights)
    monkeypatch.setattr(plan_module, "BATCH_BYTES", limit)
    alive: list[weakref.ref[Tensor]] = []

    def stream() -> Iterable[tuple[str, Tensor]]:
        for name, tensor in weights:
            held = sum(t.nbytes for r in alive if (t := r()) is not None)
            assert held <= limit
            fresh = tensor.clone()
            alive.append(weakref.ref(fresh))
            yield name, fresh
            del fresh

    plan.load(stream())
    assert_same(tensors_of(host), want)


def test_other_tensors_are_handed_on_in_order() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    want, _ = reference(MODELOPT_NVFP4, checkpoint)
    host, _, plan = build_plan(MODELOPT_NVFP4)
    ours = named(checkpoint)
    mixed = [("norm", torch.ones(3)), *ours[:5], ("head", torch.ones(2)), *ours[5:]]
    others = list(plan.load_own(iter(mixed), {name for name, _ in ours}))
    assert [name for name, _ in others] == ["norm", "head"]
    assert_same(tensors_of(host), want)


# --- what makes a plan stale ---


def test_a_plan_follows_experts_that_moved() -> None:
    placement = place(3, physical=4)
    checkpoint = make_checkpoint(MODELOPT_NVFP4, 3)
    host, experts, plan = build_plan(MODELOPT_NVFP4, placement=placement)
    weights = in_one_buffer(named(checkpoint))
    (bucket,) = cut_buckets(Manifest.of(weights), 1 << 40)
    copies = plan.bucket(bucket)
    raw = torch.empty(0, dtype=torch.uint8).set_(weights[0][1].untyped_storage())
    plan.load(weights)
    copies.load(raw)
    assert not plan.stale
    placement.follow([2, 1, 0, 2])
    assert plan.stale
    plan.refresh()
    assert not plan.stale
    for load_again in (lambda: plan.load(weights), lambda: copies.load(raw)):
        host.w2_weight.data.zero_()
        experts.ledger.begin_update()
        load_again()
        for slot, expert in enumerate([2, 1, 0, 2]):
            want = checkpoint[expert, "w2", Role.WEIGHT]
            assert_equal(host.w2_weight.data[slot], want)
        assert experts.ledger.missing() == experts.ledger.duplicates() == []


@pytest.mark.parametrize("how", ["replaced", "moved"])
def test_a_plan_notices_a_parameter_that_is_another_one(how: str) -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    want, _ = reference(MODELOPT_NVFP4, checkpoint)
    host, _, plan = build_plan(MODELOPT_NVFP4)
    plan.load(named(checkpoint))
    old = host.w13_weight
    elsewhere = torch.zeros_like(old.data)
    if how == "moved":
        old.data = elsewhere
    else:
        new = nn.Parameter(elsewhere, requires_grad=False)
        new.__dict__.update(old.__dict__)
        host.w13_weight = new
    assert plan.stale
    plan.refresh()
    plan.load(named(checkpoint))
    assert_same(tensors_of(host), want)


# --- models ---


def test_a_tensor_that_the_model_computes_on_goes_through_its_loader() -> None:
    checkpoint = make_checkpoint(PLAIN_BF16)
    host, experts, _ = build_plan(PLAIN_BF16)
    inner = loader_of(host, experts)

    def doubling(weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        for name, tensor in weights:
            inner([(name, 2 * tensor if name.startswith("1 ") else tensor)])
            yield name

    plan = CopyPlan(doubling, host.parameters)
    doubled = {k: 2 * t if k[0] == 1 else t for k, t in checkpoint.items()}
    want, by_loaders = reference(PLAIN_BF16, doubled)
    for _ in range(2):
        experts.ledger.begin_update()
        plan.load(in_one_buffer(named(checkpoint)))
        assert_same(tensors_of(host), want)
        assert loads(experts) == loads(by_loaders)
    (bucket,) = cut_buckets(Manifest.of(named(checkpoint)), 1 << 40)
    with pytest.raises(TypeError, match=r"^1 w1 WEIGHT: the model computes on it"):
        plan.bucket(bucket).load(torch.zeros(bucket.nbytes, dtype=torch.uint8))


def test_a_bucket_needs_its_buffer() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    _, _, plan = build_plan(MODELOPT_NVFP4)
    (bucket,) = cut_buckets(Manifest.of(named(checkpoint)), 1 << 40)
    copies = plan.bucket(bucket)
    for buffer in (
        torch.zeros(bucket.nbytes - 1, dtype=torch.uint8),
        torch.zeros(bucket.nbytes, dtype=torch.int8),
    ):
        with pytest.raises(ValueError, match=f"The bucket has {bucket.nbytes} bytes"):
            copies.load(buffer)


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint with one 3-D tensor for all experts of a projection."""
    out: dict[str, Tensor] = {}
    groups: dict[tuple[str, str], dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(".experts.")
        if not rest:
            out[name] = tensor
            continue
        expert, proj, suffix = rest.split(".")
        rows = tensor.reshape(-1, *tensor.shape[1:])
        groups.setdefault((layer, suffix), {})[int(expert), proj] = rows
    for (layer, suffix), parts in groups.items():
        experts = range(1 + max(e for e, _ in parts))
        both = [
            torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in experts
        ]
        down = [parts[e, "down_proj"] for e in experts]
        out[f"{layer}.experts.gate_up_proj.{suffix}"] = torch.stack(both)
        out[f"{layer}.experts.down_proj.{suffix}"] = torch.stack(down)
    return out


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors", "bf16"])
def test_a_whole_model_in_vllm(tmp_path: Path, kind: str) -> None:
    """vLLM's own name mapping and `load_weights`, per-expert and fused names."""
    with vllm_process(tmp_path, kind) as config:
        model = load_model(tmp_path, kind, config)
        cold = {
            n: p.detach().clone()
            for n, p in model.named_parameters()
            if ".experts." in n
        }
        plan = plan_of(model)
        assert plan_of(model) is plan
        for make in (lambda t: t, fused):
            if make is fused and kind == "bf16":
                continue  # vLLM reads those of an unquantized model itself
            for seed in (5, 0):
                tensors = make(model_tensors(kind, seed))
                ours = [(n, t) for n, t in tensors.items() if ".experts." in n]
                model.load_weights(iter(ours))
                want = {n: model.get_parameter(n).detach().clone() for n in cold}
                for n in cold:
                    model.get_parameter(n).data.view(torch.uint8).fill_(0xA5)
                plan.load(in_one_buffer(ours))
                assert_same({n: model.get_parameter(n).data for n in cold}, want)
            assert_same(want, cold)
