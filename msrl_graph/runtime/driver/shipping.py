"""Files that a run copies when the run begins, for its processes on all hosts.

The run copies two groups of files:

- The user's Python files with functions and trackers of the program, and all files that these files import
  (user_modules.py).
- All files of a model's folder except the weights: tokenizer, config, chat template. Links that lead out of the folder
  are not followed.

Invariant: the files are read once per run, even if processes die. If the files are too large to be sent to the hosts of
a cluster, the run is refused before anything is sent. A run on one machine sends nothing. If the files are too large in
a run on one machine, only the Python files are copied, and the files of models are read from the models' folders.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...diagnostics import Diagnostic, Fault
from ...diagnostics.quantities import size
from ...files.untrusted_folder import open_inside
from ...files.urls import is_url
from ...ir.plan import Plan
from ..process.cluster_join import files_loaded
from ..process.shipped_files import ShippedFile
from ..weights.tensor_files import companion_files
from . import user_modules

MOST = 256 << 20  # bytes: some tens of MiB are usual, and each host keeps them during the run


def files(plan: Plan, shipped: bool = True) -> dict[str, ShippedFile]:
    """Return the files to copy, by absolute path.

    `shipped` means that the files are sent to other hosts. Raises Fault if the files are sent and have more than MOST
    bytes in total.
    """
    spans = {path: node.span for path, _, node in files_loaded(plan)}
    code = user_modules.plan_files(plan) | user_modules.tracker_files(plan)
    owners = dict(code)  # by file, the model folder or program file that needs it
    for model in plan.deploy.models.values():
        if model.path and not is_url(model.path):  # each host has a copy of a model at a URL
            folder = Path(model.path).absolute()
            owners |= dict.fromkeys(companion_files(folder), folder)
    sizes = {file: file.stat().st_size for file in owners}
    if sum(sizes.values()) > MOST and not shipped:
        owners = code
    elif sum(sizes.values()) > MOST:
        largest = max(sizes, key=lambda file: sizes[file])
        raise Fault(
            Diagnostic(
                "bad-value",
                f"{size(sum(sizes.values()))} would be shipped to each host, more than {size(MOST)}; the largest file "
                f"is {largest}, of {size(sizes[largest])}, with {owners[largest]}",
                spans.get(str(owners[largest]), plan.deploy.span),
                "large files are read by path on each host: leave them out of the folder, or read them from elsewhere",
            )
        )
    folders = {
        Path(model.path).absolute() for model in plan.deploy.models.values() if model.path and not is_url(model.path)
    }
    return {str(file): _read_file(file, owner if (owner := owners[file]) in folders else None) for file in owners}


def _read_file(file: Path, folder: Path | None) -> ShippedFile:
    """Read a file of the user, or a file of a model.

    `folder` is the folder of the model; None for a file of the user.
    """
    with file.open("rb") if folder is None else open_inside(file, folder) as stream:
        return ShippedFile(stream.read(), os.fstat(stream.fileno()).st_mtime_ns)


__all__ = ["files"]
