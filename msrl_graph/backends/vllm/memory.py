"""Release and reallocation of the weights' and the cache's memory in vLLM.

Invariant: a parameter is always the same object, and has the same address whenever it has memory. So views of the
parameter and captured graphs stay valid. A released parameter's contents are lost.

On host cores, storages are resized. On other devices, vLLM's sleep mode is used (level 2: no contents are kept), and
vLLM's allocator maps new memory to the same addresses. The functions of sleep mode are called in the order in which
vLLM's and vllm-ascend's workers call them: sleep, wake the weights, wake the cache, sleep. A worker that sleeps twice
in a row would release memory that it no longer has. vLLM's sleep mode has run on an H100. vllm-ascend's sleep mode has
never run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .. import devices
from ..devices import allocate, release, view_bytes

if TYPE_CHECKING:
    import torch


class EngineMemory(Protocol):
    def weights(self) -> None:
        """Allocate the parameters' memory; the parameters' contents are undefined."""

    def cache(self) -> None:
        """Allocate the memory of the KV cache, and clear the cache."""

    def give(self) -> None:
        """Release the memory of the parameters and of the KV cache, if they have memory."""


def release_embedding_buffers(runner: Any) -> None:
    """Release vLLM's buffers for prompts that are passed as embeddings.

    The buffers are never used. They are as large as a step's hidden states.
    """
    for unused in {id(tensor): tensor for tensor in (runner.inputs_embeds.cpu, runner.inputs_embeds.gpu)}.values():
        release(unused)


def clear(cache: torch.Tensor) -> None:
    """Fill a KV cache with zeros.

    Kernels read beyond a sequence's end, where the cache must not contain NaN.
    """
    view_bytes(cache.untyped_storage()).zero_()


class ResizedMemory:
    """The memory of an engine on host cores, where vLLM's sleep mode is not used."""

    def __init__(self, runner: Any, stages: int) -> None:
        self._parameters = list(runner.model.parameters())
        if runner.intermediate_tensors is None and stages > 1:
            # The input of a pipeline stage. vLLM allocates it in its warm-up, but not on the CPU.
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
    """The memory of an engine on GPUs or NPUs.

    vLLM's sleep mode releases this memory. `worker` is vLLM's worker, or the worker of a vLLM plug-in.
    """

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
            # vllm-ascend transposes experts when it wakes, to load weights next (its pull request 13012). Here no load
            # follows, so restore the parameters.
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
