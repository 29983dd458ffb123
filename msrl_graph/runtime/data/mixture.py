"""Several data as one: their rows in the proportion of weights.

Invariant: the row at a position is a function of the seed. With the weights 3 and 1, each block of 4 positions has 3
rows of the first part and 1 row of the second, in a random order. Each part deals its own rows in passes, in the order
that it has without the mixture; so a small part begins its next pass earlier.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ... import noise
from ...data.data_files import titled_paths
from ...ir.plan import DataSource, Plan
from ..process.host_facts import sampled_digest
from ..process.task_report import RunError
from .columns import Array, ColumnData, concatenate
from .dataset import Dataset


class Mixture:
    """The usable rows of several data, numbered from 0, part by part."""

    def __init__(self, data: DataSource, plan: Plan, parts: Mapping[str, Dataset]) -> None:
        self.parts = [parts[name] for name in data.parts]
        self.weights = np.array([*data.parts.values()])
        self.starts = np.cumsum([0, *map(len, self.parts)])
        self.stream = noise.RandomStream(plan.deploy.run.seed, "mixture", data.name)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def excluded(self) -> int:
        """The number of rows that are not used, for any reason."""
        return sum(part.excluded for part in self.parts)

    @property
    def reason(self) -> str:
        return "; ".join(f"{part.data.name}: {part.reason}" for part in self.parts if part.excluded)

    def locate(self, index: int) -> str:
        """Describe, for a message, where a usable row is in its file."""
        part = int(np.searchsorted(self.starts, index, "right")) - 1
        return self.parts[part].locate(index - int(self.starts[part]))

    def indices(self, position: int, count: int) -> Array:
        """Return `count` row indices from `position` on."""
        block = int(self.weights.sum())
        first = position // block
        last = (position + count - 1) // block if count else first - 1
        owners = np.repeat(np.arange(len(self.parts)), self.weights)
        shuffled = [
            owners[np.argsort(self.stream.keys(turn, np.arange(block)), kind="stable")]
            for turn in range(first, last + 1)
        ]
        dealt = np.concatenate([np.zeros(0, np.int64), *shuffled])
        result = np.zeros(len(dealt), np.int64)
        for i, part in enumerate(self.parts):
            places = np.flatnonzero(dealt == i)
            result[places] = self.starts[i] + part.indices(first * int(self.weights[i]), len(places))
        return result[position - first * block :][:count]

    def take(self, indices: Array) -> dict[str, ColumnData]:
        """Return the columns of these rows, in this order."""
        owners = np.searchsorted(self.starts, indices, "right") - 1
        order = np.argsort(owners, kind="stable")
        pieces = [
            part.take(indices[order][owners[order] == i] - self.starts[i])
            for i, part in enumerate(self.parts)
            if (owners == i).any() or not (len(owners) or i)
        ]
        back = np.argsort(order, kind="stable")
        return {name: concatenate([piece[name] for piece in pieces]).take(back) for name in pieces[0]}


def load_data(plan: Plan, digests: Mapping[str, str]) -> dict[str, Dataset | Mixture]:
    """Load all data of a plan.

    `digests` are the digests of the files when the run began, by title. Raises RunError if a file was changed since
    then, because a process that replaces another must not read other rows. Raises Fault.
    """
    loaded: dict[str, Dataset] = {}
    for name, data in plan.deploy.data.items():
        if data.parts:
            continue
        if _is_changed(data, digests):
            raise RunError(f"the data {data.path} ({data.span.place}) were changed after the run began")
        loaded[name] = Dataset(data, plan)
    return {
        name: Mixture(data, plan, loaded) if data.parts else loaded[name] for name, data in plan.deploy.data.items()
    }


def _is_changed(data: DataSource, digests: Mapping[str, str]) -> bool:
    began = {
        title: digest
        for title, digest in digests.items()
        if digest and (title == data.name or title.startswith(f"{data.name}: "))
    }
    paths = titled_paths(data)
    return bool(began) and (
        began.keys() != paths.keys() or any(began[title] != sampled_digest(str(paths[title])) for title in began)
    )
