# SPDX-License-Identifier: Apache-2.0
"""The layer: born once, checked before it serves, reloaded in place, byte for byte."""

import importlib.util
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_megamoe_plugin.checkpoint import (
    COMPRESSED_TENSORS_NVFP4,
    CONVENTIONS,
    MODELOPT_NVFP4,
    PLAIN_BF16,
    Convention,
    Role,
)
from vllm_megamoe_plugin.experts import L2_ACT_SCALE, MegaMoE
from vllm_megamoe_plugin.layouts import LAYOUTS, Layout
from vllm_megamoe_plugin.loader import Placement

from .helpers import (
    PLACEMENTS,
    PREFIX,
    SHARDS,
    Checkpoint,
    Key,
    addresses,
    assert_equal,
    assert_same,
    build,
    calls_of,
    cold_start,
    load,
    load_one,
    make_checkpoint,
    place,
    replay,
    shuffled,
    snapshot,
    tensors_of,
    tokens,
    trace,
)

SIZES = {"hidden": 256, "intermediate": 256}
QUANTIZED = [c for c in CONVENTIONS if c.format.global_scale]

conventions = pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.name)
quantized = pytest.mark.parametrize("convention", QUANTIZED, ids=lambda c: c.name)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda x: x.name)
placements = pytest.mark.parametrize(
    "placement", PLACEMENTS.values(), ids=PLACEMENTS.keys()
)


def _with(checkpoint: Checkpoint, key: Key, value: float) -> Checkpoint:
    """The checkpoint with one per-tensor scale replaced, as it is stored."""
    return checkpoint | {key: torch.full_like(checkpoint[key], value)}


def _input_scales(checkpoint: Checkpoint, convention: Convention) -> Tensor:
    stored = torch.stack(
        [
            t.view(())
            for (_, shard, role), t in checkpoint.items()
            if shard == "w2" and role is Role.INPUT_SCALE
        ]
    )
    return stored.reciprocal() if convention.reciprocal else stored


# --- birth ---


@conventions
@layouts
def test_everything_a_kernel_reads_exists_from_birth(
    convention: Convention, layout: Layout
) -> None:
    host, experts = build(convention, layout=layout)
    born = addresses(host)
    load(host, experts, make_checkpoint(convention))
    for _ in range(2):
        experts.process(host)
        assert addresses(host) == born
    registered = {t.untyped_storage().data_ptr() for t in tensors_of(host).values()}
    for name, tensor in experts.kernel_tensors(host).items():
        assert tensor.untyped_storage().data_ptr() in registered, name


@quantized
def test_the_l2_scale_is_one_persistent_element_that_no_loader_fills(
    convention: Convention,
) -> None:
    host, _ = build(convention)
    scale = getattr(host, L2_ACT_SCALE)
    assert_equal(scale, torch.ones(1))
    assert L2_ACT_SCALE in host.state_dict()
    for name, buffer in host.named_buffers():
        assert buffer.weight_loader_numel == 0, name
        assert name in host.state_dict()


def test_bf16_has_no_scales() -> None:
    host, _ = build(PLAIN_BF16)
    assert set(tensors_of(host)) == {"w13_weight", "w2_weight"}


def test_input_scales_are_unusable_until_they_are_loaded() -> None:
    host, _ = build(MODELOPT_NVFP4)
    assert host.w2_input_scale.isnan().all()
    assert host.w13_input_scale.isnan().all()


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        ("deep_gemm", {"hidden": 192}, "hidden size 192 is not a multiple of 128"),
        (
            "deep_gemm",
            {"intermediate": 64},
            "intermediate size 64 is not a multiple of 128",
        ),
        ("plain", {"hidden": 72}, "hidden size 72 is not a multiple of 16"),
    ],
)
def test_sizes_a_layout_cannot_hold_are_refused(
    layout: str, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"{PREFIX}: {message}, which nvfp4 needs"):
        build(MODELOPT_NVFP4, layout=LAYOUTS[layout], **sizes)


