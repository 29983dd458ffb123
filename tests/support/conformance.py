"""Every engine against transformers: what each computes of a small model of each family, on small layouts.

`deviations` has the largest differences of a cell, which is a family, an engine and a layout:

- logits: of all tokens of the vocabulary, less their mean, which no probability depends on;
- logp: of the tokens of a batch, or of the tokens that a generator has drawn;
- gradient: its norm over all weights, relative;
- step: of all weights after a step of AdamW, relative to the rate. Its epsilon is so large that the step is a smooth
  function of the gradient.
"""

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import engines
import mixture
import numpy as np
import ranks
import torch
from torch import distributed as dist

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import ENGINES, hf_modules
from msrl_graph.backends.spec import ForwardRequest, Sampling, collect_responses
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.ir.workload import Workload
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout, slices

# By family, what writes a small model with weights at random. Widths of experts: vLLM makes no smaller tiles on a CPU.
WRITTEN = {
    "llama": mixture.llama,
    "llama with biases": partial(mixture.llama, attention_bias=True, mlp_bias=True),
    "qwen2": mixture.qwen2,
    "qwen3": mixture.dense,
    "qwen3_moe": partial(mixture.mixture, width=64),
    "deepseek_v3": partial(mixture.latent, moe_intermediate_size=64),
    "gemma": mixture.gemma,
}
LAYOUTS = {
    "one rank": Layout(),
    "tp 2": Layout(tp=2),
    "dp 2": Layout(dp=2),
    "ep 2": Layout(dp=2, ep=2),
    "pp 2": Layout(pp=2),
}
ROWS = 8
VOCABULARY = 16
RATE = 0.01
EPSILON = 0.1


def settled(name, model, layout):
    """A layout with the engine's own way to divide experts."""
    return ENGINES[name].spread.settle_etp(replace(layout, etp=0), model)


def has(name, model, layout):
    """Whether an engine says that it computes a model on a layout, on host cores."""
    spec = ENGINES[name]
    axes = [axis for axis in ("tp", "pp", "ep") if getattr(layout, axis) > 1]
    known = all(axis in spec.axes and axis not in spec.list_plan_only("host") for axis in axes)
    return known and not model.list_lacking(spec.features) and (layout.ep == 1 or model.experts is not None)


def batch():
    draw = np.random.default_rng(0)
    prompts = ragged([draw.integers(2, VOCABULARY, n) for n in draw.integers(2, 7, ROWS)], np.int32)
    responses = ragged([draw.integers(2, VOCABULARY, n) for n in draw.integers(2, 6, ROWS)], np.int32)
    return prompts, responses


def loss(made, share):
    """Of a data-parallel group, whose gradients are added up."""
    return (made.logp * share).sum()


def shares(responses):
    return torch.linspace(-1, 1, len(responses.values))


class Reference:
    """What transformers and torch compute."""

    def __init__(self, folder):
        from transformers import AutoModelForCausalLM

        self.net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.net.eval()
        self.prompts, self.responses = batch()

    def logits(self, prompts, responses):
        """Of each response token, the logits that it is drawn by."""
        found = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
            found.append(self.net(ids[None]).logits[0, len(prompt) - 1 : -1])
        return torch.cat(found)

    def step(self):
        """Log-probabilities of all tokens, the gradient's norm, and weights after a step, by our names."""
        logps = self.logits(self.prompts, self.responses).log_softmax(-1)
        tokens = torch.from_numpy(self.responses.values.astype(np.int64))
        (logps.gather(1, tokens[:, None])[:, 0] * shares(self.responses)).sum().backward()
        norm = torch.nn.utils.get_total_norm([value.grad for value in self.net.parameters()])
        torch.optim.AdamW(self.net.parameters(), RATE, eps=EPSILON, weight_decay=0.1).step()
        return logps.detach(), float(norm), by_our_names(self.net)


def by_our_names(net):
    """Of experts, gate and up are one parameter of a layer."""
    found = {}
    for name, value in net.named_parameters():
        owner, experts, leaf = name.partition(".experts.")
        value = value.detach().clone()
        parts = value.chunk(2, 1) if leaf == "gate_up_proj" else [value]
        names = ["gate_proj", "up_proj"] if len(parts) == 2 else [leaf]
        found |= {f"{owner}.experts.*.{n}.weight" if experts else name: p for n, p in zip(names, parts, strict=True)}
    return found


