"""Attributes of nodes and edges, and values that are computed from them.

Invariant: code reads the typed value of an attribute, such as `UpdateAttributes.of(node).mini_batch`. The expression
that the program states (`node.stated("mini_batch")`) is only for messages about the attribute. The method `of` of
`UpdateAttributes` and of similar classes accepts any node. For a node with another verb, it returns the defaults.

To add an attribute of `update`, add a field to `UpdateAttributes` and code in a pass or an engine that reads the field.
An engine that does not support all attributes lists its supported attributes (`supported_attributes` in
backends/spec.py). A run rejects an attribute that is not in this list. If few engines know an attribute, its field has
`opt_in = True`, and each of these engines lists it in `opt_in`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from .attribute_schema import EdgeAttributes, NodeAttributes, attr
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
    NumericKind,
    StringKind,
    WordsKind,
)

N = TypeVar("N", int, float)
# The value of a required attribute that is missing: only in a program with a mistake, which is reported.
ABSENT = Expr("absent")
LOOKS = 8  # how often a partial rollout checks its responses before the longest possible one ends


@dataclass(frozen=True)
class SourceAttributes(NodeAttributes):
    """Attributes of `source(COUNT) -> columns { … }`."""

    count: int = attr(COUNT, 1, "The number of data rows per iteration.", head=True)
    weights: Expr | None = attr(
        CALL,
        None,
        "The sampling weight of each row: a function of columns of the data and of states. It returns one number of 0 "
        "or more per row of the data. One call gets the columns of all usable rows, as with `per = batch`. Each "
        "iteration draws from all rows. Within an iteration, no row is drawn twice before all rows have been drawn; "
        "in the next iteration, every row may be drawn again. Rows of weight 0 are drawn only when no others are "
        "left, and the run reports this. If all weights are 0, the run ends.",
        "equal weights",
    )


@dataclass(frozen=True)
class GenerateAttributes(NodeAttributes):
    """Attributes of a `generate` node, which samples responses."""

    samples: int = attr(COUNT, 1, "The number of responses per prompt. With 8, 128 prompts have 1,024 responses.")
    temperature: Expr = attr(
        TEMPERATURE,
        Expr("number", 1.0),
        "The number by which the logits are divided; 0 takes the likeliest token. See "
        "[Temperatures](nodes.md#temperatures).",
    )
    top_p: float = attr(SHARE, 1.0, "Draws each token from the likeliest tokens that together have this probability.")
    top_k: int = attr(COUNT, 0, "Draws each token from this number of likeliest tokens.", "all")
    min_p: float = attr(
        NumericKind(0, 1),
        0.0,
        "Draws no token whose probability, at the sampling temperature, is below this share of the likeliest token's. "
        "The engines of this package support it.",
        opt_in=True,
    )
    stop: tuple[str, ...] = attr(
        StringKind(several=True),
        (),
        "Strings that end a response, in addition to the end token. A response ends as soon as its text, including "
        "special tokens, contains one of the strings. The string remains part of the response.",
        "none",
    )
    max_tokens: int | None = attr(
        COUNT, None, "The maximum length of a response, end token included.", "the bound of the response column"
    )
    partial: float = attr(
        NumericKind(0, 1),
        0.0,
        "Partial rollout: the number of additional prompts in progress, as a share of the prompts that an iteration "
        "takes. With 0.5 and a source of 128, 192 prompts are in progress, and the iteration takes the first 128 "
        "whose responses have all ended. The other prompts are cut: the next iteration continues their responses "
        "after the tokens that exist, with its own weights.",
        "0: each response is generated completely",
    )
    cuts: int = attr(
        COUNT,
        4,
        "With `partial`: the maximum number of times that the responses to a prompt may be cut. A token is at most "
        "`staleness` + `cuts` versions old.",
    )
    overdue: str = attr(
        WordsKind(("wait", "drop_group")),
        "wait",
        "With `partial`: what happens to a prompt that has been cut `cuts` times. `wait`: the iteration continues "
        "until all responses to the prompt have ended, even if only a few are left. `drop_group`: if they have not "
        "ended when the iteration has enough prompts, all of them are dropped. Nothing is learned from them, and the "
        "prompt is not drawn again before its turn in the data. Dropped responses are "
        "[counted](../metrics.md#responses).",
    )
    environment: Expr | None = attr(
        ENVIRONMENT,
        None,
        "Your class with `reset` and `step`, which exchange text or messages with the policy: several turns with "
        "tools ([how](../../guides/environments.md)). The response contains all turns, and its bound applies to their "
        "sum. The other columns that the node writes come from the environment.",
        "none",
    )
    agent: Expr | None = attr(
        AGENT,
        None,
        "Your function that calls the policy over an OpenAI-compatible endpoint of the run "
        "([how](../../guides/agents.md)). The response contains the conversation of the function with the policy. The "
        "other columns that the node writes are what the function returns.",
        "none",
    )
    tool_calls: Expr | None = attr(
        TOOL_CALLS,
        None,
        "With `agent`: the format in which the policy writes tool calls, or your function that reads them. It takes a "
        "text. It returns the text without the calls, and a list of the calls, each a name and its arguments.",
        "the format of the model's chat template",
    )
    turns: int | None = attr(
        COUNT,
        None,
        "With `environment` or `agent`: the maximum number of answers of the policy per row.",
        "limited only by the length of the response",
    )
    conversations: int = attr(
        COUNT,
        1,
        "With `agent`: the maximum number of conversations per row to train on, the latest that fit into the response "
        "([how](../../guides/agents.md#what-is-trained-on)). Each is a separate sequence; the plan has memory for all.",
    )
    timeout: float = attr(
        TIME,
        math.inf,
        "The time limit of one step of an `environment`, or of an `agent` for one row; a longer call has failed.",
        "none",
    )
    on_failure: str = attr(
        WordsKind(("stop", "drop_row", "drop_group")),
        "stop",
        "What happens to a row whose `environment` or `agent` raises, takes too long or returns an invalid value. "
        "`stop` ends the run. `drop_row` drops the row from the iteration. `drop_group` drops all responses to the "
        "prompt of the row. Dropped rows are [counted and reported](../metrics.md#rows-that-failed).",
    )
    memory: int = attr(
        SIZE,
        2 * 10**9,
        "With `on_failure`: the memory limit of a process that runs the environment, in addition to the memory that "
        "the process uses after it has imported the environment's file.",
    )

    def under_way(self, prompts: int) -> int:
        """Return how many prompts are in progress if an iteration needs `prompts` prompts."""
        return prompts + (max(1, round(self.partial * prompts)) if self.partial else 0)

    @property
    def waits(self) -> bool:
        """Whether an iteration waits for responses that were interrupted `cuts` times."""
        return self.overdue == "wait"

    def stretch(self, longest: int) -> int:
        """Return the tokens per response between two checks for complete prompts."""
        return max(1, math.ceil(longest / LOOKS))

    @property
    def partner(self) -> Expr | None:
        """The environment or agent of the generation, or None.

        An environment or agent writes part of the response, and all other columns that the generation writes.
        """
        return self.environment or self.agent

    def longest(self, bound: int) -> int:
        """Return the maximum length of a response; `bound` is that of the response column."""
        return bound if self.max_tokens is None else min(bound, self.max_tokens)


@dataclass(frozen=True)
class InferAttributes(NodeAttributes):
    """Attributes of an `infer` node, which computes with weights but does not train."""


@dataclass(frozen=True)
class UpdateAttributes(NodeAttributes):
    """Attributes of an `update` node, which takes optimizer steps on a loss."""

    loss: Expr = attr(
        LOSS,
        ABSENT,
        "Loss terms of msrl_graph or of your file, combined with `+`, `-` and `*`. An example is `clip(0.2) + 0.001 * "
        "kl()`: see [Losses](losses.md#losses).",
        must="clip(0.2)",
    )
    optimizer: Expr = attr(
        OPTIMIZER, ABSENT, "An [optimizer](losses.md#optimizers), such as `adamw(lr = 1e-6)`.", must="adamw(lr = 1e-6)"
    )
    reduce: Expr = attr(
        REDUCE,
        Expr("word", "tokens"),
        "How the losses of tokens are reduced to one number. `tokens`: the mean over the tokens of the mini-batch. "
        "`sequences`: the mean over rows of each row's mean. `constant(n)`: the mean over rows of each row's sum / n.",
    )
    masked_rows: str = attr(
        WordsKind(("count", "skip")),
        "count",
        "With `reduce = sequences` or `constant(n)`: how a row counts if none of its tokens is in the loss, since a "
        "mask excludes all of them or the row is empty. `count`: as a row with the loss 0. `skip`: not at all, so the "
        "mean is over the other rows, as in verl.",
    )
    mini_batch: int | None = attr(
        COUNT,
        None,
        "The number of rows per optimizer step. The seed decides for each epoch which rows belong to which step; the "
        "order in which rows arrive does not. If `mini_batch` does not divide the number of rows, the last step of an "
        "epoch has the remaining rows. So 32 rows with `mini_batch = 12` make steps of 12, 12 and 8 rows. The dp of "
        "the layout must divide `mini_batch`.",
        "all rows",
    )
    epochs: int = attr(COUNT, 1, "The number of passes over the rows of an iteration.")
    clip_grad: float = attr(NumericKind(0, above=True), 1.0, "The 2-norm to which a larger gradient is clipped.")
    after: int = attr(COUNT_OR_0, 0, "The first iteration in which the update runs; iterations are counted from 0.")
    every: int = attr(COUNT, 1, "The update runs every `every` iterations.")

    def step_rows(self, rows: N) -> int | N:
        """Return the rows per optimizer step: `mini_batch`, or all `rows` of an iteration."""
        return rows if self.mini_batch is None else self.mini_batch

    def steps(self, rows: int) -> int:
        """Return the number of optimizer steps of an iteration with `rows` rows."""
        return -(-rows // max(1, self.step_rows(rows))) * self.epochs

    def due(self, iteration: int) -> bool:
        """Return whether an update runs in an iteration; nodes of other verbs always run."""
        return iteration >= self.after and (iteration - self.after) % self.every == 0

    def steps_in_run(self, rows: int, iterations: int) -> int:
        """Return how many optimizer steps a run takes if no filter drops rows.

        `rows` is the number of rows in an iteration.
        """
        return self.steps(rows) * max(0, -(-(iterations - self.after) // self.every))

    @property
    def rate(self) -> Expr:
        """The learning rate: a number, a state, or the call of a schedule."""
        return self.optimizer.args[self.optimizer.keys.index("lr")]


@dataclass(frozen=True)
class CallAttributes(NodeAttributes):
    """Attributes of a function node, which calls Python or filters rows."""

    call: Expr | None = attr(
        CALL,
        None,
        "The function. A column is passed to the parameter of the same name; `f(reward = score)` passes the column "
        "`score` to the parameter `reward`. Options are passed in the call by position or by name.",
        "must be given, except in a filter",
    )
    per: str = attr(
        PER,
        Node.per,
        "What one call gets. `row`: one row. The name of a column: all rows below one row of that column (`prompt`: "
        "the group of a prompt). `batch`: all remaining rows of the iteration.",
    )
    keep: Expr | None = attr(
        KEEP,
        None,
        "A filter: a row leaves the iteration if this comparison or call is false for the row. With `per`, one call "
        "filters one group: the whole group or some of its rows leave.",
        "every row",
    )
    select: Expr | None = attr(
        CALL,
        None,
        "A filter: the function returns the indices of the rows that remain, in order. An index may be repeated up to "
        "1,024 times, or up to the number of rows if there are more.",
        "every row",
    )
    refill: int = attr(
        COUNT,
        0,
        "With a filter: the maximum number of additional rounds of prompts. Rounds are added until as many groups "
        "remain as the source has rows. If more groups remain, the last in the order of the source are dropped. If "
        "the rounds do not suffice, the run ends with an error.",
        "no refill",
    )
    adaptive: bool = attr(
        FlagKind(),
        False,
        "With `refill`, if `per` is a column of the source: each iteration first draws the number of prompts that is "
        "likely to suffice, according to the share of prompts that passed the filter in previous iterations. In all, "
        "an iteration draws no more prompts than `refill` allows.",
    )
    on_failure: str = attr(
        WordsKind(("stop", "leave")),
        "stop",
        "With `call`: what happens if a call raises or returns an invalid value. `stop`: the run ends. `leave`: the "
        "row of the call (with `per`: the group) leaves the iteration and is "
        "[counted](../metrics.md#rows-that-failed).",
    )

    @classmethod
    def _of(cls, node: Node) -> CallAttributes:
        return cls(**cls.values(node.attributes), per=node.per)  # `per` is a field of the node itself

    @property
    def functions(self) -> tuple[Expr, ...]:
        """The calls in the node's attributes; a comparison in a filter counts as a call."""
        return tuple(called for called in (self.call, self.keep, self.select) if called is not None)


