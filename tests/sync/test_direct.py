# SPDX-License-Identifier: Apache-2.0
"""An update equals a cold start, moves nothing, and a broken one does not serve."""

import random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_megamoe_plugin.sync.digest import compare, digest_all, registered_tensors
from vllm_megamoe_plugin.sync.direct import (
    DirectUpdate,
    expert_layers,
    load_checkpoint,
    run_or_abort,
)
from vllm_megamoe_plugin.sync.manifest import BROKEN, REFUSED, Manifest, ManifestError
from vllm_megamoe_plugin.sync.wire import cut_buckets

from ..vllm_layer import TOP_K, E, H, build, checkpoint, vllm_process

LAYERS = [f"model.layers.{i}.mlp.experts" for i in range(2)]


def model_config() -> Any:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config().model_config


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

    def load_weights(self, weights: Any) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            layer, _, rest = name.partition(".experts.")
            if rest:
                # a draft has the last layers only
                runner = self.moe[LAYERS.index(f"{layer}.experts") - len(LAYERS)]
                list(runner.load_weights([(rest, tensor)]))
            else:
                from vllm.model_executor.model_loader.weight_utils import (
                    default_weight_loader,
                )

                param = self.get_parameter(name)
                getattr(param, "weight_loader", default_weight_loader)(param, tensor)
                loaded.add(name)
        return loaded


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


def cold(source: int | dict[str, Tensor]) -> Model:
    """A model as it starts, from the weights of a seed or from given ones."""
    model = Model()
    warm(model, weights(source) if isinstance(source, int) else source)
    return model


def warm(model: Model, tensors: dict[str, Tensor]) -> None:
    """Load a model for the first time."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    record_metadata_for_reloading(model)
    model.load_weights(tensors.items())
    process_weights_after_loading(model, model_config(), torch.device("cpu"))


def snapshot(model: Model) -> dict[str, Any]:
    from vllm_megamoe_plugin.sync.live import live_tensors, packed_weights

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
    return DirectUpdate(
        model, model_config(), Manifest.of(new.items(), **options), expected
    )


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


@pytest.mark.parametrize("size", [1, 500, 1 << 20])
def test_buckets_equal_a_cold_start_each_time(size: int) -> None:
    """Experts and others in one bucket, in an order that mixes them."""
    model = cold(1)
    for seed in (2, 3, 2):
        new = list(weights(seed).items())
        random.Random(1).shuffle(new)
        update = open_update(model, dict(new))
        for bucket in cut_buckets(update.manifest, size):
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            for (_, place), spec in zip(
                bucket.views(buffer), bucket.tensors, strict=True
            ):
                place.copy_(dict(new)[spec.name])
            update.load_bucket(bucket, buffer)
            buffer.fill_(0x7F)  # the next bucket takes its place
        update.finish()
        reference = cold(seed)
        difference = compare(snapshot(reference), snapshot(model))
        assert (difference.changed, difference.missing) == ((), ())
        assert all(map(torch.equal, serve(model), serve(reference)))


def test_a_bucket_with_an_unknown_or_a_second_tensor_is_refused() -> None:
    model, new = cold(1), weights(2)
    update = open_update(model, new)
    first, *_ = cut_buckets(update.manifest, 1 << 20)
    buffer = torch.zeros(first.nbytes, dtype=torch.uint8)
    update.load_bucket(first, buffer)
    with pytest.raises(ValueError, match="came twice"):
        update.load_bucket(first, buffer)
    other, *_ = cut_buckets(Manifest.of([("extra", torch.ones(3))]), 1 << 20)
    with pytest.raises(ValueError, match="extra is not in the manifest"):
        update.load_bucket(other, buffer)


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
    with pytest.raises(RuntimeError, match="experts are incomplete"):
        serve(model)
    assert not any(t.is_meta for t in registered_tensors(model).values())
    apply(model, weights(1))
    assert compare(before, snapshot(model)).identical
    serve(model)


def test_the_first_tensor_stops_serving() -> None:
    model, new = cold(1), weights(2)
    before = snapshot(model)
    update = open_update(model, new)
    assert refusing(model) == []
    update.abort()
    assert compare(before, snapshot(model)).identical
    update = open_update(model, new)
    update.load(list(new.items())[:1])
    assert refusing(model) == LAYERS
    update.abort()
    assert refusing(model) == LAYERS


def test_a_layerwise_reload_left_half_way_is_replaced() -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    model = cold(1)
    before = snapshot(model)
    initialize_layerwise_reload(model)
    model.load_weights(list(weights(3).items())[:-20])
    with pytest.raises(ManifestError, match="a layerwise reload has not finished"):
        open_update(model, part(2, LAYERS[0]), partial=True)
    apply(model, weights(2))
    after = snapshot(model)
    assert compare(before, after).moved == ()
    difference = compare(snapshot(cold(2)), after)
    assert (difference.changed, difference.missing, difference.added) == ((), (), ())


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


def part(seed: int, *prefixes: str) -> dict[str, Tensor]:
    return {n: t for n, t in weights(seed).items() if n.startswith(prefixes)}


def mixed(new: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model started from weights 1 holds after a partial update."""
    return weights(1) | new


