# SPDX-License-Identifier: Apache-2.0
"""The portable kernels equal the reference, under CUDA graphs too."""

import dataclasses

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin.formats import FORMATS, NVFP4, WeightFormat, e2m1_values
from vllm_megamoe_plugin.kernels.base import Problem, Run, Tensors
from vllm_megamoe_plugin.kernels.portable.adapter import PortableKernel
from vllm_megamoe_plugin.kernels.reference import reference_moe

from ...helpers import assert_equal
from .problems import layer, problem, stored, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MODES = [(fmt, mode) for fmt in FORMATS.values() for mode in fmt.modes]
modes = pytest.mark.parametrize(
    ("fmt", "mode"), MODES, ids=[f"{f.name}-{m}" for f, m in MODES]
)
Args = tuple[Tensor, Tensor, Tensor]


def _bind(p: Problem, all_scales: bool = False) -> tuple[Tensors, Tensors, Run]:
    """(plain tensors, what the kernel reads, the bound kernel), all on the GPU."""
    plain = layer(p, all_scales)
    there = stored(plain, "cuda")
    on_gpu = dataclasses.replace(
        plain, **{name: t.cuda() for name, t in plain.named().items()}
    )
    return on_gpu, there, PortableKernel().bind(p, there)


def _cuda(args: Args) -> Args:
    return tuple(t.cuda() for t in args)


def _assert_close(got: Tensor, expected: Tensor, quantized: bool) -> None:
    """Sums associate differently, so an intermediate may round the other way.

    That moves g, u, h or o by a bf16 step, 2^-8, and with quantized activations h by
    an E2M1 step, up to a third of it, or the scale of a block of 16 by a step.

    The bounds of quantized activations are the noise of the definition itself: the
    reference against itself with each L1 sum off by up to 2e-6 of its row's peak, the
    largest of 40 layers with 2 to 4 loads each. A token scale that is wrong in its
    last bit, which flips codes of x, must fail; with it, the largest of 4 layers:

        H, I           noise: error, of the peak    wrong last bit: error, of the peak
        64, 32         0.0036, 0.094                0.030, 0.19
        208, 48        0.0079, 0.104                0.046, 0.25
        256, 128       0.0092, 0.051                0.028, 0.20
        512, 256 all   0.0041, 0.088                0.028, 0.16
        512, 384       0.0120, 0.027                0.044, 0.19
    """
    got, expected = got.float(), expected.float()
    assert got.isfinite().all()
    error = (got - expected).norm() / expected.norm()
    assert error < (2**-6 if quantized else 2**-8), f"relative error {error:.5f}"
    # of rows of zeros, where nothing is routed, nothing is allowed
    row_peak = expected.abs().amax(1, keepdim=True).clamp(min=1e-30)
    worst = ((got - expected).abs() / row_peak).max()
    assert worst < (2**-3 if quantized else 2**-6), f"{worst:.5f} of the row's peak"


def _reference(args: Args, plain: Tensors, p: Problem) -> Tensor:
    return reference_moe(*args, plain, p.format, p.mode, p.swiglu_limit)


# --- against the reference ---


@modes
@pytest.mark.parametrize("experts", [8, 32, 128])
def test_every_load_matches(fmt: WeightFormat, mode: str, experts: int) -> None:
    p = problem(fmt, mode, experts, 512, 384, top_k=4)
    plain, _, run = _bind(p)
    for count in (1, 3, 17, 129, 1024, 2048):
        args = _cuda(tokens(p, count))
        _assert_close(run(*args), _reference(args, plain, p), mode == "w4a4")


@modes
@pytest.mark.parametrize(
    ("hidden", "intermediate"),
    [(128, 64), (192, 96), (208, 48), (2048, 768), (1040, 272), (64, 32)],
)
def test_any_size_matches(
    fmt: WeightFormat, mode: str, hidden: int, intermediate: int
) -> None:
    p = problem(fmt, mode, 8, hidden, intermediate, top_k=2)
    plain, _, run = _bind(p)
    for count in (1, 40, 300):
        args = _cuda(tokens(p, count))
        _assert_close(run(*args), _reference(args, plain, p), mode == "w4a4")


@pytest.mark.parametrize("mode", NVFP4.modes)
def test_block_scales_over_the_whole_range(mode: str) -> None:
    p = problem(NVFP4, mode, 8, 512, 256, top_k=2)
    plain, _, run = _bind(p, all_scales=True)
    for count in (1, 129):
        args = _cuda(tokens(p, count))
        _assert_close(run(*args), _reference(args, plain, p), mode == "w4a4")


