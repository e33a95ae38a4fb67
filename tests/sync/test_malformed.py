# SPDX-License-Identifier: Apache-2.0
"""Every kind of malformed update, and the exact words that turn it away.

One row each, pushed by a trainer through the wire into the engine of a whole tiny
model. After a refused one the old weights serve and no byte has changed; after one
whose fault showed later nothing serves, and a full update restores every byte.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from vllm_megamoe_plugin.sync.direct import DirectUpdate, run_or_abort
from vllm_megamoe_plugin.sync.manifest import (
    BROKEN,
    REFUSED,
    Manifest,
    TensorSpec,
)

from ..vllm_layer import E, load_model, model_tensors, vllm_process
from .served_model import check_refusing, check_unharmed, digests, outputs
from .trainer import Trainer, engine_of, update_info

PREFIXES = [f"model.layers.{i}.mlp.experts" for i in range(2)]
EXPERT = f"{PREFIXES[1]}.3.down_proj"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
FIRST = "model.embed_tokens.weight"


@dataclass
class Update:
    """An update on its way to be malformed."""

    tensors: dict[str, Tensor]
    declared: list[TensorSpec] = field(default_factory=list)
    partial: bool = False
    sha256: list[Any] | None = None
    told: Callable[[dict[str, Any]], Any] = lambda info: info
    """Changes what the engine is told."""
    sent: Callable[[list[tuple[str, Tensor]]], Any] = lambda weights: weights
    """Changes what is streamed."""

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Declare a tensor otherwise than it is, at its place or at the end."""
        new = TensorSpec(name, shape, dtype)
        names = [spec.name for spec in self.declared]
        if name in names:
            self.declared[names.index(name)] = new
        else:
            self.declared.append(new)

    def manifest(self) -> Manifest:
        digests = None if self.sha256 is None else tuple(self.sha256)
        return Manifest(tuple(self.declared), self.partial, digests)


@dataclass(frozen=True)
class Row:
    """How an update is broken, and what is said about it."""

    breaks: Callable[[Update], Any]
    says: str
    kind: str = "modelopt"
    trainer: str | None = None
    """What its trainer says."""

    @property
    def refused(self) -> bool:
        """Whether it is turned away before anything is written."""
        return self.says.endswith(REFUSED)


def told(**changes: Any) -> Callable[[Update], None]:
    """Change entries of what the engine is told; `...` removes one."""

    def change(update: Update) -> None:
        def merge(info: dict[str, Any]) -> dict[str, Any]:
            return {k: v for k, v in (info | changes).items() if v is not ...}

        update.told = merge

    return change


def in_manifest(**changes: Any) -> Callable[[Update], None]:
    """Change entries of the wire form; callables get what was there."""

    def change(update: Update) -> None:
        def merge(info: dict[str, Any]) -> dict[str, Any]:
            old = info["manifest"]
            new = {k: v(old.get(k)) if callable(v) else v for k, v in changes.items()}
            merged = {k: v for k, v in (old | new).items() if v is not ...}
            return info | {"manifest": merged}

        update.told = merge

    return change


def first(value: Any) -> Callable[[list], list]:
    return lambda old: [value, *old[1:]]


def drop(*names: str) -> Callable[[Update], None]:
    def change(update: Update) -> None:
        update.declared = [s for s in update.declared if s.name not in names]

    return change


def only(prefix: str, *without: str) -> Callable[[Update], None]:
    """A partial update of what starts so."""

    def change(update: Update) -> None:
        update.partial = True
        update.declared = [
            s
            for s in update.declared
            if s.name.startswith(prefix) and s.name not in without
        ]

    return change


def holds(name: str, value: Any) -> Callable[[Update], None]:
    """One value of a tensor; a byte for block scales."""

    def change(update: Update) -> None:
        tensor = update.tensors[name]
        tensor = tensor.view(torch.uint8) if tensor.dim() == 2 else tensor
        tensor.view(-1)[-1] = value

    return change


def all_hold(suffix: str, value: float) -> Callable[[Update], None]:
    def change(update: Update) -> None:
        for name, tensor in update.tensors.items():
            if name.endswith(suffix):
                tensor.fill_(value)

    return change


def declares(name: str, shape: tuple[int, ...], dtype: torch.dtype):
    return lambda update: update.declare(name, shape, dtype)


def sends(change: Callable[[list[tuple[str, Tensor]]], Any]):
    return lambda update: setattr(update, "sent", change)


