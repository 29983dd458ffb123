"""What a rank holds, measured: the storages of all live tensors.

Invariant: a storage counts once, however many tensors share it; host buffers (of a swap) count apart, since on a CPU device and host
share one memory.
"""

from __future__ import annotations

import gc

import torch

_host: set[int] = set()  # data pointers of host buffers


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Marks a tensor's storage as host memory."""
    _host.add(tensor.untyped_storage().data_ptr())
    return tensor


def forget(tensor: torch.Tensor) -> None:
    _host.discard(tensor.untyped_storage().data_ptr())


def held() -> dict[str, int]:
    """Bytes of live tensors on the `device` and in `host` buffers."""
    seen: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type != "meta":
            local = item.to_local() if hasattr(item, "to_local") else item
            try:
                storage = local.untyped_storage()
            except (NotImplementedError, RuntimeError):  # a tensor subclass without storage
                continue
            seen[storage.data_ptr()] = storage.nbytes()
    seen.pop(0, None)
    host = sum(size for pointer, size in seen.items() if pointer in _host)
    return {"device": sum(seen.values()) - host, "host": host}
