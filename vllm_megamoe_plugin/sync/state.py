# SPDX-License-Identifier: Apache-2.0
"""Whether a model may serve, and what becomes of one whose reload was left half way."""

from torch import nn

from ..ledger import summarize
from ..reload import abort_layerwise, layerwise_progress
from .direct import expert_layers
from .manifest import BROKEN


def why_incomplete(model: nn.Module) -> str | None:
    """What keeps a model from serving, None when nothing does."""
    waiting, done = layerwise_progress(model)
    if waiting:
        return (
            f"A weight update is under way: {len(done)} modules have their new "
            f"weights, {len(waiting)} wait for theirs ({summarize(waiting)}). Finish "
            "it, or call megamoe_abort_reload if its sender is gone."
        )
    try:
        for layer in expert_layers(model):
            layer.experts.ledger.check_ready()
            layer.experts.check_addresses(layer.module)
    except RuntimeError as e:
        return str(e)
    return None


def abort_reload(model: nn.Module) -> tuple[list[str], list[str]]:
    """Put the old tensors of every module that a layerwise reload left back.

    Returns:
        names of the modules that have their old weights again, and of those that had
        finished and keep the new ones. If there are any of these, the experts refuse
        to serve until a full update.
    """
    waiting, done = layerwise_progress(model)
    abort_layerwise(model.modules())
    if done:
        discard(
            model,
            f"A layerwise reload was given up after {len(done)} modules had their new "
            f"weights ({summarize(done)}); {len(waiting)} have their old ones.",
        )
    return waiting, done


def discard(model: nn.Module, why: str) -> None:
    """Make the experts refuse to serve until a full update."""
    for layer in expert_layers(model):
        layer.experts.ledger.begin_update()
        layer.experts.ledger.failure = f"{why} {BROKEN}"


def check_in_place(model: nn.Module) -> None:
    """Verify that no tensor a kernel reads has moved.

    Raises:
        RuntimeError: naming the layer and the tensors.
    """
    for layer in expert_layers(model):
        layer.experts.check_addresses(layer.module)