PARTS = {
    "a layer": (f"{LAYERS[1]}.",),
    "two experts of two layers": (f"{LAYERS[0]}.2.", f"{LAYERS[1]}.0."),
    "a module": ("dense.",),
    "a module and an expert": ("norm.", f"{LAYERS[0]}.3."),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_partial_update_changes_its_units_only(name: str) -> None:
    model, new = cold(1), part(2, *PARTS[name])
    before = snapshot(model)
    apply(model, new, partial=True)
    after = snapshot(model)
    assert compare(before, after).moved == ()
    reference = cold(mixed(new))
    difference = compare(snapshot(reference), after)
    assert (difference.changed, difference.missing, difference.added) == ((), (), ())
    assert all(map(torch.equal, serve(model), serve(reference)))
    assert compare(before, after).changed


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_the_l2_scale_of_a_partial_update_is_the_maximum_of_old_and_new(factor) -> None:
    model, (layer, _) = cold(1), LAYERS
    suffix = "down_proj.input_scale"
    largest = max((weights(1)[f"{layer}.{e}.{suffix}"], e) for e in range(E))
    other = (largest[1] + 1) % E
    new = part(1, f"{layer}.{other}.")
    new[f"{layer}.{other}.{suffix}"] = largest[0] * factor
    apply(model, new, partial=True)
    (scale,) = expert_layers(model)[0].module.l2_act_scale.tolist()
    assert scale == (largest[0] * max(1.0, factor)).item()


def test_a_partial_update_notices_what_it_did_not_declare_and_what_it_misses() -> None:
    model, new = cold(1), part(2, f"{LAYERS[0]}.2.")
    name = f"{LAYERS[0]}.2.up_proj.weight"
    update = open_update(model, new, partial=True)
    update.load(new.items())
    undeclared = f"{LAYERS[0]}.1.up_proj.weight"
    model.load_weights([(undeclared, weights(2)[undeclared])])
    with pytest.raises(RuntimeError, match="more than once: w13_weight: expert 1 w3"):
        run_or_abort(update, update.finish)
    apply(model, weights(1))

    without = {n: t for n, t in new.items() if n != name}
    with pytest.raises(ManifestError, match=f"1 missing: {name}. A partial update"):
        open_update(model, without, partial=True)
    update = open_update(model, new, partial=True)
    update.load(without.items())
    update._waiting.clear()  # the ledger must see it too
    with pytest.raises(
        RuntimeError, match=r"1 expert tensors .* w13_weight: expert 2 w3"
    ):
        run_or_abort(update, update.finish)


def test_a_partial_update_cannot_hide_a_broken_layer() -> None:
    model = cold(1)
    broken = open_update(model, part(2, LAYERS[0]), partial=True)
    broken.load(part(2, f"{LAYERS[0]}.0.").items())
    broken.abort()
    message = rf"refused: {LAYERS[0]} is incomplete.* full update\. {REFUSED}"
    for units in (LAYERS[1], f"{LAYERS[0]}.0.", "dense."):
        with pytest.raises(ManifestError, match=message):
            open_update(model, part(2, units), partial=True)
    apply(model, part(1, LAYERS[0]), partial=True)
    serve(model)


@pytest.mark.parametrize("units", [("dense.", "norm."), ("dense.", *LAYERS)])
def test_only_a_full_update_repairs_what_broke_outside_the_experts(units) -> None:
    model = cold(1)
    before = snapshot(model)
    broken = open_update(model, part(2, *units), partial=True)
    broken.load(part(2, "dense.weight").items())
    broken.abort()
    assert refusing(model) == LAYERS
    with pytest.raises(ManifestError, match="is incomplete"):
        open_update(model, part(1, *LAYERS), partial=True)
    apply(model, weights(1))
    assert compare(before, snapshot(model)).identical


def test_a_bare_load_leaves_more_than_its_layer_in_question() -> None:
    model, name = cold(1), f"{LAYERS[0]}.1.up_proj.weight"
    model.load_weights([(name, weights(2)[name])])
    with pytest.raises(ManifestError, match=f"{LAYERS[0]} is incomplete"):
        open_update(model, part(1, LAYERS[0]), partial=True)


def corrupted(new: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    wrong = new[name].clone()
    wrong.view(-1).view(torch.uint8)[-1] ^= 1
    return new | {name: wrong}


def test_declared_digests_are_checked_before_a_tensor_is_written() -> None:
    model, new = cold(1), weights(2)
    before, names = snapshot(model), list(new)
    apply(model, new, digests=True)
    apply(model, weights(1), digests=True)
    assert compare(before, snapshot(model)).identical

    update = open_update(model, new, digests=True)
    wrong = corrupted(new, names[0])
    message = f"before it wrote anything: {names[0]} has SHA-256 .* {REFUSED}"
    with pytest.raises(RuntimeError, match=message):
        run_or_abort(update, lambda: update.load(wrong.items()))
    assert compare(before, snapshot(model)).identical
    assert refusing(model) == []

    update = open_update(model, new, digests=True)
    wrong = corrupted(new, names[7])
    message = f"after 7 of {len(new)} tensors: {names[7]} has SHA-256 .* {BROKEN}"
    with pytest.raises(RuntimeError, match=message):
        run_or_abort(update, lambda: update.load(wrong.items()))
    assert refusing(model) == LAYERS


class Draft(Model):
    """An MTP draft: it has a part of its target's checkpoint, and skips the rest."""

    def load_weights(self, weights: Any) -> set[str]:
        mine = (f"{LAYERS[1]}.", "norm.")
        return super().load_weights(w for w in weights if w[0].startswith(mine))


@pytest.mark.parametrize("partial", [False, True])
def test_a_draft_takes_what_it_knows_of_its_targets_checkpoint(partial: bool) -> None:
    draft = Draft()
    draft.moe = draft.moe[1:]
    del draft.dense
    assert [layer.prefix for layer in expert_layers(draft)] == [LAYERS[1]]
    warm(draft, weights(1))
    before = snapshot(draft)
    new = part(2, LAYERS[1], "norm.") if partial else weights(2)
    apply(draft, new, partial=partial)
    after = snapshot(draft)
    assert compare(before, after).moved == ()
    assert all(map(torch.equal, serve(draft), serve(cold(2))[1:]))
    assert torch.equal(draft.norm.weight, weights(2)["norm.weight"])
    with pytest.raises(ManifestError, match="cannot tell which module"):
        open_update(draft, part(2, LAYERS[0]), partial=True)


def test_a_checkpoint_directory_is_applied_in_place(tmp_path) -> None:
    model = cold(1)
    before = snapshot(model)
    save_file(weights(2), tmp_path / "model.safetensors")
    expected = {s.name: s for s in Manifest.of(weights(0).items()).tensors}
    loaded = load_checkpoint(model, model_config(), tmp_path, expected)
    after = snapshot(model)
    assert compare(before, after).moved == ()
    difference = compare(snapshot(cold(2)), after)
    assert (difference.changed, difference.missing, difference.added) == ((), (), ())
    assert loaded == set(dict(model.named_parameters()))

    save_file(part(1, LAYERS[0]), tmp_path / "model.safetensors")
    with pytest.raises(ManifestError, match="missing"):
        load_checkpoint(model, model_config(), tmp_path, expected)
    assert compare(after, snapshot(model)).identical
    loaded = load_checkpoint(model, model_config(), tmp_path, expected, partial=True)
    assert {name.split(".w")[0] for name in loaded} == {"moe.0.routed_experts"}
