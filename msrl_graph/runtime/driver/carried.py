"""What outlives an iteration, weights aside: how far the data was read, and the values of states.

Invariant: it lives in the driver, and changes only when an iteration has ended: every process gets it with the task. A
checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...ir.attributes import Call
from ...ir.plan import Plan
from ..data.columns import Array
from ..process.report import Report, RunError
from ..process.task import Task
from ..weights import checkpoint

FILE = "states.safetensors"


class Carried:
    """`rows` are those of the source's data: a state of each prompt has a value for every one."""

    def __init__(self, plan: Plan, rows: int) -> None:
        self.graph, self.rows = plan.graph, rows
        self.refills = any(Call.of(n).refill for n in plan.graph.nodes)
        self.positions = {0: 0}  # in the data, by iteration, of those where it is known
        self.states: dict[str, Array] = {}
        for state in plan.graph.states:
            first = float(state.initial.literal())
            self.states[state.name] = np.full(rows, first) if state.per else np.asarray(first)
        # Whether the next iteration is known before this one has ended, with all that it begins with.
        self.known = not self.states and not self.refills

    def task(self, number: int) -> Task:
        """Iteration `number` of training, which is `foreseen`."""
        return Task("train", number, self.graph.rows[0], 0, self._position(number), self.of_run())

    @property
    def position(self) -> int:
        """Where the data of the next iteration begin."""
        return self.positions[min(self.positions)]

    def foreseen(self, number: int) -> bool:
        """Whether it is known which data an iteration begins with."""
        return not self.refills or number in self.positions

    def _position(self, number: int) -> int:
        last = number if self.refills else min(number, max(self.positions))
        return self.positions[last] + (number - last) * self.graph.rows[0]

    def drew(self, task: Task, prompts: int) -> None:
        """An iteration has taken so many prompts of the data."""
        self.positions[task.number + 1] = task.position + prompts

    def of_run(self) -> dict[str, float]:
        """The states that the whole run has one value of."""
        return {name: float(value) for name, value in self.states.items() if not value.ndim}

    def tables(self) -> dict[str, Array]:
        """The states that each row of the data has a value of."""
        return {name: value for name, value in self.states.items() if value.ndim}

    def after(self, task: Task, reports: list[Report]) -> None:
        """Takes what an iteration of training has left."""
        drawn = sum(int(r.sums["prompts_drawn"][0]) for r in reports if "prompts_drawn" in r.sums)
        self.drew(task, drawn or task.prompts)
        self.positions = {number: place for number, place in self.positions.items() if number > task.number}
        rows = next((r.drawn for r in reports if len(r.drawn)), np.zeros(0, np.int64))
        given: dict[str, list[tuple[int, float]]] = {}
        for report in reports:
            for name, found in report.states.items():
                given.setdefault(name, []).extend(zip(found.units, found.values, strict=True))
        for name, pairs in given.items():
            for unit, value in sorted(pairs):  # of a row that came twice the last prompt counts, whoever computed it
                if self.states[name].ndim:
                    self.states[name][rows[unit]] = value
                else:
                    self.states[name] = np.asarray(value)

    def save(self, folder: Path, says: Mapping[str, str]) -> list[checkpoint.File]:
        """The states as a file of a checkpoint, if there are any."""
        return [checkpoint.write_arrays(folder, FILE, self.states, says)] if self.states else []

    def restore(self, folder: Path, manifest: checkpoint.Manifest) -> None:
        """Takes over what a checkpoint holds. RunError where its states are not those of this program and its data."""
        usual = manifest.iteration * self.graph.rows[0]
        self.positions = {manifest.iteration: usual if manifest.position < 0 else manifest.position}
        if not self.states:
            return
        found = checkpoint.read_arrays(folder / FILE) if any(f.name == FILE for f in manifest.files) else {}
        for name, value in self.states.items():
            if name not in found:
                raise RunError(f"{folder} holds no value of the state `{name}`: it is a checkpoint of another program")
            if found[name].shape != value.shape:
                has, wants = found[name].size, f"the data has {self.rows} rows" if value.ndim else "the run has one"
                raise RunError(
                    f"{folder} holds {has} values of the state `{name}`, and {wants}: go on with the data that it was "
                    "made with"
                )
            self.states[name] = found[name].astype(np.float64)
