"""What outlives an iteration, weights aside: how far the data was read, responses that go on in the next one, and the
values of states.

Invariant: it lives in the driver, and changes only when an iteration has ended, or its generation, or its functions:
every process gets it with the task. A state has one value in each iteration, which the one before left. Only what draws
rows may go by an older one, of the iteration that the updates were in then. A checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ...ir.async_schedule import late_states
from ...ir.attributes import CallAttributes, GenerateAttributes
from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ..data.columns import Array
from ..process.task import CutPrompt, Tables, Task
from ..process.task_report import Report, RunError
from ..weights import checkpoint
from .adaptive_draw import RefillSize

FILE = "states.safetensors"
# Of responses that go on, in FILE: of each prompt its position in the data, how often it was cut and how many
# responses it has; of each response its tokens and whether it has ended; and of each token what is known of it.
CUT = "cut/"


class RunState:
    """`rows` are those of the source's data: a state of each prompt has a value for every one."""

    def __init__(self, plan: Plan, rows: int) -> None:
        self.graph = plan.graph
        self.rows = rows
        self.refills = any(CallAttributes.of(n).refill for n in plan.graph.nodes)
        self.refill = RefillSize(self.graph)
        self.positions = {0: 0}  # in the data, by iteration, of those where it is known
        growing = next((n for n in plan.graph.verb("generate") if n.cuts), None)
        # How many data-parallel groups tell what they have cut; 0: nothing goes on in another iteration.
        self.groups = plan.placement(growing.name).layout.dp if growing else 0
        self.prompts = GenerateAttributes.of(growing).under_way(plan.graph.rows[0]) if growing else plan.graph.rows[0]
        self.told: dict[int, list[list[CutPrompt]]] = {}  # by iteration, what its groups have cut
        self.cut: dict[int, tuple[CutPrompt, ...]] = {0: ()}  # by iteration that goes on with them, where all is known
        firsts = {s.name: (s, float(s.initial.literal())) for s in plan.graph.states}
        # By iteration, of those where they are known; the first is the one that the updates are in.
        self.states: dict[int, dict[str, Array]] = {
            0: {name: np.full(rows, x) if s.per else np.asarray(x) for name, (s, x) in firsts.items()}
        }
        self.draws: dict[int, tuple[int, dict[str, Array]]] = {}  # by iteration that was begun: of which, and these
        self.drawing = late_states(plan)
        # Whether the next iteration is known before this one has ended, with all that it begins with.
        self.known = not firsts and not self.refills and not self.groups

    def task(self, number: int) -> Task:
        """Iteration `number` of training, which is `foreseen`, as far as is known of it. What its rows are drawn by is
        what is known when it is asked for first."""
        cut = self.cut[number] if self.groups else ()
        now = min(self.states)
        _, draws = self.draws.setdefault(number, (now, self.states[now]))
        states = self.states.get(number, {})
        position = self._position(number)
        prompts, wanted = (self.refill.of(number), self.refill.target) if self.refill.adapts else (self.prompts, 0)
        own = (_of_run(states), _of_run(draws))
        return Task("train", number, prompts, {}, position, own[0], cut=cut, draws=own[1], wanted=wanted)

    @property
    def position(self) -> int:
        """Where the data of the next iteration begin."""
        return self.positions[min(self.positions)]

    def knows(self, number: int) -> bool:
        """Whether it is known which states the iteration before has left."""
        return number in self.states

    def foreseen(self, number: int) -> bool:
        """Whether it is known which data an iteration begins with."""
        return (not self.refills or number in self.positions) and (not self.groups or number in self.cut)

    def _position(self, number: int) -> int:
        last = number if self.refills or self.groups else min(number, max(self.positions))
        return self.positions[last] + (number - last) * self.graph.rows[0]

    def heard(self, task: Task, report: Report) -> None:
        """Takes what a process that has ended an iteration knows of the next one's data."""
        if report.rounds:
            self._drew(task, report.rounds * task.prompts)
        following = task.number + 1
        if report.cut is None or following in self.cut:
            return
        self.told.setdefault(following, []).append(report.cut)
        if len(self.told[following]) == self.groups:
            every = [c for cut in self.told.pop(following) for c in cut]
            self.cut[following] = tuple(sorted(every, key=lambda c: (-c.cuts, c.position)))
            self._drew(task, task.prompts - len(task.cut))

    def _drew(self, task: Task, prompts: int) -> None:
        """An iteration has taken so many prompts of the data."""
        self.positions[task.number + 1] = task.position + prompts

    def evaluation(self, evaluation: Evaluation, number: int, prompts: int) -> Task:
        """An evaluation after so many iterations."""
        states = _of_run(self.states[number])
        return Task(evaluation.task, number, prompts, evaluation.samples_of(self.graph), 0, states, draws=states)

    def tables(self, number: int) -> Tables:
        """The states that each row of the data has a value of, of an iteration that was begun."""
        return Tables(_of_rows(self.draws[number][1]), _of_rows(self.states.get(number, {})))

    def after(self, task: Task, reports: list[Report]) -> None:
        """Takes what an iteration of training has left."""
        drawn = sum(int(r.sums["prompts_drawn"][0]) for r in reports if "prompts_drawn" in r.sums)
        self._drew(task, drawn or task.prompts - len(task.cut))
        for report in reports:
            self.heard(task, report)
        self.learn(task.number, reports)
        self.refill.ended(task.number, reports)
        self.states = {number: states for number, states in self.states.items() if number > task.number}
        self.draws = {number: drawn for number, drawn in self.draws.items() if number > task.number}
        self.positions = {number: place for number, place in self.positions.items() if number > task.number}
        self.cut = {number: cut for number, cut in self.cut.items() if number > task.number}

    def learn(self, number: int, reports: Sequence[Report]) -> None:
        """Takes what the functions of an iteration have left, with whose own states they began."""
        if number + 1 in self.states:
            return
        states = dict(self.states[number])
        rows = next((r.drawn for r in reports if len(r.drawn)), np.zeros(0, np.int64))
        given: dict[str, list[tuple[int, float]]] = {}
        for report in reports:
            for name, found in report.states.items():
                given.setdefault(name, []).extend(zip(found.units, found.values, strict=True))
        for name, pairs in given.items():
            states[name] = states[name].copy()  # an iteration that was begun may still be drawn by it
            for unit, value in sorted(pairs):  # of a row that came twice the last prompt counts, whoever computed it
                states[name][rows[unit] if states[name].ndim else ()] = value
        self.states[number + 1] = states

    def count(self, number: int, reports: Sequence[Report]) -> None:
        """Adds the metrics of states to the report of an iteration that has ended which tells the rows that it drew:
        their values, on average over these rows, and how many iterations older those were that drew them."""
        report = next(r for r in reports if len(r.drawn))
        rows = report.drawn
        for name, value in self.states[number].items():
            some = value[rows] if value.ndim else np.atleast_1d(value)
            report.count(name, float(some.sum()), len(some))
        self.refill.count(number, report)
        for name in self.drawing:
            report.count(f"{name}/age", number - self.draws[number][0], 1)

    def save(self, folder: Path, says: Mapping[str, str]) -> list[checkpoint.CheckpointFile]:
        """The states as a file of a checkpoint, if there are any."""
        held = {**self.states[min(self.states)], **(_arrays(self.cut[min(self.cut)]) if self.groups else {})}
        held |= self.refill.saved()
        return [checkpoint.write_arrays(folder, FILE, held, says)] if held else []

    def restore(self, folder: Path, manifest: checkpoint.Manifest) -> None:
        """Takes over what a checkpoint holds. RunError where its states are not those of this program and its data."""
        usual = manifest.iteration * self.graph.rows[0]
        self.positions = {manifest.iteration: usual if manifest.position < 0 else manifest.position}
        states = self.states = {manifest.iteration: self.states[min(self.states)]}
        if not states[manifest.iteration] and not self.groups and not self.refill.adapts:
            return
        found = checkpoint.read_arrays(folder / FILE) if any(f.name == FILE for f in manifest.files) else {}
        self.refill.restore(found)
        self.cut = {manifest.iteration: _cut(found, manifest.iteration)}
        for name, value in self.states[manifest.iteration].items():
            if name not in found:
                raise RunError(f"{folder} holds no value of the state `{name}`: it is a checkpoint of another program")
            if found[name].shape != value.shape:
                has = found[name].size
                wants = f"the data has {self.rows} rows" if value.ndim else "the run has one"
                raise RunError(
                    f"{folder} holds {has} values of the state `{name}`, and {wants}: go on with the data that it was "
                    "made with"
                )
            states[manifest.iteration][name] = found[name].astype(np.float64)


