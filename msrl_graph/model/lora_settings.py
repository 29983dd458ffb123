"""The settings of a LoRA adapter, as a program or an adapter's folder states them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter (lora.py).

    - `targets`: the names of the projections that have an adapter, or `all_linear`.
    - `dropout`: the share of the inputs of A that an update sets to 0 (backends/kernels/keyed_dropout.py).
    - `seed`: the seed of the first values, and of the dropout.
    - `folder`: the folder with the first values (peft_folder.py); "" if they are drawn.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    seed: int = 0
    folder: str = ""

    def __str__(self) -> str:
        targets = ", ".join(self.targets)
        return f"lora of rank {self.rank}, alpha {self.alpha:g}, for {targets}"

    @property
    def scale(self) -> float:
        """The number by which the product of the two matrices is multiplied."""
        return self.alpha / self.rank
