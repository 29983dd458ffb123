"""A device as torch has it: its memory, its streams, the buffers that it copies from and to.

Invariant: torch-free at import; what depends on the kind of a device (hardware/device_kinds.py) is asked of a Device,
and nothing else calls torch's module of a kind. On a host's cores streams and events do nothing.

`npu` has never been run: none was at hand. It is written by the documentation of torch_npu, which says the names of
torch.cuda; torch knows an NPU once torch_npu is imported. `cuda` was run on one H100 (docs/results.md).
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

# Where host buffers lie: on a host's cores nothing else tells them from what the device holds.
_buffers: set[int] = set()
_making = False  # a host buffer, which is not among them yet
# By address: storages that an allocator has taken the memory of, which torch does not know.
_asleep: dict[int, weakref.ref[torch.UntypedStorage]] = {}
_RESIZE = "resize_"
# Callers that follow storages whose memory changes without an operation of torch's.
_watchers: list[Callable[[torch.UntypedStorage], object]] = []


class MemoryUsage(NamedTuple):
    """Bytes."""

    free: int
    total: int


@dataclass(frozen=True)
class TorchDevice:
    """The `index`-th of the devices of a kind that this process sees (hardware/visibility_masks.py)."""

    kind: DeviceKind = HOST
    index: int = 0

    @property
    def place(self) -> torch.device:
        import torch

        # A host's tensors name none: to one with a number they would be copied.
        return torch.device(self.kind.torch) if self.kind.is_host else torch.device(self.kind.torch, self.index)

    @property
    def _module(self) -> Any:
        import torch

        if self.kind.plugin:
            import_module(self.kind.plugin)
        return torch.get_device_module(self.kind.torch)

    def claim(self) -> None:
        """Makes it the device of this process: what names a kind alone means this one."""
        self._module.set_device(self.index)

    def finish(self) -> None:
        """Returns when all that was begun on it is done."""
        self._module.synchronize()

    # Memory.

    def memory(self) -> MemoryUsage:
        """What others hold of it is not free; a host's cores have the host's memory."""
        if self.kind.shares_host_memory:
            import psutil

            found = psutil.virtual_memory()
            return MemoryUsage(found.available, found.total)
        return MemoryUsage(*self._module.mem_get_info(self.index))

    def peak(self) -> int:
        """The most bytes at once of this process since `reset_peak`: of its tensors; on a host of all that it holds."""
        if not self.kind.shares_host_memory:
            return int(self._module.max_memory_allocated(self.index))
        lines = (PROCESS / "status").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

    def reset_peak(self) -> None:
        if self.kind.shares_host_memory:
            (PROCESS / "clear_refs").write_text("5", encoding="utf-8")  # proc(5): the peak is what is held now
        else:
            self._module.reset_peak_memory_stats(self.index)

    def host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room in host memory for what a tensor of this device holds, from and to which it copies without the host's
        help."""
        global _making
        import torch

        pinned = not self.kind.shares_host_memory
        _making = True
        try:
            # On its host a tensor's buffer lies in memory as the tensor does; elsewhere like it too, but for the place.
            buffer = torch.empty_like(tensor, device=HOST.torch, pin_memory=pinned)
        finally:
            _making = False
        _buffers.add(at := buffer.untyped_storage().data_ptr())
        weakref.finalize(buffer.untyped_storage(), _buffers.discard, at).atexit = False
        _report(buffer.untyped_storage())
        return buffer


class Lane:
    """A stream of a device beside the one that its process computes on."""

    def __init__(self, device: TorchDevice) -> None:
        self.module = device._module
        self.stream = self.module.Stream()

    @contextmanager
    def begin(self) -> Iterator[None]:
        """What is begun within comes after all that the caller's stream has begun so far, since whoever had the memory
        before may not be through with it, and runs beside what it begins from then on."""
        self.stream.wait_stream(self.module.current_stream())
        with self.module.stream(self.stream):
            yield

    def mark(self) -> Any:
        """What has been begun so far, for `join`."""
        event = self.module.Event()
        event.record(self.stream)
        return event

    def join(self, mark: Any = None) -> None:
        """The caller's stream goes on when all that was begun here is done, or all before a mark."""
        if mark is None:
            mark = self.mark()
        self.module.current_stream().wait_event(mark)


