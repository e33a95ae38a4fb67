# SPDX-License-Identifier: Apache-2.0
"""What a kernel is asked (`Problem`), what it answers (`Support`), what it reads.

Kernels never own weights. One is bound once to the layer's tensors, which keep their
addresses for life, and is then called with tokens and routing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..formats import WeightFormat
from ..layouts import Layout

#: vLLM's names of the one activation that kernels know: silu(gate) * up.
ACTIVATIONS = ("silu", "swiglu")


class KernelUnavailableError(RuntimeError):
    """No kernel, or not the one asked for, can run the problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One MoE layer on one rank, as far as a kernel choice depends on it."""

    format: WeightFormat
    mode: str
    """Activation mode, one of the format's."""
    num_experts: int
    """Experts on this rank."""
    hidden: int
    intermediate: int
    """Per expert, after tensor parallelism."""
    top_k: int
    activation: str = "silu"
    swiglu_limit: float | None = None
    device: str = "cpu"
    capability: tuple[int, int] | None = None
    """CUDA compute capability, None on CPU."""
    graphs: bool = False
    """Whether the forward is captured into CUDA graphs."""

    @property
    def arch(self) -> str:
        """`cpu`, or e.g. `SM90`."""
        if self.capability is None:
            return self.device
        return f"SM{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True, slots=True)
class Support:
    """A kernel's answer: yes, or every reason why not."""

    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    @classmethod
    def unless(cls, *conditions: tuple[bool, str]) -> "Support":
        """Collect the reason of each condition that does not hold."""
        return cls(tuple(reason for holds, reason in conditions if not holds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors:
    """Every tensor a kernel reads, each at its address for life.

    E local experts, H hidden, I intermediate; values and block scales in the byte
    order of the kernel's layout.
    """

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    gate_alpha: Tensor | None = None
    """fp32 [E]: global weight scale of w1."""
    up_alpha: Tensor | None = None
    """fp32 [E]: global weight scale of w3; need not equal `gate_alpha`."""
    w2_alpha: Tensor | None = None
    """fp32 [E]: global weight scale of w2, without the activation scale."""
    l2_act_scale: Tensor | None = None
    """fp32 [1]: L2 activation scale of the layer; None means a unit scale."""

    def named(self) -> dict[str, Tensor]:
        """The tensors that are there, by field name."""
        fields = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        return {name: tensor for name, tensor in fields if tensor is not None}


#: (x bf16 [T, H], top-k weights fp32 [T, K], local expert slots int [T, K], -1 for
#: none) -> bf16 [T, H], this rank's share of the routed output.
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class Kernel(Protocol):
    """An adapter to one kernel family."""

    @property
    def name(self) -> str: ...

    @property
    def layout(self) -> Layout: ...

    def support(self, problem: Problem) -> Support:
        """Whether the kernel can run the problem here; touches no device memory."""
        ...

    def bind(self, problem: Problem, tensors: Tensors) -> Run:
        """Take the kernel's views of the tensors, once."""
        ...


def probe_device() -> tuple[str, tuple[int, int] | None]:
    """(device type, CUDA capability) of this process's accelerator."""
    if torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_capability()
    return "cpu", None
