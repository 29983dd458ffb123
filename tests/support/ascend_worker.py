"""What vllm-ascend's worker does when it sleeps and wakes, recorded: no NPU is at hand.

By vllm_ascend/worker/worker.py and device_allocator/camem.py of 0.23.0: sleeping gives back all that the allocator has,
whether it is mapped or not, so that to sleep twice is an error, as waking what is awake; at level 2 buffers are kept on
the host and weights are lost; waking refuses the NZ format, and turns experts for a load that is to follow.
"""

import torch
from torch.utils._pytree import tree_leaves


def runner(model):
    """What a worker has of a model, as much as sleeping looks at."""
    both = type("Both", (), {"cpu": torch.zeros(8, 4), "gpu": torch.zeros(8, 4)})()
    caches = (torch.zeros(4), torch.zeros(4))  # keys and values of a layer
    return type("Runner", (), {"model": model, "inputs_embeds": both, "kv_caches": [caches]})()


class Worker:
    def __init__(self, runner, nz=False):
        self.model_runner = runner
        self.caches = tree_leaves(runner.kv_caches)
        self.mapped = {"weights", "kv_cache"}
        self.nz = nz
        self.told = []
        self.saved = {}

    def sleep(self, level=1):
        self.told.append(f"sleep {level}")
        if self.mapped != {"weights", "kv_cache"}:
            raise RuntimeError(f"memory is unmapped that is not mapped: {self.mapped or 'none is'}")
        self.mapped.clear()
        model = self.model_runner.model
        self.saved = {name: b.clone() for name, b in model.named_buffers()} if level == 2 else {}
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers(), *self.caches):
                tensor.fill_(float("nan"))

    def wake_up(self, tags=None):
        self.told.append(f"wake {' '.join(tags)}")
        if self.nz:
            raise ValueError("FRACTAL_NZ mode is enabled")
        if self.mapped & {*tags}:
            raise RuntimeError(f"memory is mapped twice: {self.mapped & {*tags}}")
        self.mapped |= {*tags}
        model = self.model_runner.model
        for name, parameter in [*model.named_parameters()] if "weights" in tags else ():
            if name.endswith(("w13_weight", "w2_weight")):
                owner, _, leaf = name.rpartition(".")
                turned = torch.nn.Parameter(parameter.transpose(1, 2), requires_grad=False)
                setattr(model.get_submodule(owner), leaf, turned)
        for name, buffer in model.named_buffers():
            if name in self.saved:
                buffer.copy_(self.saved.pop(name))
