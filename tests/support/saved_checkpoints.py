"""Checkpoints that are written without a run."""

import gzip

import numpy as np

from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.runtime.driver.resume import program
from msrl_graph.runtime.weights import checkpoint
from msrl_graph.runtime.weights.checkpoint import Manifest, begin, commit, write_tensors


def lines(count):
    """So many lines of metrics."""
    return b"".join(b'{"iteration": %d, "reward": 0.5}\n' % i for i in range(count))


def save(run, plan, iteration, keep=9, written=None, copy=True):
    """A checkpoint of one small tensor in two files, one of states, and a `copy` of as many lines of metrics.
    `written` is what the manifest says in place of the truth."""
    import torch

    partial = begin(run, iteration)
    true = {"iteration": iteration, "lines": iteration, "position": 8 * iteration}
    says = checkpoint.checkpoint_metadata(**true, program=program(plan)) | checkpoint.step_metadata(
        {"actor.update": iteration}
    )
    shards = [Shard("w", ((2 * r, 2 * r + 2), (0, 3)), torch.arange(6.0).view(2, 3) + r) for r in range(2)]
    files = [
        write_tensors(partial, f"actor-rank-{r:05d}.safetensors", [("actor/weights", s)], says)
        for r, s in enumerate(shards)
    ]
    files.append(checkpoint.write_arrays(partial, "states.safetensors", {"solved": np.arange(3.0) + iteration}, says))
    if copy:
        files.append(checkpoint.write_metrics(partial, gzip.compress(lines(iteration)), says))
    known = {"format_version": checkpoint.FORMAT, "steps": {"actor.update": iteration}, **true}
    return commit(
        partial, Manifest(**known | {"program": program(plan), "files": tuple(files)} | (written or {})), keep
    )
