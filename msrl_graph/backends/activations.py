"""Offload of activations to host memory between the forward and the backward pass.

The offloaded tensors are the tensors that layers save for their backward pass. Where layers are recomputed, only the
layers' inputs are offloaded.

Invariant: the backward pass reads the same bits that the forward pass saved. Saved tensors that shared a storage before
the offload also share a storage afterwards.

- Forward: when a layer saves a tensor, the tensor's storage is copied to the host. The storage's device memory is
  released after the forward pass of the next layer.
- Backward: while the backward pass of one layer computes, the storages that the preceding layer saved are copied back
  to the device. The backward pass of the preceding layer is next.
- Weights stay on the device. Tensors that are not floating-point also stay on the device, because all layers share
  them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .devices import Lane, TorchDevice, get_local_tensor, view_bytes

if TYPE_CHECKING:
    import torch

LEAST = 1 << 10  # bytes; copying smaller storages gains nothing


class Activations:
    """Hooks that offload the tensors saved by the layers of a model."""

    def __init__(self, device: TorchDevice, layers: Sequence[torch.nn.Module]) -> None:
        self.device = device
        self.lanes = (Lane(device), Lane(device))
        self.current_pass: _Pass | None = None  # the current forward pass that saves tensors
        for layer in layers:
            layer.register_forward_pre_hook(self._enter)
        layers[-1].register_forward_hook(self._exit)

    @contextmanager
    def offload_saved_tensors(self) -> Iterator[None]:
        """Offload the tensors that the forward pass inside this context saves."""
        import torch

        if not torch.is_grad_enabled():
            yield
            return
        self.current_pass = _Pass(self.device, *self.lanes)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.current_pass.pack, self.current_pass.unpack):
                yield
        finally:
            self.current_pass = None

    def _enter(self, layer: Any, _: Any) -> None:
        if self.current_pass is not None:  # a backward pass may recompute a layer
            self.current_pass.begin(
                {get_local_tensor(parameter).untyped_storage()._cdata for parameter in layer.parameters()}
            )

    def _exit(self, *_: Any) -> None:
        if self.current_pass is not None:
            self.current_pass.end()


class _Kept:
    """A storage that was copied to the host.

    Some of the tensors that the forward pass saved are views of this storage. `uses` is the number of these tensors
    that the backward pass has not yet read.
    """

    def __init__(self, storage: torch.UntypedStorage, buffer: torch.Tensor, group: int) -> None:
        self.device_storage: torch.UntypedStorage | None = storage  # None while it is offloaded
        self.buffer = buffer
        self.group = group
        self.uses = 0
        self.mark: Any = None  # event of the copy back


@dataclass(frozen=True)
class _Saved:
    """A tensor that a layer saved: a view of the storage `entry`."""

    entry: _Kept
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Pass:
    """The storages that one forward pass saves, in one group per layer.

    Group 0 has the storages that are saved before the first layer.
    """

    def __init__(self, device: TorchDevice, out_lane: Lane, back_lane: Lane) -> None:
        self.device = device
        self.out_lane = out_lane
        self.back_lane = back_lane
        self.groups: list[list[_Kept]] = [[]]
        self.known: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Kept]] = {}
        self.weights: set[int] = set()
        self.finished = False
        self.lowest_group = -1  # the last group that was fetched
        self.marks: list[Any] = []  # events of the copies to the host, by group

    # Forward.

    def begin(self, weights: set[int]) -> None:
        """Start the forward pass of the next layer.

        Also release the device memory of the storages saved by the layer two positions earlier, after the copies of
        these storages to the host are complete. `weights` identifies the storages of the started layer's weights, which
        are not offloaded.
        """
        self.weights = weights
        self.marks.append(self.out_lane.mark())
        self.groups.append([])
        if len(self.groups) > 2:
            self._release_group(len(self.groups) - 3)

    def end(self) -> None:
        """Finish the last layer; release the device memory of all saved storages."""
        self.finished = True
        self.marks.append(self.out_lane.mark())
        for group in range(len(self.groups)):
            self._release_group(group)
        self.lowest_group = len(self.groups)

    def _release_group(self, group: int) -> None:
        self.out_lane.join(self.marks[group])
        for entry in self.groups[group]:
            entry.device_storage = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        if (wait := getattr(tensor, "trigger_wait", None)) is not None:  # a result of a collective, without a storage
            tensor = wait()
        storage = tensor.untyped_storage()
        if (
            self.finished
            or not tensor.is_floating_point()
            or storage.nbytes() < LEAST
            or storage._cdata in self.weights
        ):
            return tensor
        known_entry = self.known.get(storage._cdata)
        if known_entry is None or known_entry[0]() is None:  # an address may be reused
            known_entry = weakref.ref(storage), self._copy_to_host(storage)
            self.known[storage._cdata] = known_entry
        entry = known_entry[1]
        entry.uses += 1
        return _Saved(entry, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def _copy_to_host(self, storage: torch.UntypedStorage) -> _Kept:
        source = view_bytes(storage)
        buffer = self.device.host_buffer(source)
        with self.out_lane.begin():
            buffer.copy_(source, non_blocking=True)
        entry = _Kept(storage, buffer, len(self.groups) - 1)
        self.groups[-1].append(entry)
        return entry

    # Backward.

    def unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        import torch

        if not isinstance(saved, _Saved):
            return saved
        entry = saved.entry
        if entry.group == self.lowest_group or (
            entry.device_storage is None and entry.group == self._find_next_group(self.lowest_group)
        ):  # a layer starts
            self._bring_back(self.groups[entry.group])
            self.lowest_group = self._find_next_group(entry.group)
            self._bring_back(self.groups[self.lowest_group] if self.lowest_group >= 0 else [])
        elif entry.device_storage is None:  # several layers saved it
            self._bring_back([entry])
        self.back_lane.join(entry.mark)
        assert entry.device_storage is not None
        restored = torch.empty(0, dtype=saved.dtype, device=entry.device_storage.device)
        restored.set_(entry.device_storage, saved.offset, saved.size, saved.stride)
        entry.uses -= 1
        if not entry.uses:
            entry.device_storage = None
        return restored

    def _find_next_group(self, group: int) -> int:
        """Return the index of the last non-empty group before group `group`, or -1.

        A group has the storages that one layer saved. The backward pass uses the groups in descending order.
        """
        return next((i for i in range(group - 1, -1, -1) if self.groups[i]), -1)

    def _bring_back(self, entries: Sequence[_Kept]) -> None:
        import torch

        entries = [entry for entry in entries if entry.device_storage is None and entry.uses]
        targets = [torch.empty(entry.buffer.shape, dtype=torch.uint8, device=self.device.place) for entry in entries]
        with self.back_lane.begin():
            for entry, target in zip(entries, targets, strict=True):
                target.copy_(entry.buffer, non_blocking=True)
        mark = self.back_lane.mark()
        for entry, target in zip(entries, targets, strict=True):
            entry.device_storage = target.untyped_storage()
            entry.mark = mark
