"""The rows of a run as Parquet files, for inspection and for replaying training.

A recording consists of tables; a table has one file for each iteration or evaluation.

Invariant: a file is in the order of the row numbers, and is either complete or absent. A value is stored at its own row
and at all rows below that row. A recorded response is used only for the prompt for which it was sampled. After a
partial rollout, the file has the responses that the iteration used, but not the responses that were cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...analysis.rowsets import Numbers, Rowsets, chain, rowsets
from ...analysis.sequences import begins_columns, is_routing, is_tokens, routing_columns, sequences
from ...diagnostics import Diagnostic, Fault
from ...diagnostics.surface import name_option
from ...files.paths import is_folder
from ...ir.attributes import CallAttributes, GenerateAttributes
from ...ir.graph import Graph, Node
from ...ir.plan import Plan
from ..process.task import Task, row_numbers
from ..process.task_report import RunError
from .columns import Array, ColumnData, ColumnRows, Verdicts, offsets_from_lengths, texts
from .numerics import rows_not_finite, sampled_columns, vocabulary_size
from .tokens import column_tokenizer, tokenise_columns

FOLDER = "rows"  # in a run's folder
EVALUATED = "evaluation_rows"  # in a run's folder; contains one folder for each evaluation
REPLAY_HINT = "replay a recording with the seed, the data, the sizes and the version that it was made with"
ORIGIN = "origin_row"  # for a repeat the number of the repeated row, for every other row its own number


@dataclass(frozen=True)
class RecordedTable:
    """A table of a recording: the rows of one generation node, or the data's prompts.

    If a `select` node copied some of these rows, the table also has the copies.

    - `column`: a column that each of these rows has, such as `response`. `rows`: the number of their row set.
    - `folder`: the table's folder within the recording; "" if there is only one table.
    - `ids`: the columns of row numbers, each with the row set that it numbers: {"row": 1, "prompt_row": 0}.
    """

    folder: str
    column: str
    rows: int
    ids: dict[str, int]

    def file(self, run: Path, iteration: int, evaluation: str = "") -> Path:
        """Return the path of this table's file for an iteration or an evaluation.

        The name of an evaluation's file is the number of iterations before the evaluation.
        """
        folder = run / EVALUATED / evaluation if evaluation else run / FOLDER
        return folder / self.folder / f"{iteration:06d}.parquet"


def tables(graph: Graph, row_sets: Rowsets | None = None) -> list[RecordedTable]:
    """List the tables that a recording of this graph has.

    With at most one generation there is one table. If there are more generations, there is one table for the prompts of
    the data and one for each generation.
    """
    row_sets = row_sets or rowsets(graph)
    generated = {
        row_sets.columns[response]: response
        for response in (sampled_columns(graph, node)[0] for node in graph.verb("generate"))
    }
    several = len(generated) > 1
    bases = generated if generated and not several else {0: graph.row_column(0), **generated}

    def ids(base: int) -> dict[str, int]:
        ancestors = {
            row_sets.sets[rowset].level: rowset
            for rowset in reversed(chain(row_sets.sets, base))
            if rowset != base or (not rowset and not several)
        }
        return {
            f"{graph.row_column(level) if several else 'prompt'}_row": rowset for level, rowset in ancestors.items()
        }

    return [
        RecordedTable(column if several else "", column, base, {"row": base, **ids(base)})
        for base, column in bases.items()
    ]


def _file_column(graph: Graph, column: str) -> str:
    """Return the name that a column has in a Parquet file.

    A dot, as in `response.logp`, becomes an underscore, because in Parquet a dot denotes a nested field. If the program
    declares a column `response_logp`, the column with the dot is named `response_logp_drawn`.
    """
    name = column.replace(".", "_")
    return (
        f"{name}_drawn"
        if column.endswith(".logp") and any(declared.name == name for declared in graph.columns)
        else name
    )


def _token_columns(plan: Plan) -> list[str]:
    """List the columns of token ids that the recording also shows as text.

    These are the columns that a model reads or generates.
    """
    graph = plan.graph
    generated = {sampled_columns(plan.graph, node)[0] for node in plan.graph.verb("generate")}
    return [
        column.name
        for column in graph.columns
        if is_tokens(graph, column.name) and (column.name in generated or vocabulary_size(plan, column.name))
    ]


def check(plan: Plan, record: bool, replay: str, begin: int) -> None:
    """Raise Fault if a recording cannot be written, or cannot be replayed.

    `record` says whether the run writes a recording, and `replay` is the folder of the run to replay ("" for none). The
    recording to replay must have every iteration from `begin` on.
    """
    diagnostics = []
    levels = tables(plan.graph)
    declared = {column.name: column for column in plan.graph.columns}
    reserved = {
        _file_column(plan.graph, name)
        for node in plan.graph.verb("generate")
        for name in (*sampled_columns(plan.graph, node), *begins_columns(plan.graph, node).values())
        if name not in declared
    }
    reserved |= {_file_column(plan.graph, sieve.column) for sieve in rowsets(plan.graph).sieves.values()}
    reserved |= {ORIGIN} if any(CallAttributes.of(other).select is not None for other in plan.graph.nodes) else set()
    own_names = {
        *reserved,
        *(name_of_id for table in levels for name_of_id in table.ids),
        *(f"{name}_text" for name in _token_columns(plan)),
    }
    for name in sorted(own_names & declared.keys()) if record else ():
        message = f"`{name}` is the name of a column that every recording has"
        help = f"give the column another name, or leave out {name_option('record', True)}"
        diagnostics.append(Diagnostic("bad-value", message, declared[name].span, help))
    for node in plan.graph.verb("generate") if replay else ():
        partner = "environment" if GenerateAttributes.of(node).environment is not None else "agent"
        has_partner = GenerateAttributes.of(node).partner is not None
        if has_partner or routing_columns(plan.graph, node.writes):
            lacks = f"what its {partner} does" if has_partner else "routes"
            message = f"`{node.name}` cannot take its responses from a recording, which does not contain {lacks}"
            help = f"leave out {name_option('replay')}"
            diagnostics.append(Diagnostic("bad-value", message, node.span_of(partner), help))
    if replay and not is_folder(Path(replay) / FOLDER):
        message = f"there is no recording in {replay}: it has no folder `{FOLDER}`"
        help = f"name the folder of a run that was made with {name_option('record', True)}"
        diagnostics.append(Diagnostic("missing-file", message, help=help))
    elif replay:
        responses = {sampled_columns(plan.graph, other)[0] for other in plan.graph.verb("generate")}
        needed_files = (
            (iteration, table.file(Path(replay), iteration))
            for iteration in range(begin, plan.deploy.run.iterations)
            for table in levels
            if table.column in responses
        )
        missing = next(((iteration, path) for iteration, path in needed_files if not path.is_file()), None)
        if missing is not None:
            message = f"the recording in {replay} has no iteration {missing[0]}: there is no file {missing[1]}"
            help = (
                f"stop before it: {name_option('iterations', missing[0])}"
                if missing[0] > begin
                else "name the folder of a run that has it"
            )
            diagnostics.append(Diagnostic("missing-file", message, help=help))
    if diagnostics:
        raise Fault(*diagnostics)


def write(run: Path, plan: Plan, pieces: dict[str, ColumnRows], task: Task) -> None:
    """Write the rows of a task into Parquet files in the folder of a run.

    `pieces` has the rows of each column, in ascending order. No file is written for a generation that does not run in
    an evaluation, because an evaluation runs only the nodes that it needs.
    """
    from pyarrow import parquet

    row_sets = rowsets(plan.graph)
    numbers = row_numbers(row_sets.sets, row_sets.refilling, task)
    for level in tables(plan.graph, row_sets):
        if not task.trains and level.column not in pieces:
            continue
        path = level.file(run, task.number, "" if task.trains else task.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        rows_by_set = _select_rows(level, row_sets, numbers, pieces, task.trains)
        parquet.write_table(_build_table(level, plan, row_sets, numbers, rows_by_set, pieces), partial)
        partial.replace(path)


def prune(run: Path, evaluations: Collection[tuple[str, int]]) -> None:
    """Remove the files of all evaluations that are not in `evaluations`.

    An entry of `evaluations` is the name of an evaluation and the number of iterations before it. Files must be removed
    if a run is resumed with more iterations: the evaluations at the end of the shorter run are not evaluations of the
    longer run.
    """
    for path in (run / EVALUATED).rglob("*.parquet"):
        name = path.relative_to(run / EVALUATED).parts[0]
        if path.stem.isdecimal() and (name, int(path.stem)) not in evaluations:
            path.unlink()


def _build_table(
    level: RecordedTable,
    plan: Plan,
    row_sets: Rowsets,
    numbers: Numbers,
    rows_by_set: dict[int, Array],
    pieces: dict[str, ColumnRows],
) -> Any:
    """Build the Arrow table of `level`: columns of the rows and of their ancestors.

    `rows_by_set` is the result of `_select_rows`. A value is null if it is missing: a filter dropped the row, or a
    function returned None.
    """
    import pyarrow as pa

    graph = plan.graph
    rows = np.unique(np.concatenate([*rows_by_set.values()]))

    def row_numbers(rowset: int, only: bool = False) -> Array:
        """Return, for each row of the table, the number of its ancestor in a row set.

        A row that is in the row set counts as its own ancestor. The number is -1 if there is no ancestor. If `only` is
        true, the number is also -1 for every row that is not in the row set.
        """
        result = np.full(len(rows), -1)
        for own_set, own_rows in rows_by_set.items():
            if rowset == own_set or (rowset in chain(row_sets.sets, own_set) and not only):
                result[np.searchsorted(rows, own_rows)] = numbers.above(own_rows, own_set, rowset)
        return result

    arrays: dict[str, Any] = {"row": pa.array(rows)} | {
        name: pa.array(row_numbers(row_set)) for name, row_set in level.ids.items() if name != "row"
    }
    if len(rows_by_set) > 1:
        arrays[ORIGIN] = pa.array(row_numbers(level.rows))
    declared = {column.name: column for column in graph.columns}
    sets = {
        as_drawn: row_sets.columns[response]
        for response, as_drawn in (sampled_columns(graph, n) for n in graph.verb("generate"))
    }
    sets |= {
        column: row_sets.columns[written]
        for n in graph.verb("generate")
        for written, column in begins_columns(graph, n).items()
    }
    sets |= row_sets.columns | {sieve.column: sieve.rows for sieve in row_sets.sieves.values()}
    for name in (*(column for column in declared if column in pieces), *sorted(pieces.keys() - declared.keys())):
        rowset = sets.get(name, 0)
        piece = pieces[name]
        is_of_rows = any(rowset in chain(row_sets.sets, own_set) for own_set in rows_by_set)
        if not is_of_rows or (name in declared and is_routing(declared[name])):  # routes are large, and of no use here
            continue
        # A verdict (how often a row continues) is written at the row only, not at its repeats.
        row_ids = row_numbers(rowset, only=rowset in rows_by_set and isinstance(piece, Verdicts))
        places = np.minimum(np.searchsorted(piece.rows, row_ids), max(len(piece.rows) - 1, 0))
        text = name in declared and declared[name].element in ("text", "json")
        rows_with_value = piece.rows[~rows_not_finite(piece.column)] if name in graph.optional else piece.rows
        arrays[_file_column(graph, name)] = _to_arrow(piece.column, places, np.isin(row_ids, rows_with_value), text)
    for name in (n for n in _token_columns(plan) if n in arrays):
        ids = [row or [] for row in arrays[name].to_pylist()]
        arrays[f"{name}_text"] = pa.array(
            column_tokenizer(plan, name).decode(map(np.asarray, ids), special=True), pa.string()
        )
    return pa.table(arrays)


def _select_rows(
    level: RecordedTable, row_sets: Rowsets, numbers: Numbers, pieces: dict[str, ColumnRows], trains: bool
) -> dict[int, Array]:
    """Return, for each row set, the numbers of the rows to write into a table.

    These are the rows that were produced and, for each `select`, the rows that it chose; copies of a row have their own
    numbers. In an evaluation (`trains` is false), each row continues once, because there are no filters.
    """
    nothing = ColumnRows(
        np.zeros(0, np.int64), ColumnData(np.zeros(0, np.int64))
    )  # a filter may have dropped all prompts
    column_names = [
        level.column,
        *(
            other.column
            for other in row_sets.sieves.values()
            if (other.failures or other.generates) and other.rows == level.rows
        ),
    ]
    rows_by_set = {level.rows: np.unique(np.concatenate([pieces.get(name, nothing).rows for name in column_names]))}
    for sieve in row_sets.sieves.values():
        if sieve.rows in rows_by_set and sieve.remaining != sieve.rows and not trains:
            rows_by_set[sieve.remaining] = rows_by_set[sieve.rows]
        elif sieve.rows in rows_by_set and sieve.remaining != sieve.rows:
            verdicts = pieces.get(sieve.column, nothing)
            chosen = verdicts.rows
            times = verdicts.column.values
            repeats = np.concatenate([np.arange(count) for count in times]) if len(chosen) else chosen
            rows_by_set[sieve.remaining] = np.repeat(chosen, times) + repeats * numbers.space[sieve.rows]
    return rows_by_set


def _to_arrow(column: ColumnData, places: Array, present: Array, text: bool) -> Any:
    """Build an Arrow array of the rows at the positions `places`.

    The array has null where `present` is false.
    """
    import pyarrow as pa

    values_present = column.take(places[present])
    if values_present.offsets is None:
        index = np.cumsum(present) - 1
        return pa.array(values_present.values).take(pa.array(index, mask=~present))
    lengths = np.zeros(len(present), np.int64)
    lengths[present] = values_present.lengths
    offsets = offsets_from_lengths(lengths)
    if text:
        strings = pa.LargeStringArray.from_buffers(
            len(present), pa.py_buffer(offsets), pa.py_buffer(values_present.values)
        )
        return strings if present.all() else strings.take(pa.array(np.arange(len(present)), mask=~present))
    is_nested = values_present.values.ndim > 1
    values = (
        pa.FixedSizeListArray.from_arrays(values_present.values.reshape(-1), values_present.values.shape[1])
        if is_nested
        else values_present.values
    )
    return pa.LargeListArray.from_arrays(offsets, values, mask=pa.array(~present))


class Recording:
    """The responses of a run that was recorded into `folder`.

    Only the responses of one iteration are in memory at a time.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.tables = {table.column: table for table in tables(plan.graph)}
        self._read: dict[str, tuple[Path, dict[str, ColumnData]]] = {}  # by node

    def prompts(self, node: Node, columns: Sequence[str], iteration: int, fan: int) -> Array:
        """Return the numbers of the prompts to which a recorded iteration has responses.

        Each prompt has `fan` responses.
        """
        prompts: Array = np.unique(self._iteration(node, columns, iteration)[1]["row"].values // fan)
        return prompts

    def responses(
        self, node: Node, columns: Sequence[str], iteration: int, prompts: list[Array], rows: Array, fan: int
    ) -> list[list[Array]]:
        """Return the recorded responses of these rows, as a generator would return them.

        `rows` are the numbers of the rows; each prompt has `fan` rows. The result has one list for each name in
        `columns`: tokens, log-probabilities at sampling, and further columns.
        """
        path, recorded = self._iteration(node, columns, iteration)
        context = sequences(self.plan.graph, node).context
        recorded_rows = recorded["row"].values
        places = np.minimum(np.searchsorted(recorded_rows, rows), len(recorded_rows) - 1)
        if len(missing := rows[recorded_rows[places] != rows]):
            raise RunError(
                f"{path} has no row {missing[0]}, which `{node.name}` ({node.span.place}) is to take from it"
            )
        for i, row in enumerate(places):
            if not np.array_equal(np.concatenate([recorded[column][row] for column in context]), prompts[i // fan]):
                message = f"row {rows[i]} of {path} is a response to another prompt than this run's"
                raise RunError(f"{message}: {REPLAY_HINT}")
        return [[recorded[_file_column(self.plan.graph, name)][row] for row in places] for name in columns]

    def _iteration(self, node: Node, columns: Sequence[str], iteration: int) -> tuple[Path, dict[str, ColumnData]]:
        """Return the path of a recorded iteration's file, and its columns."""
        path = self.tables[columns[0]].file(self.folder, iteration)
        context = sequences(self.plan.graph, node).context
        if node.name not in self._read or self._read[node.name][0] != path:
            names = ("row", *context, *(_file_column(self.plan.graph, column) for column in columns))
            self._read[node.name] = (path, tokenise_columns(self.plan, node, _load(path, names)))
        return self._read[node.name]


def _load(path: Path, names: tuple[str, ...]) -> dict[str, ColumnData]:
    """Load the columns `names` of a file, by ascending row number.

    Rows that have no value in one of these columns are left out.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as source:
            if missing := [column for column in names if column not in source.schema_arrow.names]:
                raise RunError(f"{path} has no column `{missing[0]}`: it is the recording of another program")
            table = source.read(columns=list(names)).drop_null().sort_by("row").combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    if not table.num_rows:
        raise RunError(f"{path} holds no rows")
    return {name: _from_arrow(table.column(name).chunk(0)) for name in names}


def _from_arrow(array: Any) -> ColumnData:
    import pyarrow as pa

    if pa.types.is_large_string(array.type):
        return texts(array.to_pylist())
    if not hasattr(array, "offsets"):
        return ColumnData(array.to_numpy())
    return ColumnData(array.values.to_numpy(), array.offsets.to_numpy().astype(np.int64))
