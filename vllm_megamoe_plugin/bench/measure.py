# SPDX-License-Identifier: Apache-2.0
"""Time of a case beside a plain copy of as many bytes, and the memory it allocates.

Case and copy take turns, so that a drift of the machine meets both, and the ratio is
the median over the turns. Imports torch only.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Action = Callable[[], object]
#: Untimed runs: plans are traced and kernels compiled, then copies captured, then
#: replayed.
WARM_UPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One case on one device. None where it was not measured; `note` says why."""

    case: str
    device: str
    bytes: int = 0
    """What the case writes."""
    seconds: float | None = None
    """Median."""
    seconds_min: float | None = None
    seconds_max: float | None = None
    ratio_to_copy: float | None = None
    """Median of time over that of a plain copy of as many bytes, turn by turn."""
    extra_bytes: int | None = None
    """Memory allocated besides the incoming bytes: on CPU every byte ever allocated, on
    CUDA the peak."""
    moved: int | None = None
    """Tensors read by the kernel whose address changed."""
    calls: int | None = None
    us_per_tensor: float | None = None
    memory: dict[str, float] | None = None
    """Of repeated updates: bytes after the first and the last cycle, and the slope."""
    note: str = ""


@dataclass(kw_only=True, slots=True)
class Samples:
    """Turns of one case."""

    case: str
    nbytes: int
    calls: int | None = None
    seconds: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    extra_bytes: int | None = None
    moved: int | None = None
    memory: dict[str, float] | None = None
    note: str = ""

    def row(self, device: torch.device) -> Row:
        """The medians."""
        pairs = zip(self.seconds, self.copies, strict=True)
        median = statistics.median(self.seconds)
        return Row(
            case=self.case,
            device=device.type,
            bytes=self.nbytes,
            seconds=median,
            seconds_min=min(self.seconds),
            seconds_max=max(self.seconds),
            ratio_to_copy=statistics.median(one / copy for one, copy in pairs),
            extra_bytes=self.extra_bytes,
            moved=self.moved,
            calls=self.calls,
            us_per_tensor=None if self.calls is None else median / self.calls * 1e6,
            memory=self.memory,
            note=self.note,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is timed."""

    name: str
    nbytes: int
    run: Action
    prepare: Action = lambda: None
    """Before each run, not timed."""
    calls: int | None = None


class PlainCopy:
    """The baseline: one contiguous copy on the device."""

    def __init__(self, source: Tensor) -> None:
        """Copies out of `source`, flat uint8, into memory of its own."""
        self._source = source
        self._target = torch.empty_like(source)

    def __call__(self, nbytes: int) -> None:
        self._target[:nbytes].copy_(self._source[:nbytes])


def measure(
    cases: Sequence[Case],
    copy: PlainCopy,
    addresses: Callable[[], Mapping[str, int]],
    device: torch.device,
    repeats: int,
) -> list[Row]:
    """A row per case: all cases once, each after its copy, then again, `repeats` times.

    Args:
        addresses: of the tensors that must not move.
    """
    found = [Samples(case=c.name, nbytes=c.nbytes, calls=c.calls) for c in cases]
    for case, samples in zip(cases, found, strict=True):
        for _ in range(WARM_UPS):
            case.prepare()
            case.run()
        before = addresses()
        case.prepare()
        samples.extra_bytes = allocated(case.run, device)
        after = addresses()
        samples.moved = sum(after[name] != address for name, address in before.items())
    for _ in range(repeats):
        for case, samples in zip(cases, found, strict=True):
            nbytes = case.nbytes
            samples.copies.append(seconds(lambda n=nbytes: copy(n), device))
            case.prepare()
            samples.seconds.append(seconds(case.run, device))
    return [samples.row(device) for samples in found]


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds(action: Action, device: torch.device) -> float:
    """Wall time until everything that `action` starts is done."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start


def allocated(action: Action, device: torch.device) -> int:
    """Bytes of device memory that `action` takes; see `Row.extra_bytes`."""
    if device.type == "cpu":
        with Allocations() as counted:
            action()
        return counted.total
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class Allocations(TorchDispatchMode):
    """Sums the sizes of all storages that operations create."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = set(_storages([args, kwargs or {}]))
        out = func(*args, **(kwargs or {}))
        new = {key: size for key, size in _storages([out]).items() if key not in given}
        self.total += sum(new.values())
        return out


def _storages(values: Iterable[Any]) -> dict[int, int]:
    """Size in bytes of each storage, by identity, of tensors and storages in values."""
    found: dict[int, int] = {}
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta:
                storage = value.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        elif isinstance(value, torch.UntypedStorage):
            found[value._cdata] = value.nbytes()
        elif isinstance(value, torch.TypedStorage):
            found |= _storages([value._untyped_storage])
        elif isinstance(value, dict):
            found |= _storages(value.values())
        elif isinstance(value, list | tuple):
            found |= _storages(value)
    return found


def to_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The report as one object."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": [asdict(row) for row in rows],
    }


def line(row: Row) -> str:
    """A row in short, for those who wait."""
    if row.seconds is None:
        return f"{row.case}: {row.note}"
    ratio = "" if row.ratio_to_copy is None else f", {row.ratio_to_copy:.2f} x copy"
    return f"{row.case}: {row.seconds * 1e3:.3f} ms{ratio}"


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table people read."""
    headings = ("case", "MB", "ms", "min", "max", "x copy", "extra bytes", "moved")
    table = Table(*headings, "µs/tensor")
    for row in rows:
        times = (row.seconds, row.seconds_min, row.seconds_max)
        table.add_row(
            row.case,
            f"{row.bytes / 1e6:.1f}",
            *("" if t is None else f"{t * 1e3:.3f}" for t in times),
            *(
                "" if value is None else form.format(value)
                for value, form in (
                    (row.ratio_to_copy, "{:.2f}"),
                    (row.extra_bytes, "{:,}"),
                    (row.moved, "{}"),
                    (row.us_per_tensor, "{:.2f}"),
                )
            ),
        )
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.case}: {row.note}", markup=False, soft_wrap=True)
