"""Files of the user's that are changed while a run is on, which takes them as they were when it began.

Invariant: each is told of once a run, though drivers die: the names of those that were told of are in the attempt's
folder, and the next attempt is given them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..process import shipped_files

_TOLD = "edited"  # within an attempt's folder: a path a line


class ChangedFiles:
    """What a driver knows of the files that its run took; `told` are those that need no other word."""

    def __init__(self, folder: Path, told: Sequence[str]) -> None:
        self.folder = folder
        self.left = {path: file for path, file in shipped_files.laid(folder).items() if path not in told}

    def look(self) -> Iterator[str]:
        """What to tell of files that were changed since the last look."""
        for path in [path for path, file in self.left.items() if shipped_files.edited(path, file)]:
            del self.left[path]
            with (self.folder / _TOLD).open("a", encoding="utf-8", errors="surrogateescape") as told:
                told.write(f"{path}\n")
            what = "was edited" if Path(path).exists() else "was removed"
            goes_on = "the run keeps using it as it was, --resume takes it as it is then"
            yield f"{path} {what} after the run began; {goes_on}"

    @staticmethod
    def told(folder: Path, before: Sequence[str]) -> tuple[str, ...]:
        """The files that an attempt, which has ended, or those before it, have told of."""
        path = folder / _TOLD
        new = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if path.is_file() else []
        return (*before, *new)


__all__ = ["ChangedFiles"]
