# SPDX-License-Identifier: Apache-2.0
"""The copies of a bucket as one CUDA graph per buffer they come out of.

A buffer of an update is reused at its address and parameters never move, so launching
each copy anew says nothing new, and on a fast GPU takes longer than the copies do. The
first time a buffer comes its copies are run as they are, the second time they are
captured, from then on one launch replays them. On CPU they are always run as they are.
Imports torch only.
"""

import torch
from torch import Tensor

from .strided import Copy, Gather, run_copies

#: Buffers whose graphs a bucket keeps; a sender alternates between few.
MAX_GRAPHS = 4
#: Streams that copies are captured on side by side, so that small ones overlap.
_LANES = 4


class Replay:
    """Copies out of one buffer or a few.

    The parameters they write must outlive it at their addresses.
    """

    def __init__(
        self, copies: list[Copy | Gather], lanes: list["torch.cuda.Stream"]
    ) -> None:
        """Captures nothing yet.

        Args:
            copies: independent of each other.
            lanes: the streams of all replays of a plan, filled by the first that
                captures: torch has few streams and hands out one twice.
        """
        self.copies = copies
        self._lanes = lanes
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        """By address of the buffer; None for one that came once."""

    def run(self, buffer: Tensor) -> None:
        """Copy out of a flat uint8 buffer on the device of the parameters.

        Raises:
            RuntimeError: the copies cannot be captured.
        """
        if not (buffer.is_cuda and self.copies):
            run_copies(self.copies, buffer)
            return
        address = buffer.data_ptr()
        if address not in self._graphs:
            run_copies(self.copies, buffer)
            if len(self._graphs) == MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[address] = None
            return
        graph = self._graphs[address]
        if graph is None:
            graph = self._graphs[address] = self._capture(buffer)
        graph.replay()

    def _capture(self, buffer: Tensor) -> "torch.cuda.CUDAGraph":
        """The copies out of this address; runs none of them."""
        graph = torch.cuda.CUDAGraph()
        # vLLM captures in inference mode, after which the generator state that every
        # capture writes can be written in that mode only
        with torch.inference_mode(), torch.cuda.device(buffer.device):
            if not self._lanes:
                self._lanes += (torch.cuda.Stream() for _ in range(_LANES))
            first, *others = self._lanes[: len(self.copies)]
            with torch.cuda.stream(first):
                # other threads may go on using the device
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for lane in others:
                        lane.wait_stream(first)
                    for n, lane in enumerate((first, *others)):
                        with torch.cuda.stream(lane):
                            # largest first: every lane gets large and small ones
                            run_copies(self.copies[n :: 1 + len(others)], buffer)
                    for lane in others:
                        first.wait_stream(lane)
                finally:
                    graph.capture_end()
        return graph
