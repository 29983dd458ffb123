"""A cluster of two hosts."""

TWO = [
    ("cluster laptop", "cluster two"),
    ("nodes = 1, devices_per_node = 2", "nodes = 2, devices_per_node = 1"),
    ("deploy grpo on laptop", "deploy grpo on two"),
    ("run { iterations", "run { save = 1, iterations"),
]
