# SPDX-License-Identifier: Apache-2.0
"""What the portable kernels can run, and binding them. Imports without Triton."""

from importlib.util import find_spec

from ...formats import BF16, NVFP4
from ...layouts import PORTABLE
from ..base import ACTIVATIONS, Problem, Run, Support, Tensors

_FORMATS = (NVFP4, BF16)
_SIZE_MULTIPLE = 16


class PortableKernel:
    """Triton on the GPUs for which no mega kernel exists."""

    name = "portable"
    layout = PORTABLE

    def support(self, problem: Problem) -> Support:
        sizes = (problem.hidden, problem.intermediate)
        modes = " or ".join(mode for fmt in _FORMATS for mode in fmt.modes)
        capability = problem.capability or (0, 0)
        return Support.unless(
            (
                (8, 0) <= capability <= (9, 0),
                f"needs SM80 to SM90, found {problem.arch}",
            ),
            (find_spec("triton") is not None, "needs Triton (pip install triton)"),
            (
                problem.format in _FORMATS and problem.mode in problem.format.modes,
                f"runs {modes}, asked for {problem.format.name} in {problem.mode}",
            ),
            (
                problem.activation in ACTIVATIONS,
                f"knows the activation silu, got {problem.activation}",
            ),
            (
                all(n % _SIZE_MULTIPLE == 0 for n in sizes),
                f"needs sizes that are multiples of {_SIZE_MULTIPLE}, got {sizes}",
            ),
        )

    def bind(self, problem: Problem, tensors: Tensors) -> Run:
        from .launch import BoundPortable, warm_up

        run = BoundPortable(problem, tensors)
        warm_up(run)
        return run
