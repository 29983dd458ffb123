"""Memory of a vLLM engine: release of its weights and cache, and reallocation.

Invariant: a parameter is the same object at the same address whenever it has memory, so views into it and captured
graphs stay valid. Its contents are lost. On host cores storages are resized. On devices vLLM sleeps (level 2: nothing
is kept), and its allocator maps other memory to the same addresses.
The order is that of vLLM's and vllm-ascend's workers: asleep, weights, cache, asleep again. A worker that sleeps
twice would release memory that it no longer has. vLLM's sleep has run on an H100, vllm-ascend's never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .. import devices
from ..devices import allocate, release, view_bytes

if TYPE_CHECKING:
    import torch


class EngineMemory(Protocol):
    def weights(self) -> None:
        """Allocate the parameters; their contents are undefined."""

    def cache(self) -> None:
        """Allocate an empty cache."""

    def give(self) -> None:
        """Release whatever is allocated of both."""


def release_embedding_buffers(runner: Any) -> None:
    """Release vLLM's buffers for prompts given as embeddings, which are never used.

    They are as large as a step's hidden states.
    """
    for unused in {id(tensor): tensor for tensor in (runner.inputs_embeds.cpu, runner.inputs_embeds.gpu)}.values():
        release(unused)


def clear(cache: torch.Tensor) -> None:
    """Zero a cache: kernels read beyond a sequence's end, where no NaN may be."""
    view_bytes(cache.untyped_storage()).zero_()


class ResizedMemory:
    """Memory on host cores, where vLLM does not sleep."""

    def __init__(self, runner: Any, stages: int) -> None:
        self._parameters = list(runner.model.parameters())
        if runner.intermediate_tensors is None and stages > 1:
            # A stage's input. vLLM allocates it in its warm-up, but not on the CPU.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                runner.max_num_tokens, runner.model_config.dtype, runner.device
            )
        release_embedding_buffers(runner)
        stage_inputs = runner.intermediate_tensors.tensors.values() if runner.intermediate_tensors is not None else ()
        # Layers may share memory.
        self._caches = list(
            {cache.untyped_storage().data_ptr(): cache for cache in (*runner.kv_caches, *stage_inputs)}.values()
        )
        self._sizes = {id(tensor): tensor.untyped_storage().nbytes() for tensor in (*self._parameters, *self._caches)}
        self._open = True  # whether the caches have memory

    def weights(self) -> None:
        for parameter in self._parameters:
            allocate(parameter, self._sizes[id(parameter)])

    def cache(self) -> None:
        if not self._open:
            for cache in self._caches:
                allocate(cache, self._sizes[id(cache)])
                clear(cache)
            self._open = True

    def give(self) -> None:
        for tensor in (*self._parameters, *self._caches):
            release(tensor)
        self._open = False


class SleepingMemory:
    """Memory on devices. `worker` is vLLM's, or a plug-in's."""

    def __init__(self, worker: Any) -> None:
        from torch.utils._pytree import tree_leaves

        self._worker = worker
        release_embedding_buffers(worker.model_runner)
        model: torch.nn.Module = worker.model_runner.model
        self._held = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self._loaded = [*model.parameters(), *model.buffers()]
        self._caches: list[torch.Tensor] = tree_leaves(worker.model_runner.kv_caches)  # some layers have two
        self._weights = self._cache = True  # whether they have memory

    def weights(self) -> None:
        if not self._weights:
            self._worker.wake_up(tags=["weights"])
            devices.wake(self._loaded)
            # vllm-ascend transposes experts on waking, for a load that does not follow here (its pull request 13012).
            for module, name, parameter in self._held:
                setattr(module, name, parameter)
            self._weights = True

    def cache(self) -> None:
        if not self._cache:
            self._worker.wake_up(tags=["kv_cache"])
            devices.wake(self._caches)
            for cache in self._caches:
                clear(cache)
            self._cache = True

    def give(self) -> None:
        if self._weights:
            self.cache()
            self._worker.sleep(level=2)
            devices.sleep([*self._loaded, *self._caches])
            self._weights = self._cache = False
