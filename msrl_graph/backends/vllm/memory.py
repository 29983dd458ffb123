"""What an engine of vLLM gives back while others compute, its weights and its cache, and how it gets them again.

Invariant: a parameter is the same object at the same address whenever it has memory, so that views into it hold, and
graphs that were captured. What it held is lost. On a host's cores storages are resized; on devices vLLM sleeps (level
2: nothing is kept), whose allocator maps other memory to the same addresses. The order is that of vLLM's and
vllm-ascend's workers: asleep, weights, cache, and asleep again; a worker that sleeps twice would give back what it no
longer has. vLLM's has slept so on an H100, vllm-ascend's never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .. import devices
from ..devices import content, release, take

if TYPE_CHECKING:
    import torch


class EngineMemory(Protocol):
    def weights(self) -> None:
        """Parameters have memory; what is in it means nothing."""

    def cache(self) -> None:
        """The cache has memory, empty."""

    def give(self) -> None:
        """Gives back what there is of both."""


def forget(runner: Any) -> None:
    """Gives back what vLLM has for prompts that come as embeddings, which none does: as large as a step's hidden
    states."""
    for unread in {id(t): t for t in (runner.inputs_embeds.cpu, runner.inputs_embeds.gpu)}.values():
        release(unread)


def clear(cache: torch.Tensor) -> None:
    """What kernels read beyond a sequence's end must be numbers."""
    content(cache.untyped_storage()).zero_()


class ResizedMemory:
    """On a host's cores, where vLLM does not sleep."""

    def __init__(self, runner: Any, stages: int) -> None:
        self._parameters = list(runner.model.parameters())
        if runner.intermediate_tensors is None and stages > 1:
            # A stage's input, which vLLM makes room for when it warms up; on the CPU it does not.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                runner.max_num_tokens, runner.model_config.dtype, runner.device
            )
        forget(runner)
        passed = runner.intermediate_tensors.tensors.values() if runner.intermediate_tensors is not None else ()
        # Layers may share one memory.
        self._caches = list({c.untyped_storage().data_ptr(): c for c in (*runner.kv_caches, *passed)}.values())
        self._sizes = {id(t): t.untyped_storage().nbytes() for t in (*self._parameters, *self._caches)}
        self._open = True  # whether the caches have memory

    def weights(self) -> None:
        for parameter in self._parameters:
            take(parameter, self._sizes[id(parameter)])

    def cache(self) -> None:
        if not self._open:
            for cache in self._caches:
                take(cache, self._sizes[id(cache)])
                clear(cache)
            self._open = True

    def give(self) -> None:
        for tensor in (*self._parameters, *self._caches):
            release(tensor)
        self._open = False


class SleepingMemory:
    """On devices. `worker` is vLLM's, or of a plug-in of it."""

    def __init__(self, worker: Any) -> None:
        from torch.utils._pytree import tree_leaves

        self._worker = worker
        forget(worker.model_runner)
        model: torch.nn.Module = worker.model_runner.model
        self._held = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self._loaded = [*model.parameters(), *model.buffers()]
        self._caches: list[torch.Tensor] = tree_leaves(worker.model_runner.kv_caches)  # of some a layer has two
        self._weights = self._cache = True  # whether they have memory

    def weights(self) -> None:
        if not self._weights:
            self._worker.wake_up(tags=["weights"])
            devices.wake(self._loaded)
            # vllm-ascend turns experts as it wakes, for a load that does not follow here (its pull request 13012).
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
