# SPDX-License-Identifier: Apache-2.0
"""Loaders only view and copy: any order, any slice, meta or traced, nothing kept."""

import gc
import importlib.util
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_megamoe_plugin.checkpoint import (
    CONVENTIONS,
    MODELOPT_NVFP4,
    PER_TENSOR,
    PLAIN_BF16,
    Convention,
    Role,
)
from vllm_megamoe_plugin.layouts import LAYOUTS, Layout
from vllm_megamoe_plugin.loader import Placement, recording

from .helpers import (
    HIDDEN,
    INTERMEDIATE,
    PLACEMENTS,
    PREFIX,
    Key,
    addresses,
    assert_equal,
    assert_same,
    build,
    calls_of,
    load,
    load_one,
    make_checkpoint,
    on_meta,
    place,
    replay,
    shuffled,
    snapshot,
    tensors_of,
    trace,
)

conventions = pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.name)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda x: x.name)
placements = pytest.mark.parametrize(
    "placement", PLACEMENTS.values(), ids=PLACEMENTS.keys()
)


class Recorder(TorchDispatchMode):
    """Every aten operation that runs, and the elements that `copy_` wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.copied = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.ops.append(func._schema.name.removeprefix("aten::"))
        if func is torch.ops.aten.copy_.default:
            assert args[0].numel() == args[1].numel()
            self.copied += args[0].numel()
        return func(*args, **(kwargs or {}))


VIEWS = {"alias", "detach", "narrow", "permute", "select", "slice", "t", "transpose"}
VIEWS |= {"view", "_unsafe_view", "_reshape_alias", "as_strided"}


# --- what a call does ---


@conventions
@layouts
@placements
def test_loading_only_views_and_copies(
    convention: Convention, layout: Layout, placement: Placement
) -> None:
    checkpoint = make_checkpoint(convention, 3, INTERMEDIATE, 256)
    host, experts = build(
        convention,
        layout=layout,
        placement=placement,
        hidden=INTERMEDIATE,
        intermediate=256,
    )
    with torch.no_grad():
        for physical, key in calls_of(placement, checkpoint):
            recorder = Recorder()
            before = addresses(host)
            with recorder:
                held = load_one(host, experts, physical, key, checkpoint[key])
            everyone = key[2] is Role.INPUT_SCALE
            held_here = 1 if everyone else len(placement.slots_of[key[0]])
            copies = held_here if placement.is_primary(physical) else 0
            assert recorder.ops.count("copy_") == copies, recorder.ops
            assert set(recorder.ops) <= VIEWS | {"copy_"}, recorder.ops
            assert held is (held_here > 0)
            assert addresses(host) == before


@conventions
@placements
def test_every_element_is_copied_exactly_once(
    convention: Convention, placement: Placement
) -> None:
    """vLLM's layerwise reload counts copied elements to know when a layer is whole."""
    checkpoint = make_checkpoint(convention, 3)
    host, experts = build(convention, placement=placement)
    size = sum(
        getattr(t, "weight_loader_numel", t.numel()) for t in tensors_of(host).values()
    )
    with torch.no_grad(), Recorder() as recorder:
        load(host, experts, checkpoint)
    assert recorder.copied == size


@conventions
@layouts
@placements
def test_any_order_gives_the_same_bytes(
    convention: Convention, layout: Layout, placement: Placement
) -> None:
    checkpoint = make_checkpoint(convention, 3, 256, 256)
    sizes = {"hidden": 256, "intermediate": 256, "layout": layout}
    host, experts = build(convention, placement=placement, **sizes)
    load(host, experts, checkpoint)
    for seed in range(3):
        other, others = build(convention, placement=placement, **sizes)
        calls = shuffled(calls_of(placement, checkpoint), seed)
        load(other, others, checkpoint, calls)
        assert_same(tensors_of(other), snapshot(host))
        assert others.ledger.missing() == others.ledger.duplicates() == []


