"""The collectives of a computation, recorded."""

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """By name, type and number of elements of the result."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        space, _, name = function.overloadpacket._qualified_op_name.partition("::")
        if space == "c10d":
            result = args[0][0] if isinstance(args[0], list) else args[0]
            self.found.append((name, result.dtype, result.numel()))
        return function(*args, **(kwargs or {}))
