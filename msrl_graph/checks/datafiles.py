"""The data files: whether those at hand have the fields that the deploy reads, and rows for an iteration.

Invariant: only the head of a file is read, and one at a URL only where it is no longer than that; a run looks at all of
it before it starts, and tells the same of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..data.datafile import CHARACTERS, few, head
from ..diagnostics import Diagnostic, Fault
from ..files import urls
from ..files.paths import is_file
from ..ir.plan import DataSource, Plan


def check(plan: Plan) -> list[Diagnostic]:
    """What is wrong with the files on this machine. One that has no rows, or cannot be read, is a warning, as one that
    is not there."""
    return list(_found(plan))


def _found(plan: Plan) -> Iterator[Diagnostic]:
    for name, data in plan.deploy.data.items():
        most = plan.graph.rows[0] if name == "source" else 1
        try:
            if not is_file(Path((data := _at_hand(data)).path)):
                continue  # told, or more than the compiler fetches
            count = head(data, most, plan.graph)
        except ModuleNotFoundError:
            continue  # what reads Parquet comes with what runs plans
        except Fault as fault:
            yield from (
                replace(d, severity="warning") if d.code in ("missing-file", "no-data", "not-installed") else d
                for d in fault.diagnostics
            )
            continue
        if count < most:
            yield few(data, f"{count:,} row{'s' * (count > 1)}", most)


def _at_hand(data: DataSource) -> DataSource:
    """With the copy of a short file at a URL."""
    if not urls.is_url(data.path):
        return data
    (size,) = urls.look(data.path, span=data.span).files.values()
    short = size is not None and size <= CHARACTERS
    return replace(data, path=str(urls.copy(data.path, span=data.span))) if short else data
