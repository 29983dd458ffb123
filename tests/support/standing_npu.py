"""A host's cores in the place of an NPU: what computes there is told it is on one. No NPU is at hand."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from recorded_npu import Npu
from recorded_operators import Operators

from msrl_graph.backends import devices
from msrl_graph.hardware.device_kinds import ASCEND, DEVICE_KINDS, HOST


class Standing(Npu):
    def __init__(self):
        super().__init__()
        self.operators = Operators()

    @contextmanager
    def standing(self, kernels=ASCEND.kernels):
        """Within, a host's cores stand for an NPU: they have its facts, and their own name for torch."""
        same = {"name": HOST.name, "torch": HOST.torch, "collectives": HOST.collectives, "settings": HOST.settings}
        kind = replace(ASCEND, **same, kernels=kernels)
        alike = torch.empty_like

        def unpinned(tensor, pin_memory=False, **named):
            self.told.append("pinned buffer") if pin_memory else None
            return alike(tensor, **named)

        with self.operators.there(), pytest.MonkeyPatch.context() as patch:
            patch.setitem(DEVICE_KINDS, HOST.name, kind)
            patch.setattr(devices.TorchDevice, "_module", self)
            patch.setattr(devices.TorchDevice, "place", torch.device(HOST.torch))
            patch.setattr(torch, "empty_like", unpinned)
            yield
