"""Two engines of somebody's own, a file of theirs: all that they know of the package is the contract
(backends/spec.py).

Their model is the embedding and the head alone: a token follows from the one before it. The generator takes the
likeliest. The trainer may be a pipeline of two stages, the embedding on one, the head on the other, which passes all
micro-batches forward before one backward.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import distributed as dist

from msrl_graph import backends
from msrl_graph.backends import hf_modules
from msrl_graph.backends.engine_protocols import Outputs, Response, Shard
from msrl_graph.backends.spec import Capabilities, EngineSpec
from msrl_graph.ir.attributes import GenerateAttributes, UpdateAttributes
from msrl_graph.sharding.layout import shard

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
GENERATOR = EngineSpec(
    name="likeliest",
    verbs=("generate",),
    build="own_engine:Likeliest",
    capabilities=Capabilities(
        axes=("dp",),
        supported_attributes=("samples", "temperature", "max_tokens"),
    ),
)
TRAINER = EngineSpec(
    name="pairs",
    verbs=("infer", "update"),
    build="own_engine:Pairs",
    capabilities=Capabilities(
        axes=("pp", "dp"),
        options=("micro_batch",),
    ),
)


def register(monkeypatch=None):
    """The line that an engine of the package has in backends/__init__.py."""
    added = {spec.name: spec for spec in (GENERATOR, TRAINER)}
    for name, spec in added.items():
        monkeypatch.setitem(backends.ENGINES, name, spec) if monkeypatch else backends.ENGINES.update({name: spec})


def shards(spec, weights, placement, devices):
    boxes = {t.name: shard(t, spec.side(placement.layout), devices.rank) for t in weights.model.weights}
    return [Shard(name, box, torch.zeros([b - a for a, b in box])) for name, box in boxes.items()]


class Likeliest:
    def __init__(self, weights, placement, devices):
        self.held = shards(GENERATOR, weights, placement, devices)
        self.fills = 0
        self.said = GenerateAttributes.of(weights.node)

    def allocate(self):
        return self.held

    def filled(self):
        self.fills += 1
        weights = {s.name: s.tensor for s in self.held}
        logp = (weights[TABLE] @ weights[HEAD].T).log_softmax(-1)
        self.next = logp.argmax(-1).numpy()
        self.logp = logp.amax(-1).numpy()

    def release(self):
        pass

    def generate(self, request):
        sampling = request.sampling
        for i, prompt in enumerate(request.response_prompts):
            before = [prompt[-1]]
            while len(before) <= sampling.max_tokens and (len(before) == 1 or before[-1] not in sampling.ends):
                before.append(self.next[before[-1]])
            yield Response(i, np.array(before[1:], np.int32), self.logp[before[:-1]].astype(np.float32))


class Pairs:
    def __init__(self, weights, placement, devices):
        self.held = shards(TRAINER, weights, placement, devices)
        self.rank = devices.rank
        self.calls = []
        self.told = []
        hf_modules.fill(weights.model, self.held)
        self.weights = {s.name: s.tensor.detach().requires_grad_() for s in self.held if s.tensor.numel()}
        self.first = TABLE in self.weights
        self.last = HEAD in self.weights
        self.group = None if self.first and self.last else devices.axis("pp").get_group()
        self.width = weights.model.hidden

    def shards(self):
        return self.held

    def score(self, micro_batches, asked):
        with torch.no_grad():
            made = [self._forward(packed, asked)[1] for packed in micro_batches]
        return [m for m in made if m is not None]

    def train(self, micro_batches: Sequence, loss, asked):
        self.told.append(UpdateAttributes.of(asked.node))
        passed = [self._forward(packed, asked) for packed in micro_batches]
        for i, (hidden, made) in reversed([*enumerate(passed)]):
            if self.last:
                self.calls.append(i)
                loss(made, i).backward()
                slope = hidden.grad
                if not self.first:
                    dist.send(slope, group=self.group, group_dst=0)
            elif self.first:
                slope = torch.empty_like(hidden)
                dist.recv(slope, group=self.group, group_src=1)
            if self.first and not self.last:
                hidden.backward(slope)

    def _forward(self, packed, asked):
        """The state that each token follows from, and on the last stage what it gives."""
        if self.first:
            hidden = self.weights[TABLE][packed["ids"][packed["offsets"][packed["row"]] + packed["position"]]]
            if not self.last:
                dist.send(hidden.detach(), group=self.group, group_dst=1)
                return hidden, None
            hidden.retain_grad() if hidden.requires_grad else None
        else:
            hidden = torch.empty(len(packed["token"]), self.width)
            dist.recv(hidden, group=self.group, group_src=0)
            hidden.requires_grad_(torch.is_grad_enabled())
        logps = (hidden @ self.weights[HEAD].T / asked.temperature).log_softmax(-1)
        logp = logps.gather(1, packed["token"][:, None])[:, 0]
        entropy = -(logps.exp() * logps).sum(-1)
        return hidden, Outputs(logp=logp, entropy=entropy if asked.entropy else entropy.detach())

    def step(self, request):
        self.told.append(UpdateAttributes.of(request.node))
        total = torch.tensor(0.0 if request.sound else torch.nan)
        for weight in self.weights.values():
            total += 0.0 if weight.grad is None else weight.grad.square().sum()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        norm = float(total.sqrt())
        with torch.no_grad():
            for weight in self.weights.values():
                if np.isfinite(norm) and weight.grad is not None:
                    weight -= request.lr * weight.grad
                weight.grad = None
        return norm

    def moments(self):
        return {}

    def restore(self, moments, steps):
        pass
