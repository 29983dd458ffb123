"""The number of concurrent calls of a function node on a host.

Invariant: results do not depend on this number, so it belongs to the deployment and not to the algorithm.
"""

from __future__ import annotations

from pathlib import Path

from .attributes import CallAttributes
from .graph import Node
from .signatures import Signature, read_signatures_as

MAX_ASYNC_CALLS = 256  # of one `async def` function; a file that needs fewer uses a semaphore


def concurrent_calls(node: Node, workers: int, signature: Signature | None) -> int:
    """Return the number of concurrent calls with `workers` worker processes.

    `signature` is that of the function, or None if it is unknown. A function of a whole batch is called once. The
    package's own functions are faster than a message to a worker, so they are called in the function host.
    """
    call = CallAttributes.of(node).functions[0]
    if call.kind != "call" or ":" not in str(call.value) or node.per == "batch":
        return 1
    if signature is not None and signature.waits:
        return MAX_ASYNC_CALLS
    return workers if signature is None or signature.parallel else 1


def read_signature(node: Node) -> Signature | None:
    """Read the signature of the user's function that a node calls.

    Return None if its file cannot be read here.
    """
    path, _, name = str(CallAttributes.of(node).functions[0].value).rpartition(":")
    try:
        return read_signatures_as("function", Path(path).read_text(encoding="utf-8-sig")).get(name)
    except (OSError, SyntaxError, ValueError):
        return None


__all__ = ["MAX_ASYNC_CALLS", "concurrent_calls", "read_signature"]
