"""Generation: how a rank computes the verb `generate` for a batch of prompts.

Invariant: what is sampled for a row is a function of (seed, node, iteration, row), of the row's prompt, of the weights
and of what an environment replies or an agent asks. All ranks of a data-parallel group make the same calls on their
engine. Only the group's leader talks to environments and agents. The leader shares all answers with the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist

from ...analysis.rowsets import rowsets
from ...analysis.sequences import begins_columns, find_response_column, sequences, temperature_exprs, temperature_name
from ...backends.engine_protocols import Response, Sampling, collect_responses
from ...ir.attributes import GenerateAttributes, SampleEdgeAttributes
from ...ir.evaluation import Draw
from ...ir.graph import Node
from ...ir.plan import Plan
from ..agents.rank_protocol import BatchStart
from ..agents.template import ChatTemplate
from ..data import numerics
from ..data.columns import Array, ColumnData, ColumnRows, Verdicts, ragged
from ..data.row_files import Recording
from ..data.tokens import Tokens, end_tokens, tokenise_columns
from ..dock.messages import Batch
from ..functions.environments import EnvironmentClass
from ..functions.surviving_rows import SurvivingRows
from ..functions.values import ReturnChecker
from ..metrics.reward_variance import ColumnMeans
from ..process import row_progress
from ..process.task import Task
from ..process.task_report import Report
from .agent_generation import AgentGeneration
from .environment_turns import BEGINNING, Dialogue
from .multi_turn import Responses
from .packing import apply_mask, count_distinct
from .partial_rollout import PartialRollout


def _count_progress(ended: Iterator[Response], total: int) -> Iterator[Response]:
    """Yield responses as they end; report the number of ended responses as progress."""
    for number, response in enumerate(ended, 1):
        row_progress.report(number, total)
        yield response


class Generation(AgentGeneration):
    """The methods with which a rank generates columns from a batch of prompts."""

    watch: numerics.NumericsWatch
    means: ColumnMeans

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.sets = rowsets(plan.graph).sets
        self.recording: Recording | None = None  # replaces the generators in training

    def build(self) -> None:
        super().build()
        nodes = [self.plan.graph.node(name) for name in self.generators]
        self.ends = {generation.name: end_tokens(self.plan.model(generation.name).path) for generation in nodes}
        self.environments = {
            generation.name: EnvironmentClass(generation, self.plan)
            for generation in nodes
            if GenerateAttributes.of(generation).environment is not None
        }
        for node in nodes:
            if node.name in self.environments and self._is_group_leader(node):  # only this rank calls the environment
                self.environments[node.name].start()

    def replay(self, folder: str) -> None:
        """Use the responses of a recorded run in all training iterations from now on."""
        self.recording = Recording(self.plan, Path(folder))

    def _generate(self, node: Node, task: Task, batch: Batch, report: Report) -> Iterator[dict[str, ColumnRows]]:
        """Yield the columns that the node writes, in chunks if a sample edge has `stream`."""
        partial = node.cuts and task.trains
        if not len(batch.rows) and not partial:  # a last chunk with fewer rows than there are groups
            return
        graph = self.plan.graph
        first = self.plan.graph.verb("generate")[0].name == node.name
        evaluation = self.plan.deploy.evaluation(task.name)
        attributes = GenerateAttributes.of(node)
        draw = evaluation.draw(graph, node) if evaluation else Draw(node.name)
        samples = draw.samples or attributes.samples
        response, as_drawn = numerics.sampled_columns(graph, node)
        sampling = Sampling(
            samples=samples,
            max_tokens=graph.bound(response) if attributes.max_tokens is None else attributes.max_tokens,
            temperature=self._temperature(node, task, batch, draw, samples),
            top_p=attributes.top_p,
            top_k=attributes.top_k,
            ends=self.ends[node.name],
            stop=attributes.stop,
        )
        context = self._context(node, batch)
        if attributes.partner is None:  # a partner's conversations are never empty, or are rejected
            self.watch.check_input(node, task, batch.rows, np.fromiter(map(len, context), int))
        rows = (batch.rows[:, None] * sampling.samples + np.arange(sampling.samples)).reshape(-1)
        keys = self._random_stream(node, task).keys(task.number, rows)
        metric_prefix = "" if first else f"{node.name}/"  # only the first generation's metrics have no prefix
        responses: list[Array] = [np.zeros(0, np.int32)] * len(rows)
        if attributes.partner is not None:
            play = self._run_episodes if attributes.agent is None else self._run_conversations
            rows, written, verdicts, last = play(node, task, batch, rows, context, sampling, report, metric_prefix)
            responses = [written[response][i] for i in range(len(rows))]
            last_turns = [tokens[first:] for tokens, first in zip(responses, last, strict=True)]
            yield {**verdicts, **{name: ColumnRows(rows, column) for name, column in written.items()}}
        elif partial:
            columns = self._run_partial_rollout(node, task, batch, context, sampling, report, metric_prefix)
            rows = columns[response].rows
            responses = [columns[response].column[i] for i in range(len(columns[response].rows))]
            yield columns
        else:
            ended: Iterator[Response]
            if self.recording is not None and task.trains:
                recorded = (node, (response, as_drawn), task.number, context, rows, sampling.samples)
                ended = map(Response, range(len(rows)), *self.recording.responses(*recorded))
            else:
                ended = _count_progress(self.generators[node.name].generate(context, keys, sampling), len(rows))
            for part in self._split_stream(node, ended):
                places = np.sort([sample.place for sample in part])
                tokens, logps = collect_responses(part)
                for place, drawn in zip(places, tokens, strict=True):
                    responses[place] = drawn
                yield self._policy_columns(node, task, rows[places], tokens, logps, report)
        lengths = np.fromiter(map(len, responses), int)
        full = self._count_truncated(node, responses, responses if attributes.partner is None else last_turns, sampling)
        report.count(f"{metric_prefix}response_truncated", float(full), len(responses))
        report.count(f"{metric_prefix}response_length", float(lengths.sum()), len(rows))
        prompt_lengths = dict(zip(batch.rows.tolist(), map(len, context), strict=True))
        prompts = rows // sampling.samples
        report.count(f"{metric_prefix}prompt_tokens", float(sum(prompt_lengths[row] for row in prompts.tolist())), 0)
        report.count(f"{metric_prefix}response_tokens", float(lengths.sum()), 0)
        report.count(
            f"{metric_prefix}distinct_prompt_tokens", float(count_distinct(context, np.zeros(len(context), int))[0]), 0
        )
        for name, number in zip(("distinct_tokens", "distinct_rows"), count_distinct(responses, prompts), strict=True):
            report.count(metric_prefix + name, float(number), 0)
        report.peak(f"{metric_prefix}response_length_max", float(lengths.max(initial=0)))
        if not partial and any(edge.dst == node.name and edge.name in task.fetches for edge in self.plan.reshards):
            staleness = float(task.number - self._version(node, task))
            report.count(f"{metric_prefix}staleness", staleness * len(rows), len(rows))
            report.peak(f"{metric_prefix}staleness_max", staleness)

    def _run_partial_rollout(
        self,
        node: Node,
        task: Task,
        batch: Batch,
        context: list[Array],
        sampling: Sampling,
        report: Report,
        metric_prefix: str,
    ) -> dict[str, ColumnRows]:
        """Return the columns of the responses that are used, and a verdict on every row."""
        fan = sampling.samples
        sieve = rowsets(self.plan.graph).sieves[node.name]
        attributes = GenerateAttributes.of(node)
        rollout = PartialRollout(
            task,
            batch.rows,
            context,
            sampling,
            attributes,
            self.plan.graph.rows[0],
            self._version(node, task),
            lambda numbers: self._sum_over_groups(node, numbers),
            self._random_stream(node, task),
        )
        known = find_response_column(self.plan.graph, node, "i32")
        if self.recording is None:
            taken_rows = rollout.run(self.generators[node.name])
        else:
            columns = (*numerics.sampled_columns(self.plan.graph, node), *([known] if known else []))
            taken_rows = rollout.replay(self.recording, node, columns)
        if self._is_group_leader(node):
            report.cut = rollout.cut_prompts(taken_rows)
            report.count(f"{metric_prefix}carried_over", float(len(report.cut)), 0)
            if not attributes.waits:
                report.count(f"{metric_prefix}overdue", float(len(batch.rows) - len(taken_rows) - len(report.cut)), 0)
        parts = [part for row in taken_rows for part in rollout.responses[row]]
        rows = (np.array(taken_rows, np.int64)[:, None] * fan + np.arange(fan)).reshape(-1)
        all_rows = (batch.rows[:, None] * fan + np.arange(fan)).reshape(-1)
        versions = [part.versions for part in parts]
        if self.recording is None or known:  # otherwise the versions are not known
            staleness = task.number - np.array([own_versions.min(initial=task.number) for own_versions in versions])
            report.count(f"{metric_prefix}staleness", float(staleness.sum()), len(rows))
            report.peak(f"{metric_prefix}staleness_max", float(staleness.max(initial=0)))
        written = self._policy_columns(
            node, task, rows, [part.tokens for part in parts], [part.logps for part in parts], report, versions
        )
        return {sieve.column: Verdicts(all_rows, ColumnData(np.isin(all_rows, rows).astype(np.int32)))} | written

    def _sum_over_groups(self, node: Node, numbers: Array) -> Array:
        """Return the sum of the arrays `numbers` over the data-parallel groups of a node."""
        placement = self.plan.placement(node.name)
        if placement.layout.dp == 1:
            return numbers
        total = torch.from_numpy(numbers).to(self.device.place)
        dist.all_reduce(total, group=self._mesh(placement)["dp"].get_group())
        sums: Array = total.cpu().numpy()
        return sums

    def _split_stream(self, node: Node, ended: Iterator[Response]) -> Iterator[list[Response]]:
        """Yield responses in chunks of the size that an edge states, or as a single chunk."""
        streams = [SampleEdgeAttributes.of(edge) for edge in self.plan.graph.samples() if edge.src == node.name]
        part: list[Response] = []
        tokens = 0
        for response in ended:
            part.append(response)
            tokens += len(response.tokens)
            for attributes in streams:
                if len(part) >= (attributes.stream or math.inf) or tokens >= (attributes.stream_tokens or math.inf):
                    yield part
                    part = []
                    tokens = 0
                    break
        if part:
            yield part

    def _policy_columns(
        self,
        node: Node,
        task: Task,
        rows: Array,
        tokens: list[Array],
        logps: list[Array],
        report: Report,
        versions: list[Array] | None = None,
    ) -> dict[str, ColumnRows]:
        """Return the columns of responses in which the policy wrote all tokens.

        `versions`: the version of the weights that sampled each token; None: the generation's current version.
        """
        graph = self.plan.graph
        response, as_drawn = numerics.sampled_columns(graph, node)
        ids = ragged(tokens, np.int32)
        logp = ragged(logps, np.float32)
        self.watch.check_response(node, task, report, rows, ids, logp, self.plan.model(node.name).vocabulary)
        columns = {response: ids, as_drawn: logp}
        if name := find_response_column(graph, node, "bool"):
            columns[name] = ColumnData(np.ones(len(ids.values), bool), ids.offsets)
        if name := find_response_column(graph, node, "i32"):
            current = ColumnData(np.full(len(ids.values), self._version(node, task), np.int32), ids.offsets)
            columns[name] = current if versions is None else ragged(versions, np.int32)
        return {name: ColumnRows(rows, column) for name, column in columns.items()}

    def _version(self, node: Node, task: Task) -> int:
        """Return the version of the generation's weights; 0 if the weights never change."""
        edge = next((reshard.name for reshard in self.plan.reshards if reshard.dst == node.name), "")
        return task.fetches[edge].version if edge in task.fetches else task.number if edge else 0

    def _count_truncated(self, node: Node, responses: list[Array], last_turns: list[Array], sampling: Sampling) -> int:
        """Count maximal-length responses that end without an end token or stop string.

        `last_turns` are the tokens of the policy's last turn in each response: the engine looked for stop strings only
        in these tokens.
        """
        pairs = zip(responses, last_turns, strict=True)
        full = [turn for ids, turn in pairs if len(ids) >= sampling.max_tokens and int(ids[-1]) not in sampling.ends]
        if not full or not sampling.stop:
            return len(full)
        texts = Tokens(self.plan.model(node.name).path).decode(full, special=True)
        return sum(not any(stop in text for stop in sampling.stop) for text in texts)

    def _run_episodes(
        self,
        node: Node,
        task: Task,
        batch: Batch,
        rows: Array,
        context: list[Array],
        sampling: Sampling,
        report: Report,
        metric_prefix: str,
    ) -> tuple[Array, dict[str, ColumnData], dict[str, Verdicts], Array]:
        """Run turns of the policy and of the environment until each row's episode is over.

        Returns the rows that did not fail, their columns (all columns only on the leader of the group), the verdicts on
        all rows, and for each returned row the position in its response where the policy's last turn begins.
        """
        episodes = self.environments[node.name].begin(batch, rows, task)
        contexts = [context[i // sampling.samples] for i in range(len(rows))]
        dialogue = Dialogue(episodes, ChatTemplate(Tokens(self.plan.model(node.name).path)), contexts)
        bound = int(sampling.max_tokens)
        responses = Responses(len(rows), bound)
        turns = GenerateAttributes.of(node).turns or bound
        last_starts = np.zeros(len(rows), int)
        answers = np.zeros(len(rows), int)
        keys = self._random_stream(node, task).keys(task.number, rows)
        with report.phase("environment"):
            first = self._share_result(node, dialogue.begin)
        started = np.array([i for i, ids in enumerate(first) if ids is not None], int)
        active = responses.append_replies(started, [ids for ids in first if ids is not None])
        for i in started[~np.isin(started, active)]:
            reason = f"the environment's first message has {len(first[i])} tokens, but a response has room for"
            episodes.refuse(int(i), f"{reason} {sampling.max_tokens}", BEGINNING)
        for turn in range(1, turns + 1) if len(active) else ():
            before = [np.concatenate([contexts[i], responses[i]]) for i in active]
            turn_sampling = sampling.select(active)
            drawn = collect_responses(
                self.generators[node.name].generate(before, keys[active], turn_sampling, responses.lengths[active])
            )
            last_starts[active] = responses.lengths[active]
            responses.append_sampled(active, *drawn)
            answers[active] += 1
            with report.phase("environment"):
                replies = self._share_result(node, dialogue.step, active, drawn[0], turn, turn < turns)
            continues = np.array([ids is not None for ids in replies])
            active = responses.append_replies(active[continues], [ids for ids in replies if ids is not None])
            if not len(active):
                break
        response, _ = numerics.sampled_columns(self.plan.graph, node)
        alive = self._share_result(node, episodes.end, {response: responses.lengths})
        verdicts = episodes.verdicts(report, metric_prefix)
        rows = rows[alive]
        columns = [column.take(np.flatnonzero(alive)) for column in responses.columns()]
        values = episodes.columns() if self._is_group_leader(node) else {}
        written = self._mix_columns(node, task, rows, columns, values, int(answers[alive].sum()), report, metric_prefix)
        return rows, written, verdicts, last_starts[alive]

    def _run_conversations(
        self,
        node: Node,
        task: Task,
        batch: Batch,
        rows: Array,
        context: list[Array],
        sampling: Sampling,
        report: Report,
        metric_prefix: str,
    ) -> tuple[Array, dict[str, ColumnData], dict[str, Verdicts], Array]:
        """Run the agents of the rows; return what the method `_run_episodes` returns."""
        contexts = [context[i // sampling.samples] for i in range(len(rows))]
        begin = BatchStart(task.name, task.number, batch, rows, contexts, int(sampling.max_tokens))
        finished = self._run_agents(node, task, begin, sampling, report)
        survivors = SurvivingRows(node, self.plan, rows, sampling.samples, task.number)
        for position, (failure, arguments) in sorted(finished.failed.items()):
            survivors.fail(position, failure, given=arguments)
        for name, number in finished.figures.items():
            report.count(metric_prefix + name, float(number), 0)
        report.remarks += finished.remarks
        alive = np.flatnonzero(~survivors.lost)
        verdicts = survivors.make_verdicts(report, metric_prefix)
        columns = [column.take(alive) for column in finished.response]
        returned = ReturnChecker(self.plan, tuple(finished.values) if self._is_group_leader(node) else ())
        values = {
            value_column: returned.column(value_column, [finished.values[value_column][i] for i in alive])
            for value_column in returned.vocabularies
        }
        written = self._mix_columns(node, task, rows[alive], columns, values, finished.answers, report, metric_prefix)
        return rows[alive], written, verdicts, np.array(finished.last, int)[alive]

    def _mix_columns(
        self,
        node: Node,
        task: Task,
        rows: Array,
        response_columns: list[ColumnData],
        values: dict[str, ColumnData],
        answers: int,
        report: Report,
        metric_prefix: str,
    ) -> dict[str, ColumnData]:
        """Return the columns of responses that contain tokens not sampled by the policy.

        `response_columns`: tokens, log-probabilities, mask and, with agents, conversation starts. `values`: columns
        that environments or agents fill.
        """
        response, as_drawn = numerics.sampled_columns(self.plan.graph, node)
        ids, logp, mask, *begins = response_columns
        self.watch.check_response(
            node, task, report, rows, ids, apply_mask(logp, mask), self.plan.model(node.name).vocabulary
        )
        report.count(f"{metric_prefix}turns", float(answers), len(rows))
        report.count(f"{metric_prefix}policy_tokens", float(mask.values.sum()), 0)
        report.count(f"{metric_prefix}environment_tokens", float((~mask.values).sum()), 0)
        written = {response: ids, as_drawn: logp}
        for column in begins_columns(self.plan.graph, node).values():
            written[column] = begins[0]
        if name := find_response_column(self.plan.graph, node, "bool"):
            written[name] = mask
        if name := find_response_column(self.plan.graph, node, "i32"):
            written[name] = replace(mask, values=np.where(mask.values, self._version(node, task), -1).astype(np.int32))
        return written | self._check_values(node, task, rows, values, report)

    def _check_values(
        self, node: Node, task: Task, rows: Array, values: dict[str, ColumnData], report: Report
    ) -> dict[str, ColumnData]:
        """Check column values that environments and agents returned; return the values."""
        for name, column in values.items():
            self.watch.check_results(node, task, report, name, rows, column)
            if column.offsets is None and column.values.dtype.kind == "f":
                self.means.count(report, node, task, name, rows, column.values)
        return values

    def _temperature(self, node: Node, task: Task, batch: Batch, draw: Draw, samples: int) -> float | Array:
        """Return the sampling temperature: one number, or one number per response."""
        if draw.temperature is not None:
            return draw.temperature
        if not (stated := temperature_exprs(self.plan.graph, node)):
            return float(GenerateAttributes.of(node).temperature.literal())
        temperatures: Array = batch.columns[temperature_name(stated[0])].values.astype(np.float32)
        self.watch.check_temperature(node, task, batch.rows, str(stated[0].value), temperatures)
        return np.repeat(temperatures, samples)

    def _context(self, node: Node, batch: Batch) -> list[Array]:
        """Return for each row the tokens that its responses continue."""
        columns = tokenise_columns(self.plan, node, batch.columns)
        parts = [columns[name] for name in sequences(self.plan.graph, node).context]
        # If the node reads no tokens, an agent or an environment reads the row.
        return [np.concatenate([part[i] for part in parts] or [np.zeros(0, np.int32)]) for i in range(len(batch.rows))]
