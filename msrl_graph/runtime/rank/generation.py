"""Generation: how a rank computes the verb `generate` for a batch of prompts.

Invariant: what is sampled for a row is a function of (seed, node, iteration, row), of the row's prompt, of the weights
and of what an environment replies or an agent asks. All ranks of a data-parallel group make the same calls on their
engine. Only the group's leader talks to environments and agents. The leader shares all answers with the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Generator as PythonGenerator
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...analysis.rowsets import rowsets
from ...analysis.sequences import begins_columns, find_response_column, sequences, temperature_exprs, temperature_name
from ... import noise
from ...backends.engine_protocols import GenerateRequest, Response, Sampling, collect_responses, fill_fields
from ...ir.attributes import GenerateAttributes, SampleEdgeAttributes
from ...ir.evaluation import Draw
from ...ir.graph import Node
from ...ir.plan import Plan
from ..agents.rank_protocol import BatchStart
from ..agents.template import ChatTemplate
from ...analysis.rowsets import rowsets
from ...analysis.sequences import begins_columns, find_response_column, sequences, temperature_exprs, temperature_name
from ..data import numerics
from ..data.columns import Array, ColumnData, ColumnRows, Verdicts, ragged
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

Columns = dict[str, ColumnRows]


class GeneratedResponses(NamedTuple):
    """The responses that a batch contributes to an iteration, for metrics.

    - `rows`: their numbers. `tokens`: their tokens.
    - `last_turns`: the tokens of the policy's last turn in each response: the engine looked for stop strings only in
      these tokens.
    """

    rows: Array
    tokens: list[Array]
    last_turns: list[Array]


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
        partial_rollout = work.node.cuts and work.task.trains
        if not len(work.batch.rows) and not partial_rollout:  # a last chunk with fewer rows than there are groups
            return
        rollout = self._begin(work)
        if work.node.name in self.partners:
            responses = yield from self._generate_with_partner(rollout)
        elif partial_rollout:
            columns = self._run_partial_rollout(rollout)
            written = columns[numerics.sampled_columns(self.context.plan.graph, work.node)[0]]
            tokens = [written.column[i] for i in range(len(written.rows))]
            responses = GeneratedResponses(written.rows, tokens, tokens)
            yield columns
        else:
            responses = yield from self._generate(rollout)
        self._count(rollout, responses)
        name = work.node.name
        if not partial_rollout and any(
            edge.dst == name and edge.name in work.task.fetches for edge in self.context.plan.reshards
        ):
            staleness = float(work.task.number - self._version(work.node, work.task))
            rollout.count("staleness", staleness * len(responses.rows), len(responses.rows))
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
        contexts = self._contexts(work)
        if attributes.partner is None:  # a partner's conversations are never empty, or are rejected
            self.context.watch.check_input(node, work.task, work.batch.rows, np.fromiter(map(len, contexts), int))
        metric_prefix = "" if first else f"{node.name}/"  # only the first generation's metrics have no prefix
        stream = self.random_stream(node, work.task)
        return Rollout(node, work.task, work.batch, work.report, contexts, sampling, stream, metric_prefix)

    def random_stream(self, node: Node, task: Task) -> noise.RandomStream:
        """Return the random stream from which a generation's tokens are sampled."""
        return noise.RandomStream(self.context.plan.deploy.run.seed, "token", node.name, task.name)

    def _generate(self, rollout: Rollout) -> PythonGenerator[Columns, None, GeneratedResponses]:
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
            generator = self.engines.generators[node.name]
            ended = generator.generate(GenerateRequest(rollout.contexts, rollout.keys, rollout.sampling))
            ended = _count_progress(ended, len(rows))
        responses: list[Array] = [np.zeros(0, np.int32)] * len(rows)
        for part in self._split_stream(node, ended):
            places = np.sort([sample.place for sample in part])
            tokens, logps = collect_responses(part)
            for place, drawn in zip(places, tokens, strict=True):
                responses[place] = drawn
            yield self._policy_columns(rollout, rows[places], tokens, logps)
        return GeneratedResponses(rows, responses, responses)

    def _generate_with_partner(self, rollout: Rollout) -> PythonGenerator[Columns, None, GeneratedResponses]:
        """Yield the columns of responses to which an environment or agents contribute."""
        name = rollout.node.name
        mixed = self.partners[name].play(rollout, self.engines.generators[name])
        written = self._mixed_columns(rollout, mixed)
        tokens = [mixed.response[0][i] for i in range(len(mixed.rows))]
        last_turns = [ids[first:] for ids, first in zip(tokens, mixed.last_starts, strict=True)]
        yield {**mixed.verdicts, **{name: ColumnRows(mixed.rows, column) for name, column in written.items()}}
        return GeneratedResponses(mixed.rows, tokens, last_turns)

    def _count(self, rollout: Rollout, responses: GeneratedResponses) -> None:
        """Report lengths, and how many tokens and rows are distinct."""
        rows = responses.rows
        lengths = np.fromiter(map(len, responses.tokens), int)
        rollout.count("response_truncated", float(self._count_truncated(rollout, responses)), len(rows))
        rollout.count("response_length", float(lengths.sum()), len(rows))
        prompt_lengths = dict(zip(rollout.batch.rows.tolist(), map(len, rollout.contexts), strict=True))
        prompts = rows // rollout.sampling.samples
        rollout.count("prompt_tokens", float(sum(prompt_lengths[row] for row in prompts.tolist())))
        rollout.count("response_tokens", float(lengths.sum()))
        no_groups = np.zeros(len(rollout.contexts), int)
        rollout.count("distinct_prompt_tokens", float(count_distinct(rollout.contexts, no_groups)[0]))
        distinct_tokens, distinct_rows = count_distinct(responses.tokens, prompts)
        rollout.count("distinct_tokens", float(distinct_tokens))
        rollout.count("distinct_rows", float(distinct_rows))
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
        written = self._policy_columns(
            rollout, rows, [part.tokens for part in parts], [part.logps for part in parts], versions
        )
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

    def _policy_columns(
        self,
        rollout: Rollout,
        rows: Array,
        tokens: list[Array],
        logps: list[Array],
        versions: list[Array] | None = None,
    ) -> Columns:
        """Return the columns of responses in which the policy wrote all tokens.

        `versions`: the version of the weights that sampled each token; None: the generation's current version.
        """
        node = rollout.node
        graph = self.context.plan.graph
        response, as_drawn = numerics.sampled_columns(graph, node)
        ids = ragged(tokens, np.int32)
        logp = ragged(logps, np.float32)
        self._check_response(rollout, rows, ids, logp)
        columns = {response: ids, as_drawn: logp}
        if name := find_response_column(graph, node, "bool"):
            columns[name] = ColumnData(np.ones(len(ids.values), bool), ids.offsets)
        if name := find_response_column(graph, node, "i32"):
            version = self._version(node, rollout.task)
            current = ColumnData(np.full(len(ids.values), version, np.int32), ids.offsets)
            columns[name] = current if versions is None else ragged(versions, np.int32)
        return {name: ColumnRows(rows, column) for name, column in columns.items()}

    def _mixed_columns(self, rollout: Rollout, mixed: MixedResponses) -> dict[str, ColumnData]:
        """Return the columns of responses that contain tokens not sampled by the policy."""
        node = rollout.node
        graph = self.context.plan.graph
        rows = mixed.rows
        response, as_drawn = numerics.sampled_columns(graph, node)
        ids, logp, mask, *begins = mixed.response
        self._check_response(rollout, rows, ids, apply_mask(logp, mask))
        rollout.count("turns", float(mixed.answers), len(rows))
        rollout.count("policy_tokens", float(mask.values.sum()))
        rollout.count("environment_tokens", float((~mask.values).sum()))
        written = {response: ids, as_drawn: logp}
        for column in begins_columns(graph, node).values():
            written[column] = begins[0]
        if name := find_response_column(graph, node, "bool"):
            written[name] = mask
        if name := find_response_column(graph, node, "i32"):
            version = self._version(node, rollout.task)
            written[name] = replace(mask, values=np.where(mask.values, version, -1).astype(np.int32))
        for name, data in mixed.values.items():
            self.context.watch.check_results(node, rollout.task, rollout.report, name, rows, data)
            if data.offsets is None and data.values.dtype.kind == "f":
                self.context.means.count(rollout.report, node, rollout.task, name, rows, data.values)
        return written | mixed.values

    def _check_response(self, rollout: Rollout, rows: Array, tokens: ColumnData, logp: ColumnData) -> None:
        vocabulary = self.context.plan.model(rollout.node.name).vocabulary
        self.context.watch.check_response(rollout.node, rollout.task, rollout.report, rows, tokens, logp, vocabulary)

    def _version(self, node: Node, task: Task) -> int:
        """Return the version of the generation's weights; 0 if the weights never change."""
        edge = next((reshard.name for reshard in self.context.plan.reshards if reshard.dst == node.name), "")
        return task.fetches[edge].version if edge in task.fetches else task.number if edge else 0

    def _count_truncated(self, rollout: Rollout, responses: GeneratedResponses) -> int:
        """Count maximal-length responses that end without an end token or stop string."""
        sampling = rollout.sampling
        pairs = zip(responses.tokens, responses.last_turns, strict=True)
        full = [turn for ids, turn in pairs if len(ids) >= sampling.max_tokens and int(ids[-1]) not in sampling.ends]
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

    def _contexts(self, work: NodeBatch) -> list[Array]:
        """Return for each row the tokens that its responses continue."""
        columns = tokenise_columns(self.context.plan, work.node, work.batch.columns)
        parts = [columns[name] for name in sequences(self.context.plan.graph, work.node).context]
        # If the node reads no tokens, an agent or an environment reads the row.
        no_tokens = np.zeros(0, np.int32)
        return [np.concatenate([part[i] for part in parts] or [no_tokens]) for i in range(len(work.batch.rows))]
