"""Optimizers: the rule that updates each tensor, and the rule's optimizer states.

Invariant: the module does not import torch, and a spec depends only on the optimizer's call in the program. The planner
counts memory with this spec, and engines take optimizer steps with this spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from ..sharding.layout import TensorKind, TensorKinds
from ..sharding.tensors import Tensor

MASTER = 4  # bytes of the float32 copy of a weight of another type, which any optimizer updates
FLOAT = 4  # bytes of an element of an optimizer state in float32
ROUNDED = 2  # in bf16
# An optimizer with states in host memory divides a step into this number of parts (MindSpeed's --swap-optimizer-times).
# The states of AT_ONCE parts are on the device: of the current part, and of the next part, which is being copied.
PARTS = 16
AT_ONCE = 2


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule that updates tensors, such as AdamW.

    - `name`: the class of torch.optim. `options`: the options of this class, except the learning rate.
    - `keeps`: the bytes per element of each optimizer state, by the state's name. Each state has the same number of
      elements as the weights.
    - `whole`: whether a step needs the whole matrix. If not, each element is updated independently of all others.
    """

    name: str
    options: Mapping[str, Any]
    keeps: Mapping[str, float]
    whole: bool = False

    @property
    def bytes(self) -> float:
        """The bytes of all optimizer states of this rule, per element of the tensor."""
        return sum(self.keeps.values())

    @property
    def is_rounded(self) -> bool:
        """Whether optimizer states are bf16 between steps; a step computes in float32."""
        return any(size == ROUNDED for size in self.keeps.values())

    @property
    def can_round(self) -> bool:
        """Whether the rule has optimizer states, and all of them are float32."""
        return bool(self.keeps) and all(size == FLOAT for size in self.keeps.values())

    def with_moments(self, item: int) -> Rule:
        """Return the rule with `item` bytes per element of each float32 optimizer state."""
        return replace(self, keeps=dict.fromkeys(self.keeps, item)) if self.can_round else self

    def state_bytes(self, master: bool) -> float:
        """Return the bytes per element of the optimizer states and the float32 copy.

        With `master`, the weights have a type other than float32. The optimizer then updates a float32 copy of the
        weights, and the result includes this copy.
        """
        return self.bytes + MASTER * master


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """An optimizer: which rule updates which tensors.

    - `rule`: the rule of all tensors. If `matrices` is set, it is the rule of all tensors except the matrices of the
      layers.
    - `matrices`: the rule of the matrices of the layers.
    - `runs`: whether an engine can run the optimizer. If False, the optimizer is only for planning, and `why` is the
      reason that it cannot run.
    """

    rule: Rule
    matrices: Rule | None = None
    runs: bool = True
    why: str = ""

    def rule_of(self, tensor: Tensor) -> Rule:
        """Return the rule that updates a tensor.

        The embedding, the head, norms and biases do not count as matrices of layers. Each expert is a matrix of its
        own.
        """
        matrix = 0 <= tensor.layer < tensor.layers and len(tensor.shape) - tensor.experts == 2
        return self.matrices if self.matrices is not None and matrix else self.rule

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The optimizer's rules, in the order in which an engine applies them."""
        return (self.rule,) if self.matrices is None else (self.rule, self.matrices)


@lru_cache(maxsize=1 << 10)
def kinds_by_rule(
    optimizer: OptimizerSpec, kinds: tuple[TensorKind, ...]
) -> tuple[tuple[Rule, tuple[TensorKind, ...]], ...]:
    """Return, for each rule of an optimizer, the tensor kinds that the rule updates."""
    if len(optimizer.rules) == 1:
        return ((optimizer.rule, kinds),)
    return tuple(
        (rule, TensorKinds(kind for kind in kinds if optimizer.rule_of(kind.tensor) is rule))
        for rule in optimizer.rules
    )


@lru_cache(maxsize=1 << 8)
def with_moments(optimizer: OptimizerSpec, item: int) -> OptimizerSpec:
    """Return an optimizer with `item` bytes per element of its states.

    Only float32 states change. A step computes them in float32, and masters stay float32.
    """
    if item == FLOAT:
        return optimizer
    matrices = None if optimizer.matrices is None else optimizer.matrices.with_moments(item)
    return replace(optimizer, rule=optimizer.rule.with_moments(item), matrices=matrices)