@conventions
@placements
def test_plain_parameters_hold_what_the_checkpoint_holds(
    convention: Convention, placement: Placement
) -> None:
    checkpoint = make_checkpoint(convention, 3)
    host, experts = build(convention, placement=placement)
    load(host, experts, checkpoint)
    local = sorted(
        (slot, placement.logical[p])
        for p, slot in enumerate(placement.local_slot)
        if slot >= 0
    )
    for role in convention.suffixes:
        ids = range(3) if role is Role.INPUT_SCALE else [e for _, e in local]
        w13, w2 = (
            getattr(host, experts.name(side, role)).data for side in ("w13", "w2")
        )
        if role in PER_TENSOR:
            for half, shard in enumerate(("w1", "w3")):
                values = [checkpoint[e, shard, role].view(()) for e in ids]
                assert_equal(w13[half], torch.stack(values), f"{role} {shard}")
            values = [checkpoint[e, "w2", role].view(()) for e in ids]
            assert_equal(w2, torch.stack(values), f"{role} w2")
            continue
        for slot, e in enumerate(ids):
            gate, up, down = (
                _tp_slice(checkpoint[e, s, role], s, placement)
                for s in ("w1", "w3", "w2")
            )
            assert_equal(w13[slot], torch.cat([gate, up]), f"{role} w13 {e}")
            assert_equal(w2[slot], down.contiguous(), f"{role} w2 {e}")


def _tp_slice(tensor: Tensor, shard: str, placement: Placement) -> Tensor:
    dim = 1 if shard == "w2" else 0
    return tensor.chunk(placement.tp_size, dim)[placement.tp_rank]


@conventions
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_shard_may_come_whole_or_already_sliced(
    convention: Convention, tp_rank: int
) -> None:
    placement = place(3, tp_rank=tp_rank, tp_size=2)
    whole = make_checkpoint(convention, 3)
    sliced = {
        key: t if key[2] in PER_TENSOR else _tp_slice(t, key[1], placement)
        for key, t in whole.items()
    }
    host, experts = build(convention, placement=placement)
    load(host, experts, whole)
    other, others = build(convention, placement=placement)
    load(other, others, sliced)
    assert_same(tensors_of(other), snapshot(host))


@conventions
def test_transposed_sources_of_fused_checkpoints(convention: Convention) -> None:
    checkpoint = make_checkpoint(convention, 3)
    host, experts = build(convention, placement=place(3))
    load(host, experts, checkpoint)
    turned = {
        key: t.t().contiguous().t() if t.dim() == 2 else t
        for key, t in checkpoint.items()
    }
    other, others = build(convention, placement=place(3))
    load(other, others, turned)
    assert_same(tensors_of(other), snapshot(host))


def test_an_expert_of_another_rank_copies_nothing() -> None:
    placement = PLACEMENTS["ep rank 1"]
    checkpoint = make_checkpoint(MODELOPT_NVFP4, 3)
    host, experts = build(MODELOPT_NVFP4, placement=placement)
    before = snapshot(host)
    for role in set(MODELOPT_NVFP4.suffixes) - {Role.INPUT_SCALE}:
        for shard in ("w1", "w2", "w3"):
            key = (1, shard, role)
            assert load_one(host, experts, 1, key, checkpoint[key]) is False
    assert_same(tensors_of(host), before)
    missing = len(experts.ledger.missing())
    load(host, experts, checkpoint)
    assert missing > len(experts.ledger.missing()) == 0


def test_without_return_success_the_answer_is_none() -> None:
    host, _ = build(MODELOPT_NVFP4)
    param = host.w2_weight_scale_2
    assert param.weight_loader(param, torch.ones(()), "w2", "w2", 0) is None


@conventions
def test_nothing_is_kept_of_the_incoming_tensor(convention: Convention) -> None:
    checkpoint = make_checkpoint(convention, 3)
    host, experts = build(convention, placement=place(3))
    sources = {key: t.clone() for key, t in checkpoint.items()}
    load(host, experts, sources)
    loaded = snapshot(host)
    for t in sources.values():
        t.view(torch.uint8).fill_(0xA5) if t.dim() else t.fill_(-1)
    assert_same(tensors_of(host), loaded)
    references = [weakref.ref(t) for t in sources.values()]
    storages = [weakref.ref(t.untyped_storage()) for t in sources.values()]
    del t
    sources.clear()
    gc.collect()
    assert not any(r() is not None for r in references + storages)


@conventions
@placements
def test_meta_parameters_load_without_data(
    convention: Convention, placement: Placement
) -> None:
    checkpoint = make_checkpoint(convention, 3)
    host, experts = build(convention, placement=placement)
    before = snapshot(host)
    meta = on_meta(host)
    with torch.no_grad(), Recorder() as recorder:
        load(meta, experts, checkpoint)
    assert recorder.copied == sum(p.numel() for p in meta.parameters())
    assert all(p.is_meta for p in meta.parameters())
    assert_same(tensors_of(host), before)
    # planning loads nothing: everything is still to come
    assert experts.ledger.missing()


