"""What nodes, edges and workers may say: a declaration for each, and the rules that follow from what is said.

Invariant: whoever uses an attribute reads its typed value, as `Update.of(node).mini_batch`. The expression that the
program states (`node.stated("mini_batch")`) is for messages about it. A declaration may be asked of any node: of one
with another verb it has its defaults.

A new attribute of `update` is a field of `Update`, and a line where a pass or an engine reads it. One that only some
engines keep to is `named`, and stands in what these `heed`; a run refuses it of all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from .attribute_schema import DeclaredAttributes, EdgeAttributes, NodeAttributes, attr
from .graph import Expr, Node
from .kinds import (
    AGENT,
    CALL,
    COUNT,
    COUNT_OR_0,
    ENVIRONMENT,
    KEEP,
    LOSS,
    OPTIMIZER,
    PER,
    REDUCE,
    SHARE,
    SIZE,
    TEMPERATURE,
    TIME,
    TOOL_CALLS,
    FlagKind,
    NameKind,
    NumericKind,
    StringKind,
    WordsKind,
)

N = TypeVar("N", int, float)
# What stands for an attribute that must be given and is not: only in a program with a mistake, which was told.
ABSENT = Expr("absent")


LOOKS = 8  # as often as this a rollout that may cut looks at its responses, until the longest there can be has ended


@dataclass(frozen=True)
class WorkerAttributes(DeclaredAttributes):
    """`worker NAME : KIND { … }`, of a kind with weights."""

    model: str = attr(
        NameKind(), "", "The name that the deploy's `model` statement gives weights to.", "the kind's name"
    )
    follows: str = attr(
        NameKind(),
        "",
        "Of a `frozen` worker: the trained worker whose weights it takes over after an iteration. Its own begin as "
        "those of its model.",
        "none: its weights never change",
    )
    every: int = attr(COUNT, 1, "With `follows`: it takes them after every so many-th iteration.")
    decay: float = attr(
        NumericKind(0, 1),
        0.0,
        "With `follows`: its weights become decay times their own and (1 - decay) times those that it follows, an "
        "exponential moving average. 0 copies them.",
    )


@dataclass(frozen=True)
class SourceAttributes(NodeAttributes):
    """`source(COUNT) -> columns { … }`."""

    count: int = attr(COUNT, 1, "How many rows of the data begin an iteration.", head=True)
    weights: Expr | None = attr(
        CALL,
        None,
        "How likely each row is to be drawn: a function of columns that the data fill and of states, which gives "
        "one number of 0 or more a row of the data. Columns come as under `per = batch`, of all usable rows at "
        "once. Each iteration draws from all of them: within one no row comes twice before all have come, over several "
        "a row comes as often as it is drawn. Rows of weight 0 are drawn when no others are left, which the run says. "
        "Where all are 0, it ends.",
        "each row alike",
    )


@dataclass(frozen=True)
class GenerateAttributes(NodeAttributes):
    """A node that draws responses."""

    samples: int = attr(COUNT, 1, "Responses to each prompt: the rows of the iteration are the source's times this.")
    temperature: Expr = attr(
        TEMPERATURE,
        Expr("number", 1.0),
        "Divides the logits; 0 takes the likeliest token. See [Temperatures](#temperatures).",
    )
    top_p: float = attr(SHARE, 1.0, "Draws from the likeliest tokens that together have this probability.")
    top_k: int = attr(COUNT, 0, "Draws from so many likeliest tokens.", "all")
    stop: tuple[str, ...] = attr(
        StringKind(several=True),
        (),
        (
            "Strings that end a response, beside the end token: as soon as its text, special tokens too, holds one, "
            "which stays part of it."
        ),
        "none",
    )
    max_tokens: int | None = attr(
        COUNT,
        None,
        "How long a response may get, end token included.",
        "the bound of the response",
    )
    partial: float = attr(
        NumericKind(0, 1),
        0.0,
        "Partial rollout: so many more prompts are under way than an iteration takes, as a share of these. With 0.5, "
        "of 192 where the source begins 128, it takes the first 128 whose responses have all ended. The others go on "
        "in the next iteration, from their tokens, with its weights.",
        "0: each response is generated whole",
    )
    cuts: int = attr(
        COUNT,
        4,
        "With `partial`: how often a prompt's responses may be cut. A token is at most `staleness` + `cuts` versions "
        "old.",
    )
    overdue: str = attr(
        WordsKind(("wait", "drop_group")),
        "wait",
        "With `partial`: what becomes of a prompt that was cut as often as it may be. `wait`: the iteration goes on "
        "until its responses have all ended, however few they are that others wait for. `drop_group`: where they "
        "have not when the iteration has enough, all of them leave: nothing is learnt from them, and the prompt is "
        "not drawn again before its turn in the data comes. They are [counted](metrics.md).",
    )
    environment: Expr | None = attr(
        ENVIRONMENT,
        None,
        "A class of yours with `reset` and `step`, which speak in text or in messages: several turns with tools "
        "([how](functions.md)). The response holds all of them, and its bound is that of all together; what else is "
        "written comes from the environment.",
        "none",
    )
    agent: Expr | None = attr(
        AGENT,
        None,
        "A function of yours that asks the policy by itself, over an endpoint as OpenAI's that the run serves "
        "([how](agents.md)). The response holds its conversation; what else is written is what the function returns.",
        "none",
    )
    tool_calls: Expr | None = attr(
        TOOL_CALLS,
        None,
        "With `agent`: how the policy writes calls of tools; a function of yours takes a text, and gives what is said "
        "beside the calls and a list of them, each a name and its arguments.",
        "as the model's chat template teaches it",
    )
    turns: int | None = attr(
        COUNT,
        None,
        "With `environment` or `agent`: how many answers of the policy a row has at most.",
        "as many as the response holds",
    )
    conversations: int = attr(
        COUNT,
        1,
        "With `agent`: of how many of its conversations a row is trained on at most, the latest that fit into the "
        "response ([how](agents.md)). Each is a sequence of its own; the plan counts memory for all of them.",
    )
    timeout: float = attr(
        TIME,
        math.inf,
        "How long one step of an `environment` may take, or an `agent` for a row; what takes longer has failed.",
        "none",
    )
    on_failure: str = attr(
        WordsKind(("stop", "drop_row", "drop_group")),
        "stop",
        "What becomes of a row whose `environment` or `agent` raises, takes too long or returns what does not belong "
        "there. `stop` ends the run; with `drop_row` the row leaves the iteration, with `drop_group` all "
        "responses to its prompt. They are [counted and told](metrics.md).",
    )
    memory: int = attr(
        SIZE,
        2 * 10**9,
        "With `on_failure`: the most that a process of the environment's rows may take beside what its file takes.",
    )

    def under_way(self, prompts: int) -> int:
        """How many prompts are under way at once, of so many that an iteration takes."""
        return prompts + (max(1, round(self.partial * prompts)) if self.partial else 0)

    @property
    def waits(self) -> bool:
        """Whether an iteration waits for prompts that were cut as often as they may be."""
        return self.overdue == "wait"

    def stretch(self, longest: int) -> int:
        """With `partial`: after so many more tokens of each response it is looked whether enough prompts are whole."""
        return max(1, math.ceil(longest / LOOKS))

    @property
    def partner(self) -> Expr | None:
        """Its environment or its agent: who else writes in the response, and gives what else is written."""
        return self.environment or self.agent

    def longest(self, bound: int) -> int:
        """The most tokens of a response whose column holds `bound`."""
        return bound if self.max_tokens is None else min(bound, self.max_tokens)


@dataclass(frozen=True)
class InferAttributes(NodeAttributes):
    """A node that computes with weights as they are."""


@dataclass(frozen=True)
class UpdateAttributes(NodeAttributes):
    """A node that takes optimizer steps on a loss."""

    loss: Expr = attr(
        LOSS,
        ABSENT,
        "Terms, of the package or a file, with `+`, `-` and `*`, as `clip(0.2) + 0.001 * kl()`: see [Losses](#losses).",
        must="clip(0.2)",
    )
    optimizer: Expr = attr(
        OPTIMIZER, ABSENT, "As `adamw(lr = 1e-6)`: see [Optimizers](#optimizers).", must="adamw(lr = 1e-6)"
    )
    reduce: Expr = attr(
        REDUCE,
        Expr("word", "tokens"),
        "How the losses of tokens become one: `tokens` is their mean over the mini-batch; `sequences` the mean "
        "over rows of each row's mean; `constant(n)` the mean over rows of each row's sum / n.",
    )
    masked_rows: str = attr(
        WordsKind(("count", "skip")),
        "count",
        "With `sequences` or `constant(n)`: the rows of which no token is in the loss, since a mask leaves all of them "
        "out or the row is empty. `count`: each counts as a row with the loss 0. `skip`: the mean is over the other "
        "rows, as in verl.",
    )
    mini_batch: int | None = attr(
        COUNT,
        None,
        (
            "Rows of an optimizer step. Which rows belong to which step is drawn from the seed, anew in each epoch, "
            "never by arrival. All rows are learnt from: where it does not divide them, the last step of an epoch has "
            "the rest, so 32 rows with `mini_batch = 12` make steps of 12, 12 and 8 rows. The dp of the layout has to "
            "divide it."
        ),
        "all rows",
    )
    epochs: int = attr(COUNT, 1, "How often each row is learnt from in an iteration.")
    clip_grad: float = attr(NumericKind(0, above=True), 1.0, "The 2-norm that the gradient is cut to.")
    after: int = attr(COUNT_OR_0, 0, "The first iteration in which it runs.")
    every: int = attr(COUNT, 1, "It runs in every so many-th iteration.")

    def step_rows(self, rows: N) -> int | N:
        """Rows of an optimizer step, of so many that an iteration has."""
        return rows if self.mini_batch is None else self.mini_batch

    def steps(self, rows: int) -> int:
        """Optimizer steps of an iteration that has so many rows."""
        return -(-rows // max(1, self.step_rows(rows))) * self.epochs

    def due(self, iteration: int) -> bool:
        """Whether it runs in an iteration; a node of another verb runs in each."""
        return iteration >= self.after and (iteration - self.after) % self.every == 0

    def steps_in_run(self, rows: int, iterations: int) -> int:
        """Optimizer steps of a run, at most: filters may leave fewer rows."""
        return self.steps(rows) * max(0, -(-(iterations - self.after) // self.every))

    @property
    def rate(self) -> Expr:
        """The learning rate: a number, a state, or the call of a schedule."""
        return self.optimizer.args[self.optimizer.keys.index("lr")]


@dataclass(frozen=True)
class CallAttributes(NodeAttributes):
    """A node of a `function` worker, which calls Python, or is a filter."""

    call: Expr | None = attr(
        CALL,
        None,
        "The function. Columns bind to its parameters by name; `f(reward = score)` binds another one. Options "
        "stand in the call by order or by name.",
        "must be given, but in a filter",
    )
    per: str = attr(
        PER,
        Node.per,
        "What one call sees: `row`; a column, so all rows that share that column's row (`prompt`: the group of a "
        "prompt); `batch`: every row of the iteration that is left.",
    )
    keep: Expr | None = attr(
        KEEP,
        None,
        "A filter: rows for which it is not true leave the iteration. With `per` groups, whole groups leave or a "
        "group gets smaller as one.",
        "every row",
    )
    select: Expr | None = attr(
        CALL,
        None,
        "A filter: the function gives the places of the rows that stay, in order; a place may come more than "
        "once, up to 1,024 times or as often as there are rows.",
        "every row",
    )
    refill: int = attr(
        COUNT,
        0,
        "With a filter: at most so many more rounds of prompts until as many groups stay as the source begins. "
        "What is over is cut in the source's order. If that does not suffice the run ends with an error.",
        "no refill",
    )
    adaptive: bool = attr(
        FlagKind(),
        False,
        "With `refill` and `per` a column of the source: each iteration draws as many prompts at once as are likely to "
        "suffice, by the share that passed in the iterations before, and no more prompts in all than `refill` allows.",
    )
    on_failure: str = attr(
        WordsKind(("stop", "leave")),
        "stop",
        "With `call`: what becomes of what a call was for, the row or with `per` the group, where the function raises "
        "or returns what does not belong there. `stop` ends the run; with `leave` it leaves the iteration, "
        "[counted and told](metrics.md).",
    )

    @classmethod
    def _of(cls, node: Node) -> CallAttributes:
        return cls(**cls.values(node.attributes), per=node.per)  # which a node has as a field of its own

    @property
    def functions(self) -> tuple[Expr, ...]:
        """What it calls; of a filter it may be a comparison."""
        return tuple(called for called in (self.call, self.keep, self.select) if called is not None)


@dataclass(frozen=True)
class SampleEdgeAttributes(EdgeAttributes):
    """`A -> B { … }`: rows go from A to B."""

    stream: int | None = attr(
        COUNT,
        None,
        (
            "B may begin when so many units (rows, or groups under `per`) are ready, and takes them batch by batch: "
            "stages overlap."
        ),
        "all rows at once",
    )
    stream_tokens: int | None = attr(
        COUNT,
        None,
        (
            "As `stream`, when the units that are ready hold so many tokens: batches take alike, whatever their rows' "
            "lengths. Of both, what comes first."
        ),
        "all rows at once",
    )
    balance: str = attr(
        WordsKind(("tokens",)),
        "",
        "`tokens` shares rows among the ranks of B by their length.",
        "by number",
    )


@dataclass(frozen=True)
class ReshardingEdgeAttributes(EdgeAttributes):
    """`A => B { … }`: the weights of A's worker go to B."""

    staleness: int = attr(
        COUNT_OR_0,
        0,
        (
            "So many versions B may be behind: 0 is synchronous. On devices of its own B goes on while A learns. On "
            "the same devices it is one behind: it generates for the next iteration before A learns from this one, "
            "whose rewards are computed meanwhile. Each row keeps the version that made it."
        ),
    )
    every: int = attr(
        COUNT,
        1,
        "Sends every so many-th version, and those that checkpoints are made of and that evaluations take: B generates "
        "with what it has until the next comes. Of `n` the rows between need `staleness = n - 1` at least.",
    )


# The attributes that name what is called, in the order in which one that fails is looked for.
CALLED = {
    name: attribute.kind
    for said in (CallAttributes, SourceAttributes, GenerateAttributes, UpdateAttributes)
    for name, attribute in said.declared().items()
    if attribute.kind in (CALL, KEEP, ENVIRONMENT, AGENT, LOSS, OPTIMIZER)
}


def place_of_call(node: Node) -> str:
    """Where what a node calls is stated, for running text; where it calls nothing, the node itself.

    Of a node that extends another one's these are different lines, often of different files.
    """
    calls = (call.span for key in CALLED if (call := node.stated(key)) is not None)
    return next((span.place for span in calls if span.line), node.span.place)