def trains(rank, folder, name, layout, reference, breaks):
    model = models.load(folder, Path("/"), None, NOWHERE)
    layout = settled(name, model, layout)
    engine = engines.built(
        name, model, layout, rank, engines.mesh(layout), adamw(lr=0.0, eps=EPSILON, weight_decay=0.1)
    )
    breaks(engine)
    prompts, responses = batch()
    own = np.arange(ROWS).reshape(layout.dp, -1)[layout.coordinates(rank).dp]
    index = np.concatenate([np.arange(responses.offsets[r], responses.offsets[r + 1]) for r in own])
    packed = pack([prompts], [responses], own)
    logps, norm, weights = reference
    found = {}
    for told in engine.score([packed], ForwardRequest(1.0, best=VOCABULARY)):  # on a pipeline's last stage
        whole = torch.empty(len(index), VOCABULARY).scatter_(1, told.ids.long(), told.best)
        found["logits"] = (whole - logps[index]).abs().max()
        tokens = torch.from_numpy(responses.values.astype(np.int64))[index]
        found["logp"] = (told.logp - logps[index].gather(1, tokens[:, None])[:, 0]).abs().max()
    engine.train([packed], lambda made, _: loss(made, shares(responses)[index]), ForwardRequest(1.0))
    found["gradient"] = abs(engine.step(RATE, 1e9) / norm - 1)
    steps = [
        (shard.tensor - weights[shard.name][slices(shard.box)]).abs().max() / RATE
        for shard in engine.shards()
        if shard.tensor.numel()
    ]
    return found | {"step": max(steps)}


def generates(rank, folder, name, layout, reference, breaks):
    model = models.load(folder, Path("/"), None, NOWHERE)
    layout = settled(name, model, layout)
    sizes = {"rows": ROWS, "prompts": ROWS, "prompt": 26, "response": 6, "samples": 2}
    work = Workload(model, layout, model.dtype, **sizes, on_host=True)
    engine = engines.built(name, model, layout, rank, engines.mesh(layout), work=work)
    breaks(engine)
    hf_modules.fill(model, engine.allocate())
    engine.filled()
    prompts, _ = batch()
    own = np.arange(ROWS).reshape(layout.dp, -1)[layout.coordinates(rank).dp]
    rows = (own[:, None] * 2 + np.arange(2)).reshape(-1)
    sampling = Sampling(2, 6, 1.0, 1.0, 0, ends=())
    drawn, logps = collect_responses(engine.generate([prompts[r] for r in own], rows, sampling))
    engine.release()
    with torch.no_grad():
        logits = Reference(folder).logits([prompts[r // 2] for r in rows], drawn)
    tokens = torch.from_numpy(np.concatenate(drawn).astype(np.int64))
    wanted = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return {"logp": (torch.from_numpy(np.concatenate(logps)) - wanted).abs().max()}


def untouched(engine):
    pass


def deviations(rank, _, folder, out, cases, breaks=untouched):
    """Writes the largest deviations of all ranks for each of the cases (engine, name of the layout)."""
    reference = Reference(folder).step()
    found = {}
    for name, layout in cases:
        compute = generates if "generate" in ENGINES[name].verbs else trains
        own = compute(rank, folder, name, LAYOUTS[layout], reference, breaks)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {what: float(value) for what, value in own.items()})
        names = {what for some in everyone for what in some}
        found[name, layout] = {what: max(some.get(what, 0.0) for some in everyone) for what in sorted(names)}
    if rank == 0:
        torch.save(found, out)
    gc.collect()  # else the engines, which are in circles, go while a later test of these ranks counts memory


def measure(family, names, folder, breaks=untouched):
    """By engine and layout, the deviations of a family's cells, on one rank and on two."""
    weights = WRITTEN[family](folder / family)
    model = models.load(weights, Path("/"), None, NOWHERE)
    cases = [(name, layout) for name in names for layout, at in LAYOUTS.items() if has(name, model, at)]
    found = {}
    for world in (1, 2):
        some = [(name, layout) for name, layout in cases if LAYOUTS[layout].devices == world]
        ranks.run(world, deviations, weights, str(folder / "found"), some, breaks)
        found |= torch.load(folder / "found")
    return found


def without_head_norms(engine):
    for layer in engine.module.model.layers:
        layer.self_attn.q_norm.forward = lambda x: x


def without_embedding_scale(engine):
    engine.module.model.embed_tokens.embed_scale.fill_(1.0)
