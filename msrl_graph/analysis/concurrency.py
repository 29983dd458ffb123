"""How many concurrent calls a host makes of a node's Python function.

Invariant: results do not depend on this number, so it belongs to the deployment and not to the algorithm.
"""

from __future__ import annotations

from pathlib import Path

from ..ir.attributes import CallAttributes
from ..ir.graph import Node
from ..ir.signatures import Signature, read_signatures_as

MAX_ASYNC_CALLS = 256  # of one `async def` function; a file that needs fewer uses a semaphore


def concurrent_calls(node: Node, workers: int, signature: Signature | None) -> int:
    """Return the number of concurrent calls of a node's function on one host.

    `workers` is the number of worker processes per host. `signature` is the signature of the function, or None if the
    signature is unknown. The result depends on what the node calls:

    - A comparison or a function of msrl_graph itself: 1. The function host makes this call in its own process, since
      the call is faster than a message to a worker process.
    - A function that gets the whole batch (`per = batch`): 1, since the function is called only once.
    - An `async` function: MAX_ASYNC_CALLS.
    - Any other function: one call per worker process, or 1 if the function is marked `parallel=False`.
    """
    call = CallAttributes.of(node).functions[0]
    if call.kind != "call" or ":" not in str(call.value) or node.per == "batch":
        return 1
    if signature is not None and signature.waits:
        return MAX_ASYNC_CALLS
    return workers if signature is None or signature.parallel else 1


def read_signature(node: Node) -> Signature | None:
    """Read the signature of the user's function that a node calls.

    Return None if the file of the function cannot be read on this machine.
    """
    path, _, name = str(CallAttributes.of(node).functions[0].value).rpartition(":")
    try:
        return read_signatures_as("function", Path(path).read_text(encoding="utf-8-sig")).get(name)
    except (OSError, SyntaxError, ValueError):
        return None


__all__ = ["MAX_ASYNC_CALLS", "concurrent_calls", "read_signature"]
