"""torch.npu, recorded: what is asked of it, in which order, and what the real one would refuse. No NPU is at hand.

Invariant: what is computed is computed by the CPU; of the device only what the order of calls says is held. A thread
has a device before it asks anything else of it, as torch_npu has it (each thread begins with none), what is waited for
has been recorded, and what a stream begins comes after what the caller's stream had begun.
"""

import threading
from contextlib import contextmanager


class Event:
    def __init__(self, npu):
        self.npu = npu
        self.recorded = None

    def record(self, stream):
        self.npu.tell("record")
        self.recorded = stream

    def synchronize(self):
        self.npu.tell("synchronize event")
        assert self.recorded is not None, "an event is waited for that was never recorded"


class Stream:
    def __init__(self, npu):
        self.npu = npu
        self.waits = set()

    def wait_stream(self, other):
        self.npu.tell("wait_stream")
        self.waits.add(id(other))

    def wait_event(self, event):
        self.npu.tell("wait_event")
        assert event.recorded is not None, "an event is waited for that was never recorded"


class Npu:
    """Stands for the module `torch.npu`."""

    def __init__(self):
        self.told = []
        self.mine = threading.local()
        self.peaks = 0
        self.first = Stream.__new__(Stream)
        self.first.npu = self
        self.first.waits = set()

    def tell(self, what):
        assert what == "set_device" or getattr(self.mine, "device", None) is not None, f"{what} before set_device"
        self.told.append(what)

    def set_device(self, index):
        self.mine.device = index
        self.tell("set_device")

    def synchronize(self):
        self.tell("synchronize")

    def mem_get_info(self, index):
        self.tell("mem_get_info")
        return 60 << 30, 64 << 30

    def max_memory_allocated(self, index):
        self.tell("max_memory_allocated")
        return self.peaks

    def reset_peak_memory_stats(self, index):
        self.tell("reset_peak_memory_stats")

    def Stream(self):
        self.tell("Stream")
        return Stream(self)

    def Event(self):
        self.tell("Event")
        return Event(self)

    def current_stream(self):
        self.tell("current_stream")
        return getattr(self.mine, "stream", self.first)

    @contextmanager
    def stream(self, stream):
        self.tell("stream")
        before = getattr(self.mine, "stream", self.first)
        assert id(before) in stream.waits, "a stream begins beside what its caller has not finished"
        self.mine.stream = stream
        try:
            yield
        finally:
            self.mine.stream = before
            stream.waits.clear()  # what the caller begins from here on is to be waited for anew
