"""The files that a run takes as they are when it begins: every process reads these copies, on every host.

Invariant: of the user's Python files it is those that the program calls and what these import (user_modules.py), of a
model's folder all but its weights: tokenizer, config, chat template, and nothing that a link in it leads out to. They
are read once a run, whatever dies in it. What is too large to be shipped to the hosts of a cluster is refused before
anything is sent; on one machine, where such files are not shipped, they are read from where they lie.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...diagnostics import Diagnostic, Fault
from ...emit.humanize import size
from ...files.untrusted_folder import open_inside
from ...files.urls import is_url
from ...ir.plan import Plan
from ..process.cluster_join import called
from ..process.shipped_files import ShippedFile
from ..weights.tensor_files import beside
from . import user_modules

MOST = 256 << 20  # bytes: some tens are usual, and each host keeps them for as long as the run takes


def files(plan: Plan, shipped: bool = True) -> dict[str, ShippedFile]:
    """The files by absolute path. `shipped`: to other hosts too. Raises Fault where they are too large for that."""
    named = {path: node.span for path, _, node in called(plan)}
    code = user_modules.of_plan(plan)
    found = dict(code)  # and for whose sake
    for model in plan.deploy.models.values():
        if model.path and not is_url(model.path):  # of which each host has a copy
            folder = Path(model.path).absolute()
            found |= dict.fromkeys(beside(folder), folder)
    sizes = {file: file.stat().st_size for file in found}
    if sum(sizes.values()) > MOST and not shipped:
        found = code
    elif sum(sizes.values()) > MOST:
        largest = max(sizes, key=lambda file: sizes[file])
        raise Fault(
            Diagnostic(
                "bad-value",
                f"{size(sum(sizes.values()))} would be shipped to each host, more than {size(MOST)}; the largest file "
                f"is {largest}, of {size(sizes[largest])}, with {found[largest]}",
                named.get(str(found[largest]), plan.deploy.span),
                "what is large is read by its path on each host: leave it out of the folder, or read it from elsewhere",
            )
        )
    folders = {Path(m.path).absolute() for m in plan.deploy.models.values() if m.path and not is_url(m.path)}
    return {str(file): _taken(file, of if (of := found[file]) in folders else None) for file in found}


def _taken(file: Path, folder: Path | None) -> ShippedFile:
    """Read a user's file, or a file of a model's `folder`."""
    with file.open("rb") if folder is None else open_inside(file, folder) as given:
        return ShippedFile(given.read(), os.fstat(given.fileno()).st_mtime_ns)


__all__ = ["files"]
