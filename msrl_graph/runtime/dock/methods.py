"""The methods of a dock's process that other processes call, with their types.

Invariant: a caller and the dock decode each other's messages to the types of this table and to nothing else. `DockHost`
(host.py) has a method for each entry, with the same parameters.
"""

from __future__ import annotations

from ..data.columns import Array, ColumnData, ColumnRows, Verdicts
from .controller import RefillRequest, ShareRequest
from .messages import DockFull, DockTimeout, RowsReady, Share, WarehouseInventory
from .wire_format import Method, Methods

Pieces = dict[str, ColumnRows | Verdicts]

DOCK_METHODS = Methods(
    {
        # A question to a controller is called by the name of its class.
        "ShareRequest": Method("ask", tuple[ShareRequest], list[Share]),
        "RefillRequest": Method("ask", tuple[RefillRequest], bool),
        "at": Method("at", tuple[str, str, int, int, str], None),
        "folder": Method("folder", tuple[()], str),
        "free": Method("free", tuple[()], tuple[int, tuple[int, bool] | None]),
        "get": Method("get", tuple[str, dict[str, dict[str, Array]]], dict[str, dict[str, ColumnData]]),
        "heard": Method("heard", tuple[str, list[RowsReady]], None),
        "known": Method("known", tuple[()], dict[str, WarehouseInventory]),
        "leave": Method("leave", tuple[()], None),
        "place": Method("place", tuple[str, str, str, int, bool], int),
        "promise": Method("promise", tuple[str, str, int], bool),
        "put": Method("put", tuple[str, str, str, Pieces | None], None),
        "still": Method("still", tuple[()], tuple[float, list[str]]),
        "whole": Method("whole", tuple[str, list[str] | None], Pieces),
    },
    errors=(DockFull, DockTimeout),
)

__all__ = ["DOCK_METHODS"]
