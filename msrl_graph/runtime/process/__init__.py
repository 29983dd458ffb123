"""What every process of a run has: its log, its report of a task, its neighbours, its end."""

from . import ast_parse

ast_parse.serialize_parsing()  # every process of a run imports this package before it starts threads
