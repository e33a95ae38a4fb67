# SPDX-License-Identifier: Apache-2.0
"""vLLM's layerwise reload, guarded: it starts clean, ends right, and can be ended."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_megamoe_plugin import envs, register
from vllm_megamoe_plugin.reload import (
    abort_layerwise,
    end_update_session,
    in_layerwise_reload,
    layerwise_progress,
)
from vllm_megamoe_plugin.sync.digest import compare, digest_all
from vllm_megamoe_plugin.sync.live import live_tensors
from vllm_megamoe_plugin.sync.manifest import BROKEN
from vllm_megamoe_plugin.sync.state import abort_reload, discard, why_incomplete

from .vllm_layer import H, load_model, model_tensors, vllm_process

TIED = {"hf_overrides": {"tie_word_embeddings": True}}


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """(config, model) of a tiny model with our experts."""
    with vllm_process(tmp_path, "modelopt") as config:
        model = load_model(tmp_path, "modelopt", config)
        yield config, model
        # models of one process share rotary embeddings
        abort_layerwise(model.modules())


def initialize(model: Any) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def finalize(model: Any, config: Any) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, config.model_config)


def digests(model: Any) -> dict:
    return digest_all(live_tensors(model), "rank")


def layer_of(model: Any) -> Any:
    return model.model.layers[0].mlp.experts.routed_experts


def forward(layer: Any) -> Tensor:
    x = torch.ones(2, H).bfloat16()
    weights, ids = torch.ones(2, 2), torch.tensor([[0, 1], [2, 3]])
    return layer.quant_method.apply(layer, x, weights, ids, None, None)


# --- how far a reload is, and how it ends ---


def test_progress_tells_what_waits_from_what_is_new(loaded: Any) -> None:
    config, model = loaded
    assert layerwise_progress(model) == ([], [])
    assert why_incomplete(model) is None
    initialize(model)
    waiting, done = layerwise_progress(model)
    assert done == []
    assert {"model.embed_tokens", "model.layers.0.mlp.experts.routed_experts"} <= set(
        waiting
    )
    assert "model.layers.0" not in waiting  # no tensor of its own
    new = model_tensors("modelopt", seed=7)
    model.load_weights([("model.norm.weight", new.pop("model.norm.weight"))])
    waiting_now, done = layerwise_progress(model)
    assert done == ["model.norm"]
    assert set(waiting) - set(waiting_now) == {"model.norm"}
    message = str(why_incomplete(model))
    assert message.startswith("A weight update is under way: 1 modules have their new")
    assert "call megamoe_abort_reload" in message
    model.load_weights(new.items())
    finalize(model, config)
    assert layerwise_progress(model) == ([], [])
    assert why_incomplete(model) is None


def test_a_module_that_models_share_proves_nothing(loaded: Any) -> None:
    """A draft model's rotary embedding is the model's: only one is being reloaded."""
    _, model = loaded
    draft = torch.nn.ModuleDict(
        {
            "rotary_emb": model.model.layers[0].self_attn.rotary_emb,
            "proj": torch.nn.Linear(2, 2),
        }
    )
    initialize(model)
    assert in_layerwise_reload(draft["rotary_emb"])
    assert layerwise_progress(draft) == ([], [])
    assert abort_reload(draft) == ([], [])


def test_a_reload_that_replaced_nothing_leaves_the_old_weights(loaded: Any) -> None:
    _, model = loaded
    before, output = digests(model), forward(layer_of(model))
    initialize(model)
    # buffered, but no module is whole
    name = "model.layers.0.self_attn.q_proj.weight"
    model.load_weights([(name, model_tensors("modelopt", seed=7)[name])])
    restored, replaced = abort_reload(model)
    assert replaced == []
    assert "model.layers.0.self_attn.qkv_proj" in restored
    assert compare(before, digests(model)).identical
    assert why_incomplete(model) is None
    assert torch.equal(forward(layer_of(model)), output)
    assert abort_reload(model) == ([], [])


@pytest.mark.parametrize("finish", ["update", "reload"])
def test_a_reload_that_replaced_something_leaves_a_mixture(
    loaded: Any, finish: str
) -> None:
    config, model = loaded
    initialize(model)
    new = model_tensors("modelopt", seed=7)
    model.load_weights([("model.norm.weight", new["model.norm.weight"])])
    _, replaced = abort_reload(model)
    assert replaced == ["model.norm"]
    message = str(why_incomplete(model))
    assert "given up after 1 modules had their new weights (model.norm)" in message
    assert message.endswith(BROKEN)
    with pytest.raises(RuntimeError, match="given up after 1 modules"):
        forward(layer_of(model))
    if finish == "reload":
        initialize(model)
        model.load_weights(new.items())
        finalize(model, config)
    else:
        from vllm_megamoe_plugin.sync.direct import DirectUpdate
        from vllm_megamoe_plugin.sync.manifest import Manifest

        expected = {spec.name: spec for spec in Manifest.of(new.items()).tensors}
        manifest = Manifest.of(new.items())
        update = DirectUpdate(model, config.model_config, manifest, expected)
        update.load(new.items())
        update.finish()
    assert why_incomplete(model) is None
    forward(layer_of(model))


def test_a_reload_never_goes_on_from_one_that_was_left(loaded: Any) -> None:
    """vLLM keeps what the first has buffered, and would mix it with the second."""
    config, model = loaded
    new = model_tensors("modelopt", seed=7)
    initialize(model)
    # half of a fused projection stays behind in the buffers
    left = ("q_proj", "k_proj")
    model.load_weights(
        [
            (n, t)
            for n, t in model_tensors("modelopt", seed=3).items()
            if any(part in n for part in left)
        ]
    )
    initialize(model)
    model.load_weights(new.items())
    finalize(model, config)
    qkv = model.model.layers[0].self_attn.qkv_proj
    x = torch.eye(H).bfloat16()
    got = qkv.quant_method.apply(qkv, x, None).t()
    at = "model.layers.0.self_attn"
    want = torch.cat([new[f"{at}.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(got, want)


def test_an_abort_restores_only_what_is_in_a_reload(loaded: Any) -> None:
    _, model = loaded
    initialize(model)
    layer = layer_of(model)
    assert in_layerwise_reload(layer)
    assert layer.w13_weight.is_meta
    abort_layerwise([layer])
    assert not in_layerwise_reload(layer)
    assert not layer.w13_weight.is_meta
    assert in_layerwise_reload(model.lm_head)
    abort_layerwise(model.modules())


def test_forward_during_a_reload_says_so(loaded: Any) -> None:
    _, model = loaded
    initialize(model)
    with pytest.raises(RuntimeError, match="a layerwise weight update is under way"):
        forward(layer_of(model))
    abort_reload(model)
    forward(layer_of(model))


# --- a reload ends right ---


@pytest.mark.parametrize("how", ["reload_weights", "engine"])
def test_a_tied_head_follows_vllms_own_reload(tmp_path: Path, how: str) -> None:
    first, second = (_tied(seed) for seed in (0, 7))
    x = torch.randn(3, H).bfloat16()
    with vllm_process(tmp_path, "modelopt", **TIED) as config:
        model = load_model(tmp_path, "modelopt", config, first)
        head = model.lm_head
        before = head.quant_method.apply(head, x)
        if how == "reload_weights":
            from vllm.model_executor.model_loader.reload.inplace import reload_weights

            reload_weights(config, model, iter(second.items()), None, True)
        else:
            initialize(model)
            model.load_weights(second.items())
            finalize(model, config)
        after = head.quant_method.apply(head, x)
    want = torch.nn.functional.linear(x, second["model.embed_tokens.weight"])
    torch.testing.assert_close(after[:, : want.shape[1]], want, rtol=0.02, atol=0.02)
    assert not torch.equal(after, before)


def _tied(seed: int) -> dict[str, Tensor]:
    tensors = model_tensors("modelopt", seed)
    del tensors["lm_head.weight"]
    return tensors


def test_a_head_that_is_not_tied_is_left_alone(loaded: Any) -> None:
    """A reload without it leaves it with its own old weights, not the embedding's."""
    config, model = loaded
    head, x = model.lm_head, torch.randn(3, H).bfloat16()
    before = head.quant_method.apply(head, x)
    initialize(model)
    model.load_weights(_tied(7).items())
    finalize(model, config)
    assert torch.equal(head.quant_method.apply(head, x), before)