@conventions
def test_dummy_values_are_the_documented_scales(convention: Convention) -> None:
    host, experts = build(convention, loader_bypassed=True)
    for param in host.parameters():
        param.data.fill_(getattr(param, "dummy_weight_value", 0))
    experts.process(host)
    read = experts.kernel_tensors(host)
    for name in {"gate_alpha", "up_alpha", "w2_alpha"} & set(read):
        torch.testing.assert_close(
            read[name], torch.full((4,), 1e-3), rtol=1e-6, atol=0
        )
    if "l2_act_scale" in read:
        assert_equal(read["l2_act_scale"], torch.ones(1))
    x, weights, slots = tokens(3)
    assert_equal(experts.forward(x, weights, slots), torch.zeros_like(x))


# --- processing ---


@conventions
@layouts
@placements
def test_shuffled_single_shard_loads_equal_a_cold_start(
    convention: Convention, layout: Layout, placement: Placement
) -> None:
    first, second = (make_checkpoint(convention, 3, **SIZES) for _ in range(2))
    options: dict[str, Any] = {"layout": layout, "placement": placement, **SIZES}
    host, _ = cold_start(convention, second, **options)
    other, others = cold_start(convention, first, **options)
    born = addresses(other)
    others.ledger.begin_update()
    load(other, others, second, shuffled(calls_of(placement, second)))
    others.process(other)
    assert_same(tensors_of(other), snapshot(host))
    assert addresses(other) == born
    others.check_addresses(other)


@conventions
def test_process_twice_is_process_once(convention: Convention) -> None:
    host, experts = cold_start(convention, make_checkpoint(convention))
    x, weights, slots = tokens(5)
    once, before = experts.forward(x, weights, slots), snapshot(host)
    experts.process(host)
    assert_same(tensors_of(host), before)
    assert_equal(experts.forward(x, weights, slots), once)


@quantized
@placements
def test_the_l2_scale_is_the_maximum_over_all_logical_experts(
    convention: Convention, placement: Placement
) -> None:
    checkpoint = make_checkpoint(convention, 3)
    host, _ = cold_start(convention, checkpoint, placement=placement)
    expected = _input_scales(checkpoint, convention).max().view(1)
    assert_equal(getattr(host, L2_ACT_SCALE), expected)


@quantized
def test_every_expert_can_be_the_maximum(convention: Convention) -> None:
    checkpoint = make_checkpoint(convention, 3)
    for expert in range(3):
        stored = 1 / 64 if convention.reciprocal else 64.0
        changed = _with(checkpoint, (expert, "w2", Role.INPUT_SCALE), stored)
        for name in ("ep rank 0", "ep rank 1"):
            host, _ = cold_start(convention, changed, placement=PLACEMENTS[name])
            assert getattr(host, L2_ACT_SCALE).item() == 64.0


def test_reciprocals_load_raw_and_are_inverted_after_loading() -> None:
    checkpoint = make_checkpoint(COMPRESSED_TENSORS_NVFP4)
    host, experts = cold_start(COMPRESSED_TENSORS_NVFP4, checkpoint)
    role = Role.GLOBAL_SCALE
    stored = {s: torch.cat([checkpoint[e, s, role] for e in range(4)]) for s in SHARDS}
    assert_equal(host.w13_weight_global_scale.data[1], stored["w3"])
    read = experts.kernel_tensors(host)
    for name, shard in (("gate_alpha", "w1"), ("up_alpha", "w3"), ("w2_alpha", "w2")):
        assert_equal(read[name], 1.0 / stored[shard], name)


def test_gate_and_up_keep_their_own_scales() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    host, experts = cold_start(MODELOPT_NVFP4, checkpoint)
    read = experts.kernel_tensors(host)
    for name, shard in (("gate_alpha", "w1"), ("up_alpha", "w3")):
        values = [checkpoint[e, shard, Role.GLOBAL_SCALE] for e in range(4)]
        assert_equal(read[name], torch.stack(values), name)
    assert not torch.equal(read["gate_alpha"], read["up_alpha"])
    # a contiguous row of the parameter itself, not a product or a copy
    assert read["gate_alpha"].data_ptr() == host.w13_weight_scale_2.data_ptr()


