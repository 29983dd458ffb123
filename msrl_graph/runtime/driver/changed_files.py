"""Detection of user files that change during a run.

The run copies the files when the run begins. If a file changes later, the run continues to use the copy.

Invariant: each changed file is reported only once per run, even if the driver dies and is restarted. The names of
reported files are stored in the attempt's temporary folder and passed to the next attempt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...diagnostics.surface import name_option
from ..process import shipped_files

_REPORTED = "edited"  # file in an attempt's folder, with a path a line


class ChangedFiles:
    """The user's files that the run has copied, and that are checked for changes.

    The files in `reported` are not checked again, because earlier attempts have already reported that these files
    changed.
    """

    def __init__(self, folder: Path, reported: Sequence[str]) -> None:
        self.folder = folder
        self.unchanged = {
            path: file for path, file in shipped_files.read_shipped(folder).items() if path not in reported
        }

    def look(self) -> Iterator[str]:
        """Yield a message for each file that has changed since the last call of `look`."""
        for path in [path for path, file in self.unchanged.items() if shipped_files.is_edited(path, file)]:
            del self.unchanged[path]
            with (self.folder / _REPORTED).open("a", encoding="utf-8", errors="surrogateescape") as record:
                record.write(f"{path}\n")
            event = "was edited" if Path(path).exists() else "was removed"
            consequence = f"the run keeps using the original, {name_option('resume')} will use the new state"
            yield f"{path} {event} after the run began; {consequence}"

    @staticmethod
    def list_reported(folder: Path, before: Sequence[str]) -> tuple[str, ...]:
        """Return the files that the attempts of a run have reported as changed.

        `folder` is the temporary folder of the last attempt. `before` are the files that the attempts before the last
        one have reported.
        """
        path = folder / _REPORTED
        new = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if path.is_file() else []
        return (*before, *new)


__all__ = ["ChangedFiles"]
