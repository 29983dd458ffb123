"""The rows that were trained on, as Parquet files: written to be looked at, and taken again in place of generated ones.

Invariant: a file holds one iteration, one table row a response, in the order of their numbers, and is there whole or not at all. A
recorded response is taken for the prompt that it was drawn for, and for no other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..diagnostics import Diagnostic, Fault
from ..graph import Node
from ..paths import is_folder
from ..plan import Plan
from ..rowsets import VERDICT, chain, rowsets
from ..sequences import is_tokens
from .columns import Array, Column, offsets_of, texts
from .readers import Task, readers
from .report import RunError
from .tokens import of_column, tokenised
from .wrong import drawn, vocabulary

FOLDER = "rows"  # in a run's folder


def file(folder: Path, iteration: int) -> Path:
    return folder / FOLDER / f"{iteration:06d}.parquet"


def _shown(column: str) -> str:
    """A column's name in the file: a dot, as in `response.logp`, would stand for a part of a column."""
    return column.replace(".", "_")


def _tokens(plan: Plan) -> list[str]:
    """The columns that can be read as text."""
    return [c.name for c in plan.graph.columns if is_tokens(plan.graph, c.name) and vocabulary(plan, c.name)]


def check(plan: Plan, record: bool, replay: str, begin: int) -> None:
    """`Fault` for a recording that cannot be written, or does not hold every iteration from `begin` on."""
    found = []
    declared = {c.name: c for c in plan.graph.columns}
    hidden = {_shown(name) for node in plan.graph.verb("generate") for name in drawn(plan.graph, node) if name not in declared}
    hidden |= {_shown(f"{n.name}{VERDICT}") for n in plan.graph.nodes if n.filters}
    own = {"row", "prompt_row", *hidden, *(f"{name}_text" for name in _tokens(plan))}
    for name in sorted(own & declared.keys()) if record else ():
        what = f"`{name}` is the name of a column that every recording has"
        found.append(Diagnostic("bad-value", what, declared[name].span, "give the column another name, or leave out --record"))
    for node in (n for n in plan.graph.verb("generate") if replay and "environment" in n.attributes):
        what = f"`{node.name}` cannot take its responses from a recording: what its environment does is not in it"
        found.append(Diagnostic("bad-value", what, node.attributes["environment"].span, "leave out --replay"))
    if replay and not is_folder(Path(replay) / FOLDER):
        what = f"there is no recording in {replay}: it has no folder `{FOLDER}`"
        found.append(Diagnostic("missing-file", what, help="name the folder of a run that was made with --record"))
    elif replay:
        missing = next((i for i in range(begin, plan.deploy.run.iterations) if not file(Path(replay), i).is_file()), None)
        if missing is not None:
            what = f"the recording in {replay} has no iteration {missing}: there is no file {file(Path(replay), missing)}"
            help = f"stop before it: --iterations {missing}" if missing > begin else "name the folder of a run that has it"
            found.append(Diagnostic("missing-file", what, help=help))
    if found:
        raise Fault(*found)


def write(path: Path, plan: Plan, columns: dict[str, tuple[Array, Column]], task: Task) -> None:
    """Writes an iteration: of each column the numbers of its rows, ascending, and the data. A table row is one of the first generation (of
    the source, if there is none); what a row lacks, since a filter dropped it, is null; of repeats the row itself stands there, and what
    later generations made is left out."""
    import pyarrow as pa
    from pyarrow import parquet

    graph, found = plan.graph, rowsets(plan.graph)
    names = next((drawn(graph, n) for n in graph.verb("generate")), None)
    base = found.columns[names[0]] if names else 0
    nothing = (np.zeros(0, np.int64), None)  # a filter may leave no prompt to generate from
    rows, _ = columns.get(names[0] if names else graph.node("source").writes[0], nothing)
    numbers = readers(plan)[0].numbers(task)
    table: dict[str, Any] = {"row": pa.array(rows), "prompt_row": pa.array(numbers.above(rows, base, 0))}
    declared = {c.name: c for c in graph.columns}
    sets = found.columns | {s.column: s.rows for s in found.sieves.values()} | ({names[1]: base} if names else {})
    for name in (*(c for c in declared if c in columns), *sorted(columns.keys() - declared.keys())):
        own = sets.get(name, 0)
        while found.sets[own].repeats and own != base:
            own = found.sets[own].above
        if own not in chain(found.sets, base):
            continue
        wanted, (there, column) = numbers.above(rows, base, own), columns[name]
        place = np.minimum(np.searchsorted(there, wanted), max(len(there) - 1, 0))
        text = name in declared and declared[name].element in ("text", "json")
        table[_shown(name)] = _arrow(column, place, np.isin(wanted, there), text)
    for name in (n for n in _tokens(plan) if n in table):
        ids = [row or [] for row in table[name].to_pylist()]
        table[f"{name}_text"] = pa.array(of_column(plan, name).decode(map(np.asarray, ids), special=True), pa.string())
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    parquet.write_table(pa.table(table), partial)
    partial.replace(path)


