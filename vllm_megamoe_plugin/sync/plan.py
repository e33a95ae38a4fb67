# SPDX-License-Identifier: Apache-2.0
"""A compiled copy plan: the loaders are traced once, their copies are replayed.

What a loader does depends on names, shapes, strides and dtypes alone, so a load with
meta tensors tells every copy of a later one. Tensors that lie in one buffer are copied
together (`strided`). The ledger is marked as by the loaders, and tensors of which this
rank keeps nothing cost a look-up. Imports torch only.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ledger import Ledger
from ..loader import Placed, Placement, recording
from .replay import Replay
from .strided import (
    Copy,
    Gather,
    Piece,
    alignment_of,
    compile_copies,
    offset_of,
    run_copies,
)
from .wire import Bucket

Copies = list[Copy | Gather]
LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], Iterable[object] | None]
#: Incoming tensors are gathered up to this much before they are copied.
BATCH_BYTES = 64 << 20
BATCH_TENSORS = 4096
#: Buffers whose copies are remembered; each distinct set of tensors is one.
_MAX_BUFFERS = 4096
_PLAN = "_megamoe_copy_plan"


@dataclass(frozen=True, slots=True, eq=False)
class _Traced:
    """What the loaders do with one tensor."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    pieces: tuple[Placed, ...]
    """Empty when this rank keeps nothing of it."""
    marks: tuple[tuple[Ledger, str, int], ...]
    """What they fill."""
    whole: Tensor | None
    """Where the tensor goes as it is, if that is one contiguous place."""
    computed: bool
    """The model computes on it, so only its loaders can load it."""

    def fits(self, tensor: Tensor) -> bool:
        return (
            tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
        )


