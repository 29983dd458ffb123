"""How many calls of a function node a host makes at once.

Invariant: what comes out does not depend on it, so it is no part of an algorithm.
"""

from __future__ import annotations

from pathlib import Path

from .attributes import Call
from .graph import Node
from .signatures import Signature, called_as

WAITING = 256  # calls of a function that waits, all in one event loop; a file that wants fewer has a semaphore


def at_once(node: Node, workers: int, signature: Signature | None) -> int:
    """So many calls, with this number of worker processes. `signature`: that of the function; None: nobody knows it.

    Functions of a whole batch are called once. The package's own take less time than a message to a worker.
    """
    call = Call.of(node).functions[0]
    if call.kind != "call" or ":" not in str(call.value) or node.per == "batch":
        return 1
    if signature is not None and signature.waits:
        return WAITING
    return workers if signature is None or signature.parallel else 1


def signature(node: Node) -> Signature | None:
    """The signature of a function of the user's that a node calls; None where its file cannot be read here."""
    path, _, name = str(Call.of(node).functions[0].value).rpartition(":")
    try:
        return called_as("function", Path(path).read_text(encoding="utf-8-sig")).get(name)
    except (OSError, SyntaxError, ValueError):
        return None


__all__ = ["WAITING", "at_once", "signature"]