@pytest.mark.parametrize("dead", [0.0, math.inf])
def test_dead_experts_of_compressed_tensors_are_left_out_and_logged(
    dead: float, caplog: pytest.LogCaptureFixture, log: logging.Logger
) -> None:
    checkpoint = make_checkpoint(COMPRESSED_TENSORS_NVFP4)
    changed = _with(checkpoint, (2, "w2", Role.INPUT_SCALE), dead)
    host, _ = cold_start(COMPRESSED_TENSORS_NVFP4, changed)
    alive = _input_scales(checkpoint, COMPRESSED_TENSORS_NVFP4)[[0, 1, 3]]
    assert_equal(getattr(host, L2_ACT_SCALE), alive.max().view(1))
    assert (
        f"{PREFIX}.w2_input_global_scale: 1 experts are never calibrated (2)"
        in caplog.text
    )


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[logging.Logger]:
    """The plugin's logger, heard even where vLLM's logging has been set up."""
    logger = logging.getLogger("vllm.megamoe")
    logger.addHandler(caplog.handler)
    yield logger
    logger.removeHandler(caplog.handler)


#: Values that no scale may have -> what the error calls them.
UNUSABLE = {math.nan: "NaN", -0.5: "negative", 0.0: "zero", 1e-39: "denormal"}


@pytest.mark.parametrize(("value", "fault"), UNUSABLE.items())
@pytest.mark.parametrize("role", [Role.GLOBAL_SCALE, Role.INPUT_SCALE])
def test_unusable_scales_are_refused_by_name(
    role: Role, value: float, fault: str
) -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    host, experts = build(MODELOPT_NVFP4)
    load(host, experts, _with(checkpoint, (3, "w2", role), value))
    name = f"{PREFIX}.{experts.name('w2', role)}"
    with pytest.raises(ValueError, match=re.escape(f"{name}: unusable ")) as error:
        experts.process(host)
    assert "expert 3" in str(error.value)
    assert f" = {value:g} ({fault})" in str(error.value)


