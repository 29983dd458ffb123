"""What a node-state computes at once: all that an engine must know to say what it holds meanwhile.

Invariant: plain figures at the columns' bounds, of one rank; where they come from is cost/holdings.py's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..model.architecture import Model
from ..sharding.layout import Layout
from .stepping import Optimizer


@dataclass(frozen=True)
class Work:
    """What a node-state computes at once on a rank: `rows` of a micro-batch (of a generation, prompts at once), which have `prompts`
    distinct beginnings of `prompt` tokens, and `response` tokens each; `batches` micro-batches before an optimizer step. `divided`:
    weights at rest are divided over dp; `trained`: they have an optimizer. An update's loss has an `entropy`, or log-probabilities of ids
    that are `given` beside the tokens; it steps by `optimizer`."""

    model: Model
    layout: Layout
    dtype: str
    rows: int
    prompts: int
    prompt: int
    response: int
    samples: int = 1
    batches: int = 1
    divided: bool = False
    trained: bool = False
    recompute: bool = False
    entropy: bool = False
    given: bool = False
    optimizer: Optimizer | None = None
