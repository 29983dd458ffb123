"""Checks of data files: the fields that the deploy reads, and the number of rows.

Invariant: the compiler reads only the beginning of a file (`head` in data/datafile.py). A file at a URL is read only if
it is so short that the beginning is the whole file. A run checks all rows of the file for the same mistakes before it
starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..data.data_files import HUB, exists
from ..data.datafile import CHARACTERS, few_rows_warning, head
from ..diagnostics import Diagnostic, Fault
from ..files import urls
from ..ir.plan import DataSource, Plan
from .stage import PlanContext


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Check the data files of a plan, as far as this machine can read them.

    A file that is missing, has no rows or cannot be read on this machine causes a warning, not an error.
    """
    return list(_check_files(plan))


def _check_files(plan: Plan) -> Iterator[Diagnostic]:
    for name, data in plan.deploy.data.items():
        most = plan.graph.rows[0] if name == "source" else 1
        try:
            if not data.path or not exists((data := _with_local_copy(data)).path):
                continue  # a mixture; or reported elsewhere, or longer than the compiler fetches
            count = head(data, most, plan.graph)
        except ModuleNotFoundError:
            continue  # the package that reads Parquet and Arrow is installed with the runtime
        except Fault as fault:
            yield from (
                replace(diagnostic, severity="warning")
                if diagnostic.code in ("missing-file", "no-data", "not-installed")
                else diagnostic
                for diagnostic in fault.diagnostics
            )
            continue
        if count < most:
            yield few_rows_warning(data, f"{count:,} row{'s' * (count > 1)}", most)


def _with_local_copy(data: DataSource) -> DataSource:
    """Replace the URL of a short data file by the path of a local copy.

    A file is short if its size in bytes is at most `CHARACTERS`, a constant. Any other data source is returned
    unchanged.
    """
    if not urls.is_url(data.path) or data.path.startswith(HUB):
        return data
    (size,) = urls.list_remote(data.path, span=data.span).files.values()
    short = size is not None and size <= CHARACTERS
    return replace(data, path=str(urls.copy(data.path, span=data.span))) if short else data
