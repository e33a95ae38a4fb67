# SPDX-License-Identifier: Apache-2.0
"""vLLM glue: the quantization method of FusedMoE models under `--moe-backend megamoe`.

Turns a layer's resolved scheme into a `MegaMoE`, refuses what no kernel of ours can
serve, and owns the one place where tokens and outputs cross ranks (`_across_ranks`).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dp_group, get_ep_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import (
    FusedMoEMethodBase,
)
from vllm.utils.torch_utils import direct_register_custom_op

from . import envs
from .checkpoint import (
    COMPRESSED_TENSORS_NVFP4,
    MODELOPT_NVFP4,
    PLAIN_BF16,
    Convention,
    unfuse,
)
from .compat import Scheme
from .eplb import Moves
from .experts import MegaMoE, Spec
from .kernels.base import Problem, probe_device
from .kernels.select import Selection, select
from .loader import Placement
from .reload import abort_layerwise, in_layerwise_reload

logger = init_logger("vllm.megamoe")

#: Module (below vLLM's quantization package) that asks for a kernel -> convention.
_ASKERS: dict[tuple[str, str], Convention] = {
    ("nvfp4", "modelopt"): MODELOPT_NVFP4,
    (
        "nvfp4",
        "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4",
    ): COMPRESSED_TENSORS_NVFP4,
    ("unquantized", "unquantized_fused_moe_method"): PLAIN_BF16,
}
#: Load formats that fill parameters without calling their loaders.
_BYPASSING_LOADS = (
    "dummy",
    "ipc_cache",
    "sharded_state",
    "tensorizer",
    "runai_streamer_sharded",
)


def build_method(layer: Any, scheme: Scheme) -> "MegaMoEMethod":
    """The method of a `RoutedExperts` layer whose scheme vLLM has just resolved.

    Raises:
        NotImplementedError: a scheme or an option that no kernel of ours serves.
        KernelUnavailableError: no kernel, or not the one asked for, can run here.
    """
    prefix, moe = layer.layer_name, layer.moe_config
    convention = _convention(prefix, scheme)
    refuse_unsupported(layer)
    weight_only = scheme.keys.get("activation_key") is None
    mode = _mode(prefix, convention, weight_only)
    return MegaMoEMethod(moe, convention, mode, input_scales=not weight_only)


def _convention(prefix: str, scheme: Scheme) -> Convention:
    asker = scheme.asker.split(".quantization.")[-1].split(".fused_moe.")[-1]
    convention = _ASKERS.get((scheme.oracle, asker))
    if convention is None:
        raise NotImplementedError(
            f"{prefix}: --moe-backend megamoe has no format for these experts "
            f"({scheme.oracle}, resolved by {asker}). This version serves NVFP4 from "
            "ModelOpt and compressed-tensors, and BF16; use --moe-backend auto."
        )
    key = str(scheme.keys.get("activation_key"))
    if convention.format.global_scale and "token" in key.lower():
        raise NotImplementedError(
            f"{prefix}: --moe-backend megamoe takes the L2 activation scale from the "
            "checkpoint, not per token; drop quantization_config.moe.activation, or "
            "use --moe-backend flashinfer_trtllm."
        )
    return convention


def _mode(prefix: str, convention: Convention, weight_only: bool) -> str:
    modes = convention.format.modes
    asked = envs.get("VLLM_MEGAMOE_ACTIVATION")
    if len(modes) == 1 or asked == "auto":
        return modes[1] if weight_only and len(modes) > 1 else modes[0]
    if asked == "w4a4" and weight_only:
        raise ValueError(
            f"{prefix}: VLLM_MEGAMOE_ACTIVATION=w4a4 needs input scales, and this "
            "checkpoint is weight-only (its activations are not quantized). Unset the "
            "variable to run w4a16, or quantize the checkpoint with activations."
        )
    return asked


def refuse_unsupported(layer: Any) -> None:
    """Refuse every option that would silently change the result.

    Raises:
        NotImplementedError: every reason, and what to use instead.
    """
    moe: FusedMoEConfig = layer.moe_config
    manager = layer.expert_map_manager
    refusals = {
        "expert biases": moe.has_bias,
        f"experts without a gate ({moe.activation.value})": not moe.is_act_and_mul,
        "router weights applied to the input": layer.apply_router_weight_on_input,
        "--enable-lora": moe.is_lora_enabled,
        "sequence parallelism": moe.is_sequence_parallel,
        "prefill context parallelism": moe.pcp_size > 1,
        "fused shared experts": manager.num_fused_shared_experts > 0,
        "SwiGLU alpha or beta": (
            layer.swiglu_alpha not in (None, 1.0)
            or layer.swiglu_beta not in (None, 0.0)
        ),
        f"activations in {moe.in_dtype}": moe.in_dtype != torch.bfloat16,
    }
    refused = [what for what, present in refusals.items() if present]
    if refused:
        raise NotImplementedError(
            f"{layer.layer_name}: --moe-backend megamoe does not serve "
            f"{', '.join(refused)}. Drop the option (--dtype bfloat16 for the "
            "activation type), or use --moe-backend auto."
        )


class _CombinesItself:
    """What vLLM's runner asks of a kernel that crosses ranks on its own.

    With it in place the runner neither dispatches tokens nor reduces our output, and
    reduces a shared expert's output by itself.
    """

    is_monolithic = False
    can_overlap_shared_experts = False

    class prepare_finalize:
        @staticmethod
        def topk_indices_dtype() -> torch.dtype | None:
            return None

    class fused_experts:
        consumes_expert_mask = False

    @staticmethod
    def output_is_reduced() -> bool:
        return True


class MegaMoEMethod(FusedMoEMethodBase):
    """Quantization method of one layer; all state is on the layer or in `experts`."""

    #: Processing changes no loaded value: it may run on tensors of vLLM's weight cache.
    supports_pre_processed_weights = True
    experts: MegaMoE
    moves: Moves | None = None
    """Set once EPLB has taken on the model."""

    def __init__(
        self, moe: FusedMoEConfig, convention: Convention, mode: str, input_scales: bool
    ) -> None:
        super().__init__(moe)
        self.convention = convention
        self.mode = mode
        self.input_scales = input_scales
        # Tensor parallelism alone leaves the reduction to the runner, which sums the
        # shared experts' output in the same collective.
        self.crosses_ranks = moe.dp_size > 1
        if self.crosses_ranks:
            self.moe_kernel = _CombinesItself()  # type: ignore[assignment]

    @property
    def supports_eplb(self) -> bool:
        return True

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        del (
            params_dtype,
            extra_weight_attrs,
        )  # the format row and our loaders settle both
        device, capability = probe_device()
        config = get_current_vllm_config()
        problem = Problem(
            format=self.convention.format,
            mode=self.mode,
            num_experts=num_experts,
            hidden=hidden_size,
            intermediate=intermediate_size_per_partition,
            top_k=self.moe.experts_per_token,
            activation=self.moe.activation.value,
            swiglu_limit=layer.swiglu_limit,
            device=device,
            capability=capability,
            graphs=device == "cuda" and not config.model_config.enforce_eager,
        )
        selection = select(problem, envs.get("VLLM_MEGAMOE_KERNEL"))
        self._log(problem, selection)
        self.experts = MegaMoE(
            Spec(
                prefix=layer.layer_name,
                convention=self.convention,
                problem=problem,
                selection=selection,
                placement=_placement(layer),
                input_scales=self.input_scales,
                fill_missing=envs.get("VLLM_MEGAMOE_MISSING_INPUT_SCALE") == "max",
                loader_bypassed=config.load_config.load_format in _BYPASSING_LOADS,
            )
        )
        self.experts.create(layer)

    @staticmethod
    def _log(problem: Problem, selection: Selection) -> None:
        logger.info_once("%s", selection.explain(problem))

    def split_fused(
        self, layer: Any, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterable[tuple[str, Tensor]]:
        """Fused 3-D expert tensors as per-expert views, for vLLM's name mapping.

        Raises:
            RuntimeError: EPLB is moving experts and nobody has drained it.
        """
        if self.moves is not None:
            if self.moves.in_flight:
                raise RuntimeError(
                    f"{layer.layer_name}: EPLB is moving experts, which would put old "
                    "weights over the new ones. Update through vLLM's reload or weight "
                    "transfer endpoints, which wait for it, or set use_async to false "
                    "in --eplb-config."
                )
            self.experts.spec.placement.follow(self.moves.current())
        return unfuse(weights, self.convention, layer.is_fused_checkpoint_transposed)

    def expert_weights(self, layer: Any) -> Iterable[Tensor]:
        """What EPLB moves with an expert."""
        return list(self.experts.expert_weights(layer))

    def before_update(self) -> None:
        """Before an update writes: end EPLB moves in flight, follow the placement.

        A collective over the ranks of the expert-parallel group while a move is.
        """
        if self.moves is not None:
            self.moves.drain()
            self.experts.spec.placement.follow(self.moves.current())

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check and derive; vLLM reruns it on every kind of reload."""
        if not in_layerwise_reload(layer):
            self.experts.check_addresses(layer)
        try:
            self.experts.process(layer)
        except ValueError:
            # back to the live tensors, so that the next update starts from them
            abort_layerwise([layer])
            raise

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Routed output; summed over ranks only where the runner does not do it."""
        # the runner runs shared experts itself, outside the kernel
        del shared_experts, shared_experts_input
        if torch.compiler.is_compiling():
            # only a CPU runner is traced through; elsewhere it is opaque itself
            op = torch.ops.vllm_megamoe.experts
            return op(x, topk_weights, topk_ids, layer.layer_name)
        return self.run(layer, x, topk_weights, topk_ids)

    def run(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """`apply`, as torch.compile never sees it: group sizes depend on the data.

        Raises:
            RuntimeError: the layer is incomplete, or its tensors moved.
        """
        if in_layerwise_reload(layer):
            raise RuntimeError(
                f"{layer.layer_name}: a layerwise weight update is under way and holds "
                "this layer's tensors. Pause the server until it has finished, or end "
                "it with megamoe_abort_reload."
            )
        if envs.get("VLLM_MEGAMOE_VERIFY_ADDRESSES") == "1":
            self.experts.check_addresses(layer)
        if self.crosses_ranks:
            return self._across_ranks(layer, x, topk_weights, topk_ids)
        slots = local_slots(topk_ids, layer.expert_map)
        return self.experts.forward(x, topk_weights, slots)

    def _across_ranks(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor
    ) -> Tensor:
        """Gather every rank's tokens, run the local experts, sum the outputs.

        The only place where this method communicates. Ranks pad to the largest token
        count, with id -1, so an idle rank takes part with zero rows of its own.
        """
        metadata = get_forward_context().dp_metadata
        group = get_dp_group()
        tokens = x.shape[0]
        rows = (
            tokens if metadata is None else int(metadata.num_tokens_across_dp_cpu.max())
        )
        x, topk_weights, topk_ids = (
            group.all_gather(_pad_rows(t, rows, fill), dim=0)
            for t, fill in ((x, 0), (topk_weights, 0), (topk_ids, -1))
        )
        slots = local_slots(topk_ids, layer.expert_map)
        out = self.experts.forward(x, topk_weights, slots)
        out = get_ep_group().all_reduce(out)
        mine = group.rank_in_group * rows
        return out[mine : mine + tokens]


def _experts_op(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer_name: str
) -> Tensor:
    layer = get_forward_context().no_compile_layers[layer_name].routed_experts
    return layer.quant_method.run(layer, x, topk_weights, topk_ids)


def _experts_shape(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer_name: str
) -> Tensor:
    return torch.empty_like(x)


_LIBRARY = torch.library.Library("vllm_megamoe", "FRAGMENT")
direct_register_custom_op(
    "experts", _experts_op, fake_impl=_experts_shape, target_lib=_LIBRARY
)


def local_slots(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Global physical expert ids [T, K] -> slots on this rank; -1 stays -1."""
    if expert_map is None:
        return topk_ids
    mapped = expert_map[topk_ids.clamp(min=0).long()].to(topk_ids.dtype)
    return torch.where(topk_ids < 0, topk_ids, mapped)


def _pad_rows(t: Tensor, rows: int, fill: int) -> Tensor:
    if t.shape[0] == rows:
        return t.contiguous()
    padded = t.new_full((rows, *t.shape[1:]), fill)
    padded[: t.shape[0]] = t
    return padded


def _placement(layer: Any) -> Placement:
    moe: FusedMoEConfig = layer.moe_config
    physical = range(moe.num_experts)
    if layer.expert_map_manager.expert_map is None:
        local = tuple(physical)
    else:
        local = tuple(layer.expert_map_manager.expert_map.tolist())
    return Placement(
        local_slot=local,
        # vLLM lays replicas out behind the logical experts, round robin
        logical=tuple(p % moe.num_logical_experts for p in physical),
        tp_rank=moe.tp_rank,
        tp_size=moe.tp_size,
    )