# --- recording: the copies a call amounts to ---


@conventions
@layouts
@placements
def test_recorded_copies_are_those_of_a_load(
    convention: Convention, layout: Layout, placement: Placement
) -> None:
    sizes = {"hidden": 256, "intermediate": 256, "layout": layout}
    checkpoint = make_checkpoint(convention, 3, 256, 256)
    host, experts = build(convention, placement=placement, **sizes)
    load(host, experts, checkpoint)
    other, others = build(convention, placement=placement, **sizes)
    before, placed = snapshot(other), []
    with recording(placed.append):
        load(other, others, checkpoint)
    assert_same(tensors_of(other), before)
    assert others.ledger.missing()
    for one in placed:
        assert one.param is getattr(other, one.loader.spec.name)
        one.stored.copy_(one.plain)
        one.loader.ledger.mark(one.loader.spec.name, one.slot, planned=False)
    assert_same(tensors_of(other), snapshot(host))
    assert others.ledger.missing() == others.ledger.duplicates() == []


def test_recording_ends_with_its_block_whatever_happens() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    host, experts = build(MODELOPT_NVFP4)
    key: Key = (1, "w2", Role.GLOBAL_SCALE)
    placed: list[Any] = []
    two = torch.ones(2)
    with pytest.raises(ValueError, match="one value"), recording(placed.append):
        load_one(host, experts, 1, key, two)
    load_one(host, experts, 1, key, checkpoint[key])
    assert not placed
    assert_equal(host.w2_weight_scale_2.data[1], checkpoint[key])


# --- dtypes: bytes are taken over, values are never converted ---


def test_fp4_bytes_may_come_as_int8_and_e4m3_as_uint8() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4, 3)
    host, experts = build(MODELOPT_NVFP4, placement=place(3))
    load(host, experts, checkpoint)
    same_bytes = {Role.WEIGHT: torch.int8, Role.BLOCK_SCALE: torch.uint8}
    aliased = {
        key: t.view(same_bytes[key[2]]) if key[2] in same_bytes else t
        for key, t in checkpoint.items()
    }
    other, others = build(MODELOPT_NVFP4, placement=place(3))
    load(other, others, aliased)
    assert_same(tensors_of(other), snapshot(host))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bf16_weights_are_cast(dtype: torch.dtype) -> None:
    checkpoint = make_checkpoint(PLAIN_BF16, 3)
    host, experts = build(PLAIN_BF16, placement=place(3))
    load(host, experts, {k: t.to(dtype) for k, t in checkpoint.items()})
    expected = checkpoint[2, "w2", Role.WEIGHT].to(dtype).bfloat16()
    assert_equal(host.w2_weight.data[2], expected)


def _dtype_error(role: Role, got: torch.dtype, need: str) -> tuple[Any, ...]:
    def change(t: Tensor) -> Tensor:
        return t.float().to(got)

    return role, change, TypeError, f"got dtype {got}, need {need}."


# name -> (role, change to a healthy tensor, error, end of its message)
REFUSALS: dict[str, tuple[Role, Callable[[Tensor], Tensor], type[Exception], str]] = {
    "weight dtype": _dtype_error(
        Role.WEIGHT, torch.bfloat16, "torch.uint8 or torch.int8"
    ),
    "block scale dtype": _dtype_error(
        Role.BLOCK_SCALE, torch.float32, "torch.float8_e4m3fn or torch.uint8"
    ),
    "global scale dtype": _dtype_error(
        Role.GLOBAL_SCALE, torch.bfloat16, "torch.float32"
    ),
    "input scale dtype": _dtype_error(Role.INPUT_SCALE, torch.float64, "torch.float32"),
    "too few rows": (
        Role.WEIGHT,
        lambda t: t[:-1],
        ValueError,
        "got shape (127, 128), need (128, 128).",
    ),
    "transposed": (
        Role.BLOCK_SCALE,
        lambda t: t.t(),
        ValueError,
        "got shape (16, 128), need (128, 16).",
    ),
    "three dimensions": (
        Role.WEIGHT,
        lambda t: t.unsqueeze(0),
        ValueError,
        "got shape (1, 128, 128), need (128, 128).",
    ),
    "per-channel global scale": (
        Role.GLOBAL_SCALE,
        lambda t: t.expand(INTERMEDIATE).contiguous(),
        ValueError,
        "expected one value, got shape (128,). Is this a per-channel checkpoint?",
    ),
    "empty input scale": (
        Role.INPUT_SCALE,
        lambda t: torch.empty(0),
        ValueError,
        "expected one value, got shape (0,). Is this a per-channel checkpoint?",
    ),
}


