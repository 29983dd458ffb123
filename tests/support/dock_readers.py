"""Readers of a dock's columns."""

from msrl_graph.analysis.rowsets import Rowset
from msrl_graph.runtime.dock.readers import ColumnRead, NodeReads

READS = (
    ColumnRead("prompt", 0, "source"),
    ColumnRead("response", 1, "actor.generate"),
    ColumnRead("reward", 1, "host.reward"),
)


def reader(fan=4, **changes):
    """Of a node that works on `fan` responses to each prompt, in `groups` groups on as many hosts."""
    fields = {"node": "n", "reads": READS, "sets": (Rowset(0), Rowset(1, 0, fan)), "rows": 1, "unit": 1}
    fields |= {"whole_batch": False, "group_warehouses": tuple(range(changes.pop("groups", 2))), "chunk": 0, "seed": 3}
    return NodeReads(**(fields | {"tokens": {"response": 1}} | changes))