def renamed(change: Callable[[str], str]) -> Callable[[Update], None]:
    def apply(update: Update) -> None:
        update.declared = [
            TensorSpec(change(s.name), s.shape, s.dtype) for s in update.declared
        ]

    return apply


def replaced(tensors: Callable[[], dict[str, Tensor]]) -> Callable[[Update], None]:
    """Another checkpoint altogether."""

    def change(update: Update) -> None:
        update.declared = list(Manifest.of(tensors().items()).tensors)

    return change


def wrong_digest_of(place: int) -> Callable[[Update], None]:
    def change(update: Update) -> None:
        update.sha256 = list(Manifest.of(update.tensors.items(), digests=True).sha256)
        update.sha256[place] = "0" * 64

    return change


def fails(count: int) -> Callable[[list[tuple[str, Tensor]]], Iterator]:
    def source(weights: list[tuple[str, Tensor]]) -> Iterator:
        yield from weights[:count]
        raise ArithmeticError("the trainer diverged")

    return source


U8, I8, F32, BF16 = torch.uint8, torch.int8, torch.float32, torch.bfloat16
ROWS: dict[str, Row] = {}


def _row(name: str, breaks: Callable[[Update], Any], says: str, **more: Any) -> None:
    assert name not in ROWS
    ROWS[name] = Row(breaks, says, **more)


def refuses(name: str, breaks: Callable[[Update], Any], says: str, **more: Any) -> None:
    """A row that is turned away by the manifest."""
    _row(name, breaks, f"Weight update refused: {says} {REFUSED}", **more)


def breaks_off(
    name: str,
    breaks: Callable[[Update], Any],
    says: str,
    *,
    after: int = 117,
    of: int = 117,
    **more: Any,
) -> None:
    """A row whose fault shows when something has been written."""
    text = f"Weight update broke off after {after} of {of} tensors: {says} {BROKEN}"
    _row(name, breaks, text, **more)


# --- what the engine is told ---

_HOLD = "update_info must hold bucket_bytes, manifest, session, got"
refuses(
    "info is text", lambda u: setattr(u, "told", lambda i: "all"), f"{_HOLD} 'all'."
)
refuses(
    "info is empty", told(manifest=..., bucket_bytes=..., session=...), f"{_HOLD} []."
)
refuses("no bucket size", told(bucket_bytes=...), f"{_HOLD} ['manifest', 'session'].")
refuses(
    "unknown entry",
    told(names=["a"]),
    f"{_HOLD} ['bucket_bytes', 'manifest', 'names', 'session'].",
)
refuses(
    "no session",
    told(session=...),
    f"{_HOLD} ['bucket_bytes', 'manifest'].",
)
for _size in (0, -1, True, "4096", 4096.0, None, 1 << 63):
    refuses(
        f"bucket size {_size!r}",
        told(bucket_bytes=_size),
        f"bucket_bytes must be a whole number from 1 to 2^63 - 1, got {_size!r}.",
    )
for _value in (None, ["a"], "a"):
    refuses(
        f"manifest is {_value!r}",
        told(manifest=_value),
        f"a manifest is a JSON object, got {_value!r}.",
    )
refuses(
    "unknown key",
    in_manifest(digests=[]),
    "the manifest has unknown keys ['digests'], known are ['names', 'shapes', "
    "'dtypes', 'partial', 'sha256'].",
)
for _key in ("names", "shapes", "dtypes"):
    refuses(
        f"no {_key}",
        in_manifest(**{_key: ...}),
        f"the manifest has no {_key}; it needs a list of them.",
    )
    refuses(
        f"{_key} no list",
        in_manifest(**{_key: {"0": 1}}),
        f"{_key} of the manifest must be a list, got {{'0': 1}}.",
    )
refuses(
    "one shape short",
    in_manifest(shapes=lambda old: old[1:]),
    "the manifest lists 117 names, 116 shapes, 117 dtypes; it needs as many of each.",
)
refuses(
    "name is a number",
    in_manifest(names=first(7)),
    "a tensor name must be text, got 7.",
)
for _shape in (64, "64", None, [-1, 64], [True, 64], [128.0, 64], [1 << 63], [[128]]):
    refuses(
        f"shape {_shape!r}",
        in_manifest(shapes=first(_shape)),
        f"{FIRST}: a shape is a list of whole numbers from 0 to 2^63 - 1, "
        f"got {_shape!r}.",
    )
