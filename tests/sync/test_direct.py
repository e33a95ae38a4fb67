# SPDX-License-Identifier: Apache-2.0
"""An update equals a cold start, moves nothing, and a broken one does not serve."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_megamoe_plugin.sync.digest import compare, digest_all, registered_tensors
from vllm_megamoe_plugin.sync.direct import DirectUpdate, expert_layers, run_or_abort
from vllm_megamoe_plugin.sync.manifest import BROKEN, REFUSED, Manifest, ManifestError

from ..vllm_layer import TOP_K, E, H, build, checkpoint, vllm_process

LAYERS = [f"model.layers.{i}.mlp.experts" for i in range(2)]
CONFIG = SimpleNamespace(
    dtype=torch.bfloat16, quantization=None, word_embeddings_untied_by_checkpoint=False
)


class Model(nn.Module):
    """Two MoE layers and a linear layer, which vLLM packs on CPU."""

    def __init__(self) -> None:
        super().__init__()
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.linear import ReplicatedLinear

        # several models of the same names live in this process
        config = get_current_vllm_config()
        config.compilation_config.static_forward_context.clear()

        self.moe = nn.ModuleList(build(config, prefix) for prefix in LAYERS)
        self.dense = ReplicatedLinear(H, H, bias=True, params_dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(H, bias=False, dtype=torch.bfloat16)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            layer, _, rest = name.partition(".experts.")
            if rest:
                runner = self.moe[LAYERS.index(f"{layer}.experts")]
                list(runner.load_weights([(rest, tensor)]))
            else:
                from vllm.model_executor.model_loader.weight_utils import (
                    default_weight_loader,
                )

                param = self.get_parameter(name)
                getattr(param, "weight_loader", default_weight_loader)(param, tensor)


def weights(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    found = {
        "dense.weight": torch.randn(H, H, generator=g).bfloat16(),
        "dense.bias": torch.randn(H, generator=g).bfloat16(),
        "norm.weight": torch.randn(H, generator=g).bfloat16(),
    }
    for i, prefix in enumerate(LAYERS):
        for name, tensor in checkpoint("modelopt", seed * 10 + i).items():
            found[f"{prefix}.{name}"] = tensor
    return found


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory):
    with vllm_process(tmp_path_factory.mktemp("model"), "modelopt") as config:
        yield config


def cold(seed: int) -> Model:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = Model()
    record_metadata_for_reloading(model)
    model.load_weights(weights(seed).items())
    process_weights_after_loading(model, CONFIG, torch.device("cpu"))
    return model


def snapshot(model: Model) -> dict[str, Any]:
    from vllm_megamoe_plugin.sync.worker_extension import live_tensors, packed_weights

    packed = digest_all(packed_weights(model), "packed")
    for entry in packed.values():
        entry["address"] = None
    return digest_all(live_tensors(model), "live") | packed


def refusing(model: Model) -> list[str]:
    """Layers that refuse to serve."""
    found = []
    for layer in expert_layers(model):
        try:
            layer.experts.ledger.check_ready()
        except RuntimeError:
            found.append(layer.prefix)
    return found


def serve(model: Model) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(5, H, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=g)[:TOP_K] for _ in range(5)])
    share = torch.full((5, TOP_K), 0.5)
    return [m.experts.forward(x, share, ids.int()) for m in expert_layers(model)]


def open_update(model: Model, new: dict[str, Tensor], **options: Any) -> DirectUpdate:
    expected = {s.name: s for s in Manifest.of(weights(0).items()).tensors}
    return DirectUpdate(model, CONFIG, Manifest.of(new.items(), **options), expected)


def apply(model: Model, new: dict[str, Tensor], **options: Any) -> None:
    update = open_update(model, new, **options)
    update.load(new.items())
    update.finish()


@pytest.mark.parametrize("split", [1, 7, 1000])
def test_any_order_and_split_equals_a_cold_start(split: int) -> None:
    model, new = cold(1), weights(2)
    before = snapshot(model)
    names = list(new)
    random.Random(split).shuffle(names)
    update = open_update(model, new)
    for start in range(0, len(names), split):
        chunk = [(name, new[name].clone()) for name in names[start : start + split]]
        update.load(chunk)
        for _, buffer in chunk:  # the sender reuses its bucket
            buffer.view(-1).view(torch.uint8).fill_(0x7F)
    update.finish()
    after = snapshot(model)
    assert compare(before, after).moved == ()
    reference = cold(2)
    difference = compare(snapshot(reference), after)
    assert (difference.changed, difference.missing, difference.added) == ((), (), ())
    assert all(map(torch.equal, serve(model), serve(reference)))


def test_there_and_back_restores_every_byte() -> None:
    model = cold(1)
    before, served = snapshot(model), serve(model)
    apply(model, weights(2))
    assert len(compare(before, snapshot(model)).changed) >= 15
    apply(model, weights(1))
    assert compare(before, snapshot(model)).identical
    assert all(map(torch.equal, served, serve(model)))


def test_a_refused_update_touches_nothing() -> None:
    model = cold(1)
    before, served = snapshot(model), serve(model)
    new = weights(2)
    del new["norm.weight"]
    with pytest.raises(ManifestError, match=r"1 missing: norm\.weight") as error:
        open_update(model, new)
    assert REFUSED in str(error.value)
    assert compare(before, snapshot(model)).identical
    assert all(map(torch.equal, served, serve(model)))


def test_half_an_update_does_not_serve_and_a_full_one_repairs_it() -> None:
    model, new = cold(1), weights(2)
    before = snapshot(model)
    update = open_update(model, new)

    def half() -> None:
        update.load(list(new.items())[len(new) // 2 :])
        raise ConnectionError("The trainer is gone.")

    message = rf"after \d+ of {len(new)} tensors: The trainer is gone\. {BROKEN}"
    with pytest.raises(RuntimeError, match=message):
        run_or_abort(update, half)
    with pytest.raises(RuntimeError, match="the experts are incomplete"):
        serve(model)
    assert not any(t.is_meta for t in registered_tensors(model).values())
    apply(model, weights(1))
    assert compare(before, snapshot(model)).identical
    serve(model)


def test_opening_alone_stops_serving() -> None:
    model = cold(1)
    update = open_update(model, weights(2))
    assert refusing(model) == LAYERS
    update.abort()
    assert refusing(model) == LAYERS


def test_finishing_early_names_what_never_came() -> None:
    model, new = cold(1), weights(2)
    update = open_update(model, new)
    update.load(list(new.items())[:-1])
    with pytest.raises(RuntimeError, match=f"1 tensors never came: {list(new)[-1]}"):
        run_or_abort(update, update.finish)
    with pytest.raises(RuntimeError, match="incomplete"):
        serve(model)


def test_values_that_cannot_serve_are_refused_at_the_end() -> None:
    model, new = cold(1), weights(2)
    name = f"{LAYERS[1]}.3.down_proj.weight_scale"
    new[name] = new[name].clone()
    new[name].view(torch.uint8)[0, 0] = 0x7F
    update = open_update(model, new)
    update.load(new.items())
    with pytest.raises(RuntimeError, match=r"block scales are NaN .* expert 3: 1 of"):
        run_or_abort(update, update.finish)
    # the first layer was whole and good, and must not serve beside the second
    assert refusing(model) == LAYERS
    apply(model, weights(1))
    serve(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n, t: [(n, t), (n, t)], "came twice"),
        (lambda n, t: [("other.weight", t)], "is not in the manifest"),
        (lambda n, t: [(n, t.float())], "is float32.* its manifest says bfloat16"),
        (lambda n, t: [(n, t[:1])], r"is bfloat16\[1, 64\], its manifest says"),
    ],
)
def test_tensors_that_break_the_manifest(change: Any, message: str) -> None:
    model, new = cold(1), weights(2)
    update = open_update(model, new)
    with pytest.raises(ValueError, match=message):
        update.load(change("dense.weight", new["dense.weight"]))
    update.abort()


def part(seed: int, layer: str) -> dict[str, Tensor]:
    return {n: t for n, t in weights(seed).items() if n.startswith(layer)}


def test_a_partial_update_changes_its_layers_only() -> None:
    model = cold(1)
    before = snapshot(model)
    apply(model, part(2, LAYERS[1]), partial=True)
    changed = compare(before, snapshot(model)).changed
    assert changed
    assert all(".1." in name for name in changed)
    first, second = serve(model)
    assert torch.equal(first, serve(cold(1))[0])
    assert torch.equal(second, serve(cold(2))[1])


def test_a_partial_update_cannot_hide_a_broken_layer() -> None:
    model = cold(1)
    open_update(model, part(2, LAYERS[0]), partial=True).abort()
    with pytest.raises(ManifestError, match=rf"{LAYERS[0]} is incomplete .* full"):
        open_update(model, part(2, LAYERS[1]), partial=True)
    apply(model, part(1, LAYERS[0]), partial=True)
    serve(model)


def engine(model: str, download_dir: str | None = None) -> Any:
    from vllm_megamoe_plugin.sync.transfer_engine import DirectEngine

    found = DirectEngine.__new__(DirectEngine)
    found.model_config = SimpleNamespace(model=model, revision=None)
    load_config = SimpleNamespace(download_dir=download_dir)
    found.vllm_config = SimpleNamespace(load_config=load_config)
    return found


def test_the_engine_finds_the_checkpoint_by_folder_and_by_name(tmp_path) -> None:
    repo = tmp_path / "models--org--tiny"
    folder = repo / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    assert list(engine(str(folder))._checkpoint_tensors()) == ["w"]
    assert list(engine("org/tiny", str(tmp_path))._checkpoint_tensors()) == ["w"]
    for absent in ("org/other", "/no/such/folder"):
        with pytest.raises(ManifestError, match=f"{absent} is no safetensors"):
            engine(absent, str(tmp_path))._checkpoint_tensors()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ManifestError, match="holds no safetensors files"):
        engine(str(folder))._checkpoint_tensors()


def test_an_update_before_init_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"init_weight_transfer_engine first\."):
        engine("m").update_weights({"manifest": {}, "bucket_bytes": 1})