class CopyPlan:
    """The copies by which a model's expert tensors are loaded."""

    def __init__(
        self, load_weights: LoadWeights, parameters: Callable[[], Iterable[Tensor]]
    ) -> None:
        """Nothing is traced yet.

        Args:
            load_weights: the model's; its loaders must be those of `loader`.
            parameters: the model's, to notice that one was replaced.
        """
        self._load_weights = load_weights
        self._parameters = parameters
        self._traced: dict[str, _Traced] = {}
        self._buffers: dict[tuple[object, ...], Copies] = {}
        self._generations: dict[Placement, int] = {}
        self._homes: dict[int, tuple[Tensor, int]] = {}
        self._buckets: dict[Bucket, BucketPlan] = {}
        self._lanes: list[torch.cuda.Stream] = []
        self._epoch = 0

    @property
    def stale(self) -> bool:
        """Whether an expert or a parameter moved since it was traced."""
        if any(p.generation != then for p, then in self._generations.items()):
            return True
        live = {id(p) for p in self._parameters()} if self._homes else set()
        return any(
            key not in live or home.data_ptr() != address
            for key, (home, address) in self._homes.items()
        )

    def refresh(self) -> None:
        """Forget a stale plan; to be called before an update."""
        if self.stale:
            self._epoch += 1
            for known in (self._traced, self._buffers, self._generations, self._homes):
                known.clear()
            for bucket in self._buckets.values():
                bucket.forget()

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors into the live parameters: any order, any split, any memory.

        Raises:
            ValueError: a tensor that its loader refuses.
            TypeError: likewise.
        """
        for _ in self.load_own(weights, own=None):
            pass

    def load_own(
        self, weights: Iterable[tuple[str, Tensor]], own: Container[str] | None
    ) -> Iterator[tuple[str, Tensor]]:
        """`load` the tensors named in `own` (None: all), hand on the others.

        A tensor is held back until `BATCH_BYTES` or `BATCH_TENSORS` have come together,
        or the end.
        """
        batch: dict[str, Tensor] = {}
        size = 0
        for name, tensor in weights:
            if own is not None and name not in own:
                yield name, tensor
                continue
            size += tensor.nbytes
            full = size > BATCH_BYTES or len(batch) == BATCH_TENSORS
            if batch and (full or name in batch):
                self._load(batch)
                batch, size = {}, tensor.nbytes
            batch[name] = tensor
        self._load(batch)

    @torch.no_grad()
    def _load(self, batch: Mapping[str, Tensor]) -> None:
        entries = self._traced_like(batch)
        shared: dict[int, list[tuple[_Traced, Tensor]]] = {}
        for entry, tensor in zip(entries, batch.values(), strict=True):
            if entry.pieces:
                key = tensor.untyped_storage()._cdata
                shared.setdefault(key, []).append((entry, tensor))
        alone: dict[tuple[torch.dtype, torch.dtype], tuple[list, list]] = {}
        for group in shared.values():
            device = group[0][0].pieces[0].param.device
            if len(group) > 1 and group[0][1].device == device:
                self._copy_buffer(group)
                continue
            for entry, tensor in group:
                if entry.whole is None:
                    self._copy_buffer([(entry, tensor.to(device))])
                    continue
                types = (entry.whole.dtype, tensor.dtype)
                stored, sources = alone.setdefault(types, ([], []))
                stored.append(entry.whole)
                sources.append(tensor)
        for stored, sources in alone.values():
            torch._foreach_copy_(stored, sources)
        for entry in entries:
            for ledger, tensor_name, slot in entry.marks:
                ledger.mark(tensor_name, slot, planned=False)
        computed = [
            pair
            for pair, entry in zip(batch.items(), entries, strict=True)
            if entry.computed
        ]
        if computed:
            _exhaust(self._load_weights(computed))

    def bucket(self, bucket: Bucket) -> "BucketPlan":
        """The compiled form of tensors in one buffer; kept for the next update."""
        known = self._buckets.get(bucket)
        if known is None:
            if len(self._buckets) >= _MAX_BUFFERS:
                self._buckets.clear()
            known = self._buckets[bucket] = BucketPlan(self, bucket)
        return known

    # --- tracing ---

    def _traced_like(self, tensors: Mapping[str, Tensor]) -> list[_Traced]:
        """What is known of each tensor, after tracing those of a new name or shape."""
        traced = self._traced
        new = {
            name: _blank(tensor)
            for name, tensor in tensors.items()
            if (known := traced.get(name)) is None or not known.fits(tensor)
        }
        if new:
            self._trace(new)
        return [traced[name] for name in tensors]

    def _trace(self, blanks: Mapping[str, Tensor]) -> None:
        """Record what the loaders do with tensors like these meta tensors."""
        names = {b.untyped_storage()._cdata: name for name, b in blanks.items()}
        pieces: dict[str, list[Placed]] = {name: [] for name in blanks}
        computed: set[str] = set()
        current = ""

        def feed() -> Iterator[tuple[str, Tensor]]:
            nonlocal current
            for name, blank in blanks.items():
                current = name
                yield name, blank

        def record(placed: Placed) -> None:
            # a view shares its base's storage; anything else was computed
            name = names.get(placed.plain.untyped_storage()._cdata)
            if name is None:
                computed.add(current)
            else:
                pieces[name].append(placed)

        with torch.inference_mode(False), torch.no_grad(), recording(record):
            _exhaust(self._load_weights(feed()))
        for name, blank in blanks.items():
            found = () if name in computed else tuple(pieces[name])
            for piece in found:
                placement = piece.loader.placement
                self._generations[placement] = placement.generation
                param = piece.param
                self._homes[id(param)] = (param, param.data_ptr())
            self._traced[name] = _Traced(
                dtype=blank.dtype,
                shape=blank.shape,
                stride=blank.stride(),
                pieces=found,
                marks=tuple(
                    (p.loader.ledger, p.loader.spec.name, p.slot) for p in found
                ),
                whole=_whole(blank, found),
                computed=name in computed,
            )

    # --- buffers ---

    def _copy_buffer(self, group: Sequence[tuple[_Traced, Tensor]]) -> None:
        """Copy tensors of one storage, in as few strided copies as they allow."""
        first = group[0][1]
        start, aligned = offset_of(first), alignment_of(first)
        places = tuple(offset_of(tensor) - start for _, tensor in group)
        key = (aligned, *(entry for entry, _ in group), *places)
        copies = self._buffers.get(key)
        if copies is None:
            if len(self._buffers) >= _MAX_BUFFERS:
                self._buffers.clear()
            entries = [entry for entry, _ in group]
            copies = compile_copies(_pieces(entries, places), aligned)
            self._buffers[key] = copies
        run_copies(copies, first)


class BucketPlan:
    """The copies and ledger marks of a bucket: no work per tensor when it comes again.

    For buckets of nothing but expert tensors whose names and layout recur.
    """

    def __init__(self, plan: CopyPlan, bucket: Bucket) -> None:
        self._plan = plan
        self._bucket = bucket
        self._compiled: tuple[int, int] | None = None
        self._computed: str | None = None
        self._replay = Replay([], [])
        self._marks: list[tuple[Ledger, str, slice]] = []

    def fits(self, buffer: Tensor) -> bool:
        """Whether `load` can take it: the model computes on none of the tensors.

        Raises:
            ValueError: the buffer is too small, or a tensor that its loader refuses.
            TypeError: likewise.
        """
        if buffer.numel() < self._bucket.nbytes or buffer.dtype is not torch.uint8:
            raise ValueError(
                f"The bucket has {self._bucket.nbytes} bytes, the buffer holds "
                f"{buffer.numel()} of {buffer.dtype}. Pass the flat uint8 buffer."
            )
        state = (self._plan._epoch, alignment_of(buffer))
        if self._compiled != state:
            self._compile(state[1])
            self._compiled = state
        return self._computed is None

    @torch.no_grad()
    def load(self, buffer: Tensor) -> None:
        """Copy every tensor out of a flat uint8 buffer on the parameters' device.

        Raises:
            ValueError: the buffer is too small, or a tensor that its loader refuses.
            TypeError: likewise, or the model computes on a tensor.
        """
        if not self.fits(buffer):
            raise TypeError(
                f"{self._computed}: the model computes on it while loading, so it "
                "cannot be copied out of a bucket. Use `CopyPlan.load`."
            )
        self._replay.run(buffer)
        for ledger, tensor, slots in self._marks:
            ledger.mark_all(tensor, slots)

    def forget(self) -> None:
        """Drop what was compiled and captured; the next buffer compiles anew."""
        self._compiled, self._replay = None, Replay([], [])

    def _compile(self, aligned: int) -> None:
        blanks = {
            spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            for spec in self._bucket.tensors
        }
        entries = self._plan._traced_like(blanks)
        both = zip(blanks, entries, strict=True)
        self._computed = next((name for name, e in both if e.computed), None)
        if self._computed is not None:
            return
        pieces = _pieces(entries, self._bucket.offsets)
        copies = compile_copies(pieces, aligned)
        self._replay = Replay(copies, self._plan._lanes)
        self._marks = list(_marks(entries))


def _marks(entries: Iterable[_Traced]) -> Iterator[tuple[Ledger, str, slice]]:
    """The ledger slots that tensors fill, in runs; one filled twice comes twice."""
    filled: dict[tuple[Ledger, str], list[int]] = defaultdict(list)
    for entry in entries:
        for ledger, tensor, slot in entry.marks:
            filled[ledger, tensor].append(slot)
    for (ledger, tensor), slots in filled.items():
        slots.sort()
        start = 0
        for end in range(1, len(slots) + 1):
            if end == len(slots) or slots[end] != slots[end - 1] + 1:
                yield ledger, tensor, slice(slots[start], slots[end - 1] + 1)
                start = end


def _pieces(entries: Sequence[_Traced], places: Sequence[int]) -> Iterator[Piece]:
    """The copies of tensors that begin at byte offsets `places` of a buffer."""
    for entry, place in zip(entries, places, strict=True):
        for placed in entry.pieces:
            yield Piece(placed.param, placed.stored, placed.plain, place)


def _blank(tensor: Tensor) -> Tensor:
    """A meta tensor of the same dtype, shape and strides, with a storage of its own."""
    shape, stride, meta = tensor.shape, tensor.stride(), torch.device("meta")
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=meta)


def _whole(blank: Tensor, pieces: Sequence[Placed]) -> Tensor | None:
    """The one contiguous place that takes all of the tensor, if there is one."""
    if len(pieces) != 1 or not blank.is_contiguous():
        return None
    stored, plain = pieces[0].stored, pieces[0].plain
    as_it_is = plain.is_contiguous() and plain.numel() == blank.numel()
    if not (as_it_is and stored.is_contiguous()):
        return None
    if plain.dtype is not blank.dtype:  # bytes that are taken over
        stored = stored.view(blank.dtype)
    return stored.view(blank.shape)


def _exhaust(loaded: Iterable[object] | None) -> None:
    """Run a `load_weights` that is a generator to its end."""
    for _ in loaded or ():
        pass


def plan_of(model: nn.Module) -> CopyPlan:
    """The plan of a live model, which lives as long as it does."""
    plan = model.__dict__.get(_PLAN)
    if plan is None:
        plan = CopyPlan(model.load_weights, model.parameters)  # type: ignore[arg-type]
        setattr(model, _PLAN, plan)
    return plan
