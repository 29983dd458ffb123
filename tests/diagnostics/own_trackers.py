"""Trackers of the programs in trackers.md."""


class WithoutAdd:
    def begin(self, run): ...