def _arrow(column: Column, place: Array, there: Array, text: bool) -> Any:
    """An array of Arrow's of the rows at these places, null where a row is not there."""
    import pyarrow as pa

    some = column.take(place[there])
    if some.offsets is None:
        index = np.cumsum(there) - 1
        return pa.array(some.values).take(pa.array(index, mask=~there))
    lengths = np.zeros(len(there), np.int64)
    lengths[there] = some.lengths
    offsets = offsets_of(lengths)
    if text:
        known = pa.LargeStringArray.from_buffers(len(there), pa.py_buffer(offsets), pa.py_buffer(some.values))
        return known if there.all() else known.take(pa.array(np.arange(len(there)), mask=~there))
    wide = some.values.ndim > 1
    values = pa.FixedSizeListArray.from_arrays(some.values.reshape(-1), some.values.shape[1]) if wide else some.values
    return pa.LargeListArray.from_arrays(offsets, values, mask=pa.array(~there))


class Recording:
    """The responses of a run that was recorded into `folder`; those of one iteration at a time are in memory."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self._read: tuple[Path | None, str, dict[str, Column]] = (None, "", {})

    def responses(
        self, node: Node, columns: tuple[str, str], iteration: int, prompts: list[Array], rows: Array, fan: int
    ) -> tuple[list[Array], list[Array]]:
        """What a generator would draw for these rows, `fan` of which belong to each prompt: tokens, and their log-probabilities as
        drawn; `columns` name the two."""
        path = file(self.folder, iteration)
        names = ("row", *node.reads, *map(_shown, columns))
        if self._read[:2] != (path, node.name):
            self._read = (path, node.name, tokenised(self.plan, node, _load(path, names)))
        found = self._read[2]
        number = found["row"].values
        place = np.minimum(np.searchsorted(number, rows), len(number) - 1)
        if len(missing := rows[number[place] != rows]):
            raise RunError(f"{path} holds no row {missing[0]}, which `{node.name}` ({node.span.place}) is to take from it")
        for i, row in enumerate(place):
            if not np.array_equal(np.concatenate([found[c][row] for c in node.reads]), prompts[i // fan]):
                what = f"row {rows[i]} of {path} is a response to another prompt than this run's"
                raise RunError(f"{what}: a recording is replayed with the seed, the data and the sizes that it was made with")
        tokens, logps = (found[name] for name in names[-2:])
        return [tokens[row] for row in place], [logps[row] for row in place]


def _load(path: Path, names: tuple[str, ...]) -> dict[str, Column]:
    """These columns of a file, by ascending number of the row."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as source:
            if missing := [n for n in names if n not in source.schema_arrow.names]:
                raise RunError(f"{path} has no column `{missing[0]}`: it is the recording of another program")
            table = source.read(columns=list(names)).sort_by("row").combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    if not table.num_rows:
        raise RunError(f"{path} holds no rows")
    return {name: _column(table.column(name).chunk(0)) for name in names}


def _column(array: Any) -> Column:
    import pyarrow as pa

    if pa.types.is_large_string(array.type):
        return texts(array.to_pylist())
    if not hasattr(array, "offsets"):
        return Column(array.to_numpy())
    return Column(array.values.to_numpy(), array.offsets.to_numpy().astype(np.int64))
