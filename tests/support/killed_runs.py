"""Programs whose processes are killed, and what their runs computed."""

from place import metrics, weights

from msrl_graph.runtime.metrics.recorder import TIMES


def computed(folder):
    """What two runs of one program have in common, line by line, and the weights."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics(folder)], weights(folder)


def program(place, *changes, evaluated=True, **run):
    words = ", ".join(f"{k} = {v}" for k, v in {"iterations": 4, "seed": 0, "save": 2, **run}.items())
    run = ("iterations = 320, seed = 0", words)
    place.write(
        run, ("every = 40", "every = 2"), ("mini_batch = 256", "mini_batch = 16"), *changes, evaluated=evaluated
    )
