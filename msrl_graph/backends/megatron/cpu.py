"""Megatron-Core on a host's cores: torch.cuda answers for them, in the place where Ascend's transfer_to_npu lets it
answer for an NPU.

Invariant: outside of `answering` torch.cuda is what it was. Nothing here is used on a device that has kernels of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock


class _Nothing:
    """A stream or an event: all has been done already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Nothing()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def answering() -> Iterator[None]:
    """Within, what asks torch.cuda for a device, a stream or memory gets the host's."""
    import torch
    from megatron.core.tensor_parallel import random  # which torch's compiler must see before torch.cuda is patched
    from megatron.core.transformer.moe import token_dispatcher

    zeros = torch.zeros

    def on_host(*args: Any, device: Any = None, **given: Any) -> Any:
        """The schedules count tokens in zeros on `cuda`; all else asks for the current device. A mode that looks at
        every call of torch would take as long as small operators do."""
        return zeros(*args, device="cpu" if str(device).startswith("cuda") else device, **given)

    answers: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "current_stream": _Nothing,
        "default_stream": _Nothing,
        "stream": lambda *_: nullcontext(),
        "Stream": _Nothing,
        "Event": _Nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": _nothing,  # nothing is drawn
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
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _moved),
        mock.patch.multiple(torch.distributed, all_gather=_gather, reduce_scatter=_reduce),
        mock.patch.object(torch, "zeros", on_host),
    ):
        yield


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What counts tokens on their way to experts is on the host already, but not in the form that it takes there."""
    return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor


def _gather(found: list[Any], own: Any, group: Any = None) -> None:
    """Unlike gloo's, of tensors of any size."""
    from torch import distributed as dist

    found[dist.get_rank(group)].copy_(own)
    for i, part in enumerate(found):
        dist.broadcast(part, group=group, group_src=i)


def _reduce(found: Any, parts: list[Any], group: Any = None) -> None:
    """Unlike gloo's, of tensors of any size."""
    from torch import distributed as dist

    for i, part in enumerate(parts):
        total = part.clone()  # the sum takes its place
        dist.reduce(total, group=group, group_dst=i)
        if i == dist.get_rank(group):
            found.copy_(total)


def stages_apart() -> tuple[Any, Any]:
    """Patches Megatron's messages between stages: gloo matches them by order, and where pp is 2 the stage before and
    the one behind are the same rank; tags keep the two directions apart."""
    import torch
    from megatron.core.pipeline_parallel import p2p_communication
    from torch import distributed as dist

    def four(out_back: Any, in_back: Any, out_on: Any, in_on: Any, back: int, on: int, group: Any) -> list[Any]:
        made = []
        for tensor, rank, tag in ((in_back, back, 2), (in_on, on, 1)):
            made += [dist.irecv(tensor, rank, group=group, tag=tag)] if tensor is not None else []
        for tensor, rank, tag in ((out_back, back, 1), (out_on, on, 2)):
            made += [dist.isend(tensor, rank, group=group, tag=tag)] if tensor is not None else []
        return made

    def batched(
        *,
        tensor_send_prev: Any,
        tensor_recv_prev: Any,
        tensor_send_next: Any,
        tensor_recv_next: Any,
        group: Any,
        prev_pipeline_rank: int,
        next_pipeline_rank: int,
    ) -> list[Any]:
        ends = (tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next)
        return four(*ends, prev_pipeline_rank, next_pipeline_rank, group)

    def shapes(
        self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        into = [torch.empty(3, dtype=torch.int64) if wanted else None for wanted in (recv_prev, recv_next)]
        out = [None if t is None else torch.tensor(t.shape) for t in (tensor_send_prev, tensor_send_next)]
        for work in four(out[0], into[0], out[1], into[1], self.prev_rank, self.next_rank, self.pp_group):
            work.wait()
        back, on = ([0, 0, 0] if t is None else t.tolist() for t in into)
        return back, on

    return mock.patch.multiple(p2p_communication, _batched_p2p_ops=batched), mock.patch.object(
        p2p_communication.P2PCommunicator, "_communicate_shapes", shapes
    )
