"""State of a run that outlives an iteration, apart from the weights.

The run state consists of the position in the data, the cut responses (which continue in the next iteration), and the
values of the algorithm states (such as a KL coefficient). A task is one iteration of training, or one evaluation.

Invariant: the run state is stored in the driver. The run state changes only when an iteration, its generation or its
functions have ended. The driver sends the run state to every process together with the task. An algorithm state has one
value in each iteration; the previous iteration sets this value. Only the sampling of rows can use an older value: the
value for the iteration that the updates computed when the task was created. A checkpoint contains the run state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ...analysis.async_schedule import late_states
from ...ir.attributes import CallAttributes, GenerateAttributes
from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ..data.columns import Array
from ..process.task import CutPrompt, Tables, Task
from ..process.task_report import Report, RunError
from ..weights import checkpoint
from .adaptive_draw import RefillSize

FILE = "states.safetensors"
# Responses that continue, in FILE. Per prompt: its position in the data, how often it was cut, and how many
# responses it has. Per response: its tokens and whether it has ended. Per token: what is known of it.
CUT = "cut/"


class RunState:
    """State of a run between iterations, which the driver holds.

    `rows` is the number of rows in the training data. A per-prompt algorithm state has one value for each of these
    rows.
    """

    def __init__(self, plan: Plan, rows: int) -> None:
        self.graph = plan.graph
        self.rows = rows
        self.refills = any(CallAttributes.of(node).refill for node in plan.graph.nodes)
        self.refill = RefillSize(self.graph)
        self.positions = {0: 0}  # in the data, by iteration, where known
        growing = next((node for node in plan.graph.verb("generate") if node.cuts), None)
        # Number of data-parallel groups that report cut prompts; 0: nothing continues in another iteration.
        self.groups = plan.placement(growing.name).layout.dp if growing else 0
        self.prompts = GenerateAttributes.of(growing).under_way(plan.graph.rows[0]) if growing else plan.graph.rows[0]
        self.reported: dict[int, list[list[CutPrompt]]] = {}  # by next iteration, the cut prompts of each group
        self.cut: dict[int, tuple[CutPrompt, ...]] = {0: ()}  # by iteration that continues them, where all are known
        firsts = {state.name: (state, float(state.initial.literal())) for state in plan.graph.states}
        # By iteration, where they are known; the first is the iteration that the updates are in.
        self.states: dict[int, dict[str, Array]] = {
            0: {
                name: np.full(rows, initial) if state.per else np.asarray(initial)
                for name, (state, initial) in firsts.items()
            }
        }
        # By begun iteration: the iteration whose states draw its rows, and these states.
        self.draws: dict[int, tuple[int, dict[str, Array]]] = {}
        self.drawing = late_states(plan)
        # Whether all that the next iteration begins with is known before this one has ended.
        self.known_early = not firsts and not self.refills and not self.groups

    def task(self, number: int) -> Task:
        """Return the task of training iteration `number`, with all inputs known so far.

        `knows_data(number)` must be true. The rows of the task are sampled with certain values of the algorithm states:
        the newest values that were known when this method was first called for the iteration.
        """
        cut = self.cut[number] if self.groups else ()
        now = min(self.states)
        _, draws = self.draws.setdefault(number, (now, self.states[now]))
        states = self.states.get(number, {})
        position = self._position(number)
        prompts, wanted = (
            (self.refill.draw_size(number), self.refill.target) if self.refill.adapts else (self.prompts, 0)
        )
        own = (_run_states(states), _run_states(draws))
        return Task("train", number, prompts, {}, position, own[0], cut=cut, draws=own[1], wanted=wanted)

    @property
    def position(self) -> int:
        """Index of the next iteration's first prompt in the endless sequence of data rows."""
        return self.positions[min(self.positions)]

    def knows(self, number: int) -> bool:
        """Return whether the algorithm states' values for iteration `number` are known."""
        return number in self.states

    def knows_data(self, number: int) -> bool:
        """Return whether the data position and cut responses of an iteration are known.

        Cut responses were cut in the previous iteration and continue in this iteration.
        """
        return (not self.refills or number in self.positions) and (not self.groups or number in self.cut)

    def _position(self, number: int) -> int:
        last = number if self.refills or self.groups else min(number, max(self.positions))
        return self.positions[last] + (number - last) * self.graph.rows[0]

    def take_report(self, task: Task, report: Report) -> None:
        """Record what a process reports about the data of the next iteration.

        The process has ended its part of `task`, an iteration of training.
        """
        if report.rounds:
            self._advance(task, report.rounds * task.prompts)
        following = task.number + 1
        if report.cut is None or following in self.cut:
            return
        self.reported.setdefault(following, []).append(report.cut)
        if len(self.reported[following]) == self.groups:
            prompts = [prompt for cut in self.reported.pop(following) for prompt in cut]
            self.cut[following] = tuple(sorted(prompts, key=lambda prompt: (-prompt.cuts, prompt.position)))
            self._advance(task, task.prompts - len(task.cut))

    def _advance(self, task: Task, prompts: int) -> None:
        """Set the next iteration's data position: `prompts` after the position of `task`."""
        self.positions[task.number + 1] = task.position + prompts

    def evaluation(self, evaluation: Evaluation, number: int, prompts: int) -> Task:
        """Return the task of an evaluation after `number` iterations.

        `prompts` is the number of prompts in the data of the evaluation.
        """
        states = _run_states(self.states[number])
        return Task(evaluation.task, number, prompts, evaluation.samples_of(self.graph), 0, states, draws=states)

    def tables(self, number: int) -> Tables:
        """Return the values of the algorithm states that have one value per data row.

        The first table has the values with which the rows of iteration `number` are sampled. The second table has the
        values for iteration `number` itself. This iteration must have begun.
        """
        return Tables(_row_states(self.draws[number][1]), _row_states(self.states.get(number, {})))

    def end_iteration(self, task: Task, reports: list[Report]) -> None:
        """Record the results of a training iteration that has ended."""
        drawn = sum(int(report.sums["prompts_drawn"][0]) for report in reports if "prompts_drawn" in report.sums)
        self._advance(task, drawn or task.prompts - len(task.cut))
        for report in reports:
            self.take_report(task, report)
        self.learn(task.number, reports)
        self.refill.learn(task.number, reports)
        self.states = {number: states for number, states in self.states.items() if number > task.number}
        self.draws = {number: draw for number, draw in self.draws.items() if number > task.number}
        self.positions = {number: place for number, place in self.positions.items() if number > task.number}
        self.cut = {number: cut for number, cut in self.cut.items() if number > task.number}

    def learn(self, number: int, reports: Sequence[Report]) -> None:
        """Record the values of algorithm states that an iteration's functions have set.

        These values are the values for the next iteration, `number` + 1.
        """
        if number + 1 in self.states:
            return
        states = dict(self.states[number])
        rows = next((report.prompt_rows for report in reports if len(report.prompt_rows)), np.zeros(0, np.int64))
        updates: dict[str, list[tuple[int, float]]] = {}
        for report in reports:
            for name, update in report.states.items():
                updates.setdefault(name, []).extend(zip(update.units, update.values, strict=True))
        for name, pairs in updates.items():
            states[name] = states[name].copy()  # a begun iteration may still be drawn by the old array
            for unit, value in sorted(pairs):  # for a row that came twice, the last prompt counts
                states[name][rows[unit] if states[name].ndim else ()] = value
        self.states[number + 1] = states

    def count(self, number: int, reports: Sequence[Report]) -> None:
        """Add the metrics of algorithm states to the report that lists the drawn prompts.

        The metrics are the mean value of each algorithm state over the drawn prompts, and the age (in iterations) of
        the values with which the rows were sampled.
        """
        report = next(candidate for candidate in reports if len(candidate.prompt_rows))
        rows = report.prompt_rows
        for name, value in self.states[number].items():
            row_values = value[rows] if value.ndim else np.atleast_1d(value)
            report.count(name, float(row_values.sum()), len(row_values))
        self.refill.count(number, report)
        for name in self.drawing:
            report.count(f"{name}/age", number - self.draws[number][0], 1)

    def save(self, folder: Path, metadata: Mapping[str, str]) -> list[checkpoint.CheckpointFile]:
        """Write the run state as a file of a checkpoint; return a list with this file.

        The position in the data is stored in the manifest, not in this file. If the run state has no other content, no
        file is written, and the list is empty.
        """
        arrays = {**self.states[min(self.states)], **(_to_arrays(self.cut[min(self.cut)]) if self.groups else {})}
        arrays |= self.refill.to_arrays()
        return [checkpoint.write_arrays(folder, FILE, arrays, metadata)] if arrays else []

    def restore(self, folder: Path, manifest: checkpoint.Manifest) -> None:
        """Restore the run state from a checkpoint.

        Raises RunError if the algorithm states in the checkpoint do not fit this program and its data.
        """
        usual = manifest.iteration * self.graph.rows[0]
        self.positions = {manifest.iteration: usual if manifest.position < 0 else manifest.position}
        states = self.states = {manifest.iteration: self.states[min(self.states)]}
        if not states[manifest.iteration] and not self.groups and not self.refill.adapts:
            return
        arrays = checkpoint.read_arrays(folder / FILE) if any(file.name == FILE for file in manifest.files) else {}
        self.refill.restore(arrays)
        self.cut = {manifest.iteration: _from_arrays(arrays, manifest.iteration)}
        for name, value in self.states[manifest.iteration].items():
            if name not in arrays:
                raise RunError(f"{folder} holds no value of the state `{name}`: it is a checkpoint of another program")
            if arrays[name].shape != value.shape:
                count = arrays[name].size
                wants = f"the data has {self.rows} rows" if value.ndim else "the run has one"
                raise RunError(
                    f"{folder} holds {count} values of the state `{name}`, but {wants}: resume with the data that it "
                    "was made with"
                )
            states[manifest.iteration][name] = arrays[name].astype(np.float64)


