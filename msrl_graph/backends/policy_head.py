"""The outputs of a policy, computed from hidden states without all logits at once.

The head is computed for all tokens and some ids of the vocabulary at a time. Only a few numbers per token are kept: the
largest logit, sums of exponentials, and the logits of requested ids. The backward pass computes the same logits again,
by the same products, so that probabilities still add up to 1. The gradient of each part of the head's weight is one
product, so it is rounded once and needs no second buffer.

Invariant: the logits that exist at once on a rank have at most `sizes.LOGITS` bytes, or one logit per token. Values and
gradients equal those of a computation with all logits on one rank, up to rounding. If the vocabulary is sharded over
ranks, no rank has logits of another rank's part, and outputs are the same on all ranks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .engine_protocols import ForwardRequest, MicroBatch, Outputs
from .memory.sizes import count_ids_at_once, count_slice_rows

if TYPE_CHECKING:
    import torch


class LogitRule(NamedTuple):
    """How a model computes logits from the products of its head.

    A product x becomes x / `scale`, or cap · tanh(x / scale / cap) if there is a `cap`.
    """

    scale: float = 1.0
    cap: float | None = None

    def apply(self, products: torch.Tensor) -> torch.Tensor:
        """Return float32 logits; float32 products are overwritten."""
        logits = products.float()
        if self.scale != 1.0:
            logits.div_(self.scale)
        if self.cap:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits


class HeadPart(NamedTuple):
    """A rank's part of a policy's head.

    - `weight` [ids, hidden]: the rows of consecutive ids, the first of which is `first`. Rows from the vocabulary's end
      on are padding and must not be here.
    - `rule`: how logits are computed.
    - `group`: the ranks that together have the whole vocabulary; None if this rank has it.
    """

    weight: torch.Tensor
    rule: LogitRule = LogitRule()
    first: int = 0
    group: Any = None


def compute_outputs(hidden: torch.Tensor, head: HeadPart, micro_batch: MicroBatch, request: ForwardRequest) -> Outputs:
    """Compute a policy's outputs from the hidden states of requested tokens.

    - `hidden` [tokens, hidden]: the states. With a sharded vocabulary, each rank computes its own part of their
      gradient; the caller adds up the parts.
    - `micro_batch`: the columns `token` [tokens], `given` [tokens, k] and `temperature` [tokens, 1]. The last two may
      be missing.
    - `request`: which outputs to compute.
    """
    import torch

    token = micro_batch["token"][:, None]
    given = micro_batch.get("given", None)
    ids = token if given is None else torch.cat([token, given], 1)
    temperature = micro_batch.get("temperature", None)
    if temperature is None and request.temperature != 1.0:
        temperature = torch.full((1, 1), request.temperature, device=hidden.device)
    keeps_entropy = request.entropy or torch.is_grad_enabled()
    logp, given_logps, entropy, best, best_ids = _make_function()(
        hidden, head.weight, head, ids, temperature, keeps_entropy, request.best
    )
    if entropy is not None and not request.entropy:
        entropy = entropy.detach()
    return Outputs(logp, None, entropy, None if given is None else given_logps, best, best_ids)


@cache
def _make_function() -> Any:
    import torch

    class Head(torch.autograd.Function):
        @staticmethod
        def forward(
            saved: Any,
            hidden: torch.Tensor,
            weight: torch.Tensor,
            head: HeadPart,
            ids: torch.Tensor,
            temperature: torch.Tensor | None,
            keeps_entropy: bool,
            best: int,
        ) -> tuple[torch.Tensor | None, ...]:
            summary = _Summary(len(hidden), ids, keeps_entropy, best, hidden.device)
            logits = None
            for columns in _slice(len(weight), count_ids_at_once(len(hidden), weight.itemsize)):
                logits = None  # or the logits of two parts would exist
                logits = _compute_logits(hidden, weight[columns], head.rule, temperature)
                summary.add(logits, head.first + columns.start)
            if head.group is not None:
                summary.add_up(head.group)
            # Two terms: subtracted one after the other, they round the logits near the largest one less.
            total = torch.stack([summary.highest, summary.mass.log()], 1)
            entropy = total[:, 1] - summary.moment / summary.mass if keeps_entropy else None
            logps = _subtract(summary.chosen, total)
            best_logps, best_ids = (_subtract(summary.largest, total), summary.largest_ids) if best else (None, None)
            # If all logits are one part, a backward pass need not compute them again.
            whole = len(weight) <= count_ids_at_once(len(hidden), weight.itemsize) and any(saved.needs_input_grad)
            kept = logits if whole else None
            saved.save_for_backward(hidden, weight, ids, temperature, total, entropy, kept)
            saved.head = head
            saved.set_materialize_grads(False)
            saved.mark_non_differentiable(*(x for x in (best_logps, best_ids) if x is not None))
            # Copies, since FSDP2 sets no hooks on views.
            return logps[:, 0].clone(), logps[:, 1:].clone(), entropy, best_logps, best_ids

        @staticmethod
        def backward(saved: Any, *grad_outputs: torch.Tensor | None) -> Any:
            hidden, weight, ids, temperature, total, entropy, kept = saved.saved_tensors
            rule = saved.head.rule
            grad_logp, grad_given, grad_entropy = grad_outputs[:3]
            grad_logps = total.new_zeros(ids.shape)
            if grad_logp is not None:
                grad_logps[:, 0] = grad_logp
            if grad_given is not None:
                grad_logps[:, 1:] = grad_given
            trains_weight = saved.needs_input_grad[1]
            grad_hidden = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
            grad_weight = torch.zeros_like(weight) if trains_weight else None
            for columns in _slice(len(weight), count_ids_at_once(len(hidden), weight.itemsize)):
                local = ids - (saved.head.first + columns.start)
                part = weight[columns]
                logits = kept if kept is not None else _compute_logits(hidden, part, rule, temperature)
                for rows in _slice(len(logits), count_slice_rows(*logits.shape)):
                    _replace_by_gradients(
                        logits[rows],
                        local[rows],
                        grad_logps[rows],
                        None if grad_entropy is None else grad_entropy[rows],
                        total[rows],
                        None if entropy is None else entropy[rows],
                        _select(temperature, rows),
                        rule,
                    )
                slope = logits.to(weight.dtype)
                del logits
                grad_hidden += slope @ part
                if grad_weight is not None:
                    torch.mm(slope.t(), hidden, out=grad_weight[columns])
                del slope
            return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None

    return Head.apply


def _select(temperature: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Return the temperatures of some tokens.

    One temperature is that of all tokens, and None is 1.
    """
    return temperature if temperature is None or len(temperature) == 1 else temperature[rows]


