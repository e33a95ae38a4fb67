# SPDX-License-Identifier: Apache-2.0
"""The experts layer: parameters, derived tensors, post-load processing, forward.

`MegaMoE` works on a host module (vLLM's `RoutedExperts`, or a module of our own): it
registers the tensors there, so names, state dicts and vLLM's reloads see them, and
keeps no tensor that is not registered. Imports torch, not vLLM.

A host has, for a quantized format (E local experts, L logical experts):

    w13_{weight}         [E, 2I, K*]      w2_{weight}         [E, H, K*]
    w13_{block scale}    per layout       w2_{block scale}    per layout
    w13_{global scale}   (2, E)           w2_{global scale}   (E,)
    w13_{input scale}    (2, L)           w2_{input scale}    (L,)

named by the checkpoint's own suffixes, rows w1 and w3 of the (2, .) ones, and the
buffers `l2_act_scale` (1,) and, where the checkpoint stores reciprocals, `w13_alpha`
(2, E) and `w2_alpha` (E,).
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import PER_TENSOR, Convention, Role
from .kernels.base import Problem, Run, Tensors
from .kernels.select import Selection
from .ledger import Ledger, summarize
from .loader import ParamLoader, ParamSpec, Placement
from .scales import (
    all_usable,
    check_block_scales,
    check_global_scales,
    gist,
    invert_into,
    judge_input_scales,
    largest_byte,
    may_hold_nan,
    read_together,
)

#: Below "vllm" so that vLLM's logging configuration shows it.
logger = logging.getLogger("vllm.megamoe")

L2_ACT_SCALE = "l2_act_scale"
ALPHAS = {"w13": "w13_alpha", "w2": "w2_alpha"}
SIDES = ("w13", "w2")
#: What a dummy load fills each role with, in checkpoint-independent terms.
_DUMMY = {Role.BLOCK_SCALE: 1.0, Role.GLOBAL_SCALE: 1e-3, Role.INPUT_SCALE: 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """Everything about one layer that is settled before a weight is seen."""

    prefix: str
    convention: Convention
    problem: Problem
    selection: Selection
    placement: Placement
    input_scales: bool
    """Whether the checkpoint stores input scales (weight-only ones do not)."""
    fill_missing: bool = False
    """Experts without a usable input scale take the layer's maximum."""
    loader_bypassed: bool = False
    """The first load may fill parameters without the loaders (dummy, sharded state)."""


