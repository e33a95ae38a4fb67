# SPDX-License-Identifier: Apache-2.0
"""The loader contract on a whole model that vLLM built: every way weights arrive."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_megamoe_plugin.sync.direct import expert_layers

from .vllm_layer import INTER, KINDS, E, H, load_model, model_tensors, vllm_process


def layers_of(model: Any) -> list[tuple[str, Any]]:
    return [(layer.name, layer.module) for layer in expert_layers(model)]


def state(model: Any) -> dict[str, tuple[Tensor, int]]:
    """Bytes and address of every registered tensor of the MoE layers."""
    out = {}
    for name, layer in layers_of(model):
        for key, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            copy = tensor.detach().clone().contiguous().view(torch.uint8)
            out[f"{name}.{key}"] = (copy, tensor.data_ptr())
    return out


def assert_same_bytes(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    differing = [k for k in want if not torch.equal(got[k][0], want[k][0])]
    assert not differing, f"{len(differing)} of {len(want)} differ: {differing[:4]}"


def assert_unmoved(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert [k for k in want if got[k][1] != want[k][1]] == []


def experts_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the MoE layers: vLLM repacks dense CPU weights once and for all,
    so that only these can be written again without its layerwise reload."""
    return {n: t for n, t in tensors.items() if ".experts." in n}


def process(model: Any) -> None:
    for _, layer in layers_of(model):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path: Path):
    kind = request.param
    with vllm_process(tmp_path, kind) as config:
        yield kind, config, load_model(tmp_path, kind, config)


def test_every_way_to_load_gives_the_same_bytes_at_the_same_addresses(loaded) -> None:
    """Cold start, direct reload in shuffled single shards, layerwise reload."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    kind, config, model = loaded
    cold = state(model)
    shards = list(experts_of(model_tensors(kind)).items())
    model.load_weights(experts_of(model_tensors(kind, seed=7)).items())
    process(model)
    moved = state(model)
    assert_unmoved(moved, cold)
    assert any(not torch.equal(moved[k][0], cold[k][0]) for k in cold)

    random.Random(0).shuffle(shards)
    for shard in shards:
        model.load_weights([shard])
    process(model)
    assert_same_bytes(state(model), cold)
    assert_unmoved(state(model), cold)

    for seed, want in ((7, moved), (0, cold)):
        weights = model_tensors(kind, seed=seed).items()
        initialize_layerwise_reload(model)
        model.load_weights(weights)
        in_time = {name: not layer.w13_is_meta for name, layer in _probed(model)}
        assert all(in_time.values()), f"buffered until finalize: {in_time}"
        finalize_layerwise_reload(model, config.model_config)
        assert_same_bytes(state(model), want)
        assert_unmoved(state(model), cold)


def _probed(model: Any) -> list[tuple[str, Any]]:
    """Whether each layer was already processed, before finalize could do it."""

    class Probe:
        def __init__(self, layer: Any) -> None:
            first = next(iter(layer.parameters()))
            self.w13_is_meta = first.is_meta

    return [(name, Probe(layer)) for name, layer in layers_of(model)]


def test_a_refused_layerwise_reload_leaves_the_live_tensors_in_place(loaded) -> None:
    """It refuses to serve, and the next full reload, of either kind, repairs it."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    kind, config, model = loaded
    cold = state(model)
    partial = model_tensors(kind, seed=7)
    lost = next(n for n in partial if ".experts.1.down_proj.weight" in n)
    del partial[lost]
    x, p = torch.randn(2, H).bfloat16(), torch.rand(2, 1)
    batch = (x, p, torch.zeros(2, 1, dtype=torch.int64))

    def run() -> list[Tensor]:
        layers = [layer for _, layer in layers_of(model)]
        return [m.quant_method.apply(m, *batch, None, None) for m in layers]

    before = run()
    initialize_layerwise_reload(model)
    model.load_weights(partial.items())
    with pytest.raises(ValueError, match="expert 1 w2"):
        finalize_layerwise_reload(model, config.model_config)
    assert_unmoved(state(model), cold)
    with pytest.raises(RuntimeError, match="do not serve"):
        run()

    initialize_layerwise_reload(model)
    model.load_weights(model_tensors(kind).items())
    finalize_layerwise_reload(model, config.model_config)
    assert_same_bytes(state(model), cold)
    assert_unmoved(state(model), cold)
    assert all(map(torch.equal, run(), before))


