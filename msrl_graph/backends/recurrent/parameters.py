"""Parameters that a recurrent mixer reads without a module's forward method.

Invariant: the forward method of transformers reads plain tensors: those of this rank's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any


class JoinedConvolution:
    """A convolution whose weight is several parameters of a mixer.

    It takes the place of transformers' module, of which only the weight and the bias are read.
    """

    bias = None

    def __init__(self, mixer: Any, names: Sequence[str]) -> None:
        self._mixer = mixer
        self._names = names

    @property
    def weight(self) -> Any:
        import torch

        return torch.cat([_read_locally(getattr(self._mixer, name), "weight") for name in self._names])


def make_local(mixer: Any, names: Sequence[str]) -> None:
    """Make reads of parameters return the tensors of this rank.

    The parameters stay what they are, under the same names: DTensors that FSDP2 may gather.
    """
    kind = type(mixer)
    reads = {name: property(partial(_read_locally, name=name)) for name in names}
    mixer.__class__ = type(kind.__name__, (kind,), reads)


def _read_locally(module: Any, name: str) -> Any:
    from torch.distributed.tensor import DTensor

    parameter = module._parameters[name]
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