def _of_run(states: Mapping[str, Array]) -> dict[str, float]:
    """The states that the whole run has one value of."""
    return {name: float(value) for name, value in states.items() if not value.ndim}


def _of_rows(states: Mapping[str, Array]) -> dict[str, Array]:
    """The states that each row of the data has a value of."""
    return {name: value for name, value in states.items() if value.ndim}


def _arrays(cut: tuple[CutPrompt, ...]) -> dict[str, Array]:
    """Responses that go on, as arrays for a file."""
    responses = [r for c in cut for r in c.responses]
    whole = {
        "positions": np.array([c.position for c in cut], np.int64),
        "cuts": np.array([c.cuts for c in cut], np.int64),
        "iterations": np.array([c.iteration for c in cut], np.int64),
        "rows": np.array([c.row for c in cut], np.int64),
        "responses": np.array([len(c.responses) for c in cut], np.int64),
        "lengths": np.array([len(tokens) for tokens, *_ in responses], np.int64),
        "ended": np.array([int(ended) for *_, ended in responses], np.int64),
    }
    for i, (name, kind) in enumerate((("tokens", np.int32), ("logps", np.float32), ("versions", np.int32))):
        whole[name] = np.concatenate([np.zeros(0, kind), *(r[i] for r in responses)])
    return {CUT + name: values for name, values in whole.items()}


def _cut(found: Mapping[str, Array], iteration: int) -> tuple[CutPrompt, ...]:
    """What `_arrays` made arrays of; nothing where a file has none. One of an older version does not say which rows
    they began as: they go on as those of `iteration`, the next one."""
    held = {name[len(CUT) :]: values for name, values in found.items() if name.startswith(CUT)}
    if not held:
        return ()
    ends = np.cumsum(held["lengths"])[:-1]
    each = [np.split(held[name], ends) if len(held["lengths"]) else [] for name in ("tokens", "logps", "versions")]
    responses = list(zip(*each, (bool(e) for e in held["ended"]), strict=True))
    made = []
    first = 0
    many = len(held["positions"])
    began = held.get("iterations", np.full(many, iteration)), held.get("rows", np.arange(many))
    for position, cuts, count, *row in zip(held["positions"], held["cuts"], held["responses"], *began, strict=True):
        made.append(CutPrompt(int(position), tuple(responses[first : first + int(count)]), int(cuts), *map(int, row)))
        first += int(count)
    return tuple(made)