@dataclass(frozen=True)
class Devices:
    """Where an engine is built: this rank's `device`, its number `rank` in the layout, and the `mesh` of all ranks of
    the layout by axis: dp and tp always, of the others those that are larger than 1. None: a rank alone. An engine that
    needs further groups makes them among its own ranks (`among`). `per_host`: of the mesh's ranks, in the order of
    their numbers, each host has so many; 0: one host has all."""

    device: TorchDevice = TorchDevice()
    rank: int = 0
    mesh: DeviceMesh | None = None
    per_host: int = 0

    # Groups that were made, by their ranks.
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    def axis(self, name: str) -> DeviceMesh:
        assert self.mesh is not None
        return self.mesh[name]

    def on_one_host(self, axis: str) -> bool:
        """Whether the ranks along an axis of the mesh are, this one's."""
        ranks = self.axis(axis).mesh.tolist()
        return not self.per_host or len({r // self.per_host for r in ranks}) == 1

    def among(self, layout: Layout, *alike: str) -> Any:
        """The process group of the ranks of a layout that stand where this one does on the axes `alike`, in the
        layout's order, which is that of experts too (`inner` is 1 where anything trains); the first call is a
        collective of them."""
        from torch import distributed as dist

        assert self.mesh is not None
        axes = self.mesh.mesh_dim_names or ()
        own = layout.coordinates(self.rank)
        every = map(layout.coordinates, range(layout.devices))
        some = [c for c in every if all(getattr(c, a) == getattr(own, a) for a in alike)]
        ranks = tuple(sorted(int(self.mesh.mesh[tuple(getattr(c, a) for a in axes)]) for c in some))
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[ranks]


def of(tensor: torch.Tensor) -> TorchDevice:
    """The device that a tensor lies on."""
    kind = next(k for k in DEVICE_KINDS.values() if k.torch == tensor.device.type)
    return TorchDevice(kind, tensor.device.index or 0)


def is_host_buffer(storage: torch.UntypedStorage) -> bool:
    return storage.data_ptr() in _buffers


def sleep(tensors: Iterable[torch.Tensor]) -> None:
    """Tells of tensors whose memory an engine's allocator has given to others, until they `wake`."""
    for storage in [t.untyped_storage() for t in tensors]:
        _asleep[storage.data_ptr()] = weakref.ref(storage)
        _report(storage)


def wake(tensors: Iterable[torch.Tensor]) -> None:
    for storage in [t.untyped_storage() for t in tensors]:
        _asleep.pop(storage.data_ptr(), None)
        _report(storage)


@contextmanager
def watched(watcher: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Call `watcher` with each storage that becomes a host buffer, falls asleep, wakes, or gets another size from
    Python (as FSDP resizes them), in any thread: changes that are not operations, which a dispatch mode sees."""
    import torch

    if not _watchers:
        setattr(torch.UntypedStorage, _RESIZE, _resize)
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
        if not _watchers:
            delattr(torch.UntypedStorage, _RESIZE)  # what it inherits is there again


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """Resize a storage as torch does, and report it."""
    import torch

    super(torch.UntypedStorage, storage).resize_(size)
    _report(storage)
    return storage


def _report(storage: torch.UntypedStorage) -> None:
    for watcher in _watchers:
        watcher(storage)


def size(storage: torch.UntypedStorage) -> int:
    """Bytes that it has memory for."""
    sleeper = _asleep.get(storage.data_ptr())
    # One that is gone may have left its address to another.
    return 0 if sleeper and sleeper() is not None else storage.nbytes()


def making_buffer() -> bool:
    """Whether an operation that runs now makes a host buffer."""
    return _making


def local(tensor: Any) -> torch.Tensor:
    """What a rank has of a tensor, a DTensor or not, as it lies in memory."""
    inner: Any = getattr(tensor, "_local_tensor", tensor)
    found: torch.Tensor = inner.wait() if hasattr(inner, "elem") else inner  # a collective may be under way
    return found


def content(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, of which tensors may each have a part."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def release(tensor: torch.Tensor) -> None:
    """Gives the memory of a tensor back; the tensor stays, for `take` to give it memory again.

    A host's allocator would keep it for this process: its pages go to the system first. (A malloc_trim would give back
    what all other tensors have left too, whose pages the next ones then fault in again.)
    """
    storage = tensor.untyped_storage()
    if storage.device.type == HOST.torch:
        page = mmap.PAGESIZE
        at = storage.data_ptr()
        first = -(-at // page) * page
        last = (at + storage.nbytes()) // page * page
        if last > first:
            with suppress(OSError, AttributeError):  # a system without the call keeps them
                _system().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    storage.resize_(0)


@cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def take(tensor: torch.Tensor, size: int | None = None) -> None:
    """Gives a tensor that was released memory again: for its elements, or `size` bytes. What it held is lost."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size() if size is None else size)
