"""The interface of a page for users.

Invariant: this module imports no code that formats, so a command that only checks a program loads none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Sheet(Protocol):
    """The interface of a page that consists of sections and a closing line.

    A section is a heading with lines and tables below it.
    """

    def heading(self, text: str, more: str = "") -> None: ...
    def line(self, text: str) -> None: ...
    def table(
        self,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        right: Sequence[int] = (),
        keep: Sequence[int] = (0,),
    ) -> None:
        """Write a table.

        `right` has the indices of the table columns that are aligned right, because they contain figures. `keep` has
        the indices of the table columns that never wrap.
        """

    def closing(self, text: str) -> None:
        """Write one sentence that summarizes the page."""