refuses(
    "more bytes than there are",
    in_manifest(shapes=first([1 << 32, 1 << 31])),
    f"{FIRST}: bfloat16[4294967296, 2147483648] has more than 2^63 - 1 bytes.",
)
_DTYPES = (
    "bool, uint8, int8, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, int16, uint16, "
    "float16, bfloat16, int32, uint32, float32, int64, uint64, float64"
)
for _dtype in ("object", "torch.bfloat16", "BF16", 3, ["bfloat16"], None):
    refuses(
        f"dtype {_dtype!r}",
        in_manifest(dtypes=first(_dtype)),
        f"{FIRST}: unknown dtype {_dtype!r}, use one of {_DTYPES}.",
    )
for _value in ("yes", 1, None):
    refuses(
        f"partial is {_value!r}",
        in_manifest(partial=_value),
        f"partial must be true or false, got {_value!r}.",
    )
refuses(
    "digests are null",
    in_manifest(sha256=None),
    "sha256 of the manifest must be a list, got None.",
)
refuses(
    "one digest",
    in_manifest(sha256=["0" * 64]),
    "the manifest lists 117 names, 117 shapes, 117 dtypes, 1 sha256; it needs as many "
    "of each.",
)
for _value in ("0" * 63, "A" * 64, 0, None):
    refuses(
        f"digest {_value!r:.9}",
        in_manifest(sha256=[_value] * 117),
        f"{FIRST}: a SHA-256 is 64 lower-case hex digits, got {_value!r}.",
    )

# --- a manifest that does not fit the model ---

_WHOLE = " Declare partial=True to update some layers or experts only."
_UNITS = (
    " A partial update holds whole units: an expert, a fused expert layer, the other "
    "tensors of a numbered layer, or a module outside of them."
)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{', '.join(names[:10])}{more}"


