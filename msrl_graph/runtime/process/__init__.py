"""What every process of a run has: its log, its report of a task, its neighbours, its end."""

from . import parsing

parsing.one_at_a_time()  # every process of a run imports this package, before it has threads of its own
