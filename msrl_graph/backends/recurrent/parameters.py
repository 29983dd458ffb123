"""Parameters that a recurrent mixer reads without a module's forward method.

Invariant: the forward method of transformers reads plain tensors: those of this rank's heads. Others read parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any


class JoinedConvolution:
    """A convolution whose weight is several parameters of a mixer.

    It takes the place of transformers' module, of which only the weight and the bias are read.
    """

    def __init__(self, mixer: Any, names: Sequence[str]) -> None:
        self._mixer = mixer
        self._names = names

    @property
    def weight(self) -> Any:
        return self._join("weight")

    @property
    def bias(self) -> Any:
        return self._join("bias") if hasattr(getattr(self._mixer, self._names[0]), "bias") else None

    def _join(self, parameter: str) -> Any:
        import torch

        return torch.cat([read_locally(getattr(self._mixer, name), parameter) for name in self._names])


def prepare(mixer: Any) -> None:
    """Make a mixer of transformers compute the same in training and in generation.

    - In training, kernels could compute a whole mixer at once, without the modules of its projections.
    - For Nemotron-H, transformers replaces time steps below `time_step_min`, but only where it computes several tokens
      at once. Neither the kernels with which the models were trained nor other engines do.
    """
    mixer.eval()
    if hasattr(mixer, "time_step_limit"):
        mixer.time_step_limit = (0.0, float("inf"))


def make_local(part: Any, names: Sequence[str]) -> None:
    """Make a module's forward method read parameters as the tensors of this rank.

    The parameters stay what they are, under the same names: DTensors that FSDP2 may gather.
    """
    kind = type(part)
    reads = {name: property(partial(_read_parameter, name=name)) for name in names}
    part.__class__ = type(kind.__name__, (kind,), reads)
    part.forward = partial(_compute, part, part.forward)


def _compute(part: Any, forward: Any, *args: Any, **options: Any) -> Any:
    part.is_computing = True
    try:
        return forward(*args, **options)
    finally:  # a layer that recomputes its activations leaves by an exception
        part.is_computing = False


def _read_parameter(part: Any, name: str) -> Any:
    return read_locally(part, name) if getattr(part, "is_computing", False) else part._parameters[name]


def read_locally(module: Any, name: str) -> Any:
    """Return this rank's part of a module's parameter, to compute with."""
    from torch.distributed.tensor import DTensor

    parameter = module._parameters[name]
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
