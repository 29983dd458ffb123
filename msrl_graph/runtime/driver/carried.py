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
        self.graph, self.position, self.rows = plan.graph, 0, rows
        self.ahead = 0  # how much farther the data was read, by the program as it was before, than this one would have
        self.states: dict[str, Array] = {}
        for state in plan.graph.states:
            first = float(state.initial.literal())
            self.states[state.name] = np.full(rows, first) if state.per else np.asarray(first)
        # Whether it is known before an iteration has ended which data the next reads, and all that it begins with.
        self.foreseen = not any(Call.of(n).refill for n in plan.graph.nodes)
        self.known = self.foreseen and not self.states

    def task(self, number: int) -> Task:
        """Iteration `number` of training."""
        prompts = self.graph.rows[0]
        position = self.ahead + number * prompts if self.foreseen else self.position
        return Task("train", number, prompts, 0, position, self.of_run())

    def of_run(self) -> dict[str, float]:
        """The states that the whole run has one value of."""
        return {name: float(value) for name, value in self.states.items() if not value.ndim}

    def tables(self) -> dict[str, Array]:
        """The states that each row of the data has a value of."""
        return {name: value for name, value in self.states.items() if value.ndim}

    def after(self, task: Task, reports: list[Report]) -> None:
        """Takes what an iteration of training has left."""
        drawn = sum(int(r.sums["prompts_drawn"][0]) for r in reports if "prompts_drawn" in r.sums)
        self.position = task.position + (drawn or task.prompts)
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
        self.position = usual if manifest.position < 0 else manifest.position
        self.ahead = self.position - usual
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
