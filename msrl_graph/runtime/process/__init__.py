"""Modules that every process of a run uses: log, reports, heartbeats, cleanup."""

from . import ast_parse

ast_parse.serialize_parsing()  # every process of a run imports this package before it starts threads