def _subtract(logits: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Replace logits by log-probabilities, in place.

    `total` [tokens, 2] has each token's largest logit, and the logarithm of Σ exp(logit - largest logit).
    """
    return logits.sub_(total[:, :1]).sub_(total[:, 1:])


def _slice(size: int, count: int) -> list[slice]:
    """Return slices of `count` elements, of which the last may be shorter."""
    return [slice(start, min(start + count, size)) for start in range(0, size, max(1, count))]


def _compute_logits(
    hidden: torch.Tensor, weight: torch.Tensor, rule: LogitRule, temperature: torch.Tensor | None
) -> torch.Tensor:
    """Return float32 logits [tokens, ids], divided by the temperature."""
    logits = rule.apply(hidden @ weight.t())
    return logits if temperature is None else logits.div_(temperature)


class _Summary:
    """What is kept of logits, for each token. With x = logit - largest logit:

    - `highest`, `mass`, `moment`: the largest logit, Σ exp(x), and Σ exp(x) x (0 unless `keeps_entropy`).
    - `chosen` [tokens, k]: the logits of the requested ids.
    - `largest`, `largest_ids` [tokens, best]: the largest logits with their ids.
    """

    def __init__(self, tokens: int, ids: torch.Tensor, keeps_entropy: bool, best: int, device: torch.device) -> None:
        import torch

        self.ids = ids
        self.keeps_entropy = keeps_entropy
        self.highest = torch.full((tokens,), -torch.inf, device=device)
        self.mass = torch.zeros(tokens, device=device)
        self.moment = torch.zeros(tokens, device=device)
        self.chosen = torch.zeros(ids.shape, device=device)
        self.largest = torch.full((tokens, best), -torch.inf, device=device)
        self.largest_ids = torch.zeros(tokens, best, dtype=torch.long, device=device)

    def add(self, logits: torch.Tensor, first: int) -> None:
        """Add the logits [tokens, ids] of consecutive ids, the first of which is `first`."""
        import torch

        size = logits.shape[1]
        self._rescale(torch.maximum(self.highest, logits.amax(-1)))
        for rows in _slice(len(logits), count_slice_rows(*logits.shape)):
            self._add_exponentials(rows, logits[rows])
        local = self.ids - first
        outside = (local < 0) | (local >= size)
        self.chosen += logits.gather(1, local.masked_fill(outside, 0)).masked_fill(outside, 0.0)
        if best := self.largest.shape[1]:
            values, places = logits.topk(min(best, size))
            self._choose(torch.cat([self.largest, values], 1), torch.cat([self.largest_ids, places + first], 1))

    def _add_exponentials(self, rows: slice, logits: torch.Tensor) -> None:
        shifted = logits - self.highest[rows, None]
        if not self.keeps_entropy:
            self.mass[rows] += shifted.exp_().sum(-1)
            return
        share = shifted.exp()
        self.mass[rows] += share.sum(-1)
        self.moment[rows] += share.mul_(shifted).sum(-1)

    def add_up(self, group: Any) -> None:
        """Add the summaries of all ranks of a group. Each rank has the result."""
        import torch
        from torch import distributed as dist

        highest = self.highest.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        self._rescale(highest)
        sums = torch.cat([self.chosen, self.mass[:, None], self.moment[:, None]], 1)
        dist.all_reduce(sums, group=group)
        self.chosen, self.mass, self.moment = sums[:, :-2], sums[:, -2], sums[:, -1]
        if self.largest.shape[1]:
            parts = [[torch.empty_like(tensor) for _ in range(group.size())] for tensor in self._best]
            for part, tensor in zip(parts, self._best, strict=True):
                dist.all_gather(part, tensor.contiguous(), group=group)
            self._choose(*(torch.cat(part, -1) for part in parts))

    @property
    def _best(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.largest, self.largest_ids

    def _choose(self, values: torch.Tensor, ids: torch.Tensor) -> None:
        self.largest, places = values.topk(self.largest.shape[1])
        self.largest_ids = ids.gather(1, places)

    def _rescale(self, highest: torch.Tensor) -> None:
        """Make the sums relative to another largest logit."""
        # Nothing was added yet where the largest logit is infinite.
        shift = (self.highest - highest).nan_to_num(neginf=0.0)
        share = shift.exp()
        self.moment = share * (self.moment + shift * self.mass)
        self.mass = share * self.mass
        self.highest = highest


def _replace_by_gradients(
    logits: torch.Tensor,
    local: torch.Tensor,
    grad_logps: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    total: torch.Tensor,
    entropy: torch.Tensor | None,
    temperature: torch.Tensor | None,
    rule: LogitRule,
) -> None:
    """Replace logits by the gradients of the products of the head, in place.

    With p the probabilities and H the entropy: log p = logit - Σ `total` of the token, d log p(i) / d logit(j) is
    (i = j) - p(j), and dH / d logit(j) is -p(j) (log p(j) + H).
    """
    slopes = None
    if rule.cap:
        slopes = logits / rule.cap
        if temperature is not None:
            slopes.mul_(temperature)
        slopes.square_().neg_().add_(1)
    logps = _subtract(logits, total)
    factor = -grad_logps.sum(-1, keepdim=True)
    if grad_entropy is None or entropy is None:
        gradient = logps.exp_().mul_(factor)
    else:
        share = logps.exp()
        gradient = logps.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).add_(factor).mul_(share)
    outside = (local < 0) | (local >= logits.shape[1])
    gradient.scatter_add_(1, local.masked_fill(outside, 0), grad_logps.masked_fill(outside, 0.0))
    if slopes is not None:
        gradient.mul_(slopes)
    if temperature is not None:
        gradient.div_(temperature)
    if rule.scale != 1.0:
        gradient.div_(rule.scale)