def _run_states(states: Mapping[str, Array]) -> dict[str, float]:
    """Return the algorithm states that have one value for the whole run."""
    return {name: float(value) for name, value in states.items() if not value.ndim}


def _row_states(states: Mapping[str, Array]) -> dict[str, Array]:
    """Return the algorithm states that have one value for each row of the data."""
    return {name: value for name, value in states.items() if value.ndim}


def _to_arrays(cut: tuple[CutPrompt, ...]) -> dict[str, Array]:
    """Convert cut responses, which continue in the next iteration, into named arrays.

    A checkpoint stores these arrays in a file.
    """
    responses = [response for prompt in cut for response in prompt.responses]
    arrays = {
        "positions": np.array([prompt.position for prompt in cut], np.int64),
        "cuts": np.array([prompt.cuts for prompt in cut], np.int64),
        "iterations": np.array([prompt.iteration for prompt in cut], np.int64),
        "rows": np.array([prompt.row for prompt in cut], np.int64),
        "responses": np.array([len(prompt.responses) for prompt in cut], np.int64),
        "lengths": np.array([len(tokens) for tokens, *_ in responses], np.int64),
        "ended": np.array([int(ended) for *_, ended in responses], np.int64),
    }
    for i, (name, kind) in enumerate((("tokens", np.int32), ("logps", np.float32), ("versions", np.int32))):
        arrays[name] = np.concatenate([np.zeros(0, kind), *(response[i] for response in responses)])
    return {CUT + name: values for name, values in arrays.items()}


