"""Check of the trackers that a `run` names.

Invariant: no package of a tracker is imported, and a user's file is parsed, never executed.
"""

from __future__ import annotations

from ..diagnostics import nearest
from ..ir.graph import Expr
from ..ir.signatures import read_classes
from ..trackers import is_file, tracker_names
from .calls import Folder
from .expressions import Problems, mistake
from .user_functions import find_in_file


def find_trackers(stated: Expr, folder: Folder, problems: Problems) -> tuple[str, ...]:
    """Return the trackers that a program states.

    A class of the user has the path of its file. `folder` returns the folder of the file that contains a span. Trackers
    that do not exist are reported and left out.
    """
    trackers = list[str]()
    for item in stated.args:
        with problems.catching():
            trackers.append(_find_tracker(item, folder))
    return tuple(trackers)


def _find_tracker(item: Expr, folder: Folder) -> str:
    name = str(item.value)
    if not is_file(name):
        if name not in tracker_names():
            help = nearest(name, tracker_names()) or 'a tracker of yours is `"file.py:Class"`'
            raise mistake("unknown-option", f"no tracker is called `{name}`", item.span, help)
        return name
    path, class_name, methods = find_in_file(folder, name, item.span, "class", read_classes)
    if "add" not in methods[class_name]:
        help = "a tracker has `begin(run)`, `add(line)` and `close(outcome)`"
        raise mistake("unknown-function", f"`{class_name}` of `{path.name}` has no method `add`", item.span, help)
    return f"{path}:{class_name}"
