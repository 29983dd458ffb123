"""Tensors of a model: names, shapes, roles, and the dims that can be sharded.

A box is a range [start, stop) in each dim of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Box = tuple[tuple[int, int], ...]
Role = Literal["base", "adapter", "buffer"]


@dataclass(frozen=True)
class Tensor:
    """A named tensor of a model, with the ways to shard it.

    - `role`: `base` for a weight of the model, `adapter` for a weight that is trained on top of frozen ones, `buffer`
      for a constant. A buffer is not sharded, is in float32 even if the weights are not, and each engine reads it from
      the model's folder.
    - `frozen`: training does not change this weight.
    - `tp_dim`: the dim that tensor parallelism shards (for experts: expert tensor parallelism). If it is -1, each rank
      has a copy.
    - `unit`: the number of consecutive rows along `tp_dim` that must remain together (a head).
    - `shared`: if there are more ranks than units, several ranks have a copy of one unit (key-value heads).
    - `padded`: the tensor has a row per vocabulary entry, and engines pad the vocabulary.
    - `experts`: dim 0 counts the experts of a layer, and ep shards it. If `name` has a `*`, the files have one tensor
      per expert, whose name has the number of the expert in place of the `*`.
    - `fused`: the files have the tensor as rows of a larger one, from row `start` on. The name of the larger tensor has
      `fused` in place of the name of the tensor's module. If the files have one tensor for all experts, these are rows
      of each expert.
    - `file_name`: the name in the files, if it is another one. Of a fused tensor, it is the name before `fused` takes
      its place.
    - `layer`: -1 for the embedding, `layers` (the number of layers) for norm and head, or else the index of the layer.
    - `tied`: the tensor is an embedding that is also on the last stage.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int = -1
    unit: int = 1
    shared: bool = False
    padded: bool = False
    experts: bool = False
    fused: str = ""
    start: int = 0
    file_name: str = ""
    tied: bool = False
    layer: int = 0
    layers: int = 1
    role: Role = "base"
    frozen: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether an optimizer step changes the tensor."""
        return self.role != "buffer" and not self.frozen

    @property
    def name_in_files(self) -> str:
        name = self.file_name or self.name
        if not self.fused:
            return name
        words = name.split(".")
        words[-3 if self.role == "adapter" else -2] = self.fused  # PROJECTION.lora_B.weight, PROJECTION.weight
        return ".".join(words)

    @property
    def in_files_by_expert(self) -> bool:
        """Whether the files have one tensor per expert."""
        return "*" in self.name_in_files

    @property
    def rows_dim(self) -> int:
        """The dim of rows: the first, or the second if dim 0 counts experts."""
        return int(self.experts)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def in_files(self, box: Box) -> Iterator[tuple[str, tuple[int, ...], Box]]:
        """Yield each file tensor that `box` covers: its name, index in `box`, and own box."""
        if not self.in_files_by_expert:
            if self.fused:
                first, stop = box[self.rows_dim]
                rows = (self.start + first, self.start + stop)
                box = (*box[: self.rows_dim], rows, *box[self.rows_dim + 1 :])
            yield self.name_in_files, (), box
            return
        for i, expert in enumerate(range(*box[0])):
            yield self.name_in_files.replace("*", str(expert)), (i,), box[1:]

    @cached_property
    def stripped(self) -> Tensor:
        """The tensor without layer, names, and place in files, which do not change boxes."""
        return (
            self
            if not (self.name or self.layer) and self.layers == 1
            else replace(self, name="", file_name="", fused="", start=0, layer=0, layers=1)
        )
