# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's load balancer (EPLB) has put a layer's experts by now.

EPLB moves experts between ranks while the server runs. A reload has to write into the
placement of the moment, and while no move is in flight: the buffer of one holds old
weights, which would land on top of new ones.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


class Moves:
    """One layer's view of the balancer's state."""

    def __init__(self, state: Any, model_state: Any, layer: int) -> None:
        """Keep a view, no copy.

        Args:
            state: vLLM's `EplbState`.
            model_state: the `EplbModelState` in it of the layer's model.
            layer: index among the model's MoE layers.
        """
        self._state = state
        self._model_state = model_state
        self._layer = layer

    def current(self) -> list[int]:
        """Physical expert id -> logical id, as the router maps them now."""
        return self._model_state.physical_to_logical_map[self._layer].tolist()

    @property
    def in_flight(self) -> bool:
        """Whether moved weights wait in a buffer for a later step to put in place."""
        return any(m.rebalanced for m in self._state.model_states.values())

    def drain(self) -> None:
        """Give up moves in flight; what was in place stays. All ranks call this."""
        self._state.drain_async()


def watch(
    state: Any, model_state: Any, method_of: Callable[[nn.Module], Any | None]
) -> None:
    """Let our layers of a model that EPLB has taken on follow its moves.

    Args:
        method_of: our quantization method of a module, None for all others.
    """
    for index, layer in enumerate(model_state.model.moe_layers):
        for module in layer.modules():
            method = method_of(module)
            if method is not None:
                method.moves = Moves(state, model_state, index)