def test_a_kernel_read_tensor_that_moved_in_a_reload_is_an_error(loaded: Any) -> None:
    config, model = loaded
    layer = layer_of(model)
    initialize(model)
    model.load_weights(model_tensors("modelopt", seed=7).items())
    layer.w2_weight.data = layer.w2_weight.data.clone()
    with pytest.raises(RuntimeError, match="w2 moved after the kernel was bound"):
        finalize(model, config)
    # whoever asks later gets the same answer: graphs read the old place
    assert "moved after the kernel was bound" in str(why_incomplete(model))


@pytest.mark.parametrize("verify", ["0", "1"])
def test_moved_tensors_are_found_before_every_forward_if_asked(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    monkeypatch.setenv("VLLM_MEGAMOE_VERIFY_ADDRESSES", verify)
    envs.get.cache_clear()
    _, model = loaded
    layer = layer_of(model)
    forward(layer)
    layer.w13_weight.data = layer.w13_weight.data.clone()
    if verify == "0":
        forward(layer)
        return
    with pytest.raises(RuntimeError, match="w13 moved after the kernel was bound"):
        forward(layer)


def test_a_model_without_our_layers_is_reloaded_as_ever() -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    register()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2)).requires_grad_(False)
    layerwise.record_metadata_for_reloading(model)
    initialize(model)
    weight = model[0].weight
    weight.weight_loader(weight, torch.ones(2, 2))
    # as vLLM has it: a second beginning goes on from the first
    initialize(model)
    assert layerwise.get_layerwise_info(model[0]).load_numel == 4


