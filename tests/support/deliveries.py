"""Weights that are delivered from version to version, on real ranks: as they should be, and broken in one way or
another."""

from dataclasses import replace
from pathlib import Path

import torch
from stage import EXAMPLE
from torch import distributed as dist
from weight_sends import met

from msrl_graph import backends, compile
from msrl_graph.backends import hf
from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.ir.plan import from_json
from msrl_graph.runtime.process.task import Task, WeightFetch
from msrl_graph.runtime.process.task_report import Report, WeightsNotDelivered
from msrl_graph.runtime.rank import weight_proof
from msrl_graph.runtime.rank.context import RankContext
from msrl_graph.runtime.rank.rank import InstructionRunner, Rank
from msrl_graph.sharding.layout import slices

EDGE = "actor.update", "actor.generate"
COLUMNS, ROWS = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"  # how tp divides them
UPDATE = "layout actor.update   { dp = 2, zero = 3 }"
GENERATE = "layout actor.generate { tp = 2 }"
APART = ((UPDATE, "layout actor.update { dp = 1 }"), (GENERATE, f"{GENERATE}\n  apart actor.generate, actor.update"))
STALE = (
    *APART,
    ("    advantage : f32[response]", "    advantage : f32[response]\n    gen_logp : f32[response]"),
    ("-> response {", "-> response, gen_logp {"),
    ("clip(0.2)", "clip(0.2, old_logp = gen_logp)"),
    ("update(prompt, response, old_logp,", "update(prompt, response, gen_logp,"),
    ("  node actor.infer(prompt, response) -> old_logp\n", ""),
    ("    old_logp  : f32[response]\n", ""),
    ("-> actor.infer, reference.infer", "-> reference.infer"),
    ("  actor.infer, reference.infer", "  reference.infer"),
    ("actor.update => actor.generate", "actor.update => actor.generate { staleness = 1 }"),
)
SMALLER = (("mini_batch = 256", "mini_batch = 8"),)
# How weights go, the ranks that takes, and the example's text changed.
WAYS = {"swap": (2, ()), "send": (3, APART), "fetch": (3, STALE)}


def planned(way, *changes):
    world = WAYS[way][0]
    text = (EXAMPLE / "grpo.rlg").read_text()
    for old, new in (*WAYS[way][1], *SMALLER, ("devices_per_node = 2", f"devices_per_node = {world}"), *changes):
        assert old in text, old
        text = text.replace(old, new)
    return compile(EXAMPLE / "grpo.rlg", text=text, sets={"prompts": "4", "group": "2"})


class Delivering(Rank):
    """A rank that is handed versions of the weights."""

    def __init__(self, plan, rank, folder):
        super().__init__(RankContext(plan, rank))
        self.context.store = met(rank, folder)
        self.build()
        self.mover = self.engines.resharders[EDGE]
        self.proof = self.engines.proofs[EDGE]
        self.trained = self.engines.trainers["actor"].shards() if "actor" in self.engines.trainers else []

    def learn(self):
        """The weights become other ones, the same on each layout."""
        if self.trained and "actor" in self.engines.swaps:
            self.engines.swaps["actor"].wait()
        for number, tensor in enumerate(self.context.plan.model(EDGE[0]).weights):
            noise = 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
            for s in self.trained:
                if s.name == tensor.name:
                    s.tensor.add_(noise[slices(s.box)])

    def deliver(self, version):
        """What is wrong with it, in words."""
        told = version + (EDGE[1] in self.engines.generators)  # an update is not told of a fetch as it publishes
        fetches = {self.mover.name: WeightFetch(version, told)}
        self.report = Report("rank")
        try:
            InstructionRunner(
                self, Task("train", version, 4, fetches=fetches, sends=(self.mover.name,)), self.report
            ).reshard((), *EDGE)
            if self.proof.unprobed:
                self.proof.probe()
                self.report.count("probed", 1, 0)
        except WeightsNotDelivered as error:
            return str(error)
        return ""

    def boxes(self):
        """Of each message that this rank has a part in, the list of what it is of."""
        return [message.boxes for message in self.mover.first_plan.messages]


# What breaks. Each on all ranks, so that they go on to make the same calls.


def not_sent(rank):
    if rank.proof.trainer and rank.proof.generator:
        for load in (load for loads in rank.mover.loads for load in loads):
            load.receives[:] = [t for t in load.receives if t.name != COLUMNS]
        return
    for boxes in rank.boxes():
        boxes[:] = [(name, box) for name, box in boxes if name != COLUMNS]


