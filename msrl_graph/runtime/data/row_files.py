"""The rows of a run as Parquet files: written to be looked at, and those of training to be replayed.

Invariant: a file holds one table of one iteration or evaluation, in the order of the rows' numbers, and is there whole
or not at all.
Every value stands at the row that it belongs to, and at those below it. A recorded response is taken for the prompt
that it was drawn for, and for no other; of a partial rollout there are those that the iteration took, and not what it
cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...diagnostics import Diagnostic, Fault
from ...files.paths import is_folder
from ...ir.attributes import CallAttributes, GenerateAttributes
from ...ir.graph import Graph, Node
from ...ir.plan import Plan
from ...ir.rowsets import Numbers, Rowsets, chain, rowsets
from ...ir.sequences import beginnings, is_tokens, sequences
from ..process.task import Task, numbers
from ..process.task_report import RunError
from .columns import Array, ColumnData, ColumnRows, Verdicts, offsets_of, texts
from .numerics import drawn, not_finite, vocabulary
from .tokens import of_column, tokenised

FOLDER = "rows"  # in a run's folder
EVALUATED = "evaluation_rows"  # in a run's folder, with a folder for each evaluation
SAME = "a recording is replayed with the seed, the data, the sizes and the version that it was made with"
ORIGIN = "origin_row"  # of a repeat the number of the row that it repeats, of all others their own


@dataclass(frozen=True)
class RecordedTable:
    """A table of a recording: the rows that one generation made, or the source's, with the repeats of them that a
    `select` made.

    `column` is what the rows stand for, as `response`, and `rows` the set that they are of (ir/rowsets.py). `folder`
    is the table's own within FOLDER, "" where there is only one table. `ids` are its columns of row numbers, each
    with the set whose rows it numbers: {"row": 1, "prompt_row": 0}.
    """

    folder: str
    column: str
    rows: int
    ids: dict[str, int]

    def file(self, run: Path, iteration: int, evaluation: str = "") -> Path:
        """The file of an iteration of training, or of an evaluation after that number of iterations."""
        folder = run / EVALUATED / evaluation if evaluation else run / FOLDER
        return folder / self.folder / f"{iteration:06d}.parquet"


def tables(graph: Graph, found: Rowsets | None = None) -> list[RecordedTable]:
    """One table where there is one generation or none; else that of the source's rows, and one for each generation."""
    found = found or rowsets(graph)
    made = {found.columns[c]: c for c in (drawn(graph, n)[0] for n in graph.verb("generate"))}
    several = len(made) > 1
    bases = made if made and not several else {0: graph.made(0), **made}

    def ids(base: int) -> dict[str, int]:
        above = {
            found.sets[s].level: s for s in reversed(chain(found.sets, base)) if s != base or (not s and not several)
        }
        return {f"{graph.made(level) if several else 'prompt'}_row": s for level, s in above.items()}

    return [
        RecordedTable(column if several else "", column, base, {"row": base, **ids(base)})
        for base, column in bases.items()
    ]


def _shown(graph: Graph, column: str) -> str:
    """A column's name in the file: a dot, as in `response.logp`, would stand for a part of a column. A declared
    `response_logp`, as an `infer` may write, keeps its name."""
    name = column.replace(".", "_")
    return f"{name}_drawn" if column.endswith(".logp") and any(c.name == name for c in graph.columns) else name


def _tokens(plan: Plan) -> list[str]:
    """The columns that can be read as text: tokens that a model writes or reads."""
    graph = plan.graph
    made = {drawn(plan.graph, n)[0] for n in plan.graph.verb("generate")}
    return [c.name for c in graph.columns if is_tokens(graph, c.name) and (c.name in made or vocabulary(plan, c.name))]