# --- weights that are thrown away ---


class Engine:
    def __init__(self) -> None:
        self.targets: list[str] = ["draft"]

    def reset_weight_update_target(self) -> None:
        self.targets.append("model")


@pytest.fixture
def worker(loaded: Any) -> Any:
    """vLLM's GPU worker around a real model, its device calls replaced."""
    from vllm.v1.worker.gpu_worker import Worker

    register()
    _, model = loaded
    worker = object.__new__(Worker)
    worker.model_runner = SimpleNamespace(
        get_model=lambda: model, get_draft_model=lambda: None, model=model
    )
    worker.weight_transfer_engine = Engine()
    worker._weight_update_active = True
    worker._weight_update_is_draft = False
    return worker


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda w: w.sleep(level=2), "Sleep level 2 discarded the weights."),
        (lambda w: w.sleep(2), "Sleep level 2 discarded the weights."),
        (lambda w: w.discard(("weights",)), "The weights were discarded."),
        (lambda w: w.reset_weights(), "The weight checker reset the weights to zero."),
        (lambda w: w.sleep(), None),
        (lambda w: w.sleep(level=1), None),
        (lambda w: w.discard(("kv_cache",)), None),
    ],
    ids=["sleep 2", "sleep(2)", "weights", "reset", "sleep", "sleep 1", "kv_cache"],
)
def test_discarded_weights_do_not_serve(
    worker: Any, call: Any, why: str | None
) -> None:
    model = worker.get_model()
    try:
        call(worker)
    except (RuntimeError, AttributeError, AssertionError):
        # no accelerator here; what matters came before
        assert "reset" not in str(why)
    if why is None:
        assert why_incomplete(model) is None
        forward(layer_of(model))
        return
    prefix = layer_of(model).layer_name
    assert why_incomplete(model) == f"{prefix}: {why} {BROKEN}"
    with pytest.raises(RuntimeError, match=why):
        forward(layer_of(model))


def test_the_cpu_worker_ignores_sleep_and_marks_nothing() -> None:
    """It overrides the methods, so it never comes past the guard."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("sleep", "discard"):
        assert getattr(CPUWorker, name) is not getattr(Worker, name)
    assert CPUWorker.reset_weights is Worker.reset_weights


def test_a_full_update_makes_discarded_weights_serve_again(loaded: Any) -> None:
    config, model = loaded
    discard(model, "Gone.")
    initialize(model)
    model.load_weights(model_tensors("modelopt", seed=7).items())
    finalize(model, config)
    assert why_incomplete(model) is None


def test_a_session_is_ended_once(worker: Any) -> None:
    end_update_session(worker)
    assert not worker._weight_update_active
    end_update_session(worker)
    assert worker.weight_transfer_engine.targets == ["draft", "model"]


def test_guards_are_installed_once() -> None:
    from vllm.model_executor.model_loader.reload import inplace, layerwise
    from vllm.v1.worker.gpu_worker import Worker

    register()
    before = (
        layerwise.initialize_layerwise_reload,
        layerwise.finalize_layerwise_processing,
        Worker.sleep,
    )
    assert inplace.initialize_layerwise_reload is before[0]
    register()
    assert before == (
        layerwise.initialize_layerwise_reload,
        layerwise.finalize_layerwise_processing,
        Worker.sleep,
    )
