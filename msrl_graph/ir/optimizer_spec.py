"""Optimizers: the update rule of each tensor and the state that it keeps.

Invariant: no import of torch, and a function of the call in the program. The planner counts memory by it and engines
step by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ..sharding.layout import Tensor, TensorKind, TensorKinds

MASTER = 4  # bytes of the float32 copy of a weight of another type, which any optimizer updates
# An optimizer with states in host memory steps in this number of parts (MindSpeed's --swap-optimizer-times). AT_ONCE
# parts are on the device: the current one, and the next one on its way.
PARTS = 16
AT_ONCE = 2


@dataclass(frozen=True, eq=False)
class Rule:
    """The update rule of tensors: the class `name` of torch.optim with `options`.

    The learning rate is not among the options. `keeps` are its states, in bytes per element by name; each is as large
    as the weights. `whole`: a step needs the whole matrix, otherwise elements are updated independently.
    """

    name: str
    options: Mapping[str, Any]
    keeps: Mapping[str, float]
    whole: bool = False

    @property
    def bytes(self) -> float:
        """Bytes of its states per element."""
        return sum(self.keeps.values())

    def state_bytes(self, master: bool) -> float:
        """Return the bytes per element of its states and float32 copies.

        With `master`, weights are of another type and have such a copy.
        """
        return self.bytes + MASTER * master


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """The rule of all tensors, or of all but the `matrices` of the layers.

    If it does not run (`runs`), it can be planned only, and `why` is the reason.
    """

    rule: Rule
    matrices: Rule | None = None
    runs: bool = True
    why: str = ""

    def rule_of(self, tensor: Tensor) -> Rule:
        """Return the rule of a tensor.

        Embedding, head, norms and biases are not matrices of layers. Each expert is a matrix of its own.
        """
        matrix = 0 <= tensor.layer < tensor.layers and len(tensor.shape) - tensor.experts == 2
        return self.matrices if self.matrices is not None and matrix else self.rule

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in the order in which an engine applies them."""
        return (self.rule,) if self.matrices is None else (self.rule, self.matrices)


@lru_cache(maxsize=1 << 10)
def kinds_by_rule(
    optimizer: OptimizerSpec, kinds: tuple[TensorKind, ...]
) -> tuple[tuple[Rule, tuple[TensorKind, ...]], ...]:
    """Return each rule of an optimizer with the kinds of tensors that it updates."""
    if len(optimizer.rules) == 1:
        return ((optimizer.rule, kinds),)
    return tuple(
        (rule, TensorKinds(kind for kind in kinds if optimizer.rule_of(kind.tensor) is rule))
        for rule in optimizer.rules
    )
