"""Metrics of an iteration, in the order of docs/reference/metrics.md.

Invariant: every key of the line of an iteration in metrics.jsonl is the name of a metric here.
"""

from __future__ import annotations

from collections.abc import Mapping

from .metric import FAILURES, Metric

_NUMBERS = "see [wrong numbers](../guides/training_problems.md#wrong-numbers)"
_CONVERSATIONS = "[what is trained on](../guides/agents.md#what-is-trained-on)"

GENERAL = (
    Metric("iteration", "", "one", "the number of the iteration, counted from 0"),
    Metric("seconds", "s", "one", "the time from the start of the iteration until its last process has ended its work"),
    Metric("prompts", "", "one", "the number of prompts of the iteration"),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "one",
        "`(prompt_tokens + response_tokens) / seconds`, for all devices together",
    ),
    Metric(
        "throughput_eq5",
        "tokens/s/device",
        "one",
        "G N (PL + SL) / devices / seconds (arXiv:2507.19017, eq. 5). G N is the number of responses. PL and SL are "
        "the maximum lengths of a prompt and of a response",
    ),
    Metric(
        "phases",
        "s",
        "max",
        "the seconds of each phase, in the process that is slowest in this phase: [see below](#phases)",
    ),
    Metric(
        "changed",
        "",
        "one",
        "only in the first iteration after `--resume`, and only if something that determines the result has changed: "
        "[the changes](../guides/resume.md#what-a-resume-compares), as a list with one text for each change",
    ),
)
COLUMNS = (
    Metric(
        "COLUMN",
        "as written",
        "mean",
        "for `reward`, and for every other `f32` or `bf16` scalar that a function, an environment or a reward model "
        "writes: the mean over the rows of the iteration whose value is finite",
    ),
    Metric(
        "COLUMN/std",
        "as written",
        "ratio",
        "for each of these columns that responses have: the unbiased standard deviation among the responses to a "
        "prompt, as a mean over the prompts. If each prompt has one response, it is the standard deviation among all "
        "responses of the iteration",
    ),
    Metric(
        "COLUMN/flat",
        "",
        "ratio",
        "the share of the prompts whose responses all have the same value. If advantages are relative to the group, "
        "nothing is learned from these prompts",
    ),
    Metric(
        "STATE",
        "as it is",
        "mean",
        "the value that the previous iteration left. For a state per prompt: the mean over the prompts of this "
        "iteration",
    ),
    Metric(
        "STATE/age",
        "iterations",
        "one",
        "with `staleness`, for a state that rows are drawn with (`weights` of the source, a temperature): by how many "
        "iterations the value with which the rows were drawn is older than the value of this iteration",
    ),
    Metric(
        "kept/NODE",
        "",
        "mean",
        "the number of rows that a filter leaves, divided by the number of rows that it got. A repeated row counts "
        "each time. For a node with `on_failure`: the share of the rows that did not leave",
    ),
    Metric(
        "distinct/NODE",
        "",
        "mean",
        "the same for a `select`, but a repeated row counts once. 1 minus this figure is the share of the rows that is "
        "lost",
    ),
    Metric(
        "refills", "", "sum", "with a filter that has `refill`: the number of rounds of prompts after the first round"
    ),
    Metric("refill/prompts", "", "one", "with a filter that is `adaptive`: the number of prompts that a round draws"),
    Metric("prompts_drawn", "", "sum", "with `refill`: the number of prompts of all rounds"),
    Metric(
        "prompts_kept",
        "",
        "sum",
        "the number of prompts of which the filter with `refill` kept a row. Excess prompts, which are cut later, "
        "count too",
    ),
    Metric(
        "without/COLUMN",
        "rows",
        "sum",
        "the number of rows without a value of the column, since its function [returned "
        "None](../guides/functions.md#results). No key if there are none",
    ),
    Metric(
        "wrong/REASON",
        "rows",
        "sum",
        "the number of rows with a [wrong number](../guides/training_problems.md#wrong-numbers), by reason. No key if "
        "there are none",
    ),
    Metric(
        "verify/cut_off",
        "rows",
        "sum",
        "with `math_verify`: the number of answers without a verdict, which count as 0: [when an answer is cut "
        "off](../guides/rewards.md#mathematical-answers)",
    ),
)
STEPS = (
    Metric("loss", "", "mean", "the mean over the steps", "update"),
    Metric(
        "loss/NAME",
        "nats, or as the term defines",
        "mean",
        "the mean of the loss term NAME over the response tokens of the steps. For `dpo` and `bradley_terry`, it is "
        "the mean over the rows",
        "update",
    ),
    Metric(
        "TERM/FIGURE",
        "as the term defines",
        "mean",
        "the mean of a figure that a loss term reports in addition to its loss. The figures are `clip/ratio`, "
        "`clip/clipped`, `clip/kl` (nats, KL(old, new)), `value_clip/error`, `value_clip/clipped`, `dpo/margin`, "
        "`dpo/accuracy`, `bradley_terry/margin`, `bradley_terry/accuracy`",
        "update",
    ),
    Metric(
        "TERM/effective_sample_size",
        "",
        "ratio",
        "for each term that has a `ratio` r: (mean r)² / mean r², over the response tokens of the steps. At 1, all "
        "tokens have the same weight. Near 0, a few tokens decide the loss",
        "update",
    ),
    Metric(
        "TERM/explained_variance",
        "",
        "ratio",
        "for `value_clip`: 1 - var(R - v) / var(R), with returns R and values v. At 1, the values predict the returns "
        "exactly. At 0 or less, they predict no better than the mean of the returns. No key if all returns are equal",
        "update",
    ),
    Metric("lr", "", "mean", "the learning rate, as a mean over the steps", "update"),
    Metric(
        "entropy",
        "nats",
        "mean",
        "the entropy of the policy's distribution at each token that the loss covers, as a mean over the tokens of the "
        "steps. It is computed at the sampling temperature, before each step",
        "update",
    ),
    Metric("grad_norm", "", "mean", "the 2-norm of the gradient before clipping, as a mean over the steps", "update"),
    Metric(
        "rows",
        "",
        "sum",
        "the number of responses that the optimizer steps saw. A response counts once per epoch, so this is always the "
        "number of responses of the iteration times the number of epochs",
    ),
    Metric("updates", "", "sum", "the number of optimizer steps that were taken", "update"),
    Metric("skipped", "", "sum", f"the number of optimizer steps that were left out: {_NUMBERS}", "update"),
)
DRIFT = (
    Metric(
        "logp_drift",
        "nats",
        "mean",
        "the mean over the response tokens of \\|a - b\\|. Here a is the trainer's log-probability of the token, and b "
        "is the generator's log-probability when it drew the token, with the same weights: see "
        "[drift](../guides/training_problems.md#drift)",
    ),
    Metric("logp_drift_max", "nats", "max", "the largest of these differences \\|a - b\\|"),
    Metric(
        "logp_drift/N",
        "nats",
        "mean",
        "with `staleness`: `logp_drift` of the rows that were drawn with weights N versions older than the trainer's "
        "weights",
    ),
    Metric("logp_drift_max/N", "nats", "max", "with `staleness`: `logp_drift_max` of the same rows"),
    Metric(
        "staleness",
        "versions",
        "mean",
        "with `staleness` or `partial`: the mean [age](language/edges.md#resharding-edges) of the rows that are "
        "trained on. If a generation is cut (`partial`), the age of a row is that of its oldest token",
        "generate",
    ),
    Metric("staleness_max", "versions", "max", "the largest of these ages", "generate"),
)
RESPONSES = (
    Metric("response_length", "tokens", "mean", "the mean length of the responses, end token included", "generate"),
    Metric("response_length_max", "tokens", "max", "the length of the longest response", "generate"),
    Metric(
        "response_truncated",
        "",
        "mean",
        "the share of the responses that were cut off. Such a response has the maximum length, and the last text that "
        "the policy wrote in it ends with neither an end token nor a stop string",
        "generate",
    ),
    Metric(
        "prompt_tokens",
        "tokens",
        "sum",
        "the number of tokens of all prompts. A prompt counts once per response. Without a generation: the tokens of "
        "the columns that the update reads",
        "generate",
    ),
    Metric("response_tokens", "tokens", "sum", "the same for all responses", "generate"),
    Metric(
        "distinct_prompt_tokens",
        "tokens",
        "sum",
        "the number of prompt tokens, where a beginning that several prompts on a rank have in common counts once. A "
        "rank computes such a beginning once. So this number can grow with the number of ranks that generate",
        "generate",
    ),
    Metric(
        "distinct_tokens",
        "tokens",
        "sum",
        "the number of response tokens, where a beginning that several responses to a prompt have in common counts "
        "once, summed up over all prompts",
        "generate",
    ),
    Metric(
        "distinct_rows",
        "",
        "sum",
        "the number of different responses to a prompt, summed up over all prompts",
        "generate",
    ),
    Metric(
        "preempted",
        "",
        "sum",
        "how often the engine preempted a sequence because its KV cache was full, and computed its tokens again later. "
        "The metric is absent if this did not happen",
        "generate",
    ),
    Metric(
        "carried_over",
        "prompts",
        "sum",
        "with `partial`: the number of prompts that continue in the next iteration",
        "generate",
    ),
    Metric(
        "overdue",
        "prompts",
        "sum",
        "with `overdue = drop_group`: the number of prompts that had been cut the maximum number of times and were not "
        "complete in time. All responses to these prompts are dropped. The longest responses are dropped most often: "
        "if this number is large, raise `cuts`",
        "generate",
    ),
)
AGENTS = (
    Metric(
        "turns",
        "",
        "mean",
        "with an environment or an [agent](../guides/agents.md): the number of answers of the policy, as a mean over "
        "the responses",
        "generate",
    ),
    Metric(
        "policy_tokens",
        "tokens",
        "sum",
        "with an environment or an agent: the number of response tokens that the policy wrote",
        "generate",
    ),
    Metric("environment_tokens", "tokens", "sum", "the number of all other response tokens", "generate"),
    Metric(
        "failed",
        "rows",
        "sum",
        f"with `on_failure`: the number of rows whose environment or agent failed {FAILURES}. All other figures cover "
        "only the rows that did not leave",
        "generate",
    ),
    Metric("failed/REASON", "rows", "sum", "the same by reason. No key if there are none", "generate"),
    Metric(
        "NODE/failed",
        "rows",
        "sum",
        f"with `on_failure = leave`: the number of rows whose function failed {FAILURES}. No key if there are none",
    ),
    Metric("NODE/failed/REASON", "rows", "sum", "the same by reason"),
    Metric(
        "conversations",
        "",
        "sum",
        "with an agent: the number of conversations that are trained on, in all. There is [one per "
        "row](../guides/agents.md#what-is-trained-on), or up to the number in the attribute `conversations`",
        "generate",
    ),
    Metric(
        "left_out_answers",
        "",
        "sum",
        "with an agent: the number of answers of the policy that are in no conversation that is trained on",
        "generate",
    ),
    Metric("left_out_tokens", "tokens", "sum", "the number of tokens of these answers", "generate"),
    Metric(
        "strayed",
        "requests",
        "sum",
        "with an agent: the number of requests that continue from answers of the policy but do not match these "
        "answers token for token. The program changed the answers, or the template renders them differently "
        f"({_CONVERSATIONS})",
        "generate",
    ),
)
TRANSFERS = (
    Metric(
        "dock_bytes",
        "B",
        "sum",
        "by node: `put` are bytes written into a warehouse. `get` are bytes read from the memory of the reader's host. "
        "`get away` are bytes read from another host. `get here` are bytes that had come from another host before",
    ),
    Metric(
        "dock_messages",
        "",
        "sum",
        "the number of messages to the docks of all hosts: queries, rows written, rows for another host, notifications "
        "between hosts, and messages of the driver",
    ),
    Metric(
        "imbalance",
        "",
        "ratio",
        "for each node that several ranks or hosts compute: the tokens of the longest share of each round divided by "
        "the tokens of the mean share, over all rounds together. A share is the rows of one data-parallel group. At 1 "
        "the shares are equal. At 1.2 the mean rank waits a sixth of the time for the longest share",
    ),
    Metric(
        "reshard_bytes",
        "B",
        "max",
        "the bytes that one rank received from other ranks over all resharding edges, for the rank that received most",
    ),
    Metric("NODE/reshard_bytes", "B", "max", "if there are several resharding edges: the bytes of the edge to NODE"),
)
# The tables of the page.
ITERATION_TABLES: Mapping[str, tuple[Metric, ...]] = {
    "general": GENERAL,
    "columns": COLUMNS,
    "steps": STEPS,
    "drift": DRIFT,
    "responses": RESPONSES,
    "agents": AGENTS,
    "transfers": TRANSFERS,
}