def check(plan: Plan, record: bool, replay: str, begin: int) -> None:
    """`Fault` for a recording that cannot be written, or does not hold every iteration from `begin` on."""
    found = []
    levels = tables(plan.graph)
    declared = {c.name: c for c in plan.graph.columns}
    hidden = {
        _shown(plan.graph, name)
        for node in plan.graph.verb("generate")
        for name in (*drawn(plan.graph, node), *beginnings(plan.graph, node).values())
        if name not in declared
    }
    hidden |= {_shown(plan.graph, s.column) for s in rowsets(plan.graph).sieves.values()}
    hidden |= {ORIGIN} if any(CallAttributes.of(n).select is not None for n in plan.graph.nodes) else set()
    own = {*hidden, *(i for t in levels for i in t.ids), *(f"{name}_text" for name in _tokens(plan))}
    for name in sorted(own & declared.keys()) if record else ():
        what = f"`{name}` is the name of a column that every recording has"
        found.append(
            Diagnostic("bad-value", what, declared[name].span, "give the column another name, or leave out --record")
        )
    for node in (n for n in plan.graph.verb("generate") if replay and GenerateAttributes.of(n).partner is not None):
        partner = "environment" if GenerateAttributes.of(node).environment is not None else "agent"
        what = f"`{node.name}` cannot take its responses from a recording: what its {partner} does is not in it"
        found.append(Diagnostic("bad-value", what, node.at(partner), "leave out --replay"))
    if replay and not is_folder(Path(replay) / FOLDER):
        what = f"there is no recording in {replay}: it has no folder `{FOLDER}`"
        found.append(Diagnostic("missing-file", what, help="name the folder of a run that was made with --record"))
    elif replay:
        taken = {drawn(plan.graph, n)[0] for n in plan.graph.verb("generate")}
        needed = (
            (i, t.file(Path(replay), i))
            for i in range(begin, plan.deploy.run.iterations)
            for t in levels
            if t.column in taken
        )
        missing = next(((i, path) for i, path in needed if not path.is_file()), None)
        if missing is not None:
            what = f"the recording in {replay} has no iteration {missing[0]}: there is no file {missing[1]}"
            help = (
                f"stop before it: --iterations {missing[0]}"
                if missing[0] > begin
                else "name the folder of a run that has it"
            )
            found.append(Diagnostic("missing-file", what, help=help))
    if found:
        raise Fault(*found)


