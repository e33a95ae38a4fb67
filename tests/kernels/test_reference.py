# SPDX-License-Identifier: Apache-2.0
"""The reference equals an independent, dense, token-by-token implementation."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin.formats import BF16, FORMATS, NVFP4, WeightFormat
from vllm_megamoe_plugin.kernels.base import Problem, Tensors
from vllm_megamoe_plugin.kernels.reference import ReferenceKernel, reference_moe

from ..helpers import assert_equal

#: The shapes of the contract: tokens 1, 17, 129 over 8 experts.
E, H, INTER, TOP_K = 8, 512, 256, 2
TOKENS = (1, 17, 129)
WEIGHT_SCALE, MID_SCALE = 0.25, 0.125
MODES = [(fmt, mode) for fmt in FORMATS.values() for mode in fmt.modes]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

modes = pytest.mark.parametrize(
    ("fmt", "mode"), MODES, ids=[f"{f.name}-{m}" for f, m in MODES]
)


# --- an independent implementation ---


def _dense(packed: Tensor, scales: Tensor | None, fmt: WeightFormat) -> Tensor:
    """fp64 [E, N, K], code by code."""
    if scales is None:
        return packed.double()
    low, high = E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]
    codes = torch.stack([low, high], dim=-1).flatten(-2)
    return codes.double() * scales.double().repeat_interleave(fmt.group, dim=-1)


def _quantize(row: Tensor, scale: Tensor) -> Tensor:
    """fp32 [K] -> fp32 [K]: NVFP4 by searching the nearest code, ties to even."""
    blocks = row.view(-1, 16)
    sf = (blocks.abs().amax(1, keepdim=True) / (6.0 * scale)).clamp(2.0**-9, 448.0)
    sf = sf.to(torch.float8_e4m3fn).float()
    wanted = (blocks / (sf * scale)).abs().clamp(max=6.0).double().unsqueeze(2)
    distance = (wanted - E2M1[:8].double()).abs()
    best = (distance == distance.amin(2, keepdim=True)).int()
    code = (best * torch.tensor([2, 1] * 4)).argmax(2)
    return (E2M1[code].copysign(blocks) * sf).view(-1)


def _matvec(weight: Tensor, x: Tensor, exact: bool) -> Tensor:
    """fp32 [N] = fp64 sum. With `exact`, checks that fp32 sums it exactly, in any
    order: every term is a multiple of one power of two, and no sum reaches 2^24 of
    it. Weights are multiples of a half there."""
    x = x.double()
    if exact:
        unit = 2.0**-20
        while not (x / (2 * unit)).frac().any():
            unit *= 2
        assert not (x / unit).frac().any()
        assert (weight.abs() @ x.abs()).max() <= 2**24 * unit / 2
    return (weight @ x).float()


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _expected(
    x: Tensor,
    weights: Tensor,
    slots: Tensor,
    t: Tensors,
    fmt: WeightFormat,
    mode: str,
    limit: float | None = None,
    exact: bool = False,
) -> Tensor:
    w13, w2 = _dense(t.w13, t.w13_scale, fmt), _dense(t.w2, t.w2_scale, fmt)
    one = torch.ones(())
    s_2 = one if t.l2_act_scale is None else t.l2_act_scale.view(())
    y = torch.zeros(x.shape)
    for token in range(x.shape[0]):
        for k in range(slots.shape[1]):
            e = int(slots[token, k])
            if e < 0:
                continue
            xq, s_x = x[token].float(), one
            if mode == "w4a4":
                amax = xq.abs().max()
                s_x = amax / 2688 if amax > 0 else one
                xq = _quantize(xq, s_x)
            gate, up = _matvec(w13[e], xq, exact).chunk(2)
            a_g, a_u, a_2 = (
                one if a is None else a[e]
                for a in (t.gate_alpha, t.up_alpha, t.w2_alpha)
            )
            g, u = _bf16(gate * (a_g * s_x)), _bf16(up * (a_u * s_x))
            if limit is not None:
                g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            h = torch.nn.functional.silu(g) * u
            if mode == "w4a4":
                h = _quantize(h, s_2)
                o = _bf16(_matvec(w2[e], h, exact) * (a_2 * s_2))
            else:
                o = _bf16(_matvec(w2[e], _bf16(h), False) * a_2)
            y[token] += o * weights[token, k]
    return y.bfloat16()


# --- problems ---


def _tensors(fmt: WeightFormat, mode: str) -> Tensors:
    if fmt.scale_dtype is None:
        return Tensors(
            w13=torch.randint(-8, 9, (E, 2 * INTER, H)).bfloat16() / 16,
            w2=torch.randint(-8, 9, (E, H, INTER)).bfloat16() / 16,
        )

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    def scales(*shape: int) -> Tensor:
        # 1 or 2: powers of two keep every sum exact
        return torch.randint(0, 2, shape).add(1).to(torch.float8_e4m3fn)

    return Tensors(
        w13=codes(E, 2 * INTER, H // 2),
        w2=codes(E, H, INTER // 2),
        w13_scale=scales(E, 2 * INTER, H // 16),
        w2_scale=scales(E, H, INTER // 16),
        gate_alpha=torch.full((E,), WEIGHT_SCALE) * 2.0 ** torch.randint(-3, 1, (E,)),
        up_alpha=torch.full((E,), WEIGHT_SCALE) * 2.0 ** torch.randint(-3, 1, (E,)),
        w2_alpha=torch.full((E,), WEIGHT_SCALE),
        l2_act_scale=torch.full((1,), MID_SCALE) if mode == "w4a4" else None,
    )


def _tokens(count: int, top_k: int = TOP_K) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose L1 scale is exactly 2^-8: the largest value is 10.5 = 2688 / 256."""
    x = torch.randint(-20, 21, (count, H)).bfloat16() / 2
    x[:, ::16] = torch.where(torch.rand(count, H // 16) < 0.5, -10.5, 10.5).bfloat16()
    weights = 2.0 ** torch.randint(-3, 1, (count, top_k)).float()
    slots = torch.rand(count, E).topk(top_k, dim=1).indices
    return x, weights, slots


def _problem(fmt: WeightFormat, mode: str, **changes: Any) -> Problem:
    return Problem(
        format=fmt,
        mode=mode,
        num_experts=E,
        hidden=H,
        intermediate=INTER,
        top_k=TOP_K,
        **changes,
    )


def _run(
    args: tuple[Tensor, Tensor, Tensor], t: Tensors, fmt: WeightFormat, mode: str
) -> Tensor:
    return reference_moe(*args, t, fmt, mode)


# --- against the independent implementation ---


@pytest.mark.parametrize("count", TOKENS)
def test_w4a4_is_exact(count: int) -> None:
    """Bitwise: powers of two make every sum exact, so no order can matter."""
    tensors, args = _tensors(NVFP4, "w4a4"), _tokens(count)
    expected = _expected(*args, tensors, NVFP4, "w4a4", exact=True)
    assert_equal(_run(args, tensors, NVFP4, "w4a4"), expected)


@modes
@pytest.mark.parametrize("limit", [None, 3.0])
def test_every_mode_matches(fmt: WeightFormat, mode: str, limit: float | None) -> None:
    tensors, args = _tensors(fmt, mode), _tokens(17)
    expected = _expected(*args, tensors, fmt, mode, limit)
    run = ReferenceKernel().bind(_problem(fmt, mode, swiglu_limit=limit), tensors)
    # one bf16 rounding of g, u, h or o may fall the other way, where an fp32 sum of a
    # matmul associates differently from the fp64 one
    peak = expected.float().abs().max().item()
    torch.testing.assert_close(run(*args), expected, rtol=2**-7, atol=peak * 2**-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("count", TOKENS)
@modes
def test_a_gpu_gives_the_same(fmt: WeightFormat, mode: str, count: int) -> None:
    tensors, args = _tensors(fmt, mode), _tokens(count)
    there = Tensors(**{name: t.cuda() for name, t in tensors.named().items()})
    got = _run(tuple(a.cuda() for a in args), there, fmt, mode)
    assert got.is_cuda
    expected = _run(args, tensors, fmt, mode)
    # silu differs in its last bit, which may turn one bf16 rounding or one code
    peak = expected.float().abs().max().item()
    torch.testing.assert_close(got.cpu(), expected, rtol=2**-7, atol=peak * 2**-8)


def test_bf16_is_the_plain_layer() -> None:
    tensors, (x, weights, slots) = _tensors(BF16, "w16a16"), _tokens(5)
    slots = slots[:, :1]
    out = _run((x, weights[:, :1], slots), tensors, BF16, "w16a16")
    for token, e in enumerate(slots[:, 0].tolist()):
        gate, up = torch.nn.functional.linear(x[token], tensors.w13[e]).chunk(2)
        h = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
        o = torch.nn.functional.linear(h, tensors.w2[e])
        expected = (o.float() * weights[token, 0]).bfloat16()
        # as above; torch's bf16 kernels accumulate in fp32 in an order of their own
        peak = expected.float().abs().max().item()
        torch.testing.assert_close(out[token], expected, rtol=2**-7, atol=peak * 2**-9)


# --- one-hot inputs: exact by hand ---


def _one_hot_layer(gate_alpha: float, up_alpha: float, mode: str) -> Tensors:
    """Expert 5: gate and up read x[32] times 1, down is 2 on its diagonal."""
    w13 = torch.zeros(E, 2 * INTER, H // 2, dtype=torch.uint8)
    w2 = torch.zeros(E, H, INTER // 2, dtype=torch.uint8)
    w13[5, :, 16] = 0x2  # code 2 is 1.0, in the low nibble: k = 32
    for i in range(INTER):
        w2[5, i, i // 2] = 0x4 << (4 * (i % 2))  # code 4 is 2.0
    return Tensors(
        w13=w13,
        w2=w2,
        w13_scale=torch.ones(E, 2 * INTER, H // 16).to(torch.float8_e4m3fn),
        w2_scale=torch.ones(E, H, INTER // 16).to(torch.float8_e4m3fn),
        gate_alpha=torch.full((E,), gate_alpha),
        up_alpha=torch.full((E,), up_alpha),
        w2_alpha=torch.full((E,), 0.5),
        l2_act_scale=torch.ones(1) if mode == "w4a4" else None,
    )


@pytest.mark.parametrize("mode", NVFP4.modes)
@pytest.mark.parametrize(("gate_alpha", "up_alpha"), [(8, 0.5), (16, 0.25), (8, 3)])
def test_gate_and_up_each_take_their_own_alpha(
    mode: str, gate_alpha: float, up_alpha: float
) -> None:
    x = torch.zeros(1, H).bfloat16()
    x[0, 32] = 6.0  # so that g >= 48, where silu(g) is g in fp32
    args = (x, torch.full((1, 1), 0.25), torch.tensor([[5]]))
    out = _run(args, _one_hot_layer(gate_alpha, up_alpha, mode), NVFP4, mode)
    h = (6 * gate_alpha) * (6 * up_alpha)
    expected = torch.zeros(1, H)
    # down doubles, its alpha halves, the router weight is a quarter
    expected[0, :INTER] = h * 2 * 0.5 * 0.25
    if mode == "w4a4":
        # h sits at the top code; only its block scale e4m3(h / 6) is rounded
        sf = torch.tensor(h / 6).to(torch.float8_e4m3fn).float()
        expected[0, :INTER] = 6 * sf * 0.25
    assert_equal(out, expected.bfloat16())


def test_the_clamp_comes_before_silu_and_gate_has_no_lower_bound() -> None:
    tensors = _one_hot_layer(1.0, 1.0, "w4a16")
    limit = 4.0
    for value in (6.0, -6.0):
        x = torch.zeros(1, H).bfloat16()
        x[0, 32] = value
        args = (x, torch.ones(1, 1), torch.tensor([[5]]))
        out = reference_moe(*args, tensors, NVFP4, "w4a16", limit)
        g, u = min(value, limit), max(-limit, min(value, limit))
        h = torch.nn.functional.silu(torch.tensor(g)) * u
        expected = torch.zeros(1, H)
        expected[0, :INTER] = h.bfloat16().float()
        assert_equal(out, expected.bfloat16(), f"value {value}")


# --- the L2 activation scale is a tensor, read at call time ---


@pytest.mark.parametrize("count", TOKENS)
def test_the_l2_scale_is_read_at_call_time(count: int) -> None:
    tensors, args = _tensors(NVFP4, "w4a4"), _tokens(count)
    problem, kernel = _problem(NVFP4, "w4a4"), ReferenceKernel()
    stale = dataclasses.replace(tensors, l2_act_scale=tensors.l2_act_scale.clone())
    run, run_stale = kernel.bind(problem, tensors), kernel.bind(problem, stale)
    before = run(*args)
    assert_equal(run_stale(*args), before)
    doubled = dataclasses.replace(
        tensors,
        l2_act_scale=tensors.l2_act_scale * 2,
        w2_alpha=tensors.w2_alpha * 2,
    )
    expected = _expected(*args, doubled, NVFP4, "w4a4", exact=True)
    tensors.l2_act_scale.mul_(2)
    tensors.w2_alpha.mul_(2)
    assert_equal(run(*args), expected)
    # the negative control: bound to a copy, it must miss the new scale
    assert not torch.equal(run_stale(*args), expected)
    assert not torch.equal(before, expected)


def test_no_l2_scale_is_a_unit_scale() -> None:
    tensors, args = _tensors(NVFP4, "w4a4"), _tokens(17)
    absent = dataclasses.replace(tensors, l2_act_scale=None)
    unit = dataclasses.replace(tensors, l2_act_scale=torch.ones(1))
    assert_equal(_run(args, absent, NVFP4, "w4a4"), _run(args, unit, NVFP4, "w4a4"))


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0.125, TypeError, "must be a float32 device tensor, got float"),
        (torch.ones(1).double(), TypeError, "must be float32, got torch.float64"),
        (torch.ones(2), ValueError, "must have one element, got (2,)"),
        (torch.ones(1, device="meta"), ValueError, "is on meta, the output on cpu"),
    ],
    ids=["float", "float64", "two", "device"],
)
def test_any_other_l2_scale_is_refused(
    scale: Any, error: type[Exception], message: str
) -> None:
    tensors = dataclasses.replace(_tensors(NVFP4, "w4a4"), l2_act_scale=scale)
    with pytest.raises(error, match=re.escape(message)):
        _run(_tokens(1), tensors, NVFP4, "w4a4")


# --- routing ---


@modes
def test_slots_of_minus_one_add_nothing(fmt: WeightFormat, mode: str) -> None:
    tensors, (x, weights, slots) = _tensors(fmt, mode), _tokens(17)
    holes = torch.rand(17, TOP_K) < 0.4
    holes[3] = True
    masked = slots.masked_fill(holes, -1)
    out = _run((x, weights, masked), tensors, fmt, mode)
    silenced = _run((x, weights.masked_fill(holes, 0.0), slots), tensors, fmt, mode)
    assert_equal(out.float() + 0.0, silenced.float() + 0.0)
    assert_equal(out[3], torch.zeros(H).bfloat16())


@modes
def test_all_minus_one_gives_zero_rows(fmt: WeightFormat, mode: str) -> None:
    tensors, (x, weights, slots) = _tensors(fmt, mode), _tokens(17)
    out = _run((x, weights, torch.full_like(slots, -1)), tensors, fmt, mode)
    assert_equal(out, torch.zeros_like(x))


@modes
def test_nan_where_nothing_is_routed_contributes_nothing(
    fmt: WeightFormat, mode: str
) -> None:
    tensors, (x, weights, slots) = _tensors(fmt, mode), _tokens(17)
    slots[2], slots[5, 1] = -1, -1
    clean = _run((x, weights, slots), tensors, fmt, mode)
    x[2], weights[2], weights[5, 1] = torch.nan, torch.nan, torch.nan
    assert_equal(_run((x, weights, slots), tensors, fmt, mode), clean)


@modes
def test_nan_in_an_expert_without_tokens_contributes_nothing(
    fmt: WeightFormat, mode: str
) -> None:
    tensors, (x, weights, slots) = _tensors(fmt, mode), _tokens(17)
    slots[slots == 6] = -1
    clean = _run((x, weights, slots), tensors, fmt, mode)
    poisoned = tensors.w13 if fmt.scale_dtype is None else tensors.w13_scale
    poisoned[6] = torch.nan
    assert_equal(_run((x, weights, slots), tensors, fmt, mode), clean)


@modes
def test_no_tokens(fmt: WeightFormat, mode: str) -> None:
    out = _run(_tokens(0), _tensors(fmt, mode), fmt, mode)
    assert out.shape == (0, H)
    assert out.dtype == torch.bfloat16


@modes
def test_int32_and_int64_slots_give_the_same(fmt: WeightFormat, mode: str) -> None:
    tensors, (x, weights, slots) = _tensors(fmt, mode), _tokens(17)
    slots[0, 0] = -1
    wide = _run((x, weights, slots), tensors, fmt, mode)
    assert_equal(_run((x, weights, slots.int()), tensors, fmt, mode), wide)


@pytest.mark.parametrize("count", [1, E])
def test_top_1_routes_by_the_mapping_not_by_the_shape(count: int) -> None:
    """With top-k 1 there are as many slots as tokens, yet they are in another order."""
    tensors, (x, weights, _) = _tensors(NVFP4, "w4a4"), _tokens(count, top_k=1)
    slots = torch.arange(count).flip(0).unsqueeze(1)
    expected = _expected(x, weights, slots, tensors, NVFP4, "w4a4", exact=True)
    assert_equal(_run((x, weights, slots), tensors, NVFP4, "w4a4"), expected)


def test_an_all_zero_token_stays_zero() -> None:
    tensors, (x, weights, slots) = _tensors(NVFP4, "w4a4"), _tokens(3)
    x[1] = 0
    out = _run((x, weights, slots), tensors, NVFP4, "w4a4")
    assert_equal(out[1] + 0.0, torch.zeros(H).bfloat16())
    assert out.isfinite().all()


@modes
def test_inputs_are_left_alone_and_equal_batches_repeat(
    fmt: WeightFormat, mode: str
) -> None:
    tensors, args = _tensors(fmt, mode), _tokens(17)
    kept = [t.clone() for t in (*args, *tensors.named().values())]
    first = _run(args, tensors, fmt, mode)
    assert_equal(_run(args, tensors, fmt, mode), first)
    for now, then in zip((*args, *tensors.named().values()), kept, strict=True):
        assert_equal(now, then)
