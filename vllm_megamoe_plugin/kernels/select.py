# SPDX-License-Identifier: Apache-2.0
"""The kernels in order of preference, and the choice among them.

Auto takes the first that can run and says why the others cannot. A kernel asked for
by name runs or is an error; it never falls back.
"""

from dataclasses import dataclass

from ..layouts import PLAIN, Layout
from .base import Kernel, KernelUnavailableError, Problem, Run, Support, Tensors
from .portable.adapter import PortableKernel
from .reference import ReferenceKernel


@dataclass(frozen=True, slots=True)
class NotYet:
    """A kernel family this version has no adapter for, with its hardware needs."""

    name: str
    needs: str
    majors: tuple[int, ...]
    layout: Layout = PLAIN

    def support(self, problem: Problem) -> Support:
        major = problem.capability[0] if problem.capability else None
        return Support.unless(
            (major in self.majors, f"needs {self.needs}, found {problem.arch}"),
            (False, "this version has no adapter for it"),
        )

    def bind(self, problem: Problem, tensors: Tensors) -> Run:
        raise KernelUnavailableError(f"{self.name}: {self.support(problem).reasons}")


#: Fastest first.
KERNELS: tuple[Kernel, ...] = (
    NotYet("deep_gemm", "SM100/SM103", (10,)),
    NotYet("flashinfer_ep", "SM90, SM100/SM103 or SM120/SM121", (9, 10, 12)),
    NotYet("b12x", "SM120/SM121", (12,)),
    PortableKernel(),
    ReferenceKernel(),
)


@dataclass(frozen=True, slots=True)
class Selection:
    """The kernel to run, and every other kernel's reasons."""

    kernel: Kernel
    rejected: dict[str, tuple[str, ...]]

    def explain(self, problem: Problem) -> str:
        """One line: what runs, in which mode, and why the others do not."""
        others = "; ".join(f"{n}: {', '.join(r)}" for n, r in self.rejected.items())
        return (
            f"MegaMoE {problem.format.name}: using {self.kernel.name} "
            f"({problem.mode}, {problem.arch}). {others}."
        )


def probe(problem: Problem) -> dict[str, Support]:
    """Every kernel's answer, in order of preference."""
    return {kernel.name: kernel.support(problem) for kernel in KERNELS}


def select(problem: Problem, asked: str = "auto") -> Selection:
    """Choose the kernel for a problem.

    Args:
        asked: `auto`, or the name of the kernel that must run.

    Raises:
        KernelUnavailableError: with every reason.
    """
    answers = probe(problem)
    if asked != "auto" and not answers[asked]:
        raise KernelUnavailableError(
            f"VLLM_MEGAMOE_KERNEL={asked} cannot run {problem.format.name} "
            f"({problem.mode}) here: {', '.join(answers[asked].reasons)}. Unset it to "
            "let the plugin choose, or choose another kernel."
        )
    for kernel in KERNELS:
        if (asked == "auto" and answers[kernel.name]) or kernel.name == asked:
            rejected = {
                name: answer.reasons for name, answer in answers.items() if not answer
            }
            return Selection(kernel, rejected)
    reasons = "; ".join(f"{n}: {', '.join(a.reasons)}" for n, a in answers.items())
    raise KernelUnavailableError(
        f"no MegaMoE kernel can run {problem.format.name} ({problem.mode}) here: "
        f"{reasons}. Serve with vLLM's own --moe-backend auto."
    )