def _saved(kind: str) -> list[str]:
    """Names in the order of a checkpoint's file, in which missing ones are told."""
    file = save(model_tensors(kind))
    return list(json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")]))


_NAMES, _SAVED = list(model_tensors("modelopt")), _saved("modelopt")
refuses(
    "empty",
    lambda u: u.declared.clear(),
    f"117 missing: {_listed(_SAVED)}; the manifest is empty.{_WHOLE}",
)
refuses("unknown tensor", declares("extra", (1,), F32), "1 unknown: extra.")
refuses("missing module", drop(FIRST), f"1 missing: {FIRST}.{_WHOLE}")
refuses(
    "missing scale",
    drop(f"{EXPERT}.weight_scale_2"),
    f"1 missing: {EXPERT}.weight_scale_2.{_WHOLE}",
)
refuses(
    "listed twice",
    lambda u: u.declared.append(u.declared[0]),
    f"1 duplicate: {FIRST} (2 times).",
)
for _what, _name, _shape, _true in (
    ("other vocabulary", FIRST, (256, 64), (128, 64)),
    ("transposed", f"{EXPERT}.weight", (16, 64), (64, 16)),
    ("one rank's slice", f"{EXPERT}.weight", (64, 8), (64, 16)),
    ("flat", f"{EXPERT}.weight", (1024,), (64, 16)),
    ("nothing in it", f"{EXPERT}.weight", (0, 16), (64, 16)),
):
    _dtype = BF16 if _name == FIRST else U8
    _text = str(_dtype).removeprefix("torch.")
    refuses(
        _what,
        declares(_name, _shape, _dtype),
        f"1 mis-shaped: {_name} ({_text}{list(_shape)}, expected "
        f"{_text}{list(_true)}).",
    )
refuses(
    "block scales of 32",
    declares(f"{EXPERT}.weight_scale", (64, 1), torch.float8_e4m3fn),
    f"1 mis-shaped: {EXPERT}.weight_scale (float8_e4m3fn[64, 1], expected "
    "float8_e4m3fn[64, 2]).",
)
refuses(
    "a scale per channel",
    declares(f"{EXPERT}.weight_scale_2", (64,), F32),
    f"1 mis-shaped: {EXPERT}.weight_scale_2 (float32[64], expected float32[]).",
)
refuses(
    "a scale with a dimension",
    declares(f"{EXPERT}.input_scale", (1,), F32),
    f"1 mis-shaped: {EXPERT}.input_scale (float32[1], expected float32[]).",
)
refuses(
    "a scale without one",
    declares(f"{EXPERT}.input_global_scale", (), F32),
    f"1 mis-shaped: {EXPERT}.input_global_scale (float32[], expected float32[1]).",
    kind="compressed-tensors",
)
for _what, _name, _shape, _dtype, _true in (
    ("signed bytes", f"{EXPERT}.weight", (64, 16), I8, "uint8"),
    ("a trainer's fp32", Q_PROJ, (64, 64), F32, "bfloat16"),
    ("block scales as bytes", f"{EXPERT}.weight_scale", (64, 2), U8, "float8_e4m3fn"),
    ("a global scale in BF16", f"{EXPERT}.weight_scale_2", (), BF16, "float32"),
):
    _got, _size = str(_dtype).removeprefix("torch."), list(_shape)
    refuses(
        _what,
        declares(_name, _shape, _dtype),
        f"1 mis-typed: {_name} ({_got}{_size}, expected {_true}{_size}).",
    )
refuses(
    "wrong shape and dtype and one more",
    lambda u: (u.declare(FIRST, (1,), F32), u.declare("x", (), U8)),
    f"1 unknown: x; 1 mis-shaped: {FIRST} (float32[1], expected bfloat16[128, 64]); "
    f"1 mis-typed: {FIRST} (float32[1], expected bfloat16[128, 64]).",
)


def other_checkpoint(name: str, mine: str, other: str) -> None:
    """A whole checkpoint of another kind sent to this one."""
    old, new = model_tensors(mine), model_tensors(other)
    unknown = [n for n in new if n not in old]
    missing = [n for n in _saved(mine) if n not in new]
    problems = [
        f"{len(x)} {what}: {_listed(x)}"
        for what, x in (("unknown", unknown), ("missing", missing))
        if x
    ]
    for what, key in (("mis-shaped", "shape"), ("mis-typed", "dtype")):
        differ = [
            f"{n} ({TensorSpec(n, tuple(new[n].shape), new[n].dtype)}, expected "
            f"{TensorSpec(n, tuple(old[n].shape), old[n].dtype)})"
            for n in new
            if n in old and getattr(new[n], key) != getattr(old[n], key)
        ]
        if differ:
            problems.append(f"{len(differ)} {what}: {_listed(differ)}")
    says = "; ".join(problems) + "." + (_WHOLE if missing else "")
    refuses(name, replaced(lambda: model_tensors(other)), says, kind=mine)


other_checkpoint("BF16 for NVFP4", "modelopt", "bf16")
other_checkpoint("compressed-tensors for ModelOpt", "modelopt", "compressed-tensors")
other_checkpoint("ModelOpt for compressed-tensors", "compressed-tensors", "modelopt")
other_checkpoint(
    "no input scales", "compressed-tensors", "compressed-tensors-weight-only"
)
refuses(
    "the trainer's prefix",
    renamed(lambda name: f"module.{name}"),
    f"117 unknown: {_listed([f'module.{n}' for n in _NAMES])}; 117 missing: "
    f"{_listed(_SAVED)}.{_WHOLE}",
)
_FUSED = [f"{PREFIXES[0]}.gate_up_proj", f"{PREFIXES[0]}.down_proj"]
refuses(
    "fused names for an expert's",
    lambda u: [u.declare(name, (E, 64, 32), U8) for name in _FUSED],
    f"2 unknown: {_listed(_FUSED)}.",
)
refuses(
    "an expert too many",
    declares(f"{PREFIXES[0]}.4.up_proj.weight", (32, 32), U8),
    f"1 unknown: {PREFIXES[0]}.4.up_proj.weight.",
)
refuses(
    "a layer too many",
    declares("model.layers.2.mlp.gate.weight", (4, 64), BF16),
    "1 unknown: model.layers.2.mlp.gate.weight.",
)
refuses(
    "half an expert",
    only(f"{PREFIXES[1]}.3.", f"{EXPERT}.weight"),
    f"1 missing: {EXPERT}.weight.{_UNITS}",
)
refuses(
    "q without k",
    only("model.layers.0.", Q_PROJ.replace("q_", "k_")),
    f"1 missing: {Q_PROJ.replace('q_', 'k_')}.{_UNITS}",
)
refuses("partial of nothing", only("x"), "the manifest is empty.")
refuses(
    "partial with an unknown layer",
    lambda u: (
        only(f"{PREFIXES[1]}.3.")(u),
        u.declare("a.experts.0.w1.weight", (), U8),
    ),
    "1 unknown: a.experts.0.w1.weight.",
)

# --- a stream that is not what was declared ---

_GAVE_UP = "The trainer gave up in the middle of the update."


def stops(name: str, change: Callable[[list[tuple[str, Tensor]]], Any], after: int,
          trainer: str) -> None:  # fmt: skip
    says = f"Weight update broke off after {after} of 117 tensors: {_GAVE_UP} {BROKEN}"
    if after == 0:
        says = f"Weight update broke off before it wrote anything: {_GAVE_UP} {REFUSED}"
    _row(name, sends(change), says, trainer=trainer)


_LAST = _NAMES[-1]
stops(
    "no stream", lambda w: [], 0, f"The weights end before {FIRST!r} of the manifest."
)
stops("the source fails at once", fails(0), 0, "the trainer diverged")
stops("the source fails later", fails(100), 89, "the trainer diverged")
stops(
    "short stream",
    lambda w: w[:-1],
    113,
    f"The weights end before {_LAST!r} of the manifest.",
)
stops(
    "long stream",
    lambda w: [*w, w[0]],
    117,
    f"{FIRST!r} follows the manifest's last tensor.",
)
stops(
    "a tensor twice",
    lambda w: [w[0], *w],
    1,
    f"The weights hold {FIRST} bfloat16[128, 64] where the manifest says "
    "model.norm.weight bfloat16[64].",
)
stops(
    "other order",
    lambda w: [w[1], w[0], *w[2:]],
    0,
    f"The weights hold model.norm.weight bfloat16[64] where the manifest says {FIRST} "
    "bfloat16[128, 64].",
)
stops(
    "other shape than declared",
    lambda w: [*w[:-1], (_LAST, w[-1][1].view(1))],
    113,
    f"The weights hold {_LAST} float32[1] where the manifest says {_LAST} float32[].",
)
stops(
    "other dtype than declared",
    lambda w: [*w[:-1], (_LAST, w[-1][1].bfloat16())],
    113,
    f"The weights hold {_LAST} bfloat16[] where the manifest says {_LAST} float32[].",
)

# --- bytes that are not what was declared ---

_CHANGED = (
    "Its bytes changed on the way, or after the manifest was made; send the update "
    "again."
)


def wrong_bytes(name: str, place: int) -> None:
    tensor = _NAMES[place]
    found = Manifest.of(model_tensors("modelopt", 1).items(), digests=True).sha256[
        place
    ]
    says = f"{tensor} has SHA-256 {found}, its manifest says {'0' * 64}. {_CHANGED}"
    text = f"Weight update broke off before it wrote anything: {says} {REFUSED}"
    if place:
        breaks_off(name, wrong_digest_of(place), says, after=place)
    else:
        _row(name, wrong_digest_of(place), text)


wrong_bytes("first tensor corrupted", 0)
wrong_bytes("a tensor corrupted", 60)
wrong_bytes("last tensor corrupted", 116)

# --- values that cannot serve ---

_RE_EXPORT = "Each must be a finite positive number; re-export the checkpoint."
_INPUT = (
    "Re-calibrate, set VLLM_MEGAMOE_MISSING_INPUT_SCALE=max to give missing ones the "
    "layer's maximum, or run weight-only with VLLM_MEGAMOE_ACTIVATION=w4a16."
)
for _byte in (0x7F, 0xFF):
    for _proj, _param, _count in (("up", "w13", 256), ("down", "w2", 128)):
        breaks_off(
            f"block scale {_byte:#x} in {_proj}",
            holds(f"{PREFIXES[1]}.3.{_proj}_proj.weight_scale", _byte),
            f"{PREFIXES[1]}.{_param}_weight_scale: block scales are NaN (bytes 0x7F or "
            f"0xFF): expert 3: 1 of {_count}. The exporter overflowed E4M3; "
            "`vllm-megamoe inspect` finds the coordinates. Re-export with scales "
            "clamped to 448.",
        )
_BAD = {
    "zero": 0.0,
    "infinite": float("inf"),
    "negative": -0.5,
    "denormal": 1e-40,
    "NaN": float("nan"),
}
for _fault, _number in _BAD.items():
    _shown = f"{torch.tensor(_number).item():g}"
    breaks_off(
        f"global scale {_fault}",
        holds(f"{PREFIXES[1]}.3.gate_proj.weight_scale_2", _number),
        f"{PREFIXES[1]}.w13_weight_scale_2: unusable global scales: expert 3 w1 = "
        f"{_shown} ({_fault}). {_RE_EXPORT}",
    )
    breaks_off(
        f"input scale {_fault}",
        holds(f"{EXPERT}.input_scale", _number),
        f"{PREFIXES[1]}.w2_input_scale: unusable input scales: expert 3 = {_shown} "
        f"({_fault}). {_INPUT}",
    )
    breaks_off(
        f"reciprocal global scale {_fault}",
        holds(f"{EXPERT}.weight_global_scale", _number),
        f"{PREFIXES[1]}.w2_weight_global_scale: unusable global scales: expert 3 w2 = "
        f"{_shown} ({_fault}). {_RE_EXPORT}",
        kind="compressed-tensors",
    )
breaks_off(
    "reciprocal of a denormal",
    holds(f"{EXPERT}.weight_global_scale", 3e38),
    f"{PREFIXES[1]}.w2_weight_global_scale: unusable global scales: expert 3 w2 = "
    f"3e+38 (denormal). {_RE_EXPORT}",
    kind="compressed-tensors",
)
for _fault in ("negative", "NaN"):
    _shown = f"{_BAD[_fault]:g}"
    breaks_off(
        f"reciprocal input scale {_fault}",
        holds(f"{EXPERT}.input_global_scale", _BAD[_fault]),
        f"{PREFIXES[1]}.w2_input_global_scale: unusable input scales: expert 3 = "
        f"{_shown} ({_fault}). {_INPUT}",
        kind="compressed-tensors",
    )
breaks_off(
    "no expert calibrated",
    all_hold("down_proj.input_global_scale", float("inf")),
    f"{PREFIXES[0]}.w2_input_global_scale: no expert has a usable input scale, so "
    "activations cannot be quantized. Run weight-only with "
    "VLLM_MEGAMOE_ACTIVATION=w4a16.",
    kind="compressed-tensors",
)


# --- the model they are pushed into ---


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """(model, trainer, digests, outputs) of one serving process."""
    folder = tmp_path_factory.mktemp("model")
    with vllm_process(folder, kind) as config:
        model = load_model(folder, kind, config)
        trainer = Trainer(engine_of(model, config))
        yield model, trainer, digests(model), outputs(model)
        trainer.close()
        trainer.engine.shutdown()


def repair(served: tuple, kind: str) -> None:
    tensors = model_tensors(kind)
    served[1].push(Manifest.of(tensors.items()), tensors.items())


CASES = [pytest.param(row.kind, name, id=name) for name, row in ROWS.items()]


@pytest.mark.parametrize(("kind", "name"), CASES, indirect=["kind"])
def test_malformed(served: tuple, kind: str, name: str) -> None:
    model, trainer, *_ = served
    row = ROWS[name]
    update = Update(model_tensors(kind, 1))
    update.declared = list(Manifest.of(update.tensors.items()).tensors)
    row.breaks(update)
    manifest = update.manifest()
    weights = update.sent(list(update.tensors.items()))
    info = update.told(update_info(manifest))
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer.push(manifest, weights, info)
    assert str(error.value) == row.says
    if row.trainer is not None:
        assert error.value.__notes__ == [row.trainer]
    if not row.refused:
        check_refusing(model)
        repair(served, kind)
    check_unharmed(served)


def test_there_are_many_kinds() -> None:
    assert len(ROWS) >= 40
    assert {row.kind for row in ROWS.values()} >= {"modelopt", "compressed-tensors"}


# --- the same model, without the wire ---

GIVEN = {
    "twice": (lambda w: [w[0], w[1], w[0]], 2, f"{FIRST} came twice."),
    "not declared": (
        lambda w: [w[0], ("extra", torch.zeros(1))],
        1,
        "extra is not in the manifest.",
    ),
    "another shape": (
        lambda w: [w[0], (w[1][0], w[1][1][:1])],
        1,
        "model.norm.weight is bfloat16[1], its manifest says bfloat16[64].",
    ),
    "too few": (lambda w: w[:-2], 115, f"2 tensors never came: {_NAMES[-2]}; {_LAST}."),
}


@pytest.mark.parametrize("kind", ["modelopt"], indirect=True)
@pytest.mark.parametrize("name", GIVEN)
def test_tensors_that_no_wire_would_carry(served: tuple, kind: str, name: str) -> None:
    model, trainer, *_ = served
    change, after, says = GIVEN[name]
    tensors = model_tensors(kind, 1)
    manifest = Manifest.of(tensors.items())
    expected = {spec.name: spec for spec in manifest.tensors}
    update = DirectUpdate(model, trainer.engine.model_config, manifest, expected)

    def give() -> None:
        update.load(change(list(tensors.items())))
        update.finish()

    with pytest.raises(RuntimeError) as error:
        run_or_abort(update, give)
    text = f"Weight update broke off after {after} of 117 tensors: {says} {BROKEN}"
    assert str(error.value) == text
    check_refusing(model)
    repair(served, kind)
    check_unharmed(served)