@pytest.mark.parametrize("shard", SHARDS)
@layouts
def test_nan_block_scales_are_refused_by_name(layout: Layout, shard: str) -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    scales = checkpoint[1, shard, Role.BLOCK_SCALE].view(torch.uint8)
    scales[5, 7], scales[90, 3] = 0x7F, 0xFF
    host, experts = build(MODELOPT_NVFP4, layout=layout)
    load(host, experts, checkpoint)
    side = "w2" if shard == "w2" else "w13"
    total = getattr(host, f"{side}_weight_scale")[0].numel()
    message = (
        f"{PREFIX}.{side}_weight_scale: block scales are NaN (bytes 0x7F or 0xFF): "
        f"expert 1: 2 of {total}. "
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        experts.process(host)


def test_w4a16_neither_needs_nor_reads_input_scales() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    bad = _with(checkpoint, (0, "w2", Role.INPUT_SCALE), math.nan)
    host, experts = cold_start(MODELOPT_NVFP4, bad, mode="w4a16")
    assert "l2_act_scale" not in experts.kernel_tensors(host)
    weight_only = {k: t for k, t in checkpoint.items() if k[2] is not Role.INPUT_SCALE}
    other, others = cold_start(
        MODELOPT_NVFP4, weight_only, mode="w4a16", input_scales=False
    )
    assert "w2_input_scale" not in tensors_of(other)
    x, weights, slots = tokens(4)
    assert_equal(experts.forward(x, weights, slots), others.forward(x, weights, slots))


def test_fill_missing_serves_uncalibrated_experts_with_the_maximum(
    caplog: pytest.LogCaptureFixture, log: logging.Logger
) -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    del checkpoint[0, "w2", Role.INPUT_SCALE]
    checkpoint = _with(checkpoint, (2, "w2", Role.INPUT_SCALE), 0.0)
    host, _ = cold_start(MODELOPT_NVFP4, checkpoint, fill_missing=True)
    expected = max(checkpoint[e, "w2", Role.INPUT_SCALE] for e in (1, 3))
    assert_equal(getattr(host, L2_ACT_SCALE), expected.view(1))
    assert "2 experts are missing (0; 2)" in caplog.text


def test_fill_missing_starts_from_the_new_checkpoint() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    old = _with(checkpoint, (0, "w2", Role.INPUT_SCALE), 512.0)
    host, experts = cold_start(MODELOPT_NVFP4, old, fill_missing=True)
    assert getattr(host, L2_ACT_SCALE).item() == 512.0
    del checkpoint[0, "w2", Role.INPUT_SCALE]
    experts.ledger.begin_update()
    load(host, experts, checkpoint)
    experts.process(host)
    expected = max(checkpoint[e, "w2", Role.INPUT_SCALE] for e in (1, 2, 3))
    assert_equal(getattr(host, L2_ACT_SCALE), expected.view(1))


# --- coverage ---


@conventions
def test_missing_tensors_are_named(convention: Convention) -> None:
    checkpoint = make_checkpoint(convention)
    del checkpoint[1, "w3", Role.WEIGHT], checkpoint[2, "w2", Role.WEIGHT]
    host, experts = build(convention)
    load(host, experts, checkpoint)
    name13, name2 = (experts.name(side, Role.WEIGHT) for side in ("w13", "w2"))
    message = (
        f"{PREFIX}: 2 expert tensors are missing: {name13}: expert 1 w3; "
        f"{name2}: expert 2 w2. "
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        experts.process(host)
    x, weights, slots = tokens(2)
    with pytest.raises(RuntimeError, match="2 slots are missing"):
        experts.forward(x, weights, slots)


def test_missing_names_the_logical_expert() -> None:
    placement = PLACEMENTS["ep rank 1"]
    checkpoint = make_checkpoint(MODELOPT_NVFP4, 3)
    del checkpoint[0, "w1", Role.GLOBAL_SCALE]
    host, experts = build(MODELOPT_NVFP4, placement=placement)
    load(host, experts, checkpoint)
    message = "1 expert tensors are missing: w13_weight_scale_2: expert 0 w1."
    with pytest.raises(ValueError, match=re.escape(message)):
        experts.process(host)


@conventions
def test_duplicate_tensors_are_named(convention: Convention) -> None:
    checkpoint = make_checkpoint(convention)
    host, experts = build(convention)
    load(host, experts, checkpoint)
    key = (3, "w3", Role.WEIGHT)
    load_one(host, experts, 3, key, checkpoint[key])
    name = experts.name("w13", Role.WEIGHT)
    message = f"{PREFIX}: loaded more than once: {name}: expert 3 w3. "
    with pytest.raises(ValueError, match=re.escape(message)):
        experts.process(host)


def test_w13_input_scales_may_be_missing_where_nothing_reads_them() -> None:
    checkpoint = make_checkpoint(MODELOPT_NVFP4)
    for shard in ("w1", "w3"):
        del checkpoint[2, shard, Role.INPUT_SCALE]
    host, _ = cold_start(MODELOPT_NVFP4, checkpoint)
    assert host.w13_input_scale.isnan().sum() == 2
    del checkpoint[2, "w2", Role.INPUT_SCALE]
    other, others = build(MODELOPT_NVFP4)
    load(other, others, checkpoint)
    with pytest.raises(ValueError, match="missing: w2_input_scale: expert 2 w2"):
        others.process(other)


# --- updates ---


@conventions
def test_any_part_may_be_rewritten_in_place(convention: Convention) -> None:
    """vLLM's own direct reload announces nothing: it loads, then processes."""
    first, second = make_checkpoint(convention), make_checkpoint(convention)
    host, experts = cold_start(convention, first)
    some = {key: t for key, t in second.items() if key[0] == 2}
    load(host, experts, some)
    x, weights, slots = tokens(3)
    with pytest.raises(RuntimeError, match="post-load processing has not run"):
        experts.forward(x, weights, slots)
    experts.process(host)
    other, others = cold_start(convention, first | some)
    assert_same(tensors_of(host), snapshot(other))
    assert_equal(experts.forward(x, weights, slots), others.forward(x, weights, slots))


def test_an_update_that_breaks_off_stops_serving_until_a_full_one_repairs_it() -> None:
    first, second = (make_checkpoint(MODELOPT_NVFP4) for _ in range(2))
    host, experts = cold_start(MODELOPT_NVFP4, first)
    derived = {n: b.clone() for n, b in host.named_buffers()}
    x, weights, slots = tokens(3)
    experts.ledger.begin_update()
    calls = calls_of(experts.spec.placement, second)
    load(host, experts, second, calls[: len(calls) // 2])
    for _ in range(2):
        with pytest.raises(ValueError, match="20 expert tensors are missing"):
            experts.process(host)
        with pytest.raises(RuntimeError, match="24 slots are missing"):
            experts.forward(x, weights, slots)
    assert_same(dict(host.named_buffers()), derived)
    experts.ledger.begin_update()
    load(host, experts, second)
    experts.process(host)
    other, others = cold_start(MODELOPT_NVFP4, second)
    assert_same(tensors_of(host), snapshot(other))
    assert_equal(experts.forward(x, weights, slots), others.forward(x, weights, slots))


@quantized
@pytest.mark.parametrize("role", [Role.GLOBAL_SCALE, Role.INPUT_SCALE])
def test_a_refused_update_leaves_derived_tensors_alone(
    convention: Convention, role: Role
) -> None:
    first, second = (make_checkpoint(convention) for _ in range(2))
    host, experts = cold_start(convention, first)
    derived = {n: b.clone() for n, b in host.named_buffers()}
    experts.ledger.begin_update()
    load(host, experts, _with(second, (1, "w2", role), math.nan))
    with pytest.raises(ValueError, match="unusable"):
        experts.process(host)
    assert_same(dict(host.named_buffers()), derived)
    with pytest.raises(RuntimeError, match="post-load processing has not run"):
        experts.forward(*tokens(2))
    experts.ledger.begin_update()
    load(host, experts, second)
    experts.process(host)
    other, _ = cold_start(convention, second)
    assert_same(tensors_of(host), snapshot(other))


def test_a_refused_value_stops_serving_however_it_was_written() -> None:
    """Engines may write parameters without the loaders, and process afterwards."""
    host, experts = cold_start(MODELOPT_NVFP4, make_checkpoint(MODELOPT_NVFP4))
    kept = host.w2_weight_scale_2.data.clone()
    host.w2_weight_scale_2.data[1] = math.nan
    with pytest.raises(ValueError, match=r"expert 1 w2 = nan \(NaN\)"):
        experts.process(host)
    with pytest.raises(RuntimeError, match="do not serve"):
        experts.forward(*tokens(2))
    host.w2_weight_scale_2.data.copy_(kept)
    experts.process(host)
    experts.forward(*tokens(2))


def test_a_layer_that_was_never_loaded_does_not_serve() -> None:
    host, experts = build(MODELOPT_NVFP4)
    with pytest.raises(RuntimeError, match=f"{PREFIX}: the experts are incomplete"):
        experts.forward(*tokens(1))
    with pytest.raises(ValueError, match=r"; .* and 34 more\. The checkpoint or"):
        experts.process(host)


def test_meta_tensors_are_not_processed() -> None:
    with torch.device("meta"):
        host, experts = build(MODELOPT_NVFP4)
    load(host, experts, make_checkpoint(MODELOPT_NVFP4))
    experts.process(host)
    assert not experts.ledger.complete


def test_moved_tensors_are_named() -> None:
    host, experts = cold_start(MODELOPT_NVFP4, make_checkpoint(MODELOPT_NVFP4))
    experts.check_addresses(host)
    host.w2_weight.data = host.w2_weight.data.clone()
    host.l2_act_scale = host.l2_act_scale.clone()
    message = f"{PREFIX}: w2, l2_act_scale moved after the kernel was bound"
    with pytest.raises(RuntimeError, match=message):
        experts.check_addresses(host)


# --- EPLB ---


@conventions
@layouts
def test_expert_weights_are_contiguous_views_of_whole_experts(
    convention: Convention, layout: Layout
) -> None:
    host, experts = cold_start(convention, make_checkpoint(convention), layout=layout)
    registered = {
        t.untyped_storage().data_ptr(): (name, t.numel())
        for name, t in tensors_of(host).items()
    }
    seen: dict[str, int] = {}
    for view in experts.expert_weights(host):
        assert view.dim() == 2
        assert view.shape[0] == 4
        assert view.is_contiguous()
        name, numel = registered[view.untyped_storage().data_ptr()]
        seen[name] = seen.get(name, 0) + view.numel()
        assert seen[name] <= numel
    # every byte of an expert moves; what all ranks hold alike does not
    stay = {"w13_input_scale", "w2_input_scale", "w13_input_global_scale"}
    stay |= {"w2_input_global_scale", L2_ACT_SCALE}
    assert seen == {n: c for n, c in registered.values() if n not in stay}


@conventions
def test_moving_experts_between_ranks_moves_their_outputs(
    convention: Convention,
) -> None:
    checkpoint = make_checkpoint(convention)
    ranks = [
        cold_start(convention, checkpoint, placement=place(4, rank=rank, ranks=2))
        for rank in (0, 1)
    ]
    x, weights, _ = tokens(6, top_k=1)

    def outputs() -> list[Tensor]:
        slots = [torch.full((6, 1), slot) for slot in (0, 1)]
        return [e.forward(x, weights, s) for _, e in ranks for s in slots]

    before = outputs()
    views = [list(experts.expert_weights(host)) for host, experts in ranks]
    for ours, theirs in zip(*views, strict=True):
        # experts 0 1 | 2 3 -> 3 1 | 2 0
        kept = ours[0].clone()
        ours[0].copy_(theirs[1])
        theirs[1].copy_(kept)
    after = outputs()
    for slot, expert in enumerate((3, 1, 2, 0)):
        assert_equal(after[slot], before[expert], f"slot {slot}")
    assert not torch.equal(before[0], before[3])
    for host, experts in ranks:
        experts.check_addresses(host)


# --- vLLM's layerwise reload and load plans, where vLLM is installed ---

if importlib.util.find_spec("vllm") is not None:

    @pytest.fixture
    def _dirty_memory() -> Iterator[None]:
        """Uninitialized memory holds NaN, so that a forgotten tensor shows."""
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)

    def _model(
        convention: Convention, **options: Any
    ) -> tuple[nn.Module, MegaMoE, list[str]]:
        """A model of one layer, its experts, and the log of its processing."""
        from vllm.model_executor.layers.quantization.base_config import (
            QuantizeMethodBase,
        )
        from vllm.model_executor.model_loader.reload import (
            record_metadata_for_reloading,
        )

        host, experts = build(convention, **options)
        log: list[str] = []

        class Method(QuantizeMethodBase):
            def create_weights(self, layer: nn.Module, *a: Any, **k: Any) -> None:
                raise NotImplementedError

            def apply(self, layer: nn.Module, *a: Any, **k: Any) -> Tensor:
                raise NotImplementedError

            def process_weights_after_loading(self, layer: nn.Module) -> None:
                log.append("processed")
                experts.process(layer)

        model = nn.Module()
        model.experts = host
        host.quant_method = Method()
        record_metadata_for_reloading(model)
        return model, experts, log

    MODES = [(c, mode) for c in CONVENTIONS for mode in c.format.modes]

    #: One placement of each kind; the loaders are tested with all of them.
    few_placements = pytest.mark.parametrize(
        "placement",
        [PLACEMENTS[name] for name in ("ep rank 1", "both replicas", "tp rank 1")],
        ids=["ep", "replicas", "tp"],
    )

    @pytest.mark.usefixtures("_dirty_memory")
    @pytest.mark.parametrize(
        ("convention", "mode"), MODES, ids=[f"{c.name}-{m}" for c, m in MODES]
    )
    @layouts
    @few_placements
    def test_layerwise_reload(
        convention: Convention, mode: str, layout: Layout, placement: Placement
    ) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        options = {"layout": layout, "placement": placement, "mode": mode, **SIZES}
        model, experts, log = _model(convention, **options)
        host = model.experts
        load(host, experts, make_checkpoint(convention, 3, **SIZES))
        experts.process(host)
        born = addresses(host)
        for seed in range(2):
            checkpoint = make_checkpoint(convention, 3, **SIZES)
            calls = shuffled(calls_of(placement, checkpoint), seed)
            last = max(i for i, c in enumerate(calls) if _copies(placement, *c))
            initialize_layerwise_reload(model)
            load(host, experts, checkpoint, calls[:last])
            assert not log
            load(host, experts, checkpoint, calls[last:])
            # the last shard completes the layer; nothing waits for the finalize
            assert log == ["processed"]
            finalize_layerwise_reload(model, None)
            assert log == ["processed"]
            log.clear()
            expected, _ = cold_start(convention, checkpoint, **options)
            assert_same(tensors_of(host), snapshot(expected))
            assert addresses(host) == born
            experts.check_addresses(host)
            experts.ledger.check_ready()

    def _copies(placement: Placement, physical: int, key: Key) -> bool:
        everyone = key[2] is Role.INPUT_SCALE
        held = everyone or placement.slots_of[placement.logical[physical]]
        return bool(held) and placement.is_primary(physical)

    @pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: c.name)
    def test_an_incomplete_layerwise_reload_is_refused(convention: Convention) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model, experts, _ = _model(convention)
        host = model.experts
        load(host, experts, make_checkpoint(convention))
        experts.process(host)
        checkpoint = make_checkpoint(convention)
        del checkpoint[1, "w2", Role.WEIGHT]
        initialize_layerwise_reload(model)
        load(host, experts, checkpoint)
        name = experts.name("w2", Role.WEIGHT)
        message = f"1 expert tensors are missing: {name}: expert 1 w2."
        with pytest.raises(ValueError, match=re.escape(message)):
            finalize_layerwise_reload(model, None)
        with pytest.raises(RuntimeError, match="do not serve"):
            experts.forward(*tokens(2))

    @conventions
    @layouts
    @few_placements
    def test_a_replayed_load_plan_equals_a_cold_start(
        convention: Convention, layout: Layout, placement: Placement
    ) -> None:
        """What vLLM's sharded engine does per layer: no loader runs."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )
        from vllm.model_executor.model_loader.reload.layerwise import (
            _copy_and_restore_kernel_tensors,
            get_layerwise_info,
        )
        from vllm.model_executor.model_loader.reload.meta import materialize_layer

        options = {"layout": layout, "placement": placement, **SIZES}
        model, experts, log = _model(convention, **options)
        host = model.experts
        load(host, experts, make_checkpoint(convention, 3, **SIZES))
        experts.process(host)
        born = addresses(host)
        checkpoint = make_checkpoint(convention, 3, **SIZES)
        plan = trace(host, experts, checkpoint)
        for _ in range(2):
            initialize_layerwise_reload(model)
            info = get_layerwise_info(host)
            materialize_layer(host, info)
            replay(host, plan, checkpoint)
            host.quant_method.process_weights_after_loading(host)
            _copy_and_restore_kernel_tensors(host, info)
            info.reset()
            finalize_layerwise_reload(model, None)
            expected, _ = cold_start(convention, checkpoint, **options)
            assert_same(tensors_of(host), snapshot(expected))
            assert addresses(host) == born
            experts.ledger.check_ready()
            checkpoint = make_checkpoint(convention, 3, **SIZES)
        assert len(log) == 2