def sent_as_it_was(rank):
    """What the mover reads is a copy that is not renewed."""

    def kept(shards):
        return [Shard(s.name, s.box, s.tensor.clone()) if s.name == COLUMNS else s for s in shards]

    if rank.proof.generator and rank.proof.trainer:
        rank.mover.swap.wait()
        rank.mover.swap.shards = kept(rank.mover.swap.shards)
    elif hasattr(rank.mover, "live"):
        rank.mover.live = kept(rank.mover.live)
    else:
        rank.mover.shards = kept(rank.mover.shards)


def cut_wrongly(rank):
    """Another rank's columns, or rows."""
    if rank.proof.trainer and rank.proof.generator:
        for load in (load for loads in rank.mover.loads for load in loads):
            for i, taken in enumerate(load.receives):
                if taken.name == COLUMNS:
                    rows, columns = taken.part
                    width = columns.stop - columns.start
                    other = slice(width, 2 * width) if columns.start == 0 else slice(0, width)
                    load.receives[i] = taken._replace(part=(rows, other))
    elif rank.proof.trainer:
        for boxes in rank.boxes():
            for i, (name, ((start, stop), *rest)) in enumerate(boxes):
                if name == ROWS:
                    size = stop - start
                    boxes[i] = (name, ((size - start, 2 * size - start), *rest))


def rows_exchanged(rank):
    """Two rows of what this rank generates with change places as it is told that all is there."""
    if generator := rank.engines.generators.get(EDGE[1]):

        def filled():
            tensor = next(s.tensor for s in generator.allocate() if s.name == COLUMNS)
            tensor[[0, 1]] = tensor[[1, 0]]

        generator.filled = filled


BREAKS = {f.__name__: f for f in (not_sent, sent_as_it_was, cut_wrongly, rows_exchanged)}


def broken(rank, folder, plan, how, out):
    """The third version is delivered in a broken way; what this rank then says goes into a file."""
    found = Delivering(from_json(plan), rank, folder)
    assert found.deliver(0) == ""
    found.learn()
    assert found.deliver(1) == ""
    dist.barrier()  # an update that publishes goes on before it is fetched
    BREAKS[how](found)
    found.learn()
    Path(out, str(rank)).write_text(found.deliver(2))


# Engines that keep what is made of weights.


class Plain(hf.HfEngine):
    """Keeps nothing."""


class Copying(hf.HfEngine):
    """Computes with a copy of the last norm, as an engine does that brings weights into a form of its own."""

    renews = True

    def filled(self):
        norm = self.module.model.norm
        if self.renews or not hasattr(self, "copy"):
            self.copy = norm.weight.clone()
            norm.forward = lambda x: self.copy * x * (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()


class Prefixes(hf.HfEngine):
    """Keeps keys and values of prompts, but for their last token, for whoever begins alike."""

    renews = True

    def filled(self):
        if self.renews or not hasattr(self, "kept"):
            self.kept = {}

    def logits(self, ids, mask, position, cache):
        if ids.shape[1] == 1:
            return super().logits(ids, mask, position, cache)
        key = ids.numpy().tobytes()
        but_last = self.cache()
        if key not in self.kept:
            super().logits(ids[:, :-1], mask[:, :-1], position[:, :-1], but_last)
            self.kept[key] = [(layer.keys, layer.values) for layer in but_last.layers]
        for layer, (keys, values) in enumerate(self.kept[key]):
            cache.update(keys, values, layer)
        return super().logits(ids[:, -1:], mask, position[:, -1:], cache)


class CopyingOnce(Copying):
    renews = False


class PrefixesOfOld(Prefixes):
    renews = False


def keeping(rank, folder, plan, engine, out):
    """Three versions for an engine that keeps something, each of them probed; what this rank says of each."""
    before = backends.ENGINES["hf"]
    share = weight_proof.SHARE
    backends.ENGINES["hf"] = replace(before, build=f"deliveries:{engine}")
    weight_proof.SHARE = 1e9
    try:
        found = Delivering(from_json(plan), rank, folder)
        told = []
        for version in range(3):
            told.append(found.deliver(version))
            assert found.proof.generator is None or "probed" in found.report.sums or told[-1]
            found.learn()
    finally:
        backends.ENGINES["hf"] = before
        weight_proof.SHARE = share
    Path(out, str(rank)).write_text("\n".join(told))