@pytest.mark.parametrize("mode", NVFP4.modes)
def test_the_clamp(mode: str) -> None:
    p = problem(NVFP4, mode, 8, 512, 256, top_k=2, swiglu_limit=0.5)
    plain, _, run = _bind(p)
    args = _cuda(tokens(p, 33))
    expected = _reference(args, plain, p)
    _assert_close(run(*args), expected, mode == "w4a4")
    unclamped = dataclasses.replace(p, swiglu_limit=None)
    assert not torch.equal(expected, _reference(args, plain, unclamped))


@pytest.mark.parametrize("mode", NVFP4.modes)
def test_one_hot_weights_are_exact(mode: str) -> None:
    """Bitwise: gate and up read one column, down is diagonal, so nothing is summed."""
    p = problem(NVFP4, mode, 4, 256, 256, top_k=1)
    plain = layer(p)
    for t in (plain.w13, plain.w2):
        t.zero_()
    for e in range(4):
        plain.w13[e, :, 16 + e] = 0x25  # 3.0 at k = 32 + 2e, 1.0 at the next
        for i in range(256):
            plain.w2[e, i, i // 2] = 0x4 << (4 * (i % 2))
    there = stored(plain, "cuda")
    run = PortableKernel().bind(p, there)
    x, weights, slots = tokens(p, 64)
    x[:, 33::2] = 0
    # far above where silu(g) is g, so that exp cannot differ in its last bit
    x[:, 32:40:2] = (x[:, 32:40:2].abs() + 1) * 64
    plain.gate_alpha.fill_(2.0)
    there.gate_alpha.fill_(2.0)
    expected = _reference((x, weights, slots), plain, p)
    assert_equal(run(*_cuda((x, weights, slots))).cpu(), expected)


@pytest.mark.parametrize("scale", [2.0**-8, None])
@pytest.mark.parametrize("count", [1, 32, 129, 4096])
def test_l2_codes_are_the_reference_s(count: int, scale: float | None) -> None:
    """w2 is the identity, so the output is the quantized h, exact in bf16.

    L1 sums are exact in any order: x are E2M1 values under one scale, w13 has block
    scales of one. So h differs only in the last bits of exp, and hardly any code may.
    """
    p = problem(NVFP4, "w4a4", 4, 256, 256, top_k=1)
    plain = layer(p)
    for t in (plain.w13_scale, plain.w2_scale):
        t.fill_(1.0)
    plain.w2.zero_()
    for i in range(256):
        plain.w2[:, i, i // 2] = 0x2 << (4 * (i % 2))  # 1.0
    plain.w2_alpha.fill_(1.0)
    l2_scale = None if scale is None else torch.full((1,), scale)
    plain = dataclasses.replace(plain, l2_act_scale=l2_scale)
    x, weights, slots = tokens(p, count)
    x = e2m1_values()[torch.randint(0, 16, x.shape)].bfloat16()
    x[:, ::16] = 6.0
    args = (x, weights.fill_(1.0), slots)
    expected = _reference(args, plain, p)
    got = PortableKernel().bind(p, stored(plain, "cuda"))(*_cuda(args)).cpu()
    assert expected.unique().numel() > 30
    differ = (got != expected).float().mean().item()
    assert differ <= 1e-4, f"{differ:.6f} of the codes differ"


@modes
def test_less_shared_memory_means_fewer_stages_and_the_same_bits(
    fmt: WeightFormat, mode: str
) -> None:
    from vllm_megamoe_plugin.kernels.portable.launch import choose

    p = problem(fmt, mode, 8, 512, 256, top_k=2)
    _, _, run = _bind(p)
    plan = choose(run.plans, 4)
    args = _cuda(tokens(p, 17))
    expected = run(*args)
    run.shared_memory = 32 * 1024
    stages = run._tile(plan.gate_up, plan.block, 512, run.w13_width)["num_stages"]
    assert stages < plan.gate_up.stages
    assert_equal(run(*args), expected)


@pytest.mark.parametrize("experts", [1, 32, 256])
def test_warming_up_meets_every_plan_and_takes_little_memory(experts: int) -> None:
    from vllm_megamoe_plugin.kernels.portable.launch import PLANS, _launches

    p = problem(NVFP4, "w4a16", experts, 512, 256, top_k=8)
    launches = list(_launches(p, PLANS))
    assert {plan for _, plan in launches} == set(PLANS)
    assert max(tokens for tokens, _ in launches) < 200


# --- routing ---


@modes
def test_slots_of_minus_one_and_nan_add_nothing(fmt: WeightFormat, mode: str) -> None:
    p = problem(fmt, mode, 8, 256, 128, top_k=2)
    plain, _, run = _bind(p)
    for count in (17, 200):
        x, weights, slots = _cuda(tokens(p, count))
        holes = torch.rand(slots.shape, device="cuda") < 0.4
        holes[3] = True
        slots = slots.masked_fill(holes, -1)
        clean = run(x, weights, slots)
        _assert_close(clean, _reference((x, weights, slots), plain, p), mode == "w4a4")
        assert_equal(clean[3], torch.zeros_like(x[3]))
        x[holes.all(1)], weights[holes] = torch.nan, torch.nan
        assert_equal(run(x, weights, slots), clean)


@modes
@pytest.mark.parametrize("count", [1, 16, 64, 500])
def test_all_tokens_to_one_expert_or_to_none(
    fmt: WeightFormat, mode: str, count: int
) -> None:
    p = problem(fmt, mode, 8, 256, 128, top_k=2)
    plain, _, run = _bind(p)
    x, weights, slots = _cuda(tokens(p, count))
    slots.fill_(5)
    _assert_close(
        run(x, weights, slots),
        _reference((x, weights, slots), plain, p),
        mode == "w4a4",
    )
    slots.fill_(-1)
    assert_equal(run(x, weights, slots), torch.zeros_like(x))


@modes
def test_no_tokens(fmt: WeightFormat, mode: str) -> None:
    p = problem(fmt, mode, 8, 256, 128, top_k=2)
    _, _, run = _bind(p)
    out = run(*_cuda(tokens(p, 0)))
    assert out.shape == (0, 256)
    assert out.dtype == torch.bfloat16


@modes
@pytest.mark.parametrize("count", [1, 50, 700])
def test_int64_slots_and_repeats_give_the_same_bits(
    fmt: WeightFormat, mode: str, count: int
) -> None:
    p = problem(fmt, mode, 32, 512, 256, top_k=4)
    _, _, run = _bind(p)
    x, weights, slots = _cuda(tokens(p, count))
    first = run(x, weights, slots)
    assert_equal(run(x, weights, slots.long()), first)
    for _ in range(5):
        assert_equal(run(x, weights, slots), first)


# --- CUDA graphs and weights that change in place ---


def _capture(run: Run, args: Args) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    run(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*args)
    return graph, out


@modes
@pytest.mark.parametrize("count", [1, 17, 129])
def test_replays_with_new_inputs_and_routing_equal_eager(
    fmt: WeightFormat, mode: str, count: int
) -> None:
    p = problem(fmt, mode, 8, 512, 256, top_k=2)
    _, _, run = _bind(p)
    args = _cuda(tokens(p, count))
    graph, out = _capture(run, args)
    for turn in range(12):
        new = _cuda(tokens(p, count))
        if turn == 5:
            new[2].fill_(3)  # all to one expert
        for static, fresh in zip(args, new, strict=True):
            static.copy_(fresh)
        graph.replay()
        assert_equal(out, run(*new), f"replay {turn}")


@pytest.mark.parametrize("count", [1, 17, 129])
def test_a_graph_reads_the_l2_scale_when_it_is_replayed(count: int) -> None:
    p = problem(NVFP4, "w4a4", 8, 512, 256, top_k=2)
    _, there, run = _bind(p)
    stale = dataclasses.replace(there, l2_act_scale=there.l2_act_scale.clone())
    args = _cuda(tokens(p, count))
    graph, out = _capture(run, args)
    stale_graph, stale_out = _capture(PortableKernel().bind(p, stale), args)
    before = run(*args)
    there.l2_act_scale.mul_(1.7)  # no power of two, which would change no bit
    expected = run(*args)
    assert not torch.equal(expected, before)
    graph.replay()
    assert_equal(out, expected)
    # the negative control: captured over a copy, it misses the new scale
    stale_graph.replay()
    assert not torch.equal(stale_out, expected)


@modes
def test_a_graph_reads_weights_that_were_loaded_in_place(
    fmt: WeightFormat, mode: str
) -> None:
    p = problem(fmt, mode, 8, 512, 256, top_k=2)
    _, there, run = _bind(p)
    args = _cuda(tokens(p, 17))
    graph, out = _capture(run, args)
    new = layer(p)
    for name, tensor in stored(new, "cuda").named().items():
        getattr(there, name).copy_(tensor)
    graph.replay()
    assert_equal(out, run(*args))
    _assert_close(out.cpu(), _reference(_cpu(args), new, p), mode == "w4a4")


def _cpu(args: Args) -> Args:
    return tuple(t.cpu() for t in args)


@modes
def test_forward_never_waits_for_the_device(fmt: WeightFormat, mode: str) -> None:
    p = problem(fmt, mode, 8, 512, 256, top_k=2)
    _, _, run = _bind(p)
    args = {count: _cuda(tokens(p, count)) for count in (1, 17, 129, 1024)}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in args.values():
            run(*each)
    finally:
        torch.cuda.set_sync_debug_mode("default")
