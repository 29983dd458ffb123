"""Patches of torch.cuda, so that Megatron-Core can run on host cores.

The patched functions of torch.cuda refer to the host. Ascend's transfer_to_npu patches the same functions, so that they
refer to an NPU.

Invariant: outside of the context `patch_torch_cuda`, torch.cuda is unchanged. This file is used on host cores only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock


class _Nothing:
    """A replacement for a CUDA stream or event, on which all work is always finished."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Nothing()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


@contextmanager
def patch_torch_cuda() -> Iterator[None]:
    """Within the context, make Megatron's calls of torch.cuda work on host cores.

    A few functions of torch.distributed, torch and Megatron are patched for the same purpose.
    """
    import torch
    from megatron.core.tensor_parallel import random  # torch's compiler must see it before torch.cuda is patched
    from megatron.core.transformer.moe import token_dispatcher

    zeros = torch.zeros

    def make_zeros(*args: Any, device: Any = None, **options: Any) -> Any:
        """Make zeros on the host if the caller asks for the device `cuda`.

        Only Megatron's schedules ask for `cuda`, to create counters of tokens. Megatron's other code asks for the
        current device. This function does not use a torch mode, which would intercept every call and need as much time
        per call as a small operator.
        """
        return zeros(*args, device="cpu" if str(device).startswith("cuda") else device, **options)

    answers: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "current_stream": _Nothing,
        "default_stream": _Nothing,
        "stream": lambda *_: nullcontext(),
        "Stream": _Nothing,
        "Event": _Nothing,
        # A function for each name: torch's compiler rejects one function that replaces two.
        "synchronize": lambda *_, **__: None,
        "empty_cache": lambda *_, **__: None,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda *_, **__: None,  # nothing is drawn
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "FloatTensor": torch.FloatTensor,
    }
    state: dict[str, Any] = {
        "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.multiple(random, **state),
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _convert_counts),
        mock.patch.multiple(torch.distributed, all_gather=_gather, reduce_scatter=_reduce),
        mock.patch.object(torch, "zeros", make_zeros),
    ):
        yield


def _convert_counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert the numbers of tokens per expert to numpy, if `as_numpy` is set.

    This function replaces a function of Megatron that moves these numbers to the host. On host cores, the numbers are
    already on the host.
    """
    return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor


def _gather(outputs: list[Any], own: Any, group: Any = None) -> None:
    """Gather tensors from the ranks of a group; the tensors may differ in size.

    Gloo's all_gather does not support different sizes.
    """
    from torch import distributed as dist

    outputs[dist.get_rank(group)].copy_(own)
    for i, part in enumerate(outputs):
        dist.broadcast(part, group=group, group_src=i)


def _reduce(output: Any, parts: list[Any], group: Any = None) -> None:
    """Sum each tensor of `parts` over the ranks, and send rank i the i-th sum.

    The tensors may differ in size, which gloo's reduce_scatter does not support.
    """
    from torch import distributed as dist

    for i, part in enumerate(parts):
        total = part.clone()  # the reduction is in place
        dist.reduce(total, group=group, group_dst=i)
        if i == dist.get_rank(group):
            output.copy_(total)


def make_stage_patches() -> tuple[Any, Any]:
    """Make patches for Megatron's messages between pipeline stages.

    With the patches, a message has a tag that says in which direction it is sent. Gloo matches messages between two
    ranks by order. With pp = 2 the previous and the next stage are the same rank, so without tags gloo would confuse
    the directions.
    """
    import torch
    from megatron.core.pipeline_parallel import p2p_communication
    from torch import distributed as dist

    def exchange_tensors(
        send_prev: Any, recv_prev: Any, send_next: Any, recv_next: Any, prev_rank: int, next_rank: int, group: Any
    ) -> list[Any]:
        requests = []
        for tensor, rank, tag in ((recv_prev, prev_rank, 2), (recv_next, next_rank, 1)):
            requests += [dist.irecv(tensor, rank, group=group, tag=tag)] if tensor is not None else []
        for tensor, rank, tag in ((send_prev, prev_rank, 1), (send_next, next_rank, 2)):
            requests += [dist.isend(tensor, rank, group=group, tag=tag)] if tensor is not None else []
        return requests

    def exchange_batched(
        *,
        tensor_send_prev: Any,
        tensor_recv_prev: Any,
        tensor_send_next: Any,
        tensor_recv_next: Any,
        group: Any,
        prev_pipeline_rank: int,
        next_pipeline_rank: int,
    ) -> list[Any]:
        tensors = (tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next)
        return exchange_tensors(*tensors, prev_pipeline_rank, next_pipeline_rank, group)

    def exchange_shapes(
        self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        received = [torch.empty(3, dtype=torch.int64) if wanted else None for wanted in (recv_prev, recv_next)]
        sent = [
            None if tensor is None else torch.tensor(tensor.shape) for tensor in (tensor_send_prev, tensor_send_next)
        ]
        for request in exchange_tensors(
            sent[0], received[0], sent[1], received[1], self.prev_rank, self.next_rank, self.pp_group
        ):
            request.wait()
        prev_shape, next_shape = ([0, 0, 0] if tensor is None else tensor.tolist() for tensor in received)
        return prev_shape, next_shape

    return mock.patch.multiple(p2p_communication, _batched_p2p_ops=exchange_batched), mock.patch.object(
        p2p_communication.P2PCommunicator, "_communicate_shapes", exchange_shapes
    )
