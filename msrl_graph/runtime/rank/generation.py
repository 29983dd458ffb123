"""Generation: how a rank computes the verb `generate` for a batch of prompts.

Invariant: what is sampled for a row is a function of (seed, node, iteration, row), of the row's prompt, of the weights
and of what an environment replies or an agent asks. All ranks of a data-parallel group make the same calls on their
engine. Only the group's leader talks to environments and agents. The leader shares all answers with the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ... import noise
from ...analysis.rowsets import rowsets
from ...analysis.sequences import (
    begins_columns,
    find_response_column,
    routing_columns,
    sequences,
    temperature_exprs,
    temperature_name,
)
from ...backends.engine_protocols import GenerateRequest, Response, Sampling, collect_responses, fill_fields
from ...ir.attributes import GenerateAttributes, SampleEdgeAttributes
from ...ir.evaluation import Draw
from ...ir.graph import Node
from ..data import numerics
from ..data.columns import Array, ColumnData, ColumnRows, Verdicts, concatenate_rows, ragged
from ..data.row_files import Recording
from ..data.tokens import Tokens, end_tokens, tokenise_columns
from ..process import row_progress
from ..process.task import Task
from .agent_generation import AgentPartner
from .context import NodeBatch, RankContext
from .engines import Engines
from .multi_turn import EnvironmentPartner
from .packing import apply_mask, count_distinct
from .partial_rollout import PartialRollout
from .rollout import MixedResponses, Rollout, response_rows
from .token_routes import split_routes

Columns = dict[str, ColumnRows]


def _count_progress(ended: Iterator[Response], total: int) -> Iterator[Response]:
    """Yield responses as they end; report the number of ended responses as progress."""
    for number, response in enumerate(ended, 1):
        row_progress.report(number, total)
        yield response


class GeneratorRole:
    """The part of a rank that generates columns from a batch of prompts.

    - `ends`: for each generation, the tokens that end a response. `partners`: for each generation with an environment
      or agents, what the policy exchanges tokens with.
    - `recording`: replaces the engines in training.
    """

    def __init__(self, context: RankContext, engines: Engines) -> None:
        self.context = context
        self.engines = engines
        self.ends: dict[str, tuple[int, ...]] = {}
        self.partners: dict[str, AgentPartner | EnvironmentPartner] = {}
        self.recording: Recording | None = None

    def start_agents(self) -> None:
        """Start the agent processes, which takes time, as the building of engines does."""
        for placement in self.context.placements:
            node = self.context.plan.graph.node(placement.node)
            if node.verb == "generate" and GenerateAttributes.of(node).agent is not None:
                self.partners[node.name] = AgentPartner(self.context, node)

    def build(self) -> None:
        """Prepare what generations need in addition to their engines."""
        for name in self.engines.generators:
            node = self.context.plan.graph.node(name)
            self.ends[name] = end_tokens(self.context.plan.model(name).path)
            if GenerateAttributes.of(node).environment is not None:
                self.partners[name] = EnvironmentPartner(self.context, node)

    def replay(self, folder: str) -> None:
        """Use the responses of a recorded run in all training iterations from now on."""
        self.recording = Recording(self.context.plan, Path(folder))

    def compute(self, work: NodeBatch) -> Iterator[Columns]:
        """Yield the columns that the node writes, in chunks if a sample edge has `stream`."""
        name = work.node.name
        plan = self.context.plan
        partial_rollout = work.node.cuts and work.task.trains
        if not len(work.batch.rows) and not partial_rollout:  # a last chunk with fewer rows than there are groups
            return
        rollout = self._begin(work)
        engine = self.engines.generators.get(name)
        preempted = getattr(engine, "preempted", 0)
        last_starts = None
        chunks: Iterable[Columns]
        if name in self.partners:
            mixed = self.partners[name].play(rollout, self.engines.generators[name])
            last_starts = mixed.last_starts
            chunks = [self._mixed_columns(rollout, mixed)]
        else:
            chunks = [self._run_partial_rollout(rollout)] if partial_rollout else self._generate(rollout)
        response, _ = numerics.sampled_columns(plan.graph, work.node)
        responses = []
        for columns in chunks:
            responses.append(columns[response])
            yield columns
        if (again := getattr(engine, "preempted", 0) - preempted) and self.context.is_group_leader(work.node):
            rollout.count("preempted", float(again))
        self._count(rollout, concatenate_rows(responses), last_starts)
        if not partial_rollout and any(edge.dst == name and edge.name in work.task.fetches for edge in plan.reshards):
            staleness = float(work.task.number - self._version(work.node, work.task))
            rows = sum(len(piece.rows) for piece in responses)
            rollout.count("staleness", staleness * rows, rows)
            rollout.peak("staleness_max", staleness)

    def _begin(self, work: NodeBatch) -> Rollout:
        node = work.node
        graph = self.context.plan.graph
        first = graph.verb("generate")[0].name == node.name
        evaluation = self.context.plan.deploy.evaluation(work.task.name)
        attributes = GenerateAttributes.of(node)
        draw = evaluation.draw(graph, node) if evaluation else Draw(node.name)
        samples = draw.samples or attributes.samples
        response, _ = numerics.sampled_columns(graph, node)
        sampling = fill_fields(
            Sampling,
            attributes,
            samples=samples,
            max_tokens=graph.bound(response) if attributes.max_tokens is None else attributes.max_tokens,
            temperature=self._temperature(work, draw, samples),
            ends=self.ends[node.name],
        )
        columns = self._contexts(work)
        # If the node reads no tokens, an agent or an environment reads the row.
        no_tokens = np.zeros(0, np.int32)
        parts = [*columns.values()]
        contexts = [np.concatenate([part[i] for part in parts] or [no_tokens]) for i in range(len(work.batch.rows))]
        if attributes.partner is None:  # a partner's conversations are never empty, or are rejected
            self.context.watch.check_input(node, work.task, work.batch.rows, np.fromiter(map(len, contexts), int))
        metric_prefix = "" if first else f"{node.name}/"  # only the first generation's metrics have no prefix
        stream = self.random_stream(node, work.task)
        lengths = {name: column.lengths for name, column in columns.items()}
        return Rollout(node, work.task, work.batch, work.report, contexts, sampling, stream, metric_prefix, lengths)

    def random_stream(self, node: Node, task: Task) -> noise.RandomStream:
        """Return the random stream from which a generation's tokens are sampled."""
        return noise.RandomStream(self.context.plan.deploy.run.seed, "token", node.name, task.name)

    def _generate(self, rollout: Rollout) -> Iterator[Columns]:
        """Yield the columns of generated or recorded responses."""
        node = rollout.node
        task = rollout.task
        rows = rollout.rows
        ended: Iterator[Response]
        if self.recording is not None and task.trains:
            columns = numerics.sampled_columns(self.context.plan.graph, node)
            recorded = (node, columns, task.number, rollout.contexts, rows, rollout.sampling.samples)
            ended = map(Response, range(len(rows)), *self.recording.responses(*recorded))
        else:
            routes = bool(routing_columns(self.context.plan.graph, node.writes))
            request = GenerateRequest(rollout.contexts, rollout.keys, rollout.sampling, routes=routes)
            ended = _count_progress(self.engines.generators[node.name].generate(request), len(rows))
        for part in self._split_stream(node, ended):
            places = np.sort([sample.place for sample in part])
            tokens, logps = collect_responses(part)
            written = self._columns(rollout, rows[places], (ragged(tokens, np.int32), ragged(logps, np.float32)))
            yield written | self._routes(rollout, rows[places], part)

    def _count(self, rollout: Rollout, responses: ColumnRows, last_starts: Array | None) -> None:
        """Report lengths, and how many tokens and rows are distinct.

        `last_starts`: for each response, where the policy's last turn begins; None: the response is one turn.
        """
        rows = responses.rows
        tokens = [responses.column[i] for i in range(len(rows))]
        lengths = responses.column.lengths
        rollout.count("response_truncated", float(self._count_truncated(rollout, tokens, last_starts)), len(rows))
        rollout.count("response_length", float(lengths.sum()), len(rows))
        prompt_lengths = dict(zip(rollout.batch.rows.tolist(), map(len, rollout.contexts), strict=True))
        prompts = rows // rollout.sampling.samples
        rollout.count("prompt_tokens", float(sum(prompt_lengths[row] for row in prompts.tolist())))
        rollout.count("response_tokens", float(lengths.sum()))
        no_groups = np.zeros(len(rollout.contexts), int)
        rollout.count("distinct_prompt_tokens", float(count_distinct(rollout.contexts, no_groups)[0]))
        for name, number in zip(("distinct_tokens", "distinct_rows"), count_distinct(tokens, prompts), strict=True):
            rollout.count(name, float(number))
        rollout.peak("response_length_max", float(lengths.max(initial=0)))

    def _run_partial_rollout(self, rollout: Rollout) -> Columns:
        """Return the columns of the responses that are used, and a verdict on every row."""
        node = rollout.node
        task = rollout.task
        graph = self.context.plan.graph
        version = self._version(node, task)
        grown = PartialRollout(rollout, graph.rows[0], version, partial(self.context.sum_over_groups, node))
        known = find_response_column(graph, node, "i32")
        if self.recording is None:
            taken_rows = grown.run(self.engines.generators[node.name])
        else:
            columns = (*numerics.sampled_columns(graph, node), *([known] if known else []))
            taken_rows = grown.replay(self.recording, node, columns)
        if self.context.is_group_leader(node):
            cut = rollout.report.cut = grown.cut_prompts(taken_rows)
            rollout.count("carried_over", float(len(cut)))
            if not GenerateAttributes.of(node).waits:
                rollout.count("overdue", float(len(rollout.batch.rows) - len(taken_rows) - len(cut)))
        parts = [part for row in taken_rows for part in grown.responses[row]]
        rows = response_rows(np.array(taken_rows, np.int64), rollout.sampling.samples)
        versions = [part.versions for part in parts]
        if self.recording is None or known:  # otherwise the versions are not known
            staleness = task.number - np.array([own_versions.min(initial=task.number) for own_versions in versions])
            rollout.count("staleness", float(staleness.sum()), len(rows))
            rollout.peak("staleness_max", float(staleness.max(initial=0)))
        tokens = ragged([part.tokens for part in parts], np.int32)
        logps = ragged([part.logps for part in parts], np.float32)
        written = self._columns(rollout, rows, (tokens, logps), ragged(versions, np.int32))
        verdicts = ColumnData(np.isin(rollout.rows, rows).astype(np.int32))
        return {rowsets(graph).sieves[node.name].column: Verdicts(rollout.rows, verdicts)} | written

    def _split_stream(self, node: Node, ended: Iterator[Response]) -> Iterator[list[Response]]:
        """Yield responses in chunks of the size that an edge states, or as a single chunk."""
        streams = [SampleEdgeAttributes.of(edge) for edge in self.context.plan.graph.samples() if edge.src == node.name]
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

    def _columns(
        self, rollout: Rollout, rows: Array, sampled: Sequence[ColumnData], versions: ColumnData | None = None
    ) -> Columns:
        """Check responses; return the columns that every generation writes.

        `sampled`: tokens, log-probabilities and, unless the policy wrote all tokens, a mask of the policy's tokens.
        `versions`: the version of the weights that sampled each token; None: the generation's current version.
        """
        node = rollout.node
        graph = self.context.plan.graph
        tokens, logps, *masks = sampled
        known_logps = apply_mask(logps, *masks) if masks else logps
        vocabulary = self.context.plan.model(node.name).vocabulary
        self.context.watch.check_response(node, rollout.task, rollout.report, rows, tokens, known_logps, vocabulary)
        mask = masks[0] if masks else ColumnData(np.ones(len(tokens.values), bool), tokens.offsets)
        response, as_drawn = numerics.sampled_columns(graph, node)
        columns = {response: tokens, as_drawn: logps}
        if name := find_response_column(graph, node, "bool"):
            columns[name] = mask
        if name := find_response_column(graph, node, "i32"):
            current = np.where(mask.values, self._version(node, rollout.task), -1).astype(np.int32)
            columns[name] = replace(mask, values=current) if versions is None else versions
        return {name: ColumnRows(rows, column) for name, column in columns.items()}

    def _routes(self, rollout: Rollout, rows: Array, responses: list[Response]) -> Columns:
        """Return the routing columns of the rows `rows`.

        `responses` are the responses of these rows, in any order.
        """
        graph = self.context.plan.graph
        routing = routing_columns(graph, rollout.node.writes)
        if not routing:
            return {}
        ordered = sorted(responses, key=lambda response: response.place)
        routes = [response.routes for response in ordered if response.routes is not None]
        prompts = np.array([response.place for response in ordered]) // rollout.sampling.samples
        lengths = {name: counts[prompts] for name, counts in rollout.context_lengths.items()}
        response, _ = numerics.sampled_columns(graph, rollout.node)
        lengths[response] = np.array([len(drawn.tokens) for drawn in ordered])
        columns = split_routes(routes, lengths)
        return {column: ColumnRows(rows, columns[name]) for name, column in routing.items()}

    def _mixed_columns(self, rollout: Rollout, mixed: MixedResponses) -> Columns:
        """Return the columns of responses that contain tokens not sampled by the policy."""
        node = rollout.node
        rows = mixed.rows
        mask = mixed.response[2]
        written = self._columns(rollout, rows, mixed.response[:3])
        rollout.count("turns", float(mixed.answers), len(rows))
        rollout.count("policy_tokens", float(mask.values.sum()))
        rollout.count("environment_tokens", float((~mask.values).sum()))
        for column in begins_columns(self.context.plan.graph, node).values():
            written[column] = ColumnRows(rows, mixed.response[3])
        for name, data in mixed.values.items():
            self.context.watch.check_results(node, rollout.task, rollout.report, name, rows, data)
            if data.offsets is None and data.values.dtype.kind == "f":
                self.context.means.count(rollout.report, node, rollout.task, name, rows, data.values)
            written[name] = ColumnRows(rows, data)
        return mixed.verdicts | written

    def _version(self, node: Node, task: Task) -> int:
        """Return the version of the generation's weights; 0 if the weights never change."""
        edge = next((reshard.name for reshard in self.context.plan.reshards if reshard.dst == node.name), "")
        return task.fetches[edge].version if edge in task.fetches else task.number if edge else 0

    def _count_truncated(self, rollout: Rollout, responses: list[Array], last_starts: Array | None) -> int:
        """Count maximal-length responses that end without an end token or stop string.

        The engine looked for stop strings only in the tokens of the policy's last turn.
        """
        sampling = rollout.sampling
        starts = np.zeros(len(responses), int) if last_starts is None else last_starts
        full = [
            ids[start:]
            for ids, start in zip(responses, starts, strict=True)
            if len(ids) >= sampling.max_tokens and int(ids[-1]) not in sampling.ends
        ]
        if not full or not sampling.stop:
            return len(full)
        texts = Tokens(self.context.plan.model(rollout.node.name).path).decode(full, special=True)
        return sum(not any(stop in text for stop in sampling.stop) for text in texts)

    def _temperature(self, work: NodeBatch, draw: Draw, samples: int) -> float | Array:
        """Return the sampling temperature: one number, or one number per response."""
        if draw.temperature is not None:
            return draw.temperature
        if not (stated := temperature_exprs(self.context.plan.graph, work.node)):
            return float(GenerateAttributes.of(work.node).temperature.literal())
        temperatures: Array = work.batch.columns[temperature_name(stated[0])].values.astype(np.float32)
        self.context.watch.check_temperature(work.node, work.task, work.batch.rows, str(stated[0].value), temperatures)
        return np.repeat(temperatures, samples)

    def _contexts(self, work: NodeBatch) -> dict[str, ColumnData]:
        """Return the token columns that responses continue, in order."""
        columns = tokenise_columns(self.context.plan, work.node, work.batch.columns)
        return {name: columns[name] for name in sequences(self.context.plan.graph, work.node).context}
