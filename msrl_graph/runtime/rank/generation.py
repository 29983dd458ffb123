"""Generation: what a rank does with prompts that it is handed, the verb `generate`.

Invariant: what is drawn for a row is a function of (seed, node, iteration, row), of its prompt, of the weights and of
what an environment answers or an agent asks. All ranks of a group make the same calls on their engine: environments and
agents are heard by the first one, and what they say is shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist

from ...backends.spec import Response, Sampling, collected
from ...ir.attributes import GenerateAttributes, SampleEdgeAttributes
from ...ir.evaluation import Draw
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.rowsets import rowsets
from ...ir.sequences import beginnings, heat, of_response, sequences, tempered
from ..agents.rank_protocol import BatchStart
from ..agents.template import ChatTemplate
from ..data import numerics
from ..data.columns import Array, ColumnData, ColumnRows, Verdicts, ragged
from ..data.row_files import Recording
from ..data.tokens import Tokens, ends, tokenised
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
from .packing import distinct, kept
from .partial_rollout import PartialRollout


def _counted(ended: Iterator[Response], of: int) -> Iterator[Response]:
    """Responses as they end, which are counted for who waits for them."""
    for number, response in enumerate(ended, 1):
        row_progress.report(number, of)
        yield response


class Generation(AgentGeneration):
    """A rank of one of the pools of devices, as far as it generates: a batch in, the written columns out."""

    watch: numerics.NumericsWatch
    means: ColumnMeans

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.sets = rowsets(plan.graph).sets
        self.recording: Recording | None = None  # where the responses of training come from, if not from the generators

    def build(self) -> None:
        super().build()
        nodes = [self.plan.graph.node(name) for name in self.generators]
        self.ends = {n.name: ends(self.plan.model(n.name).path) for n in nodes}
        self.environments = {
            n.name: EnvironmentClass(n, self.plan) for n in nodes if GenerateAttributes.of(n).environment is not None
        }
        for node in nodes:
            if node.name in self.environments and self._first(node):  # who asks it
                self.environments[node.name].start()

    def replay(self, folder: str) -> None:
        """Takes the responses of training from a recorded run from now on."""
        self.recording = Recording(self.plan, Path(folder))

    def _generate(self, node: Node, task: Task, batch: Batch, report: Report) -> Iterator[dict[str, ColumnRows]]:
        """What the node writes, in parts where an edge from it streams: each as soon as so many responses have
        ended."""
        partial = node.cuts and task.trains
        if not len(batch.rows) and not partial:  # a last chunk smaller than the groups are many
            return
        graph = self.plan.graph
        first = self.plan.graph.verb("generate")[0].name == node.name
        evaluation = self.plan.deploy.evaluation(task.name)
        said = GenerateAttributes.of(node)
        draw = evaluation.draw(graph, node) if evaluation else Draw(node.name)
        samples = draw.samples or said.samples
        response, as_drawn = numerics.drawn(graph, node)
        sampling = Sampling(
            samples=samples,
            max_tokens=graph.bound(response) if said.max_tokens is None else said.max_tokens,
            temperature=self._temperature(node, task, batch, draw, samples),
            top_p=said.top_p,
            top_k=said.top_k,
            ends=self.ends[node.name],
            stop=said.stop,
        )
        context = self._context(node, batch)
        if said.partner is None:  # whose conversations begin with something, or are refused
            self.watch.begun(node, task, batch.rows, np.fromiter(map(len, context), int))
        rows = (batch.rows[:, None] * sampling.samples + np.arange(sampling.samples)).reshape(-1)
        keys = self._stream(node, task).keys(task.number, rows)
        head = "" if first else f"{node.name}/"  # of other generations than the first the metrics are named apart
        responses: list[Array] = [np.zeros(0, np.int32)] * len(rows)
        if said.partner is not None:
            play = self._episodes if said.agent is None else self._conversations
            rows, written, verdicts, last = play(node, task, batch, rows, context, sampling, report, head)
            responses = [written[response][i] for i in range(len(rows))]
            own = [tokens[first:] for tokens, first in zip(responses, last, strict=True)]
            yield {**verdicts, **{name: ColumnRows(rows, made) for name, made in written.items()}}
        elif partial:
            found = self._rollout(node, task, batch, context, sampling, report, head)
            rows = found[response].rows
            responses = [found[response].column[i] for i in range(len(found[response].rows))]
            yield found
        else:
            ended: Iterator[Response]
            if self.recording is not None and task.trains:
                of = (node, (response, as_drawn), task.number, context, rows, sampling.samples)
                ended = map(Response, range(len(rows)), *self.recording.responses(*of))
            else:
                ended = _counted(self.generators[node.name].generate(context, keys, sampling), len(rows))
            for part in self._parts(node, ended):
                places, (tokens, logps) = np.sort([r.place for r in part]), collected(part)
                for place, drawn in zip(places, tokens, strict=True):
                    responses[place] = drawn
                yield self._written(node, task, rows[places], tokens, logps, report)
        lengths = np.fromiter(map(len, responses), int)
        cut_off = self._truncated(node, responses, responses if said.partner is None else own, sampling)
        report.count(f"{head}response_truncated", float(cut_off), len(responses))
        report.count(f"{head}response_length", float(lengths.sum()), len(rows))
        read = dict(zip(batch.rows.tolist(), map(len, context), strict=True))
        prompts = rows // sampling.samples
        report.count(f"{head}prompt_tokens", float(sum(read[prompt] for prompt in prompts.tolist())), 0)
        report.count(f"{head}response_tokens", float(lengths.sum()), 0)
        report.count(f"{head}distinct_prompt_tokens", float(distinct(context, np.zeros(len(context), int))[0]), 0)
        for name, number in zip(("distinct_tokens", "distinct_rows"), distinct(responses, prompts), strict=True):
            report.count(head + name, float(number), 0)
        report.peak(f"{head}response_length_max", float(lengths.max(initial=0)))
        if not partial and any(e.dst == node.name and e.name in task.fetches for e in self.plan.reshards):
            behind = float(task.number - self._version(node, task))
            report.count(f"{head}staleness", behind * len(rows), len(rows))
            report.peak(f"{head}staleness_max", behind)

    def _rollout(
        self,
        node: Node,
        task: Task,
        batch: Batch,
        context: list[Array],
        sampling: Sampling,
        report: Report,
        head: str,
    ) -> dict[str, ColumnRows]:
        """Partial rollout: what the node writes of the prompts that the iteration takes, and which these are."""
        fan = sampling.samples
        sieve = rowsets(self.plan.graph).sieves[node.name]
        said = GenerateAttributes.of(node)
        rollout = PartialRollout(
            task,
            batch.rows,
            context,
            sampling,
            said,
            self.plan.graph.rows[0],
            self._version(node, task),
            lambda of: self._summed(node, of),
            self._stream(node, task),
        )
        known = of_response(self.plan.graph, node, "i32")
        if self.recording is None:
            taken = rollout.run(self.generators[node.name])
        else:
            columns = (*numerics.drawn(self.plan.graph, node), *([known] if known else []))
            taken = rollout.replay(self.recording, node, columns)
        if self._first(node):
            report.cut = rollout.cut(taken)
            report.count(f"{head}carried_over", float(len(report.cut)), 0)
            if not said.waits:
                report.count(f"{head}overdue", float(len(batch.rows) - len(taken) - len(report.cut)), 0)
        some = [g for row in taken for g in rollout.grown[row]]
        rows = (np.array(taken, np.int64)[:, None] * fan + np.arange(fan)).reshape(-1)
        every = (batch.rows[:, None] * fan + np.arange(fan)).reshape(-1)
        versions = [g.versions for g in some]
        if self.recording is None or known:  # else nobody knows
            behind = task.number - np.array([v.min(initial=task.number) for v in versions])
            report.count(f"{head}staleness", float(behind.sum()), len(rows))
            report.peak(f"{head}staleness_max", float(behind.max(initial=0)))
        written = self._written(node, task, rows, [g.tokens for g in some], [g.logps for g in some], report, versions)
        return {sieve.column: Verdicts(every, ColumnData(np.isin(every, rows).astype(np.int32)))} | written

    def _summed(self, node: Node, numbers: Array) -> Array:
        """The sums over all data-parallel groups of a node."""
        placement = self.plan.placement(node.name)
        if placement.layout.dp == 1:
            return numbers
        here = torch.from_numpy(numbers).to(self.device.place)
        dist.all_reduce(here, group=self._mesh(placement)["dp"].get_group())
        found: Array = here.cpu().numpy()
        return found

    def _parts(self, node: Node, ended: Iterator[Response]) -> Iterator[list[Response]]:
        """Responses as they are handed on: all at once, or as many as the first that streams waits for."""
        streams = [SampleEdgeAttributes.of(e) for e in self.plan.graph.samples() if e.src == node.name]
        part: list[Response] = []
        tokens = 0
        for response in ended:
            part.append(response)
            tokens += len(response.tokens)
            for said in streams:
                if len(part) >= (said.stream or math.inf) or tokens >= (said.stream_tokens or math.inf):
                    yield part
                    part = []
                    tokens = 0
                    break
        if part:
            yield part

    def _written(
        self,
        node: Node,
        task: Task,
        rows: Array,
        tokens: list[Array],
        logps: list[Array],
        report: Report,
        versions: list[Array] | None = None,
    ) -> dict[str, ColumnRows]:
        """The columns of responses that nobody but the policy wrote in, of its `versions` or the one that it has."""
        graph = self.plan.graph
        response, as_drawn = numerics.drawn(graph, node)
        ids = ragged(tokens, np.int32)
        logp = ragged(logps, np.float32)
        self.watch.response(node, task, report, rows, ids, logp, self.plan.model(node.name).vocabulary)
        made = {response: ids, as_drawn: logp}
        if name := of_response(graph, node, "bool"):
            made[name] = ColumnData(np.ones(len(ids.values), bool), ids.offsets)
        if name := of_response(graph, node, "i32"):
            alone = ColumnData(np.full(len(ids.values), self._version(node, task), np.int32), ids.offsets)
            made[name] = alone if versions is None else ragged(versions, np.int32)
        return {name: ColumnRows(rows, column) for name, column in made.items()}

    def _version(self, node: Node, task: Task) -> int:
        """Of the weights that a generation draws with: how many iterations were trained before; 0 where they never
        change."""
        edge = next((e.name for e in self.plan.reshards if e.dst == node.name), "")
        return task.fetches[edge].version if edge in task.fetches else task.number if edge else 0

    def _truncated(self, node: Node, responses: list[Array], own: list[Array], sampling: Sampling) -> int:
        """How many responses are as long as one may get and end with neither an end token nor a stop string. `own` is
        what the policy wrote last in each: all that its engine looked for stop strings in as it drew that."""
        each = zip(responses, own, strict=True)
        full = [o for r, o in each if len(r) >= sampling.max_tokens and int(r[-1]) not in sampling.ends]
        if not full or not sampling.stop:
            return len(full)
        texts = Tokens(self.plan.model(node.name).path).decode(full, special=True)
        return sum(not any(stop in text for stop in sampling.stop) for text in texts)

    def _episodes(
        self,
        node: Node,
        task: Task,
        batch: Batch,
        rows: Array,
        context: list[Array],
        sampling: Sampling,
        report: Report,
        head: str,
    ) -> tuple[Array, dict[str, ColumnData], dict[str, Verdicts], Array]:
        """Turns of the policy and of the environment until each row's episode is over: the rows that did not fail, what
        the node writes of them, on the first rank of the group all of it, which failed, and at which token of its
        response the policy began its last turn."""
        episodes = self.environments[node.name].begin(batch, rows, task)
        contexts = [context[i // sampling.samples] for i in range(len(rows))]
        dialogue = Dialogue(episodes, ChatTemplate(Tokens(self.plan.model(node.name).path)), contexts)
        bound = int(sampling.max_tokens)
        responses = Responses(len(rows), bound)
        turns = GenerateAttributes.of(node).turns or bound
        last = np.zeros(len(rows), int)
        answers = np.zeros(len(rows), int)
        keys = self._stream(node, task).keys(task.number, rows)
        with report.phase("environment"):
            first = self._shared(node, dialogue.begin)
        begun = np.array([i for i, ids in enumerate(first) if ids is not None], int)
        going = responses.told(begun, [ids for ids in first if ids is not None])
        for i in begun[~np.isin(begun, going)]:
            what = f"what the environment says first takes {len(first[i])} tokens, and a response holds"
            episodes.refuse(int(i), f"{what} {sampling.max_tokens}", BEGINNING)
        for turn in range(1, turns + 1) if len(going) else ():
            before = [np.concatenate([contexts[i], responses[i]]) for i in going]
            some = sampling.of(going)
            drawn = collected(self.generators[node.name].generate(before, keys[going], some, responses.lengths[going]))
            last[going] = responses.lengths[going]
            responses.drawn(going, *drawn)
            answers[going] += 1
            with report.phase("environment"):
                told = self._shared(node, dialogue.step, going, drawn[0], turn, turn < turns)
            on = np.array([ids is not None for ids in told])
            going = responses.told(going[on], [ids for ids in told if ids is not None])
            if not len(going):
                break
        response, _ = numerics.drawn(self.plan.graph, node)
        stay = self._shared(node, episodes.end, {response: responses.lengths})
        verdicts = episodes.verdicts(report, head)
        rows = rows[stay]
        found = [column.take(np.flatnonzero(stay)) for column in responses.columns()]
        values = episodes.columns() if self._first(node) else {}
        written = self._spoken(node, task, rows, found, values, int(answers[stay].sum()), report, head)
        return rows, written, verdicts, last[stay]

    def _conversations(
        self,
        node: Node,
        task: Task,
        batch: Batch,
        rows: Array,
        context: list[Array],
        sampling: Sampling,
        report: Report,
        head: str,
    ) -> tuple[Array, dict[str, ColumnData], dict[str, Verdicts], Array]:
        """What agents make of rows: as `_episodes`."""
        contexts = [context[i // sampling.samples] for i in range(len(rows))]
        begin = BatchStart(task.name, task.number, batch, rows, contexts, int(sampling.max_tokens))
        over = self._conversed(node, task, begin, sampling, report)
        standing = SurvivingRows(node, self.plan, rows, sampling.samples, task.number)
        for position, (failure, given) in sorted(over.failed.items()):
            standing.fail(position, failure, given=given)
        for name, number in over.figures.items():
            report.count(head + name, float(number), 0)
        report.remarks += over.remarks
        stay = np.flatnonzero(~standing.lost)
        verdicts = standing.verdicts(report, head)
        found = [column.take(stay) for column in over.response]
        returned = ReturnChecker(self.plan, tuple(over.values) if self._first(node) else ())
        values = {c: returned.column(c, [over.values[c][i] for i in stay]) for c in returned.vocabularies}
        written = self._spoken(node, task, rows[stay], found, values, over.answers, report, head)
        return rows[stay], written, verdicts, np.array(over.last, int)[stay]

    def _spoken(
        self,
        node: Node,
        task: Task,
        rows: Array,
        found: list[ColumnData],
        values: dict[str, ColumnData],
        answers: int,
        report: Report,
        head: str,
    ) -> dict[str, ColumnData]:
        """What the node writes of rows in which another wrote too: of the response `found` its tokens, their
        log-probabilities, the mask and of an agent's where conversations begin, and the `values` of other columns."""
        response, as_drawn = numerics.drawn(self.plan.graph, node)
        ids, logp, mask, *begins = found
        self.watch.response(node, task, report, rows, ids, kept(logp, mask), self.plan.model(node.name).vocabulary)
        report.count(f"{head}turns", float(answers), len(rows))
        report.count(f"{head}policy_tokens", float(mask.values.sum()), 0)
        report.count(f"{head}environment_tokens", float((~mask.values).sum()), 0)
        written = {response: ids, as_drawn: logp}
        for column in beginnings(self.plan.graph, node).values():
            written[column] = begins[0]
        if name := of_response(self.plan.graph, node, "bool"):
            written[name] = mask
        if name := of_response(self.plan.graph, node, "i32"):
            written[name] = replace(mask, values=np.where(mask.values, self._version(node, task), -1).astype(np.int32))
        return written | self._values(node, task, rows, values, report)

    def _values(
        self, node: Node, task: Task, rows: Array, values: dict[str, ColumnData], report: Report
    ) -> dict[str, ColumnData]:
        """What environments and agents returned, looked at as the results of functions are."""
        for name, column in values.items():
            self.watch.results(node, task, report, name, rows, column)
            if column.offsets is None and column.values.dtype.kind == "f":
                self.means.count(report, node, task, name, rows, column.values)
        return values

    def _temperature(self, node: Node, task: Task, batch: Batch, draw: Draw, samples: int) -> float | Array:
        """What a generation draws at: as an evaluation says, else as the node does, a number or one for each of the
        responses."""
        if draw.temperature is not None:
            return draw.temperature
        if not (of := tempered(self.plan.graph, node)):
            return float(GenerateAttributes.of(node).temperature.literal())
        found: Array = batch.columns[heat(of[0])].values.astype(np.float32)
        self.watch.temperature(node, task, batch.rows, str(of[0].value), found)
        return np.repeat(found, samples)

    def _context(self, node: Node, batch: Batch) -> list[Array]:
        """What is generated after: the tokens of the columns that the node reads, text by the tokenizer of its
        model."""
        columns = tokenised(self.plan, node, batch.columns)
        parts = [columns[c] for c in sequences(self.plan.graph, node).context]
        # An agent or an environment may be all who reads.
        return [np.concatenate([c[i] for c in parts] or [np.zeros(0, np.int32)]) for i in range(len(batch.rows))]
