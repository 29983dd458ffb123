"""A device as torch sees it: its memory, its streams and its host buffers.

A host buffer is a tensor in host memory to which a tensor of the device can be copied.

Invariant: importing this module does not import torch. All code that depends on the kind of a device
(hardware/device_kinds.py) goes through a TorchDevice: no other code calls the torch module of a device kind, such as
torch.cuda. On host cores, operations on streams and events do nothing.

The kind `npu` has never been run, because no NPU was available. The code for NPUs follows the documentation of
torch_npu, which has the same function names as torch.cuda. Torch supports NPUs after torch_npu has been imported. The
kind `cuda` was run on one H100 (docs/results.md).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..hardware.device_kinds import DEVICE_KINDS, HOST, DeviceKind

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ..sharding.layout import Layout

PROCESS = Path("/proc/self")

# Addresses of host buffers. On host cores nothing else distinguishes host buffers from tensors of the device.
_host_buffers: set[int] = set()
_making_buffer = False  # a host buffer is being allocated that is not in _host_buffers yet
# By address: storages whose memory an allocator has taken without torch's knowledge.
_sleeping_storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
_RESIZE = "resize_"
# Callbacks for storages whose memory changes without a torch operation.
_watchers: list[Callable[[torch.UntypedStorage], object]] = []


class MemoryUsage(NamedTuple):
    """Free and total memory of a device, in bytes."""

    free: int
    total: int


@dataclass(frozen=True)
class TorchDevice:
    """The `index`-th device of a kind, among the devices that this process sees.

    A visibility mask can hide devices of the host from the process (hardware/visibility_masks.py).
    """

    kind: DeviceKind = HOST
    index: int = 0

    @property
    def place(self) -> torch.device:
        import torch

        # Host tensors have no device index; a tensor would be copied to a device with an index.
        return torch.device(self.kind.torch) if self.kind.is_host else torch.device(self.kind.torch, self.index)

    @property
    def _module(self) -> Any:
        import torch

        if self.kind.plugin:
            import_module(self.kind.plugin)
        return torch.get_device_module(self.kind.torch)

    def claim(self) -> None:
        """Make this device the process's current device.

        Torch then uses this device for a device name without an index, such as "cuda".
        """
        self._module.set_device(self.index)

    def finish(self) -> None:
        """Wait until all work that was started on the device has finished."""
        self._module.synchronize()

    # Memory.

    def memory(self) -> MemoryUsage:
        """Return the free and total memory of the device.

        Memory that other processes hold does not count as free. For host cores, the result is the host's free and total
        memory.
        """
        if self.kind.shares_host_memory:
            import psutil

            host_memory = psutil.virtual_memory()
            return MemoryUsage(host_memory.available, host_memory.total)
        return MemoryUsage(*self._module.mem_get_info(self.index))

    def peak(self) -> int:
        """Return this process's peak memory since `reset_peak`, in bytes.

        On a GPU or NPU, the peak counts the memory of tensors. On host cores, the peak counts all memory of the
        process.
        """
        if not self.kind.shares_host_memory:
            return int(self._module.max_memory_allocated(self.index))
        lines = (PROCESS / "status").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

    def reset_peak(self) -> None:
        if self.kind.shares_host_memory:
            (PROCESS / "clear_refs").write_text("5", encoding="utf-8")  # proc(5): resets the peak to the current use
        else:
            self._module.reset_peak_memory_stats(self.index)

    def host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate host memory for a copy of a tensor of this device.

        If the device has its own memory, the host memory is pinned. Copies between pinned host memory and the device do
        not need the host's CPU.
        """
        global _making_buffer
        import torch

        pinned = not self.kind.shares_host_memory
        _making_buffer = True
        try:
            # The buffer has the tensor's memory layout.
            buffer = torch.empty_like(tensor, device=HOST.torch, pin_memory=pinned)
        finally:
            _making_buffer = False
        _register_buffer(buffer.untyped_storage())
        return buffer


