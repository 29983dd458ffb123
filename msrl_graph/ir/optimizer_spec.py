"""What an optimizer is: by which rule which tensors step, and what it keeps of them.

Invariant: torch-free, and a function of the call in the program: the planner counts by it, and engines step by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ..sharding.layout import Tensor, TensorKind, TensorKinds

MASTER = 4  # bytes of the float32 copy of a weight of another type, by which any optimizer steps
# An optimizer whose states lie in host memory steps by so many parts (MindSpeed's --swap-optimizer-times): one is on
# the device, and the next one on its way.
PARTS = 16
AT_ONCE = 2


@dataclass(frozen=True, eq=False)
class Rule:
    """How tensors step: as the class `name` of torch.optim does, with `options` beside the learning rate. `keeps` are
    its states, each as large as the weights: bytes an element, by name. `whole`: a step needs the whole matrix; else
    elements step one by one."""

    name: str
    options: Mapping[str, Any]
    keeps: Mapping[str, float]
    whole: bool = False

    @property
    def bytes(self) -> float:
        """Of its states, an element."""
        return sum(self.keeps.values())

    def beside(self, master: bool) -> float:
        """Of its states, and of float32 masters where weights are of another type, an element."""
        return self.bytes + MASTER * master


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """The rule of all tensors, or of all but the `matrices` of the layers. What does not run can be planned; `why`
    tells."""

    rule: Rule
    matrices: Rule | None = None
    runs: bool = True
    why: str = ""

    def of(self, tensor: Tensor) -> Rule:
        """The rule of a tensor: embedding, head, norms and biases are no matrices of layers; of experts each is one."""
        matrix = 0 <= tensor.layer < tensor.layers and len(tensor.shape) - tensor.experts == 2
        return self.matrices if self.matrices is not None and matrix else self.rule

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Each rule, in the order in which an engine steps by them."""
        return (self.rule,) if self.matrices is None else (self.rule, self.matrices)


@lru_cache(maxsize=1 << 10)
def parted(optimizer: OptimizerSpec, kinds: tuple[TensorKind, ...]) -> tuple[tuple[Rule, tuple[TensorKind, ...]], ...]:
    """Each rule of an optimizer, and the kinds of a model's tensors that step by it."""
    if len(optimizer.rules) == 1:
        return ((optimizer.rule, kinds),)
    return tuple((rule, TensorKinds(k for k in kinds if optimizer.of(k.tensor) is rule)) for rule in optimizer.rules)
