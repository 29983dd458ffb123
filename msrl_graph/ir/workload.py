"""What a node computes at once: all that an engine must know to say what it holds meanwhile.

Invariant: plain figures at the columns' bounds, of one rank; where they come from is cost/holdings.py's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..model.architecture import Model
from ..sharding.layout import Layout
from .optimizer_spec import OptimizerSpec


@dataclass(frozen=True)
class Workload:
    """What a node computes at once on one rank.

    - `rows` of a micro-batch (of a generation: prompts at once), which have `prompts` different beginnings of
      `prompt` tokens, and `response` tokens each. 8 responses to 2 prompts are 8 rows of 2 prompts.
    - `after`: a row's last token is fed too, since its own state is scored; else it predicts nothing.
    - `batches`: micro-batches before an optimizer step. `divided`: weights at rest are divided over dp. `trained`:
      they have an optimizer.
    - `activations_away`: what layers keep for their backward pass lies in host memory in between. `optimizer_away`: so
      many bytes of what the optimizer keeps do, between steps. `on_host`: the devices are a host's cores.
    - Of an update: whether its loss has an `entropy`, or log-probabilities of ids that are `given` beside the tokens;
      and the `optimizer` that it steps by.
    """

    model: Model
    layout: Layout
    dtype: str
    rows: int
    prompts: int
    prompt: int
    response: int
    samples: int = 1
    after: bool = False
    batches: int = 1
    divided: bool = False
    trained: bool = False
    recompute: bool = False
    activations_away: bool = False
    optimizer_away: int = 0
    entropy: bool = False
    given: bool = False
    optimizer: OptimizerSpec | None = None
    on_host: bool = False

    @property
    def fed(self) -> int:
        """Tokens of a row that are fed, those of its prompt among them."""
        return max(1, self.prompt + self.response - (not self.after))


def micro_batches(rows: int, size: int, layout: Layout) -> int:
    """Into how many micro-batches of at most `size` rows so many rows of a group go. Interleaved stages take them pp at
    a time (arXiv:2104.04473, section 2.2), so that there are more, some of them smaller, or empty."""
    number = max(1, -(-rows // size))
    return -(-number // layout.pp) * layout.pp if layout.vpp > 1 else number


def kv_elements(model: Model, layout: Layout) -> int:
    """Elements of keys and values that a token leaves on one rank, in all of its layers."""
    each = model.kv_elements if model.latent else 2 * -(-model.kv_heads // layout.tp) * model.head_dim
    return layout.most_layers(model.layers) * each


def in_flight(work: Workload, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at once, in wholes of its layers. One forward, one backward
    (arXiv:2104.04473): pp less the stages before it. Interleaved: 2 (pp - stage - 1) + (vpp - 1) pp + 1 chunks, each 1
    / vpp of its layers."""
    pp = work.layout.pp
    vpp = work.layout.vpp
    if vpp == 1:
        return min(work.batches, pp - stage)
    return min(work.batches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1) / vpp
