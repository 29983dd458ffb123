"""The measured memory of a rank: the bytes of the storages of all live tensors.

The bytes are measured at one moment (`live_bytes`), or as the peak of a phase (`Peak`).

Invariant: a storage counts once, by its present size, even if several tensors share it. Host buffers are main memory
for tensors that are moved away from the device, such as weights that are swapped out. They are counted separately from
other tensors in main memory. If the CPU is the device, tensors outside host buffers count as device memory. Memory that
a kernel allocates for itself while it runs is not part of a tensor and is not measured.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...backends import devices
from ...hardware.device_kinds import HOST

RELEASE_SECONDS = 0.002  # seconds in which gloo's thread releases a collective's tensors after the wait for it
# Where a storage is: on a device, in a host buffer, or in main memory, which is the device memory of a CPU.
DEVICE, BUFFER, MAIN = PLACES = ("device", "buffer", "main")
_entered = threading.local()  # the `peak` that is entered in a thread
_WRAPPERS = {DTensor: "_local_tensor", AsyncCollectiveTensor: "elem"}  # and the attribute with the tensor inside


def _storage(item: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, or None if the tensor has no memory of its own.

    For a wrapper such as DTensor, the result is the storage of the local tensor inside.
    """
    if type(item) is not torch.Tensor:
        for wrapper, inside in _WRAPPERS.items():
            if isinstance(item, wrapper):
                return _storage(getattr(item, inside))
    try:
        storage = item.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a tensor subclass without storage
        return None
    # A fake tensor has no storage, whatever device it reports.
    return None if storage.device.type == "meta" else storage


def _storages() -> list[torch.UntypedStorage]:
    """Return the storages of all tensors that Python's garbage collector knows."""
    known = gc.get_objects()
    kinds = {kind for kind in {*map(type, known)} if issubclass(kind, torch.Tensor)}
    storages = (_storage(item) for item in known if type(item) in kinds)
    return [storage for storage in storages if storage is not None]


def _sum(storages: list[torch.UntypedStorage]) -> dict[str, int]:
    """Return how many bytes the storages use on the device and on the host.

    Storages at the same address share one memory. The size of this memory is the size of the largest of these storages.
    """
    sizes: dict[int, int] = {}
    places: dict[int, str] = {}
    for storage in storages:
        if address := storage.data_ptr():
            sizes[address] = max(devices.count_allocated_bytes(storage), sizes.get(address, 0))
            places[address] = _place(storage)
    sums = dict.fromkeys(PLACES, 0)
    for address, size in sizes.items():
        sums[places[address]] += size
    return _by_place(sums, DEVICE in places.values())


def _place(storage: torch.UntypedStorage) -> str:
    if devices.is_host_buffer(storage):
        return BUFFER
    return MAIN if storage.device.type == HOST.torch else DEVICE


def _by_place(sums: Mapping[str, int], other_device: bool) -> dict[str, int]:
    """Return the number of bytes on the `device` and on the `host`.

    `sums` has the number of bytes in each place. The places (`PLACES`) are a device other than the CPU, host buffers,
    and other main memory. `other_device` is true if some storage is on a device other than the CPU. Main memory then
    counts as host memory. If `other_device` is false, the CPU is the device, and main memory counts as device memory.
    """
    main = sums[MAIN]
    return {
        "device": sums[DEVICE] + (0 if other_device else main),
        "host": sums[BUFFER] + (main if other_device else 0),
    }


def live_bytes() -> dict[str, int]:
    """Return how many bytes the live tensors use on the `device` and on the `host`."""
    return _sum(_storages())


@contextmanager
def unmeasured() -> Iterator[None]:
    """Context whose operations a `Peak` does not measure.

    These operations must not need more memory than the operations that were measured before them.
    """
    peak: Peak | None = getattr(_entered, "peak", None)
    if peak is None:
        yield
        return
    peak.pause()
    try:
        yield
    finally:
        peak.resume()


class _Operation(NamedTuple):
    """The facts about a torch operation that a measurement needs."""

    name: str
    # Made of other operations on every device (in inference mode it is dispatched before it is decomposed).
    composite: bool
    mutable: bool  # it may change the storages that it is given
    collective: bool


@cache
def _operation(func: Any) -> _Operation:
    keys = ("CompositeImplicitAutograd", "CPU", "CUDA", "PrivateUse1")
    composite, *own = (torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)
    return _Operation(str(func), composite and not any(own), bool(func._schema.is_mutable), "c10d" in func.namespace)


