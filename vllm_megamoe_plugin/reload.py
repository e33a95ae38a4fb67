# SPDX-License-Identifier: Apache-2.0
"""vLLM's reloads: how far one is, how to end one, and guards around all of them.

As in `compat`, each patch says why, what and when it goes; none does anything for a
model without our layers. `registration` installs them and says what they call.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from .compat import rebind

_MARK = "_megamoe_guarded"
OnModel = Callable[[nn.Module], None]


def in_layerwise_reload(module: nn.Module) -> bool:
    """Whether vLLM holds temporary tensors on the module, to be copied back later."""
    from vllm.model_executor.model_loader.reload import layerwise

    return layerwise.get_layerwise_info(module).can_load()


def layerwise_progress(model: nn.Module) -> tuple[list[str], list[str]]:
    """Modules that a layerwise reload still waits for, and those it has replaced.

    A reload takes on all modules of a model when it begins and lets go of each one as
    its last tensor arrives; those without tensors, which are in neither list, stay in
    it to its end. Both lists are empty while no reload is under way.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    def has_tensors(module: nn.Module) -> bool:
        return any(layerwise.get_layer_params_buffers(module))

    # the outermost one: models may share others (rotary embeddings)
    witness = next((m for m in model.modules() if not has_tensors(m)), model)
    if not in_layerwise_reload(witness):
        return [], []
    waiting: list[str] = []
    done: list[str] = []
    for name, module in model.named_modules():
        if has_tensors(module):
            (waiting if in_layerwise_reload(module) else done).append(name)
    return waiting or [type(model).__name__], done


def abort_layerwise(modules: Iterable[nn.Module]) -> None:
    """Put the live tensors of modules in an unfinished layerwise reload back.

    Why: vLLM has no way to abort one; a refusal half way would leave temporary or meta
    tensors registered for good. Goes when `reload.layerwise` can abort.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for module in modules:
        info = layerwise.get_layerwise_info(module)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(module, info)
            info.reset()
        layerwise.LOADING_LAYERS.discard(module)
        if hasattr(module, "_original_do_torchao_reload"):
            module._do_torchao_reload = module._original_do_torchao_reload


def end_update_session(worker: Any) -> None:
    """Let a next sender start, as if the session a sender left had failed.

    Why: vLLM ends a session when a chunk fails or the sender finishes it, never for a
    sender that is gone. Goes when vLLM has an endpoint for that.
    """
    from vllm.v1.worker import gpu_worker

    if not worker._weight_update_active:
        return
    worker._weight_update_active = False
    worker.weight_transfer_engine.reset_weight_update_target()
    if worker._weight_update_is_draft and hasattr(
        gpu_worker, "restore_quantized_lm_heads"
    ):  # vLLM 0.33
        gpu_worker.restore_quantized_lm_heads(worker.get_draft_model(), refresh=False)


# --- guards ---------------------------------------------------------------------


def guard_reloads(
    module: ModuleType,
    concerns: Callable[[nn.Module], bool],
    begin: OnModel,
    end: OnModel,
) -> None:
    """Make each layerwise reload start clean and end right, whoever runs it.

    Why: vLLM goes on from a reload that was left half way, mixing its buffered tensors
    with the new ones, and passes over output heads that nothing loads. Goes when
    `reload.layerwise` can abort and repacks tied heads.

    Args:
        module: vLLM's `reload.layerwise`.
        concerns: whether a model has layers of ours.
        begin: called before a reload takes the model on.
        end: called after the last module has been processed.
    """
    initialize, finalize = (
        module.initialize_layerwise_reload,
        module.finalize_layerwise_processing,
    )
    if hasattr(initialize, _MARK):
        return

    @wraps(initialize)
    def initialize_layerwise_reload(model: nn.Module) -> None:
        if concerns(model):
            begin(model)
        initialize(model)

    @wraps(finalize)
    def finalize_layerwise_processing(model: nn.Module, model_config: Any) -> None:
        if not concerns(model):
            finalize(model, model_config)
            return
        heads = _passed_over_heads(model, model_config)
        finalize(model, model_config)
        for head in heads:
            _repack_tied_head(head, model)
        end(model)

    setattr(initialize_layerwise_reload, _MARK, True)
    rebind(module, "initialize_layerwise_reload", initialize_layerwise_reload)
    rebind(module, "finalize_layerwise_processing", finalize_layerwise_processing)


def _passed_over_heads(model: nn.Module, model_config: Any) -> list[nn.Module]:
    """Output heads with a packed copy, tied to an embedding, that a reload leaves."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import layerwise

    def waits(head: nn.Module) -> bool:
        # one that was loaded has left the reload
        info = layerwise.get_layerwise_info(head)
        return info.kernel_tensors is not None and not info.load_numel

    packed: list[nn.Module] = [
        module
        for module in model.modules()
        if isinstance(module, ParallelLMHead)
        and hasattr(module, "cpu_linear")
        and waits(module)
    ]
    # one that is not tied keeps what it had when an update leaves it out
    return packed if packed and model_config.hf_text_config.tie_word_embeddings else []


def _repack_tied_head(head: Any, model: Any) -> None:
    """Renew the packed copy of an output head that no checkpoint tensor names.

    Why: on CPU a head that is tied to the input embedding keeps a packed copy of its
    own, and may have dropped the shared weight. Layerwise reload would leave it with
    the old weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    shape = (head.num_embeddings_per_partition, head.embedding_dim)
    embeddings: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding)
        and not isinstance(module, ParallelLMHead)
    ]
    sources = [m for m in embeddings if tuple(m.weight.shape) == shape]
    if len(sources) != 1:
        raise RuntimeError(
            f"The output head was not in the update and {len(sources)} embeddings "
            f"have its shape {shape}, so it cannot be told what it is tied to."
        )
    head.weight = sources[0].weight
    head.quant_method.process_weights_after_loading(head)


def guard_worker(
    module: ModuleType,
    concerns: Callable[[nn.Module], bool],
    discard: Callable[[nn.Module, str], None],
) -> None:
    """Notice when a worker throws its weights away.

    Why: deep sleep, discarding and the checker's reset free or zero the weights where
    no loader sees it, and vLLM would serve what is left. Goes when vLLM refuses to
    serve discarded weights itself.

    Args:
        module: vLLM's `gpu_worker`. A worker that ignores sleep (the CPU one) overrides
            these methods, so that nothing is marked there.
        discard: called with what happens to a model's weights, just before it does.
    """
    Worker = module.Worker
    if hasattr(Worker.sleep, _MARK):
        return
    sleep, throw_away, reset = Worker.sleep, Worker.discard, Worker.reset_weights

    def gone(why: str, *models: nn.Module | None) -> None:
        for model in models:
            if model is not None and concerns(model):
                discard(model, why)

    @wraps(sleep)
    def _sleep(self: Any, level: int = 1) -> None:
        if level == 2:
            why = "Sleep level 2 discarded the weights."
            gone(why, self.get_model(), self.get_draft_model())
        sleep(self, level)

    @wraps(throw_away)
    def _discard(self: Any, tags: tuple[str, ...]) -> None:
        if "weights" in tags:
            why = "The weights were discarded."
            gone(why, self.get_model(), self.get_draft_model())
        throw_away(self, tags)

    @wraps(reset)
    def _reset_weights(self: Any) -> None:
        gone("The weight checker reset the weights to zero.", self.get_model())
        reset(self)

    setattr(_sleep, _MARK, True)
    Worker.sleep, Worker.discard, Worker.reset_weights = (
        _sleep,
        _discard,
        _reset_weights,
    )
