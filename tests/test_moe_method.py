# SPDX-License-Identifier: Apache-2.0
"""The method vLLM's layers get: routing, refusals, modes, shared experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin import envs
from vllm_megamoe_plugin.kernels.base import KernelUnavailableError
from vllm_megamoe_plugin.moe_method import MegaMoEMethod, local_slots

from .vllm_layer import TOP_K, E, H, build, checkpoint, vllm_process


@pytest.fixture(autouse=True)
def fresh_envs():
    envs.get.cache_clear()
    yield
    envs.get.cache_clear()


def loaded_layer(config: Any, kind: str, **overrides: Any) -> Any:
    runner = build(config, **overrides)
    list(runner.load_weights(checkpoint(kind).items()))
    layer = runner.routed_experts
    layer.quant_method.process_weights_after_loading(layer)
    return runner


def dequantized(kind: str) -> dict[str, Tensor]:
    """fp32 weights of the random checkpoint, by an independent decoding."""
    raw = checkpoint(kind)
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(grid + [-v for v in grid])
    out = {}
    for name in {n.rsplit(".", 1)[0] for n in raw}:
        if kind == "bf16":
            out[name] = raw[f"{name}.weight"].float()
            continue
        modelopt = kind == "modelopt"
        packed = raw[f"{name}.{'weight' if modelopt else 'weight_packed'}"]
        scale = raw[f"{name}.weight_scale"].float().repeat_interleave(16, dim=1)
        if modelopt:
            alpha = raw[f"{name}.weight_scale_2"]
        else:
            alpha = 1 / raw[f"{name}.weight_global_scale"]
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
        out[name] = table[codes] * scale * alpha
    return out


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors-weight-only", "bf16"])
def test_the_layer_computes_the_moe(kind: str, tmp_path: Path, monkeypatch) -> None:
    """Weight-only output against a dense fp32 computation on decoded weights."""
    if kind == "modelopt":
        monkeypatch.setenv("VLLM_MEGAMOE_ACTIVATION", "w4a16")
    torch.manual_seed(0)
    x = torch.randn(9, H).bfloat16()
    ids = torch.rand(9, E).topk(TOP_K).indices
    ids[4, 1] = -1
    p = torch.rand(9, TOP_K)
    w = dequantized(kind)
    want = torch.zeros(9, H)
    for t in range(9):
        for k in range(TOP_K):
            if (e := int(ids[t, k])) < 0:
                continue
            gate = w[f"{e}.gate_proj"] @ x[t].float()
            up = w[f"{e}.up_proj"] @ x[t].float()
            h = torch.nn.functional.silu(gate) * up
            want[t] += p[t, k] * (w[f"{e}.down_proj"] @ h)
    with vllm_process(tmp_path, kind) as config:
        layer = loaded_layer(config, kind).routed_experts
        assert isinstance(layer.quant_method, MegaMoEMethod)
        got = layer.quant_method.apply(layer, x, p, ids, None, None)
    # g, u, h and o are rounded to bf16 (2^-9 each), and so is the sum
    torch.testing.assert_close(
        got.float(), want, rtol=0.03, atol=float(want.abs().max()) * 0.01
    )


def test_shared_experts_run_outside_the_kernel(tmp_path: Path) -> None:
    from vllm.forward_context import set_forward_context

    class Shared(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones_like(x)

    x, logits = torch.randn(3, H).bfloat16(), torch.randn(3, E).bfloat16()
    with vllm_process(tmp_path, "modelopt") as config:
        runner = loaded_layer(config, "modelopt", shared_experts=Shared())
        alone = loaded_layer(config, "modelopt", prefix="model.layers.1.mlp.experts")
        with set_forward_context(None, config):
            torch.testing.assert_close(
                runner(x, logits), alone(x, logits) + 1, rtol=0, atol=0
            )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_other_ranks_have_no_slot(dtype: torch.dtype) -> None:
    expert_map = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 2], [3, -1]], dtype=dtype)
    want = torch.tensor([[-1, 0], [1, -1]], dtype=dtype)
    assert torch.equal(local_slots(ids, expert_map), want)
    assert local_slots(ids, None) is ids


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"has_bias": True}, "expert biases"),
        ({"apply_router_weight_on_input": True}, "router weights applied to the input"),
        ({"activation": "gelu"}, "activation silu, got gelu"),
        ({"swiglu_alpha": 1.702}, "SwiGLU alpha or beta"),
    ],
)
def test_what_no_kernel_serves_is_refused_with_the_reason(
    overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with (
        vllm_process(tmp_path) as config,
        pytest.raises(
            (NotImplementedError, KernelUnavailableError), match=reason
        ) as caught,
    ):
        build(config, **overrides)
    assert "--moe-backend auto" in str(caught.value)


def test_a_weight_only_checkpoint_runs_w4a16_and_refuses_w4a4(
    tmp_path: Path, monkeypatch
) -> None:
    kind = "compressed-tensors-weight-only"
    with vllm_process(tmp_path, kind) as config:
        layer = loaded_layer(config, kind).routed_experts
        assert layer.quant_method.mode == "w4a16"
        envs.get.cache_clear()
        monkeypatch.setenv("VLLM_MEGAMOE_ACTIVATION", "w4a4")
        with pytest.raises(ValueError, match="weight-only"):
            build(config, prefix="model.layers.1.mlp.experts")


def test_a_kernel_asked_for_by_name_never_falls_back(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_MEGAMOE_KERNEL", "deep_gemm")
    with (
        vllm_process(tmp_path, "modelopt") as config,
        pytest.raises(KernelUnavailableError, match="needs SM100"),
    ):
        build(config)


def test_an_incomplete_layer_does_not_serve(tmp_path: Path) -> None:
    """A half-written layer refuses, a full load repairs it."""
    with vllm_process(tmp_path, "modelopt") as config:
        runner = loaded_layer(config, "modelopt")
        layer = runner.routed_experts
        x, p = torch.randn(2, H).bfloat16(), torch.rand(2, TOP_K)
        ids = torch.zeros(2, TOP_K, dtype=torch.int64)
        before = layer.quant_method.apply(layer, x, p, ids, None, None)
        list(runner.load_weights(list(checkpoint("modelopt", seed=1).items())[:5]))
        with pytest.raises(RuntimeError, match="do not serve"):
            layer.quant_method.apply(layer, x, p, ids, None, None)
        list(runner.load_weights(checkpoint("modelopt").items()))
        layer.quant_method.process_weights_after_loading(layer)
        after = layer.quant_method.apply(layer, x, p, ids, None, None)
        assert torch.equal(before, after)


def test_eplb_moves_every_tensor_of_an_expert(tmp_path: Path) -> None:
    """Swapping two experts through the EPLB views swaps their outputs."""
    for kind in ("modelopt", "compressed-tensors"):
        with vllm_process(tmp_path / kind, kind) as config:
            layer = loaded_layer(config, kind).routed_experts
            x, p = torch.randn(2, H).bfloat16(), torch.ones(2, 1)

            def run(expert: int, layer=layer, x=x, p=p) -> Tensor:
                ids = torch.full((2, 1), expert)
                return layer.quant_method.apply(layer, x, p, ids, None, None)

            first, last = run(0), run(3)
            assert not torch.equal(first, last)
            for view in layer.get_expert_weights():
                assert view.is_contiguous()
                assert view.shape[0] == E
                flat = view.view(torch.uint8)
                saved = flat[0].clone()
                flat[0].copy_(flat[3])
                flat[3].copy_(saved)
            assert torch.equal(run(3), first)
            assert torch.equal(run(0), last)
