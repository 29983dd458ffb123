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
from ..sequences import is_tokens
from .columns import Array, Column
from .report import RunError
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
    own = {"row", "prompt_row", *hidden, *(f"{name}_text" for name in _tokens(plan))}
    for name in sorted(own & declared.keys()) if record else ():
        what = f"`{name}` is the name of a column that every recording has"
        found.append(Diagnostic("bad-value", what, declared[name].span, "give the column another name, or leave out --record"))
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


def write(path: Path, plan: Plan, columns: dict[str, Column], fan: int, tokenizer: Any) -> None:
    """Writes an iteration: `columns` hold all rows of their level, `fan` responses a prompt; without a generation the prompts' rows are
    all there is."""
    import pyarrow as pa
    from pyarrow import parquet

    graph = plan.graph
    response = next((c for n in graph.verb("generate") for c in drawn(graph, n)), next(iter(columns)))
    rows = np.arange(len(columns[response]))
    table: dict[str, Any] = {"row": pa.array(rows), "prompt_row": pa.array(rows // fan)}
    declared = {c.name: c for c in graph.columns}
    for name in (*(c for c in declared if c in columns), *sorted(columns.keys() - declared.keys())):
        prompts = name in declared and declared[name].level == 0
        column = columns[name].take(rows // fan) if prompts else columns[name]
        text = name in declared and declared[name].element in ("text", "json")
        table[_shown(name)] = _arrow(column, text)
    for name in _tokens(plan):
        ids = table[name].to_pylist()
        table[f"{name}_text"] = pa.array(tokenizer.decode_batch(ids, skip_special_tokens=False), pa.string())
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    parquet.write_table(pa.table(table), partial)
    partial.replace(path)


def _arrow(column: Column, text: bool) -> Any:
    """An array of Arrow's over the same memory."""
    import pyarrow as pa

    if column.offsets is None:
        return pa.array(column.values)
    if text:
        return pa.LargeStringArray.from_buffers(len(column), pa.py_buffer(column.offsets), pa.py_buffer(column.values))
    values = column.values
    if values.ndim > 1:
        values = pa.FixedSizeListArray.from_arrays(values.reshape(-1), values.shape[1])
    return pa.LargeListArray.from_arrays(column.offsets, values)


class Recording:
    """The responses of a run that was recorded into `folder`; those of one iteration at a time are in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: tuple[Path | None, str, dict[str, Column]] = (None, "", {})

    def responses(
        self, node: Node, columns: tuple[str, str], iteration: int, prompts: list[Array], rows: Array, fan: int
    ) -> tuple[list[Array], list[Array]]:
        """What a generator would draw for these rows, `fan` of which belong to each prompt: tokens, and their log-probabilities as
        drawn; `columns` name the two."""
        path = file(self.folder, iteration)
        names = ("row", *node.reads, *map(_shown, columns))
        if self._read[:2] != (path, node.name):
            self._read = (path, node.name, _load(path, names))
        found = self._read[2]
        number = found["row"].values
        place = np.minimum(np.searchsorted(number, rows), len(number) - 1)
        if len(missing := rows[number[place] != rows]):
            raise RunError(f"{path} holds no row {missing[0]}, which `{node.name}` (line {node.span.line}) is to take from it")
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
    if not hasattr(array, "offsets"):
        return Column(array.to_numpy())
    return Column(array.values.to_numpy(), array.offsets.to_numpy().astype(np.int64))
