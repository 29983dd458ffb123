"""A rank's life on a device: it reshards, generates, swaps, infers, updates, keeps a checkpoint and goes on from it."""

import torch
from stage import Stage, one_rank

from msrl_graph.runtime.weights import checkpoint

ENGINES = (
    "  run {",
    "  engine actor.generate = hf\n  engine actor.update = fsdp\n  engine reference.infer = fsdp\n  run {",
)
EDGE = ("actor.update", "actor.generate")


def lived(folder, *changes):
    """A rank's life: an iteration, a checkpoint, another iteration; and a rank that goes on from the checkpoint. What
    both have drawn, and end with."""
    stage, drawn = started(*changes), []
    drawn.append(iterated(stage))
    files, steps, failed = stage.checkpoints.write(str(partial := checkpoint.begin(folder, 1)), {})
    manifest = checkpoint.Manifest(checkpoint.FORMAT, 1, 0, dict(steps), {}, tuple(files))
    path = checkpoint.commit(partial, manifest, 1)
    drawn.append(iterated(stage))
    again = started(*changes)
    again.checkpoints.resume(str(path), checkpoint.read_manifest(path))
    drawn.append(iterated(again))
    assert not failed
    return drawn, stage.whole(), again.whole()


def started(*changes):
    stage = Stage(one_rank(("(lr = 2e-4", "(lr = 1e-2"), ENGINES, *changes))
    stage.generator.release()
    return stage


def iterated(stage):
    edge = stage.engines.resharders[EDGE]
    edge.run(stage.generator.allocate)
    stage.generator.filled()
    columns = stage.sampled()
    stage.generator.release()
    edge.swap.start_in()
    edge.swap.wait()
    for node in ("actor.infer", "reference.infer"):
        columns |= stage.act(node, columns)
    stage.act("actor.update", columns)
    return torch.from_numpy(columns["response"].values)