def test_a_tensor_that_moved_is_an_error(loaded) -> None:
    """A captured graph would go on reading the old storage."""
    _, _, model = loaded
    layer = layers_of(model)[0][1]
    weight = next(p for n, p in layer.named_parameters() if n.startswith("w2_weight"))
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match="w2 moved after the kernel was bound"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_recorded_plan_of_the_whole_model_replays(loaded) -> None:
    """vLLM's sharded-RDT planner records every expert copy; the copies restore all."""
    from vllm.distributed.weight_transfer.sharded_rdt_engine import (
        ShardedRDTWeightTransferEngine,
    )

    kind, _, model = loaded
    tensors = model_tensors(kind)
    experts = {n: t for n, t in tensors.items() if ".experts." in n}
    engine = object.__new__(ShardedRDTWeightTransferEngine)
    engine.model, engine.device = model, torch.device("cpu")
    engine._name_to_plan = {}

    init = SimpleNamespace(
        names=list(tensors),
        dtype_names=[str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        shapes=[list(t.shape) for t in tensors.values()],
    )
    cold = state(model)
    engine._bake(init)
    assert_unmoved(state(model), cold)
    assert set(experts) <= set(engine._name_to_plan), "an expert tensor has no plan"

    scatters = [s for plan in _unique(engine._name_to_plan) for s in plan]
    mine = [s for s in scatters if s.src[0] in experts]
    assert len(mine) == len(experts)
    for s in mine:
        getattr(s.layer, s.param_name).data.view(torch.uint8).zero_()
    for s in mine:
        source = experts[s.src[0]]
        for op, args, kwargs in s.src[1]:
            source = getattr(source, op)(*args, **dict(kwargs))
        param = getattr(s.layer, s.param_name).data
        param.as_strided(s.shape, s.stride, s.offset).copy_(source)
    process(model)
    assert_same_bytes(state(model), cold)
    assert_unmoved(state(model), cold)


def _unique(plans: dict[str, list[Any]]) -> list[list[Any]]:
    return list({id(plan): plan for plan in plans.values()}.values())


@pytest.mark.parametrize("kind", KINDS)
def test_loads_and_processes_on_meta(kind: str, tmp_path: Path) -> None:
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    weights = {name: t.to("meta") for name, t in model_tensors(kind).items()}
    with (
        vllm_process(tmp_path, kind) as config,
        set_default_torch_dtype(torch.bfloat16),
        torch.device("meta"),
    ):
        model = initialize_model(vllm_config=config)
        model.load_weights(weights.items())
        process(model)
        assert all(
            p.is_meta for _, layer in layers_of(model) for p in layer.parameters()
        )


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_load_serves(kind: str, tmp_path: Path) -> None:
    """Dummy global scales are 1e-3 and input scales 1, whatever is stored for them."""
    with vllm_process(tmp_path, kind, load_format="dummy") as config:
        model = load_model(tmp_path, kind, config)
        for _, layer in layers_of(model):
            read = layer.quant_method.experts.kernel_tensors(layer)
            if kind != "bf16":
                torch.testing.assert_close(read["gate_alpha"], torch.full((E,), 1e-3))
                torch.testing.assert_close(read["up_alpha"], torch.full((E,), 1e-3))
            if "l2_act_scale" in read:
                assert read["l2_act_scale"].tolist() == [1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_vllms_weight_cache_serve_and_reload(
    kind: str, tmp_path: Path
) -> None:
    """The cache puts another process's processed tensors, bare, on a meta model."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader
    from vllm.model_executor.utils import weights_already_processed
    from vllm.utils.torch_utils import set_default_torch_dtype

    with vllm_process(tmp_path, kind) as config:
        daemon = load_model(tmp_path, kind, config)
        entries = {
            f"{name}.{key}": SimpleNamespace(
                kind="param" if isinstance(tensor, nn.Parameter) else "buffer",
                rebuild=lambda device, t=tensor: t.detach().clone(),
            )
            for name, layer in layers_of(daemon)
            for key, tensor in (*layer.named_parameters(), *layer.named_buffers())
        }
        config.load_config = LoadConfig(load_format="ipc_cache")
        config.compilation_config.static_forward_context.clear()
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            model = initialize_model(vllm_config=config)
        cached = SimpleNamespace(entries=entries, aliases={})
        IpcModelLoader(config.load_config)._apply_entries(model, cached, 0)
        with weights_already_processed():
            process(model)
        assert all(
            x.quant_method.supports_pre_processed_weights for _, x in layers_of(model)
        )
        assert_same_bytes(state(model), state(daemon))
        born = state(model)
        new = experts_of(model_tensors(kind, seed=3))
        for each in (model, daemon):
            each.load_weights(new.items())
            process(each)
        assert_same_bytes(state(model), state(daemon))
        assert_unmoved(state(model), born)


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts' weights as the two 3-D tensors newer checkpoints store."""
    out = {n: t for n, t in tensors.items() if ".experts." not in n}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{at}.{e}.{p}.weight"] for e in range(E)])
            for p in ("gate_proj", "up_proj", "down_proj")
        )
        out[f"{at}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        out[f"{at}.down_proj"] = down
    assert out[f"{at}.gate_up_proj"].shape == (E, 2 * INTER, H)
    return out


def test_fused_bf16_experts_load_like_single_ones(tmp_path: Path) -> None:
    with vllm_process(tmp_path, "bf16") as config:
        model = load_model(tmp_path, "bf16", config)
        cold = state(model)
        model.load_weights(experts_of(model_tensors("bf16", seed=3)).items())
        model.load_weights(experts_of(_fused(model_tensors("bf16"))).items())
        process(model)
        assert_same_bytes(state(model), cold)


def test_fused_nvfp4_experts_load_like_single_ones(tmp_path: Path) -> None:
    """Values, block scales and per-tensor scales, each fused over the experts."""
    tensors = model_tensors("modelopt")
    fused = {n: t for n, t in tensors.items() if ".experts." not in n}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            gate, up, down = (
                torch.stack(
                    [
                        tensors[f"{at}.{e}.{p}.{suffix}"].view(torch.uint8)
                        if suffix == "weight_scale"
                        else tensors[f"{at}.{e}.{p}.{suffix}"]
                        for e in range(E)
                    ]
                )
                for p in ("gate_proj", "up_proj", "down_proj")
            )
            both = (
                torch.stack([gate, up], 1)
                if gate.dim() == 1
                else torch.cat([gate, up], 1)
            )
            name = "" if suffix == "weight" else f"_{suffix}"
            fused[f"{at}.gate_up_proj{name}"] = both
            fused[f"{at}.down_proj{name}"] = down
    with vllm_process(tmp_path, "modelopt") as config:
        model = load_model(tmp_path, "modelopt", config)
        cold = state(model)
        model.load_weights(experts_of(model_tensors("modelopt", seed=3)).items())
        model.load_weights(experts_of(fused).items())
        process(model)
        assert_same_bytes(state(model), cold)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t, n: t.pop(n), "missing"),
        (lambda t, n: t.update({n: t[n][:-1]}), "need"),
        (lambda t, n: t.update({n: t[n].short()}), "got dtype torch.int16"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_a_broken_checkpoint_names_the_tensor(damage, message, tmp_path: Path) -> None:
    tensors = model_tensors("modelopt")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    damage(tensors, name)
    with (
        vllm_process(tmp_path, "modelopt") as config,
        pytest.raises((ValueError, TypeError), match=message) as caught,
    ):
        load_model(tmp_path, "modelopt", config, tensors)
    for part in ("model.layers.1.mlp.experts", "expert 2", "w3"):
        assert part in str(caught.value)
