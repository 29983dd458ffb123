"""The workload of a node: all that an engine needs to account for its memory.

Invariant: plain numbers of one rank, at the bounds of the columns. cost/holdings.py computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..model.architecture import Model
from ..sharding.layout import Layout
from .optimizer_spec import OptimizerSpec


@dataclass(frozen=True)
class Workload:
    """What a node computes at once on one rank.

    - `rows`: rows of a micro-batch (of a generation: prompts at once). They have `prompts` different beginnings of
      `prompt` tokens, and `response` tokens each. 8 responses to 2 prompts are 8 rows of 2 prompts.
    - `after`: the last token of a row is fed, too, since its own state is scored; otherwise it predicts nothing.
    - `batches`: micro-batches before an optimizer step. `divided`: weights at rest are sharded over dp. `trained`: the
      weights have an optimizer.
    - `activations_away`: activations for the backward pass are in host memory in between. `optimizer_away`: bytes of
      optimizer state that are in host memory between steps. `on_host`: the devices are cores of a host.
    - Of an update: `entropy`: its loss has an entropy. `given`: it has log-probabilities of ids other than the tokens.
      `optimizer`: the optimizer.
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
    scores_other_ids: bool = False
    optimizer: OptimizerSpec | None = None
    on_host: bool = False

    @property
    def fed(self) -> int:
        """Tokens of a row that are fed to the model, including its prompt."""
        return max(1, self.prompt + self.response - (not self.after))


def micro_batches(rows: int, size: int, layout: Layout) -> int:
    """Return the number of micro-batches of at most `size` rows for `rows` rows.

    Interleaved stages take them pp at a time (arXiv:2104.04473, section 2.2). Then there are more micro-batches, some
    of them smaller or empty.
    """
    number = max(1, -(-rows // size))
    return -(-number // layout.pp) * layout.pp if layout.vpp > 1 else number


def kv_elements(model: Model, layout: Layout) -> int:
    """Return the KV elements per token on one rank, in all of its layers."""
    per_layer = model.kv_elements if model.latent else 2 * -(-model.kv_heads // layout.tp) * model.head_dim
    return layout.most_layers(model.layers) * per_layer


def in_flight(work: Workload, stage: int) -> float:
    """Return the micro-batches whose activations a stage keeps at once.

    The unit is the activations of all layers of the stage. With one forward, one backward (arXiv:2104.04473) it is pp
    less the number of stages before it. Interleaved, it is 2 (pp - stage - 1) + (vpp - 1) pp + 1 chunks, each of 1 /
    vpp of the layers.
    """
    pp = work.layout.pp
    vpp = work.layout.vpp
    if vpp == 1:
        return min(work.batches, pp - stage)
    return min(work.batches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1) / vpp
