"""Optimizer slices: the tensors that a rank updates by one rule, and their states.

A rule is an update rule of the optimizer, such as AdamW.

Invariant: elements are updated in float32 and independently of each other, so that no layout changes the result. States
and gradients that are bf16 are converted piece by piece, and states are rounded back to the nearest bf16. With ZeRO 1
all tensors of a slice are concatenated. The replica group is the ranks that hold copies of these tensors. Each
rank of the replica group updates one stretch: a range of elements of the concatenation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ir.optimizer_spec import FLOAT, Rule
from ...sharding.layout import Layout
from ..devices import allocate, release
from ..engine_protocols import Shard
from ..host_offload import HostOffload
from ..memory.sizes import CHUNK

if TYPE_CHECKING:
    import torch

    from ...sharding.tensors import Tensor
    from ..devices import Devices

MomentTensors = dict[str, dict[str, "torch.Tensor"]]  # by kind of state and by tensor's name


@dataclass(frozen=True)
class ReplicaGroup:
    """The `number` ranks that hold the same boxes of some tensors.

    A box is one index range per dimension. Each rank of the group computes a partial gradient of the boxes; the partial
    gradients must be summed. This rank is the `index`-th rank of the group.
    """

    number: int = 1
    index: int = 0
    group: Any = None


def make_replica_group(layout: Layout, devices: Devices, divided: bool, experts: bool) -> ReplicaGroup:
    """Return the group of ranks that hold the same weights and sum their gradients.

    With `experts`, the weights are experts. With `divided`, weights are sharded over dp, and the engine has already
    summed the gradients over dp.
    """
    if experts:
        number = 1 if divided else layout.edp
        shared_axes = "pp ep etp"
    else:
        number, shared_axes = (layout.cp, "pp tp dp") if divided else (layout.cp * layout.dp, "pp tp")
    if number == 1:
        return ReplicaGroup()
    group = devices.make_group(layout, *shared_axes.split())
    return ReplicaGroup(number, group.rank(), group)


class OptimizerSlice:
    """Tensors, or rows of tensors, that are updated by one rule, element by element.

    A rule is an update rule of the optimizer, such as AdamW. With ZeRO 1, the tensors are concatenated, and this rank
    updates only its stretch (a range of elements) of the concatenation. Between `leave` and `arrive` the optimizer
    states are in host memory.
    """

    def __init__(
        self,
        rule: Rule,
        tensors: list[Tensor],
        shards: list[Shard],
        layout: Layout,
        devices: Devices,
        divided: bool,
        copies: ReplicaGroup,
    ) -> None:
        import torch

        self.copies = copies
        self.tensors = tensors
        self.shards = shards
        self.layout = layout
        self.devices = devices
        self.divided = divided
        self.place = devices.device.place
        self.rule = rule
        self.keeps = rule.keeps
        self.flat = layout.zero == 1 and copies.number > 1
        self.sizes = [shard.tensor.numel() for shard in shards]
        if self.flat:
            self.stretch = -(-sum(self.sizes) // copies.number)
            self.masters = [self._copy_stretch([shard.tensor for shard in shards])]
        else:
            # Float32 weights are their own masters.
            self.masters = [
                shard.tensor
                if shard.tensor.dtype == torch.float32
                else shard.tensor.to(torch.float32, memory_format=torch.contiguous_format)
                for shard in shards
            ]
        # With float32 weights the stretch is a copy of the weights, which exists only during a step.
        self.copied = self.flat and all(shard.tensor.dtype == torch.float32 for shard in shards)
        # The optimizer states of each master; a state is made by the first step.
        self.state: defaultdict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)
        self.count = 0  # steps that the states have taken
        self.host_offload: HostOffload | None = None
        self.away = False  # whether the optimizer states are in host memory
        if self.copied:
            release(self.masters[0])

    def _get_states(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the optimizer states of a master; make them if they do not exist.

        A master is a tensor that the optimizer updates in float32: a float32 copy of a weight, or the weight itself.
        """
        import torch

        if not (states := self.state[master]):
            for kind in self.keeps:
                states[kind] = torch.zeros(master.shape, dtype=self._get_dtype(kind), device=self.place)
        return states

    def _get_dtype(self, kind: str) -> torch.dtype:
        """Return the dtype in which optimizer states of a kind are stored."""
        import torch

        return torch.float32 if self.keeps[kind] == FLOAT else torch.bfloat16

    def _iterate_overlaps(self, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield the tensors that overlap with a range of elements, and the overlaps.

        The range from `start` to `stop` counts elements in the concatenation of the slice's tensors. Each yielded value
        is a tuple: the tensor's index, the overlap as a slice of the range, and the overlap as a slice of the flattened
        tensor.
        """
        offset = 0
        for i, size in enumerate(self.sizes):
            low = max(offset, start)
            high = min(offset + size, stop)
            if low < high:
                yield i, slice(low - start, high - start), slice(low - offset, high - offset)
            offset += size

    def _iterate_own_slices(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield the tensors that overlap with this rank's stretch, and the overlaps.

        The stretch is a range of elements of the concatenated tensors. The yielded tuples are as in
        `_iterate_overlaps`.
        """
        return self._iterate_overlaps(self.stretch * self.copies.index, self.stretch * (self.copies.index + 1))

    def _copy_stretch(self, tensors: list[torch.Tensor], own: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of this rank's stretch of some tensors.

        The stretch is a range of elements of the concatenated `tensors`. All ranks have stretches of the same size;
        where a stretch extends beyond the tensors' last element, the copy has zeros. The copy is written to `own`; it
        is float32 if `own` is not given.
        """
        import torch

        own = torch.zeros(self.stretch, device=self.place) if own is None else own.zero_()
        for i, where, piece in self._iterate_own_slices():
            own[where] = tensors[i].reshape(-1)[piece]
        return own

    # Host memory between steps.

    def leave(self) -> None:
        states = self._list_states()
        if self.host_offload is None or [*map(id, self.host_offload.tensors)] != [
            *map(id, states)
        ]:  # some states are created by the first step
            self.host_offload = HostOffload(self.devices.device, states)
        self.host_offload.store()
        self.host_offload.leave()
        self.away = True

    def come(self) -> None:
        """Start the copy of optimizer states that are in host memory to the device."""
        if self.away and self.host_offload is not None:
            self.host_offload.come()
        self.away = False

    def arrive(self) -> None:
        if self.host_offload is not None:
            self.host_offload.arrive()

    def _list_states(self) -> list[torch.Tensor]:
        """List the tensors that this optimizer slice holds in addition to the weights.

        The list has the optimizer states, and the masters (float32 copies of weights) that are not weights themselves.
        """
        weights = {id(shard.tensor) for shard in self.shards}
        masters = [] if self.copied else [master for master in self.masters if id(master) not in weights]
        states = [
            self.state[master].get(kind) for master in self.masters if master in self.state for kind in self.keeps
        ]
        return masters + [state for state in states if state is not None]

    def _read_stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contents of an optimizer state.

        If the optimizer states are in host memory, the result is the state's host buffer.
        """
        return self.host_offload.stored(tensor) if self.away and self.host_offload is not None else tensor

    def step(self, gradients: list[torch.Tensor], scale: float, options: dict[str, Any]) -> None:
        """Update all elements of the slice's tensors; empty the list `gradients`.

        The gradients are multiplied by `scale`. `options` are the options of the update rule, such as the learning
        rate.
        """
        if self.flat:
            own = {
                i for i, _, _ in self._iterate_own_slices()
            }  # other ranks' gradients are freed first, so that the peak does not grow
            gradients[:] = [candidate if i in own else candidate.new_empty(0) for i, candidate in enumerate(gradients)]
            gradients[:] = [self._copy_stretch(gradients, gradients[0].new_empty(self.stretch))]
        if self.copied:
            allocate(self.masters[0])
            self._copy_stretch([shard.tensor for shard in self.shards], self.masters[0])
        self._update_masters(gradients, scale, options)
        gradients.clear()
        self._write_back()
        if self.copied:
            release(self.masters[0])

    def _update_masters(self, gradients: list[torch.Tensor], scale: float, options: dict[str, Any]) -> None:
        """Update the masters (the float32 weights) from their gradients, times `scale`."""
        import torch

        for master in self.masters:
            self._get_states(master)
        placeholder = torch.zeros(0, device=self.place)
        optimizer = getattr(torch.optim, self.rule.name)([placeholder], lr=0.0, **self.rule.options)
        (group,) = optimizer.param_groups
        group.update(options)
        converts = self.rule.is_rounded or any(gradient.dtype != torch.float32 for gradient in gradients)
        for pieces in self._iterate_pieces(CHUNK if converts else 0):
            # Where torch keeps the number of steps: fused kernels keep it on the device.
            place = self.place if group.get("fused") else None
            counts = torch.full((len(pieces),), float(self.count), device=place).unbind()
            stored = [
                {kind: _select(state, where) for kind, state in self._get_states(self.masters[i]).items()}
                for i, where in pieces
            ]
            group["params"] = [_select(self.masters[i], where) for i, where in pieces]
            for weights, (i, where), states, count in zip(group["params"], pieces, stored, counts, strict=True):
                weights.grad = scale_gradient(_select(gradients[i].contiguous(), where), scale)
                optimizer.state[weights] = {"step": count} | {kind: _widen(state) for kind, state in states.items()}
            optimizer.step()
            for weights, states in zip(group["params"], stored, strict=True):
                weights.grad = None
                _round_states(states, optimizer.state[weights])
            optimizer.state.clear()
            del weights, states, stored  # or these would exist next to the next pieces'
        self.count += 1

    def _iterate_pieces(self, size: int) -> Iterator[list[tuple[int, slice]]]:
        """Yield lists of pieces of masters that are updated at once.

        A piece is the index of a master, and a slice of its flattened elements. The pieces of a list have at most
        `size` elements together. If `size` is 0, there is one list, of whole masters.
        """
        if not size:
            yield [(i, slice(None)) for i in range(len(self.masters))]
            return
        pieces: list[tuple[int, slice]] = []
        room = size
        for i, master in enumerate(self.masters):
            start = 0
            while start < master.numel():
                stop = min(master.numel(), start + room)
                pieces.append((i, slice(start, stop)))
                room -= stop - start
                start = stop
                if not room:
                    yield pieces
                    pieces = []
                    room = size
        if pieces:
            yield pieces

    def moments(self) -> dict[str, list[Shard]]:
        """Return the optimizer states of the slice's tensors.

        The keys of the result are the kinds of optimizer states, such as a first or second moment. The result is empty
        if the optimizer of a checkpoint had other kinds, and no step was taken since.
        """
        import torch
        from torch import distributed as dist

        states = [self.state[master] for master in self.masters]
        if self.keeps and not all(states):
            return {}
        kinds = {name: [self._read_stored(state[name]) for state in states] for name in self.keeps}
        if any(shard.tensor.dtype != torch.float32 for shard in self.shards):
            kinds["master"] = [*map(self._read_stored, self.masters)]
        if self.flat:
            for kind, (own,) in kinds.items():
                flat = own.new_empty(self.stretch * self.copies.number, device=self.place)
                dist.all_gather_into_tensor(flat, own.to(self.place), group=self.copies.group)
                flat = flat.to(own.device)
                kinds[kind] = list(torch.split(flat[: sum(self.sizes)], self.sizes))
        return {
            kind: [
                Shard(shard.name, shard.box, tensor.view(shard.tensor.shape))
                for shard, tensor in zip(self.shards, tensors, strict=True)
            ]
            for kind, tensors in kinds.items()
        }

    def restore(self, moments: MomentTensors, steps: int) -> None:

        self.state.clear()
        self.count = 0
        # A weight that was frozen until now has no states yet: its master is the weight, and its moments are 0.
        kinds = {
            kind: [
                by_name[shard.name] if shard.name in by_name else shard.tensor.float() * (kind == "master")
                for shard in self.shards
            ]
            for kind, by_name in moments.items()
        }
        kinds = {kind: tensors for kind, tensors in kinds.items() if kind == "master" or kind in self.keeps}
        if self.flat:
            kinds = {kind: [self._copy_stretch(tensors)] for kind, tensors in kinds.items()}
        masters = kinds.pop("master", None)
        if masters is None and not self.copied:
            weights = [shard.tensor for shard in self.shards]
            masters = [self._copy_stretch(weights)] if self.flat else weights
        for i, master in enumerate(self.masters):
            if masters is not None and masters[i] is not master:
                master.copy_(masters[i])
            if steps and len(kinds) == len(self.keeps):  # an optimizer of another kind starts with empty states
                # Offloading releases a tensor's storage, so each state must own its storage.
                self.state[master] = {
                    kind: per_master[i].to(self.place, self._get_dtype(kind), copy=self.host_offload is not None)
                    for kind, per_master in kinds.items()
                }
                self.count = steps

    def _write_back(self) -> None:
        """Copy the masters (float32 copies of the weights) to the weights."""
        import torch
        from torch import distributed as dist

        if self.flat:
            weights = [held_shard.tensor for held_shard in self.shards]
            for low in range(0, self.stretch, CHUNK):
                part = self.masters[0][low : low + CHUNK]
                parts = torch.empty(self.copies.number, len(part), device=self.place)
                dist.all_gather_into_tensor(parts.view(-1), part, group=self.copies.group)
                for rank, values in enumerate(parts):
                    start = self.stretch * rank + low
                    for i, where, piece in self._iterate_overlaps(start, start + len(part)):
                        _put(weights[i], piece, values[where])
                del parts, values  # or they would exist next to the next chunk's
        else:
            for master, shard in zip(self.masters, self.shards, strict=True):
                if master is not shard.tensor:
                    shard.tensor.copy_(master)


def scale_gradient(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a gradient times `scale` in float32.

    A float32 gradient is changed in place.
    """
    gradient = gradient.float()
    return gradient.mul_(scale) if scale != 1.0 else gradient


def _widen(state: torch.Tensor) -> torch.Tensor:
    """Return optimizer states in float32."""
    return state if state.itemsize == 4 else state.float()  # `float` takes time even if it does nothing


def _round_states(states: dict[str, torch.Tensor], computed: dict[str, torch.Tensor]) -> None:
    """Copy computed optimizer states into the stored ones, unless they are the same."""
    for kind, state in states.items():
        if computed[kind] is not state:
            state.copy_(computed[kind])


def _select(tensor: torch.Tensor, where: slice) -> torch.Tensor:
    """Return some elements of a flattened tensor, or the whole tensor.

    The result is a view.
    """
    return tensor if where == slice(None) else tensor.view(-1)[where]


def _put(tensor: torch.Tensor, piece: slice, values: torch.Tensor) -> None:
    """Write `values` to some elements of a tensor.

    `piece` is the slice of these elements in the flattened tensor. The tensor may be a view of another tensor.
    """
    flat = tensor.reshape(-1)  # a view or a copy
    flat[piece].copy_(values)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