@pytest.mark.parametrize(
    ("role", "change", "error", "message"), REFUSALS.values(), ids=REFUSALS.keys()
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    role: Role, change: Any, error: type[Exception], message: str
) -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    host, experts = build(MODELOPT_NVFP4)
    load(host, experts, checkpoint)
    before = snapshot(host)
    key = (2, "w3", role)
    name = f"{PREFIX}.{experts.name('w13', role)}"
    with pytest.raises(error, match=re.escape(message)) as raised:
        load_one(host, experts, 2, key, change(checkpoint[key]))
    assert str(raised.value) == f"{PREFIX} expert 2 w3 ({name}): {message}"
    assert_same(tensors_of(host), before)


def test_wrong_shape_under_tensor_parallelism_says_both_that_fit() -> None:
    host, experts = build(MODELOPT_NVFP4, placement=place(4, tp_rank=1, tp_size=2))
    key: Key = (1, "w2", Role.WEIGHT)
    odd = torch.zeros(HIDDEN, 40, dtype=torch.uint8)
    message = (
        "got shape (256, 40), need (256, 32) or (256, 64) "
        "(all 2 tensor-parallel slices)."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load_one(host, experts, 1, key, odd)


@pytest.mark.parametrize("shard", ["w2", "w4", "gate"])
def test_a_shard_of_another_parameter_is_refused(shard: str) -> None:
    host, _ = build(MODELOPT_NVFP4)
    param = host.w13_weight_scale_2
    message = (
        f"{PREFIX} expert 2 {shard} (n): shard {shard!r} does not belong to "
        "w13_weight_scale_2."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        param.weight_loader(param, torch.ones(()), "n", shard, 2)


@pytest.mark.parametrize("expert", [-1, 4])
def test_an_expert_the_layer_does_not_have_is_refused(expert: int) -> None:
    host, experts = build(MODELOPT_NVFP4)
    message = (
        f"{PREFIX} expert {expert} w2 ({PREFIX}.w2_input_scale): expert id out of "
        "range, the layer has 4 experts."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load_one(host, experts, expert, (0, "w2", Role.INPUT_SCALE), torch.ones(()))


def test_an_error_names_the_expert_also_where_only_a_replica_is() -> None:
    host, experts = build(MODELOPT_NVFP4, placement=PLACEMENTS["ep rank 1"])
    with pytest.raises(ValueError, match=re.escape(f"{PREFIX} expert 0 w2 (")):
        load_one(host, experts, 0, (0, "w2", Role.GLOBAL_SCALE), torch.ones(2))


# --- under vLLM's load planner, where vLLM is installed ---

if importlib.util.find_spec("vllm") is not None:

    @conventions
    @layouts
    @placements
    def test_a_traced_layer_replays(
        convention: Convention, layout: Layout, placement: Placement
    ) -> None:
        sizes = {"hidden": 256, "intermediate": 256}
        checkpoint = make_checkpoint(convention, 3, **sizes)
        options = {"layout": layout, "placement": placement, **sizes}
        host, experts = build(convention, **options)
        load(host, experts, checkpoint)
        planned, others = build(convention, **options)
        scatters = trace(planned, others, checkpoint)
        size = sum(p.numel() for p in planned.parameters())
        assert sum(torch.Size(s.shape).numel() for s in scatters) == size
        replay(planned, scatters, checkpoint)
        assert_same(tensors_of(planned), snapshot(host))

    def test_a_traced_layer_replays_bytes_under_another_name() -> None:
        """`view(dtype)` of a source is planned too, and moves the same bytes."""
        checkpoint = make_checkpoint(MODELOPT_NVFP4, 3)
        host, experts = build(MODELOPT_NVFP4, placement=place(3))
        load(host, experts, checkpoint)
        aliased = {
            key: t.view(torch.int8) if key[2] is Role.WEIGHT else t
            for key, t in checkpoint.items()
        }
        planned, others = build(MODELOPT_NVFP4, placement=place(3))
        replay(planned, trace(planned, others, aliased), aliased)
        assert_same(tensors_of(planned), snapshot(host))