def write(run: Path, plan: Plan, pieces: dict[str, ColumnRows], task: Task) -> None:
    """Write the rows of a task into a run's folder: all rows of each column, ascending.

    An evaluation runs only the nodes that it needs. A generation that it does not run has no table in it.
    """
    from pyarrow import parquet

    found = rowsets(plan.graph)
    counted = numbers(found.sets, found.refilling, task)
    for level in tables(plan.graph, found):
        if not task.trains and level.column not in pieces:
            continue
        path = level.file(run, task.number, "" if task.trains else task.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        here = _here(level, found, counted, pieces, task.trains)
        parquet.write_table(_table(level, plan, found, counted, here, pieces), partial)
        partial.replace(path)


def prune(run: Path, evaluations: Collection[tuple[str, int]]) -> None:
    """Remove the rows of all evaluations but these, each a name and the iterations before it.

    A run that is resumed for longer does not do those again that came after the end of the shorter one.
    """
    for path in (run / EVALUATED).rglob("*.parquet"):
        name = path.relative_to(run / EVALUATED).parts[0]
        if path.stem.isdecimal() and (name, int(path.stem)) not in evaluations:
            path.unlink()


def _table(
    level: RecordedTable,
    plan: Plan,
    found: Rowsets,
    numbers: Numbers,
    here: dict[int, Array],
    pieces: dict[str, ColumnRows],
) -> Any:
    """The rows of a level with all columns of it and of those above. What a row lacks is null: since a filter dropped
    it, or since a function returned None."""
    import pyarrow as pa

    graph = plan.graph
    rows = np.unique(np.concatenate([*here.values()]))

    def of(rowset: int, only: bool = False) -> Array:
        """The number of the row of a set that each row is, or lies under; -1 where there is none. `only`: not of what
        lies under it."""
        wanted = np.full(len(rows), -1)
        for own, some in here.items():
            if rowset == own or (rowset in chain(found.sets, own) and not only):
                wanted[np.searchsorted(rows, some)] = numbers.above(some, own, rowset)
        return wanted

    made: dict[str, Any] = {"row": pa.array(rows)} | {
        name: pa.array(of(s)) for name, s in level.ids.items() if name != "row"
    }
    if len(here) > 1:
        made[ORIGIN] = pa.array(of(level.rows))
    declared = {c.name: c for c in graph.columns}
    sets = {
        as_drawn: found.columns[response] for response, as_drawn in (drawn(graph, n) for n in graph.verb("generate"))
    }
    sets |= {c: found.columns[r] for n in graph.verb("generate") for r, c in beginnings(graph, n).items()}
    sets |= found.columns | {s.column: s.rows for s in found.sieves.values()}
    for name in (*(c for c in declared if c in pieces), *sorted(pieces.keys() - declared.keys())):
        rowset = sets.get(name, 0)
        piece = pieces[name]
        if not any(rowset in chain(found.sets, own) for own in here):
            continue
        # How often a row goes on is not said of its repeats again.
        wanted = of(rowset, only=rowset in here and isinstance(piece, Verdicts))
        place = np.minimum(np.searchsorted(piece.rows, wanted), max(len(piece.rows) - 1, 0))
        text = name in declared and declared[name].element in ("text", "json")
        has = piece.rows[~not_finite(piece.column)] if name in graph.optional else piece.rows
        made[_shown(graph, name)] = _arrow(piece.column, place, np.isin(wanted, has), text)
    for name in (n for n in _tokens(plan) if n in made):
        ids = [row or [] for row in made[name].to_pylist()]
        made[f"{name}_text"] = pa.array(of_column(plan, name).decode(map(np.asarray, ids), special=True), pa.string())
    return pa.table(made)


def _here(
    level: RecordedTable, found: Rowsets, numbers: Numbers, pieces: dict[str, ColumnRows], trains: bool
) -> dict[int, Array]:
    """The rows of a level by set: those that were made, and of each `select` those that it chose, repeats by numbers of
    their own. In an evaluation each goes on once, since it has no filters."""
    nothing = ColumnRows(
        np.zeros(0, np.int64), ColumnData(np.zeros(0, np.int64))
    )  # a filter may leave no prompt to generate from
    made = [
        level.column,
        *(s.column for s in found.sieves.values() if (s.failures or s.generates) and s.rows == level.rows),
    ]
    here = {level.rows: np.unique(np.concatenate([pieces.get(name, nothing).rows for name in made]))}
    for sieve in found.sieves.values():
        if sieve.rows in here and sieve.left != sieve.rows and not trains:
            here[sieve.left] = here[sieve.rows]
        elif sieve.rows in here and sieve.left != sieve.rows:
            verdicts = pieces.get(sieve.column, nothing)
            chosen = verdicts.rows
            times = verdicts.column.values
            which = np.concatenate([np.arange(n) for n in times]) if len(chosen) else chosen
            here[sieve.left] = np.repeat(chosen, times) + which * numbers.space[sieve.rows]
    return here


def _arrow(column: ColumnData, place: Array, there: Array, text: bool) -> Any:
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
        self.plan = plan
        self.folder = folder
        self.tables = {t.column: t for t in tables(plan.graph)}
        self._read: dict[str, tuple[Path, dict[str, ColumnData]]] = {}  # by node

    def prompts(self, node: Node, columns: Sequence[str], iteration: int, fan: int) -> Array:
        """Those that a recorded iteration has responses to."""
        found: Array = np.unique(self._iteration(node, columns, iteration)[1]["row"].values // fan)
        return found

    def responses(
        self, node: Node, columns: Sequence[str], iteration: int, prompts: list[Array], rows: Array, fan: int
    ) -> list[list[Array]]:
        """What a generator would draw for these rows, `fan` of which belong to each prompt, by what `columns` name:
        tokens, their log-probabilities as drawn, and more that is known of each."""
        path, found = self._iteration(node, columns, iteration)
        context = sequences(self.plan.graph, node).context
        number = found["row"].values
        place = np.minimum(np.searchsorted(number, rows), len(number) - 1)
        if len(missing := rows[number[place] != rows]):
            raise RunError(
                f"{path} holds no row {missing[0]}, which `{node.name}` ({node.span.place}) is to take from it"
            )
        for i, row in enumerate(place):
            if not np.array_equal(np.concatenate([found[c][row] for c in context]), prompts[i // fan]):
                what = f"row {rows[i]} of {path} is a response to another prompt than this run's"
                raise RunError(f"{what}: {SAME}")
        return [[found[_shown(self.plan.graph, name)][row] for row in place] for name in columns]

    def _iteration(self, node: Node, columns: Sequence[str], iteration: int) -> tuple[Path, dict[str, ColumnData]]:
        """The file of an iteration, and what is read of it."""
        path = self.tables[columns[0]].file(self.folder, iteration)
        context = sequences(self.plan.graph, node).context
        if node.name not in self._read or self._read[node.name][0] != path:
            names = ("row", *context, *(_shown(self.plan.graph, c) for c in columns))
            self._read[node.name] = (path, tokenised(self.plan, node, _load(path, names)))
        return self._read[node.name]


def _load(path: Path, names: tuple[str, ...]) -> dict[str, ColumnData]:
    """These columns of the rows of a file that have all of them, by ascending number of the row."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as source:
            if missing := [n for n in names if n not in source.schema_arrow.names]:
                raise RunError(f"{path} has no column `{missing[0]}`: it is the recording of another program")
            table = source.read(columns=list(names)).drop_null().sort_by("row").combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    if not table.num_rows:
        raise RunError(f"{path} holds no rows")
    return {name: _column(table.column(name).chunk(0)) for name in names}


def _column(array: Any) -> ColumnData:
    import pyarrow as pa

    if pa.types.is_large_string(array.type):
        return texts(array.to_pylist())
    if not hasattr(array, "offsets"):
        return ColumnData(array.to_numpy())
    return ColumnData(array.values.to_numpy(), array.offsets.to_numpy().astype(np.int64))