def _tensors(items: Any) -> list[torch.Tensor]:
    if isinstance(items, torch.Tensor):
        return [items]
    if isinstance(items, list | tuple) and all(type(item) is torch.Tensor for item in items):
        return [*items]
    return [item for item in tree_leaves(items) if isinstance(item, torch.Tensor)]


@dataclass(slots=True)
class _Entry:
    """A storage that an `_Account` counts, and the bytes that are counted for it."""

    storage: weakref.ref[torch.UntypedStorage]
    made_by: str
    shape: tuple[int, ...]
    address: int = 0
    extent: int = 0  # bytes of the storage, even while it has no memory on the device
    size: int = 0
    buffer: bool = False


Item = tuple[int, str, tuple[int, ...]]  # bytes, the operation that made it, shape


class _Account:
    """A running sum of the bytes of live storages.

    The sum is updated when a storage is made, freed or resized.

    Invariant: after `settle`, the sum is equal to `_sum` over the live storages that the account knows. Some changes
    are queued until the next `settle`: changes in another thread, and changes that happen while the account itself is
    being updated. The garbage collector can cause the second kind at any moment.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by storage
        self._by_address: dict[int, set[int]] = {}  # by address: keys of `_entries`
        self._counted: dict[int, tuple[str, int]] = {}  # by address: place and bytes in `_sums`
        self._sums = dict.fromkeys(PLACES, 0)
        self._device_addresses = 0  # the number of addresses on a device other than the host
        self._events: deque[tuple[int, weakref.ref[torch.UntypedStorage] | None]] = deque()
        self._since: dict[int, Item | None] = {}  # by storage that changed since the mark: its state then
        self.freed: Callable[[int], object] = lambda key: None
        self.changed = False  # since it was last set to False

    def note(self, storage: torch.UntypedStorage) -> None:
        """Queue a change of a storage until the next `settle`."""
        self._events.append((storage._cdata, None))

    def note_all(self) -> None:
        self._events.extend((key, None) for key in [*self._entries])

    def settle(self) -> None:
        """Update the sum with all queued changes."""
        while self._events:
            key, gone = self._events.popleft()
            entry = self._entries.get(key)
            if entry is None or (gone is not None and entry.storage is not gone):
                continue
            storage = entry.storage()
            if storage is not None:
                self._update(key, entry, storage)
            elif gone is not None:
                self._forget(key, entry)

    def see(self, storage: torch.UntypedStorage, made_by: str, shape: tuple[int, ...]) -> None:
        """Update the sum for a storage that is new or may have changed.

        For a new storage, `made_by` is the operation that made the storage, and `shape` is the shape of the tensor in
        the storage.
        """
        if self._events:
            self.settle()
        key = storage._cdata
        entry = self._entries.get(key)
        if entry is not None and (storage.data_ptr(), storage.nbytes()) == (entry.address, entry.extent):
            return
        if entry is None:
            reference = weakref.ref(storage, lambda gone: self._events.append((key, gone)))
            entry = self._entries[key] = _Entry(reference, made_by, shape)
            self._since.setdefault(key, None)
        self._update(key, entry, storage)

    def see_again(self, storage: torch.UntypedStorage) -> None:
        """Update the sum for a storage that may have changed, if the account knows it."""
        if storage._cdata in self._entries:
            self.see(storage, "", ())

    def now(self) -> dict[str, int]:
        """Return the live bytes on the `device` and the `host` at the last `settle`."""
        return _by_place(self._sums, self._device_addresses > 0)

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the storages that the account knows and that are still live."""
        return [storage for entry in [*self._entries.values()] if (storage := entry.storage()) is not None]

    def mark(self) -> None:
        """Remember which storages are counted now, so that `marked` can return them later."""
        self._since.clear()

    def marked(self) -> list[Item]:
        """Return the storages that were counted at the last `mark`, except host buffers.

        Each item is (bytes, operation that made the storage, shape).
        """
        unchanged = (_item(entry) for key, entry in self._entries.items() if key not in self._since)
        return [item for item in (*unchanged, *self._since.values()) if item is not None]

    def _update(self, key: int, entry: _Entry, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        entry.extent = storage.nbytes()
        buffer = devices.is_host_buffer(storage)
        size = devices.count_allocated_bytes(storage)
        if (address, size, buffer) == (entry.address, entry.size, entry.buffer):
            return
        self._since.setdefault(key, _item(entry))
        before = entry.address
        entry.address = address
        entry.size = size
        entry.buffer = buffer
        if before != address:
            self._leave(before, key)
        if address:
            self._by_address.setdefault(address, set()).add(key)
            self._count(address)

    def _forget(self, key: int, entry: _Entry) -> None:
        self._since.setdefault(key, _item(entry))
        del self._entries[key]
        self._leave(entry.address, key)
        self.freed(key)

    def _leave(self, address: int, key: int) -> None:
        if address:
            self._by_address[address].discard(key)
            self._count(address)

    def _count(self, address: int) -> None:
        """Update the sum for the storages at one address, which share one memory."""
        self.changed = True
        place, size = self._counted.pop(address, (MAIN, 0))
        self._sums[place] -= size
        self._device_addresses -= place == DEVICE
        live = [storage for key in self._by_address[address] if (storage := self._entries[key].storage()) is not None]
        if not live:
            if not self._by_address[address]:
                del self._by_address[address]
            return
        place = _place(live[0])
        size = max(map(devices.count_allocated_bytes, live))
        self._counted[address] = place, size
        self._sums[place] += size
        self._device_addresses += place == DEVICE


def _item(entry: _Entry) -> Item | None:
    return None if entry.buffer or not entry.size else (entry.size, entry.made_by, entry.shape)


class Peak(TorchDispatchMode):
    """The peak of the bytes of live tensors while this context is active.

    The peak includes the tensors that exist when the context begins, and every tensor that an operation makes.
    Operations of the backward pass are included.

    - `peak`: the largest number of bytes on the device and on the host. The two peaks may occur at different times.
    - `before`: the bytes on the device and on the host when the context begins.
    - `largest`: the storages that are on the device when the device has its peak, as (bytes, operation that made the
      storage, shape).
    - `moment`: the operation after which the device has its peak.

    After each operation, only the storages that this operation has made or changed are examined. A thread of gloo holds
    the tensors of a collective for a short time after the collective is done, and longer on a busy machine. Memory that
    only this thread holds is not part of the peak.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before = {"device": 0, "host": 0}
        self.peak = {"device": 0, "host": 0}
        self.moment = ""
        self._account = _Account()
        self._collected: set[int] = set()  # storages that were passed to a collective
        self._account.freed = self._collected.discard
        self._depth = 0  # it may be entered again from within
        self._watching = ExitStack()

    @property
    def largest(self) -> list[Item]:
        return self._account.marked()

    def __enter__(self) -> Peak:
        self._depth += 1
        if self._depth == 1:
            self._watching.enter_context(devices.watch_storages(self._account.note))
            if self.moment:
                self._account.note_all()
            else:
                for storage in _storages():
                    self._account.see(storage, "before", ())
                self._look("before")
                self.before = dict(self.peak)
            _entered.peak = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if not self._depth:
            _entered.peak = None
            self._watching.close()

    def pause(self) -> None:
        """Ignore this thread's operations until `resume`."""
        _entered.peak = None
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def resume(self) -> None:
        super().__enter__()  # type: ignore[no-untyped-call]
        _entered.peak = self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(issubclass(kind, tuple(_WRAPPERS)) for kind in types):
            return NotImplemented  # a wrapper's own operations are dispatched one by one
        operation = _operation(func)
        if operation.composite:
            with self:
                decomposed = func.decompose(*args, **kwargs or {})
            if decomposed is not NotImplemented:
                return decomposed
        result = func(*args, **kwargs or {})
        for item in _tensors(result):
            if (storage := _storage(item)) is not None:
                self._account.see(storage, operation.name, tuple(item.shape))
        if operation.mutable:
            for item in _tensors((args, kwargs)):
                if (storage := _storage(item)) is not None:
                    self._account.see_again(storage)
        if operation.collective:
            storages = (_storage(item) for item in _tensors((args, result)))
            self._collected |= {storage._cdata for storage in storages if storage is not None}
        if not devices.is_making_buffer():  # a buffer counts separately once it is made
            self._look(operation.name)
        return result

    def _look(self, moment: str) -> None:
        self._account.settle()
        if not self._account.changed and self.moment:
            return
        self._account.changed = False
        now = self._account.now()
        if self._collected and now["device"] > self.peak["device"]:
            time.sleep(RELEASE_SECONDS)
            self._account.settle()
            now = self._account.now()
        if now["device"] > self.peak["device"] or not self.moment:
            self.moment = moment
            self._account.mark()
        self.peak = {place: max(most, now[place]) for place, most in self.peak.items()}