class Lane:
    """A stream of a device, in addition to the stream on which the process computes."""

    def __init__(self, device: TorchDevice) -> None:
        self.module = device._module
        self.stream = self.module.Stream()

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Run the operations in the body of the `with` statement on this stream.

        The operations start after all work that the caller's stream has already started, because that work can still
        use the same memory. The operations run concurrently with the work that the caller's stream starts later.
        """
        self.stream.wait_stream(self.module.current_stream())
        with self.module.stream(self.stream):
            yield

    def mark(self) -> Any:
        """Return an event that completes when all work started on this stream is done.

        The event can be passed to `join`.
        """
        event = self.module.Event()
        event.record(self.stream)
        return event

    def join(self, mark: Any = None) -> None:
        """Make the caller's stream wait for this stream.

        The caller's stream waits for the work before the event `mark`, or for all work of this stream if `mark` is
        None.
        """
        if mark is None:
            mark = self.mark()
        self.module.current_stream().wait_event(mark)


@dataclass(frozen=True)
class Devices:
    """The device, rank and process mesh with which an engine is built.

    - `device`: this rank's device.
    - `rank`: this rank's number in the layout.
    - `mesh`: the mesh of all ranks of the layout. It has the axes dp and tp, and each other axis that is larger than 1.
      None if the layout has a single rank.
    - `per_host`: the number of ranks of the mesh on each host; consecutive ranks share a host. 0 if one host has all
      ranks.

    An engine that needs more process groups creates them from its own ranks (`make_group`).
    """

    device: TorchDevice = TorchDevice()
    rank: int = 0
    mesh: DeviceMesh | None = None
    per_host: int = 0

    # Process groups that exist already, by their ranks.
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def axis(self, name: str) -> DeviceMesh:
        assert self.mesh is not None
        return self.mesh[name]

    def on_one_host(self, axis: str) -> bool:
        """Return whether this rank's group along a mesh axis is on one host."""
        ranks = self.axis(axis).mesh.tolist()
        return not self.per_host or len({rank // self.per_host for rank in ranks}) == 1

    def make_group(self, layout: Layout, *shared_axes: str) -> Any:
        """Return the process group of the ranks that share coordinates with this rank.

        The group has all ranks of `layout` whose coordinates on the axes `shared_axes` equal this rank's coordinates.
        The ranks of the group are ordered by their number in the layout. If the ranks hold different experts, the
        experts are in the same order as the ranks. Only a `Layout.inner` (the number of data-parallel replicas with
        adjacent ranks) greater than 1 would change this order, and `Layout.inner` is 1 for every node that trains. The
        first call for a group is a collective: all ranks of the group must make the call.
        """
        from torch import distributed as dist

        assert self.mesh is not None
        axes = self.mesh.mesh_dim_names or ()
        own_coordinates = layout.coordinates(self.rank)
        all_coordinates = map(layout.coordinates, range(layout.devices))
        members = [
            coordinates
            for coordinates in all_coordinates
            if all(getattr(coordinates, axis_name) == getattr(own_coordinates, axis_name) for axis_name in shared_axes)
        ]
        ranks = tuple(
            sorted(
                int(self.mesh.mesh[tuple(getattr(coordinates, axis_name) for axis_name in axes)])
                for coordinates in members
            )
        )
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[ranks]


def device_of(tensor: torch.Tensor) -> TorchDevice:
    """Return the TorchDevice whose memory holds a tensor."""
    kind = next(candidate for candidate in DEVICE_KINDS.values() if candidate.torch == tensor.device.type)
    return TorchDevice(kind, tensor.device.index or 0)


def is_host_buffer(storage: torch.UntypedStorage) -> bool:
    return storage.data_ptr() in _host_buffers


def sleep(tensors: Iterable[torch.Tensor]) -> None:
    """Mark tensors as asleep: until `wake`, they count as having no memory.

    While a tensor sleeps, the allocator of its memory may use the memory for other purposes. Torch itself does not know
    that a tensor sleeps.
    """
    for storage in [tensor.untyped_storage() for tensor in tensors]:
        _sleeping_storages[storage.data_ptr()] = weakref.ref(storage)
        _report(storage)


def wake(tensors: Iterable[torch.Tensor]) -> None:
    for storage in [tensor.untyped_storage() for tensor in tensors]:
        _sleeping_storages.pop(storage.data_ptr(), None)
        _report(storage)


@contextmanager
def watch_storages(watcher: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Within the context, call `watcher` with each storage whose memory changes.

    `watcher` is called with a storage, in any thread, each time the storage:

    - becomes a host buffer,
    - falls asleep or wakes (`sleep`, `wake`),
    - gets another size from Python (FSDP resizes storages this way).

    A torch dispatch mode does not see these changes, because no torch operator makes them.
    """
    import torch

    if not _watchers:
        setattr(torch.UntypedStorage, _RESIZE, _resize)
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
        if not _watchers:
            delattr(torch.UntypedStorage, _RESIZE)  # the inherited method is visible again


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """Resize a storage as torch does, and report the storage to the watchers."""
    import torch

    super(torch.UntypedStorage, storage).resize_(size)
    _report(storage)
    return storage


def map_host_buffer(memory: mmap.mmap, counted: bool) -> torch.Tensor:
    """Return mapped memory as a host buffer of bytes.

    Several processes may have mapped the same memory. The memory is `counted` in one of them. It is not pinned: the
    registration of mapped memory has not been tried on a device.
    """
    import numpy as np
    import torch

    buffer = torch.from_numpy(np.frombuffer(memory, np.uint8))
    if counted:
        _register_buffer(buffer.untyped_storage())
    else:
        sleep([buffer])
    return buffer


def _register_buffer(storage: torch.UntypedStorage) -> None:
    _host_buffers.add(address := storage.data_ptr())
    weakref.finalize(storage, _host_buffers.discard, address).atexit = False
    _report(storage)


def _report(storage: torch.UntypedStorage) -> None:
    for watcher in _watchers:
        watcher(storage)


def count_allocated_bytes(storage: torch.UntypedStorage) -> int:
    """Return the bytes of memory that a storage has; 0 if the storage is asleep."""
    sleeper = _sleeping_storages.get(storage.data_ptr())
    # The address may have belonged to a freed storage, and belong to another one.
    return 0 if sleeper and sleeper() is not None else storage.nbytes()


def is_making_buffer() -> bool:
    """Return whether this process is currently allocating a host buffer.

    Host buffers are allocated by `TorchDevice.host_buffer`.
    """
    return _making_buffer


def get_local_tensor(tensor: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor; return any other tensor unchanged."""
    inner: Any = getattr(tensor, "_local_tensor", tensor)
    local_tensor: torch.Tensor = inner.wait() if hasattr(inner, "elem") else inner  # a collective may be in flight
    return local_tensor


def view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor of all bytes of a storage.

    The tensor is a view. Several other tensors may share the storage.
    """
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor; the tensor object stays valid.

    `allocate` gives the tensor memory again. On the host, the allocator would keep freed memory for this process, so
    this function first returns the tensor's memory pages to the operating system. malloc_trim is not used for this
    purpose: it would also return the pages that all other tensors have freed, and the next tensors would have to fault
    those pages in again.
    """
    storage = tensor.untyped_storage()
    if storage.device.type == HOST.torch:
        page = mmap.PAGESIZE
        address = storage.data_ptr()
        first = -(-address // page) * page
        last = (address + storage.nbytes()) // page * page
        if last > first:
            with suppress(OSError, AttributeError):  # a system without madvise keeps the pages
                _system().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    storage.resize_(0)


@cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def allocate(tensor: torch.Tensor, size: int | None = None) -> None:
    """Allocate memory for a released tensor; the old contents are lost.

    The memory has `size` bytes, or just enough bytes for the tensor's elements if `size` is None.
    """
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size() if size is None else size)
