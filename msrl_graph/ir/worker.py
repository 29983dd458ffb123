"""The workers of an algorithm: who has weights, and who calls functions."""

from __future__ import annotations

from dataclasses import dataclass

from ..diagnostics import NOWHERE, Span
from ..model.lora import StatedLora


@dataclass(frozen=True)
class Worker:
    """One set of weights, or (kind `function`) the place where Python functions run."""

    name: str
    kind: str
    frozen: bool = False
    model: str = ""
    span: Span = NOWHERE
    follows: str = ""  # the worker whose weights a frozen one takes over, every `every` iterations
    every: int = 1
    decay: float = 0.0
    freeze: tuple[str, ...] = ()  # parts and patterns of weights that an update does not change (model/freezing.py)
    adapter: StatedLora | None = None

    def due(self, number: int) -> bool:
        """Return whether a follower's weights change after iteration `number`."""
        return bool(self.follows) and (number + 1) % self.every == 0

    @property
    def following_description(self) -> str:
        """A text about which worker this worker follows, and how; "" if it follows none."""
        how = f" every {self.every} iterations" if self.every > 1 else ""
        return (
            ""
            if not self.follows
            else f"follows {self.follows}{how}" + (f", decay {self.decay:g}" if self.decay else "")
        )