def _from_arrays(arrays: Mapping[str, Array], iteration: int) -> tuple[CutPrompt, ...]:
    """Restore the cut responses from the arrays of `_to_arrays`; () if there are none.

    Each response has the iteration and the row number with which it began. An older version of msrl_graph did not store
    these two numbers. Responses without these numbers continue as rows of `iteration`, the next iteration.
    """
    fields = {name[len(CUT) :]: values for name, values in arrays.items() if name.startswith(CUT)}
    if not fields:
        return ()
    ends = np.cumsum(fields["lengths"])[:-1]
    parts = [np.split(fields[name], ends) if len(fields["lengths"]) else [] for name in ("tokens", "logps", "versions")]
    responses = list(zip(*parts, (bool(flag) for flag in fields["ended"]), strict=True))
    prompts = []
    first = 0
    prompt_count = len(fields["positions"])
    origins = fields.get("iterations", np.full(prompt_count, iteration)), fields.get("rows", np.arange(prompt_count))
    for position, cuts, count, *row in zip(
        fields["positions"], fields["cuts"], fields["responses"], *origins, strict=True
    ):
        prompts.append(
            CutPrompt(int(position), tuple(responses[first : first + int(count)]), int(cuts), *map(int, row))
        )
        first += int(count)
    return tuple(prompts)
