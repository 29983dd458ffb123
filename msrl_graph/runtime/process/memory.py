"""What a rank holds, measured: the storages of all live tensors, at an instant or at the peak of a phase.

Invariant: a storage counts once, however many tensors share it, and by its present size; host buffers count
apart, since on a CPU device and host share one memory. What a kernel takes for itself while it runs is no tensor and is
not seen.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...backends import devices
from ...hardware.device_kinds import HOST

LETS_GO = 0.002  # seconds in which gloo's thread lets go of what a collective was given, once that has been waited for
_WRAPPERS = {DTensor: "_local_tensor", AsyncCollectiveTensor: "elem"}  # and the attribute with the tensor inside


def _storage(item: torch.Tensor) -> torch.UntypedStorage | None:
    """Where a tensor's elements lie; of a wrapper (DTensor), its local tensor's."""
    for wrapper, inside in _WRAPPERS.items():
        if isinstance(item, wrapper):
            return _storage(getattr(item, inside))
    try:
        storage = item.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a tensor subclass without storage
        return None
    return None if storage.device.type == "meta" else storage  # nor has a fake tensor one, whatever device it tells of


def _storages() -> list[torch.UntypedStorage]:
    """Of all tensors that Python knows."""
    found = (_storage(item) for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
    return [s for s in found if s is not None]


def _sum(storages: list[torch.UntypedStorage]) -> dict[str, int]:
    seen = {s.data_ptr(): s for s in storages}
    seen.pop(0, None)
    away = any(s.device.type != HOST.torch for s in seen.values())  # then what lies on the host is none of a device's
    sizes = {key: devices.size(s) for key, s in seen.items()}
    buffers = (k for k, s in seen.items() if devices.is_host_buffer(s) or (away and s.device.type == HOST.torch))
    host = sum(sizes[key] for key in buffers)
    return {"device": sum(sizes.values()) - host, "host": host}


def held() -> dict[str, int]:
    """Bytes of live tensors on the `device` and in `host` buffers."""
    return _sum(_storages())


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operation is other operations, on every device (in inference mode it comes here before it is taken
    apart)."""
    keys = ("CompositeImplicitAutograd", "CPU", "CUDA", "PrivateUse1")
    composite, *own = (torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)
    return composite and not any(own)


class Peak(TorchDispatchMode):
    """The most bytes that tensors held at one time while this was entered.

    Counted is what was there before, and every tensor that an operation makes, in the backward pass too. `peak` has
    the bytes of the device and of the host; the two need not be of the same moment. `largest` lists what the device
    held at its peak, as (bytes, operation that made it, shape), and `moment` is the operation after which that was.
    Slow, since it looks at every operation. A thread of gloo's holds what a collective was given for a moment after
    that is done, or longer on a busy machine; what only that thread holds is no part of the peak.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = {"device": 0, "host": 0}
        self.moment = ""
        self.largest: list[tuple[int, str, tuple[int, ...]]] = []
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, tuple[int, ...]]] = {}
        self._collected: set[int] = set()  # keys of `_live` that a collective was given

    def __enter__(self) -> Peak:
        if not self.moment:  # and not entered again, from within
            for storage in _storages():
                self._see(storage, "before", ())
            self._look("before")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, tuple(_WRAPPERS)) for t in types):
            return NotImplemented  # a wrapper's own operations come here one by one
        if _is_composite(func):
            with self:
                found = func.decompose(*args, **kwargs or {})
            if found is not NotImplemented:
                return found
        result = func(*args, **kwargs or {})
        for item in tree_leaves(result):
            if isinstance(item, torch.Tensor) and (storage := _storage(item)) is not None:
                self._see(storage, str(func), tuple(item.shape))
        if "c10d" in func.namespace:
            given = (_storage(item) for item in tree_leaves((args, result)) if isinstance(item, torch.Tensor))
            self._collected |= {storage._cdata for storage in given if storage is not None}
        if not devices.making_buffer():  # which counts apart once it is made
            self._look(str(func))
        return result

    def _see(self, storage: torch.UntypedStorage, made_by: str, shape: tuple[int, ...]) -> None:
        key = storage._cdata
        if key not in self._live:
            self._live[key] = (weakref.ref(storage, self._gone(key)), made_by, shape)

    def _gone(self, key: int) -> Callable[[object], None]:
        def remove(_: object) -> None:
            self._live.pop(key, None)
            self._collected.discard(key)

        return remove

    def _now(self) -> tuple[dict[str, int], list[tuple[torch.UntypedStorage, str, tuple[int, ...]]]]:
        live = [(s, made, shape) for ref, made, shape in list(self._live.values()) if (s := ref()) is not None]
        return _sum([s for s, _, _ in live]), live

    def _look(self, moment: str) -> None:
        now, live = self._now()
        if self._collected and now["device"] > self.peak["device"]:
            del live  # which would hold what is to go
            time.sleep(LETS_GO)
            now, live = self._now()
        if now["device"] > self.peak["device"] or not self.moment:
            self.moment = moment
            self.largest = [
                (size, made, shape)
                for s, made, shape in live
                if (size := devices.size(s)) and not devices.is_host_buffer(s)
            ]
        self.peak = {place: max(most, now[place]) for place, most in self.peak.items()}