@dataclass(frozen=True)
class SampleEdgeAttributes(EdgeAttributes):
    """Attributes of a sample edge `A -> B { … }`, which sends rows from A to B."""

    stream: int | None = attr(
        COUNT,
        None,
        "B may begin when this number of units (rows, or groups with `per`) is ready. B gets the units batch by "
        "batch, so that A and B compute at the same time.",
        "all rows at once",
    )
    stream_tokens: int | None = attr(
        COUNT,
        None,
        "Like `stream`, but counts the tokens of the units that are ready: batches take equal time for rows of any "
        "length. With both attributes, the limit that is reached first applies.",
        "all rows at once",
    )
    balance: str = attr(
        WordsKind(("tokens",)),
        "",
        "`tokens` distributes rows among the ranks of B by the lengths of the rows.",
        "by the number of rows",
    )


@dataclass(frozen=True)
class ReshardingEdgeAttributes(EdgeAttributes):
    """Attributes of `A => B { … }`, which sends the weights of A's worker to B."""

    staleness: int = attr(
        COUNT_OR_0,
        0,
        "The bound on the age of B's weights, in versions; 0 means synchronous. With devices of its own, B continues "
        "to generate while A trains. If A and B share devices, B's weights are one version behind: B generates for "
        "the next iteration before A trains on the current iteration, whose rewards are computed meanwhile. Each row "
        "records the version that generated it.",
    )
    every: int = attr(
        COUNT,
        1,
        "Sends only every `every`-th version of the weights, and the versions of checkpoints and evaluations. B "
        "generates with its current weights until the next version arrives. `every = n` needs a `staleness` of n - 1 "
        "or more.",
    )


# The attributes that name a call, in the order in which a failing call is looked up.
CALLED = {
    name: attribute.kind
    for declaration in (CallAttributes, SourceAttributes, GenerateAttributes, UpdateAttributes)
    for name, attribute in declaration.declared().items()
    if attribute.kind in (CALL, KEEP, ENVIRONMENT, AGENT, LOSS, OPTIMIZER)
}


def place_of_call(node: Node) -> str:
    """Return the line and file of a node's call as text, for use in a sentence.

    For a node without a call, the text names the line of the node. If a node extends another node, the call can come
    from the other node, which is often in another file.
    """
    calls = (call.span for key in CALLED if (call := node.stated(key)) is not None)
    return next((span.place for span in calls if span.line), node.span.place)
