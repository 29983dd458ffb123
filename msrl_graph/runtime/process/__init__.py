"""What every process of a run needs: log, task reports, heartbeats, cleanup."""

from . import ast_parse

ast_parse.serialize_parsing()  # every process of a run imports this package before it starts threads
