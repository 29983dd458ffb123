"""What every process of a run has: its log, its report of a task, its neighbours, its end."""