class MegaMoE:
    """One MoE layer's experts on one rank."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.prefix = spec.prefix
        self.ledger = Ledger(spec.prefix)
        self._marks: dict[str, dict[str, Any]] = {}
        self._addresses: dict[str, int] = {}
        self._run: Run | None = None

    # --- birth: every tensor a kernel reads, at its address for life ---

    def create(self, host: nn.Module) -> None:
        """Register all parameters and derived buffers on the host.

        Raises:
            ValueError: sizes the kernel's layout cannot hold.
        """
        self._check_sizes()
        for side in SIDES:
            for role in self._roles():
                self._register(host, side, role)
        if self.spec.convention.format.global_scale:
            self._buffer(host, L2_ACT_SCALE, torch.ones(1, dtype=torch.float32))
            if self.spec.convention.reciprocal:
                e = self.spec.problem.num_experts
                for side, shape in (("w13", (2, e)), ("w2", (e,))):
                    zeros = torch.zeros(shape, dtype=torch.float32)
                    self._buffer(host, ALPHAS[side], zeros)
        self._mark(host)

    def name(self, side: str, role: Role) -> str:
        """Name of a parameter on the host."""
        return f"{side}_{self.spec.convention.suffixes[role]}"

    def _roles(self) -> list[Role]:
        roles = list(self.spec.convention.suffixes)
        return (
            roles
            if self.spec.input_scales
            else [r for r in roles if r is not Role.INPUT_SCALE]
        )

    def _check_sizes(self) -> None:
        p, layout = self.spec.problem, self.spec.selection.kernel.layout
        fmt = p.format
        for label, n in (("hidden", p.hidden), ("intermediate", p.intermediate)):
            multiple = max(
                layout.row_multiple,
                fmt.group * layout.scale_col_multiple if fmt.scale_dtype else 1,
                fmt.values_per_element,
            )
            if n % multiple:
                raise ValueError(
                    f"{self.prefix}: {label} size {n} is not a multiple of {multiple}, "
                    f"which {fmt.name} needs in the {layout.name} layout. With tensor "
                    "parallelism the intermediate size is divided by its degree; use "
                    "--enable-expert-parallel, or --moe-backend auto."
                )

    def _register(self, host: nn.Module, side: str, role: Role) -> None:
        p, layout = self.spec.problem, self.spec.selection.kernel.layout
        fmt, e = p.format, p.num_experts
        rows, k = (
            (p.intermediate, p.hidden) if side == "w13" else (p.hidden, p.intermediate)
        )
        param_rows = 2 * rows if side == "w13" else rows
        view = None
        shard: tuple[int, ...] = ()
        slots = e
        if role is Role.WEIGHT:
            cols = fmt.weight_cols(k)
            shape: tuple[int, ...] = (e, param_rows, cols)
            dtype, view, shard = fmt.weight_dtype, layout.view(side), (rows, cols)
        elif role is Role.BLOCK_SCALE:
            assert fmt.scale_dtype is not None
            cols = fmt.scale_cols(k)
            shape = (e, *layout.scale_shape(param_rows, cols))
            dtype, view = fmt.scale_dtype, layout.view(f"{side}_scale")
            shard = (rows, cols)
        else:
            if role is Role.INPUT_SCALE:
                slots = self.spec.placement.num_logical
            shape = (2, slots) if side == "w13" else (slots,)
            dtype = torch.float32
        data = torch.empty(shape, dtype=dtype)
        if role is Role.INPUT_SCALE:
            data.fill_(float("nan"))  # "never loaded" must not look like a scale
        param = nn.Parameter(data, requires_grad=False)
        param_spec = ParamSpec(
            name=self.name(side, role),
            role=role,
            side=side,
            view=view,
            shard_shape=shard,
            tp_dim=None if view is None else (0 if side == "w13" else 1),
        )
        loader = ParamLoader(param_spec, self.spec.placement, self.ledger, slots)
        marks: dict[str, Any] = {"weight_loader": loader.load}
        if role in _DUMMY:
            value = _DUMMY[role]
            flip = role in PER_TENSOR and self.spec.convention.reciprocal
            marks["dummy_weight_value"] = 1 / value if flip else value
        self._marks[param_spec.name] = marks
        host.register_parameter(param_spec.name, param)

    def _buffer(self, host: nn.Module, name: str, value: Tensor) -> None:
        # Persistent, so that a layerwise reload copies it back; 0 elements to load, so
        # that the same reload does not wait for a checkpoint tensor to fill it.
        self._marks[name] = {"weight_loader_numel": 0}
        host.register_buffer(name, value)

    def _mark(self, host: nn.Module) -> None:
        """Put what vLLM's loaders look for on the tensors.

        Not once only: vLLM's weight cache registers bare tensors in place of ours.
        """
        for name, marks in self._marks.items():
            tensor = getattr(host, name)
            for attribute, value in marks.items():
                if not hasattr(tensor, attribute):
                    setattr(tensor, attribute, value)

    # --- after loading: check first, then derive in place ---

    def process(self, host: nn.Module) -> None:
        """Check what was loaded and derive scales into their fixed tensors.

        Idempotent, and starts from checkpoint values each time. During a layerwise
        reload the host holds temporary tensors; vLLM copies them back afterwards.

        Raises:
            ValueError: naming missing, duplicate or unusable tensors. Derived tensors
                are untouched then, and the layer does not serve.
        """
        if any(t.is_meta for t in host.parameters(recurse=False)):
            return  # nothing to look at; runs again on the real tensors
        self._mark(host)
        self.ledger.dirty = True  # until accepted, however the bytes came here
        temporary = bool(self._addresses) and self.addresses(host) != self._addresses
        self._check_coverage(host, temporary)
        l2_scale = self._check_values(host)
        if self.spec.convention.reciprocal:
            for side in SIDES:
                stored = getattr(host, self.name(side, Role.GLOBAL_SCALE))
                invert_into(getattr(host, ALPHAS[side]), stored.data)
        if self.spec.convention.format.global_scale:
            getattr(host, L2_ACT_SCALE).fill_(l2_scale)
        if self._run is None:
            kernel = self.spec.selection.kernel
            self._run = kernel.bind(self.spec.problem, self.tensors(host))
            self._addresses = self.addresses(host)
        self.ledger.accept()

    def _check_coverage(self, host: nn.Module, temporary: bool) -> None:
        ledger = self.ledger
        if self.spec.loader_bypassed and not ledger.complete and ledger.untouched:
            return
        if not (ledger.open or temporary):
            return  # in place, into a layer that is whole: any part may be new
        if temporary and ledger.replayed_plan():
            return
        if duplicates := ledger.duplicates():
            raise ValueError(
                f"{self.prefix}: loaded more than once: {summarize(duplicates)}. Does "
                "the checkpoint hold a tensor in two files?"
            )
        missing = ledger.missing()
        optional = self._optional_tensors()
        for label in [m for m in missing if m.split(":")[0] in optional]:
            missing.remove(label)
        if missing:
            raise ValueError(
                f"{self.prefix}: {len(missing)} expert tensors are missing: "
                f"{summarize(missing)}. The checkpoint or the weight update is "
                "incomplete."
            )
        for name in optional:
            holes = ledger.holes(name)
            if holes:
                flat = getattr(host, name).data.view(-1)
                flat[torch.tensor(holes, device=flat.device)] = float("nan")

    def _optional_tensors(self) -> set[str]:
        """Parameters whose absence this mode can bear; their holes become NaN."""
        if not self.spec.input_scales:
            return set()
        # the reference's L1 scale is per token, so w13's is only kept for other kernels
        sides = SIDES if self._ignores_w2_input_scale() else ("w13",)
        return {self.name(side, Role.INPUT_SCALE) for side in sides}

    def _ignores_w2_input_scale(self) -> bool:
        return self.spec.problem.mode != "w4a4" or self.spec.fill_missing

    def _check_values(self, host: nn.Module) -> float:
        """Check every scale that is read; returns the layer's L2 activation scale."""
        named = {}
        if self.spec.convention.format.scale_dtype is torch.float8_e4m3fn:
            for side in SIDES:
                name = self.name(side, Role.BLOCK_SCALE)
                named[name] = largest_byte(getattr(host, name).data)
        if self.spec.convention.format.global_scale:
            for side in SIDES:
                name = self.name(side, Role.GLOBAL_SCALE)
                named[name] = gist(getattr(host, name).data)
        if self.spec.problem.mode == "w4a4":
            name = self.name("w2", Role.INPUT_SCALE)
            named[name] = gist(getattr(host, name).data)
        values = dict(zip(named, read_together(list(named.values())), strict=True))
        reciprocal = self.spec.convention.reciprocal
        for name, found in values.items():
            param = getattr(host, name).data
            if param.dtype is torch.float32 and not all_usable(
                found, reciprocal=reciprocal
            ):
                # all of them, to name those that are not
                values[name] = found = param.flatten().tolist()
            self._check_one(host, name, found)
        return self._l2_scale(values)

    def _check_one(self, host: nn.Module, name: str, found: list[float]) -> None:
        """Refuse unusable block scales (by their largest byte) or global scales."""
        side, _, suffix = name.partition("_")
        role = self.spec.convention.role_of(suffix)
        experts = self.spec.placement.slot_logical
        where = f"{self.prefix}.{name}"
        if role is Role.BLOCK_SCALE and may_hold_nan(found[0]):
            check_block_scales(getattr(host, name).data, where, experts)
        if role is Role.GLOBAL_SCALE:
            halves = ("w1", "w3") if side == "w13" else ("w2",)

            def label(n: int) -> str:
                half, slot = divmod(n, len(experts))
                return f"expert {experts[slot]} {halves[half]}"

            reciprocal = self.spec.convention.reciprocal
            check_global_scales(found, where, label, reciprocal=reciprocal)

    def _l2_scale(self, values: dict[str, list[float]]) -> float:
        """The layer's L2 activation scale, 1 where the mode does not quantize."""
        if self.spec.problem.mode != "w4a4":
            return 1.0
        name = self.name("w2", Role.INPUT_SCALE)
        scales = judge_input_scales(
            values[name],
            f"{self.prefix}.{name}",
            reciprocal=self.spec.convention.reciprocal,
            fill_missing=self.spec.fill_missing,
        )
        for what, which in (
            ("never calibrated", scales.dead),
            ("missing", scales.filled),
        ):
            if which:
                logger.warning(
                    "%s.%s: %d experts are %s (%s); they take the maximum, %g.",
                    self.prefix,
                    name,
                    len(which),
                    what,
                    summarize([str(e) for e in which]),
                    scales.maximum,
                )
        return scales.maximum

    # --- what a kernel reads ---

    def tensors(self, host: nn.Module) -> Tensors:
        """The kernel's view of the host's tensors, sharing their storage."""

        def data(side: str, role: Role) -> Tensor | None:
            has = role in self.spec.convention.suffixes
            return getattr(host, self.name(side, role)).data if has else None

        w13, w2 = data("w13", Role.WEIGHT), data("w2", Role.WEIGHT)
        assert w13 is not None
        assert w2 is not None
        alpha13, alpha2 = data("w13", Role.GLOBAL_SCALE), data("w2", Role.GLOBAL_SCALE)
        if self.spec.convention.reciprocal:
            alpha13, alpha2 = (getattr(host, ALPHAS[s]) for s in SIDES)
        quantized = self.spec.problem.mode == "w4a4"
        return Tensors(
            w13=w13,
            w2=w2,
            w13_scale=data("w13", Role.BLOCK_SCALE),
            w2_scale=data("w2", Role.BLOCK_SCALE),
            gate_alpha=None if alpha13 is None else alpha13[0],
            up_alpha=None if alpha13 is None else alpha13[1],
            w2_alpha=alpha2,
            l2_act_scale=getattr(host, L2_ACT_SCALE) if quantized else None,
        )

    def kernel_tensors(self, host: nn.Module) -> dict[str, Tensor]:
        """Every tensor the kernel reads, by name."""
        return self.tensors(host).named()

    def derived(self) -> dict[str, str]:
        """Each buffer that post-load processing fills, with the parameter it follows.

        In a mode that does not quantize activations the L2 scale is 1 and follows none.
        """
        found = {}
        if self.spec.problem.mode == "w4a4":
            found[L2_ACT_SCALE] = self.name("w2", Role.INPUT_SCALE)
        if self.spec.convention.reciprocal:
            for side in SIDES:
                found[ALPHAS[side]] = self.name(side, Role.GLOBAL_SCALE)
        return found

    def addresses(self, host: nn.Module) -> dict[str, int]:
        """Device address of each tensor the kernel reads."""
        return {n: t.data_ptr() for n, t in self.kernel_tensors(host).items()}

    def check_addresses(self, host: nn.Module) -> None:
        """Verify that no kernel-read tensor moved since the kernel was bound.

        Raises:
            RuntimeError: naming the tensors that moved.
        """
        if self._run is None:
            return
        moved = [
            name
            for name, address in self.addresses(host).items()
            if self._addresses.get(name) != address
        ]
        if moved:
            raise RuntimeError(
                f"{self.prefix}: {', '.join(moved)} moved after the kernel was bound; "
                "captured graphs would read freed memory. Restart the server."
            )

    def expert_weights(self, host: nn.Module) -> Iterable[Tensor]:
        """Contiguous [E, n] views of everything that moves with an expert (EPLB).

        Input scales are not among them: every rank holds all logical experts'.
        """
        e = self.spec.problem.num_experts
        for side in SIDES:
            for role in self._roles():
                if role is not Role.INPUT_SCALE:
                    param = getattr(host, self.name(side, role)).data
                    yield from _per_expert(param, e, role)
            if self.spec.convention.reciprocal:
                alpha = getattr(host, ALPHAS[side])
                yield from _per_expert(alpha, e, Role.GLOBAL_SCALE)

    def forward(self, x: Tensor, topk_weights: Tensor, slots: Tensor) -> Tensor:
        """This rank's routed output.

        Args:
            x: bf16 [T, H].
            topk_weights: fp32 [T, K].
            slots: int [T, K], local expert slots, -1 for none.

        Returns:
            bf16 [T, H].

        Raises:
            RuntimeError: the layer is incomplete.
        """
        self.ledger.check_ready()
        assert self._run is not None
        return self._run(x, topk_weights, slots)


def _per_expert(tensor: Tensor, experts: int, role: Role) -> Iterable[Tensor]:
    if role is Role.GLOBAL_SCALE and tensor.dim() == 2:
        yield from (row.view(experts, 1) for row in tensor)
    else:
        yield tensor.view(experts, -1)
