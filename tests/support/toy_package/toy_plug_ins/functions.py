"""A function, a loss term and an optimizer."""

from msrl_graph.algorithms.registry import Count, Positive, Rate, Tokens, function, loss_term, optimizer
from msrl_graph.ir.optimizer_spec import OptimizerSpec, Rule


@function()
def toy_length(response: str, answer: str, *, most: Positive = 4.0) -> float:
    """The length of a response without its answer, as a share of `most`."""
    return len(response.replace(answer, "")) / most


@loss_term
def toy_confidence(logp: Tokens) -> Tokens:
    """Minus the log-probability of each token."""
    return -logp


@optimizer
def toy_sgd(*, lr: Rate, warmup: Count = 1) -> OptimizerSpec:
    """Stochastic gradient descent without any state."""
    return OptimizerSpec(Rule("SGD", {}, {}))
