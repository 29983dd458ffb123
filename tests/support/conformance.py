"""Comparison of every engine with transformers, for a small model of each family, on small layouts.

`measure` returns the largest differences of each cell. A cell is a family, an engine and a layout:

- logits: the normalized logits (log-probabilities) of all tokens of the vocabulary
- logp: the log-probabilities of the tokens of a batch, or of the tokens that a generator draws
- gradient: the norm of the gradient of all weights, relative
- step: all weights after a step of AdamW, relative to the learning rate. The epsilon of AdamW is so large that the step
  is a smooth function of the gradient.
"""

import gc
import zlib
from dataclasses import replace
from functools import partial
from inspect import unwrap
from pathlib import Path
from types import FunctionType, MethodType

import dense_families
import engines
import hybrid_families
import mamba_families
import mixture
import mixture_families
import numpy as np
import ranks
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch.nn.utils import parametrize

from msrl_graph import noise
from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import ENGINES, hf_modules, hf_names
from msrl_graph.backends.devices import get_local_tensor
from msrl_graph.backends.engine_protocols import (
    ForwardRequest,
    GenerateRequest,
    Sampling,
    StepRequest,
    collect_responses,
)
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.ir.workload import Workload
from msrl_graph.model import freezing, lora, models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.runtime.weights.adapter_merge import AdapterMerge
from msrl_graph.sharding.layout import Layout, slices

# By family, a function that writes a small model with random weights. vLLM supports no narrower experts on a CPU.
WRITTEN = {
    "llama": mixture.llama,
    "llama with biases": partial(mixture.llama, attention_bias=True, mlp_bias=True),
    "qwen2": mixture.qwen2,
    "qwen3": mixture.dense,
    "qwen3_moe": partial(mixture.mixture, width=64),
    "deepseek_v3": partial(mixture.latent, moe_intermediate_size=64),
    "gemma": mixture.gemma,
    "mistral": mixture.mistral,
    "mistral with windows": partial(mixture.mistral, sliding_window=mixture.WINDOW),
    "qwen2 with windows": partial(mixture.qwen2, **mixture.WINDOWED),
    "qwen3_moe with mixed layers": partial(mixture.mixture, width=64, **mixture.MIXED),
    **dense_families.WRITTEN,
    **mixture_families.WRITTEN,
    **hybrid_families.WRITTEN,
    **mamba_families.WRITTEN,
}
# One model of each, and one with experts.
FAMILIES = [name for name in WRITTEN if name.endswith(" with experts") or " " not in name]
LAYOUTS = {
    "one rank": Layout(),
    "tp 2": Layout(tp=2),
    "dp 2": Layout(dp=2),
    "ep 2": Layout(dp=2, ep=2),
    "pp 2": Layout(pp=2),
}
DIVIDED = LAYOUTS | {"zero 2": Layout(dp=2, zero=2), "zero 3": Layout(dp=2, zero=3)}
CONTEXT = {"cp 2": Layout(cp=2), "cp 2, ulysses": Layout(cp=2, cp_kind="ulysses")}
EVERY = DIVIDED | CONTEXT
ROWS = 8
VOCABULARY = 16
RATE = 0.01
EPSILON = 0.1
# The largest allowed difference. Float32 rounds by 1e-7 of the largest number of a sum.
BARS = {"logits": 1e-5, "logp": 1e-5, "gradient": 1e-5, "step": 1e-4}
# Of these models, transformers' own step in float32 differs from that in float64 by the bar or more.
ROUNDED = {family: {"step": 2e-4} for family in ("qwen2", "qwen2 with windows", "smollm3")}
# Scans of recurrent layers are longer sums in float32.
ROUNDED |= {family: {"step": 4e-4} for family in hybrid_families.WRITTEN}
ROUNDED |= {family: {"logits": 2e-5, "logp": 2e-5, "step": 4e-4} for family in mamba_families.WRITTEN}
# With frozen weights, an adapter, or rows divided among ranks.
OTHER_BARS = {"logits": 2e-4, "logp": 2e-4, "gradient": 1e-4, "step": 1e-3}
SEEN = 2e-3  # the least difference in log-probability if an engine leaves out a feature


def settle_layout(name, model, layout):
    """Return the layout with the `etp` that the engine chooses if none is stated."""
    return ENGINES[name].sharding.spread.settle_etp(replace(layout, etp=0), model)


def supports(name, model, layout):
    """Return whether an engine can compute a model on a layout, on host cores."""
    spec = ENGINES[name]
    axes = [axis for axis in ("tp", "cp", "pp", "ep") if getattr(layout, axis) > 1]
    known = all(axis in spec.capabilities.axes and axis not in spec.list_plan_only("host") for axis in axes)
    known = known and layout.zero in spec.capabilities.zero
    return known and not model.list_lacking(spec.capabilities.features) and (layout.ep == 1 or bool(model.experts))


def batch():
    draw = np.random.default_rng(0)
    prompts = ragged([draw.integers(2, VOCABULARY, n) for n in draw.integers(2, 7, ROWS)], np.int32)
    responses = ragged([draw.integers(2, VOCABULARY, n) for n in draw.integers(2, 6, ROWS)], np.int32)
    return prompts, responses


def shares(responses):
    return torch.linspace(-1, 1, len(responses.values))


def load(folder, frozen=(), adapter=None):
    return lora.adapt(freezing.freeze(models.load(folder, Path("/"), None, NOWHERE), frozen), adapter)


def adapter_values(tensor):
    """Return values of an adapter's matrix: at random, since the first values of B are 0."""
    draw = np.random.default_rng(zlib.crc32(tensor.name.encode()))
    return torch.from_numpy(draw.normal(0, 0.2, tensor.shape).astype(np.float32))


class AddProducts(torch.nn.Module):
    """A parametrization: a weight of transformers plus the products of its adapters.

    A weight can have several projections one after the other.
    """

    def __init__(self, adapters, rows, scale):
        super().__init__()
        self.adapters = adapters  # by part of the weight: A and B, or None
        self.rows = rows  # of each part
        self.scale = scale

    def forward(self, weight):
        parts = weight.split(self.rows, -2) if len(self.rows) > 1 else [weight]
        return torch.cat(
            [
                part if pair is None else part + self.scale * pair[1] @ pair[0]
                for part, pair in zip(parts, self.adapters, strict=True)
            ],
            dim=-2,
        )


def read_by_transformers(folder):
    """Return transformers' model of a folder. Kernels that ignore a cap of scores are not used."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    attention = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention).eval()


class Reference:
    """A model that transformers and torch compute."""

    def __init__(self, folder, frozen=(), adapter=None):
        self.net = read_by_transformers(folder)
        hf_names.unify_names(self.net)
        self.model = model = load(folder, frozen, adapter)
        trained = {tensor.name for tensor in model.trained}
        for name, value in self.net.named_parameters():
            value.requires_grad_(next(iter(our_parts(name, value, model))) in trained)
        self.adapters = {
            tensor.name: adapter_values(tensor).requires_grad_() for tensor in model.trained if adapter is not None
        }
        self._add_adapters(model)
        self.prompts, self.responses = batch()

    def _add_adapters(self, model):
        pairs = {weight.name: (self.adapters[down], self.adapters[up]) for weight, down, up in lora.list_adapted(model)}
        for path, value in [*self.net.named_parameters()] if pairs else ():
            parts = our_parts(path, value, model)
            own = [pairs.get(name) for name in parts]
            if any(own):
                owner, _, leaf = path.rpartition(".")
                rows = [part.shape[-2] for part in parts.values()]
                added = AddProducts(own, rows, model.lora.scale)
                parametrize.register_parametrization(self.net.get_submodule(owner), leaf, added)

    def logits(self, prompts, responses):
        """Return the logits from which each token of the responses is drawn."""
        found = []
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
            found.append(self.net(ids[None]).logits[0, len(prompt) - 1 : -1])
        return torch.cat(found)

    def step(self):
        """Make a step of AdamW.

        Returns the log-probabilities of all tokens before the step, the norm of the gradient, and the weights after the
        step, by the names that msrl_graph uses.
        """
        logps = self.logits(self.prompts, self.responses).log_softmax(-1)
        tokens = torch.from_numpy(self.responses.values.astype(np.int64))
        (logps.gather(1, tokens[:, None])[:, 0] * shares(self.responses)).sum().backward()
        trained = [*self.adapters.values()] or [value for value in self.net.parameters() if value.requires_grad]
        norm = torch.nn.utils.get_total_norm([value.grad for value in trained])
        torch.optim.AdamW(trained, RATE, eps=EPSILON, weight_decay=0.1).step()
        own = {name: value.detach() for name, value in self.adapters.items()}
        return logps.detach(), float(norm), own or by_our_names(self.net, self.model)


def by_our_names(net, model):
    """Return the weights of a transformers model, by the names that msrl_graph uses."""
    found = {}
    for name, value in net.named_parameters():
        found |= our_parts(name, value.detach().clone(), model)
    return found


def our_parts(name, value, model):
    """Return the weights in a parameter of transformers, by name.

    For experts, transformers has one parameter for the gate and up projections of a layer. Some families have one for
    several projections of any layer.
    """
    tensors = {tensor.name: tensor for tensor in model.tensors}
    owner, experts, leaf = name.partition(".experts.")
    if experts and name not in tensors:
        leaves = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
        parts = value.chunk(len(leaves), 1) if len(leaves) > 1 else [value]
        return {f"{owner}.experts.*.{leaf}.weight": part for leaf, part in zip(leaves, parts, strict=True)}
    owner, leaf, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", "", "")
    parts = [tensors[f"{owner}.{part}.{kind}"] for part in model.fused.get(leaf, ())]
    return {part.name: value[part.start : part.start + part.shape[0]] for part in parts} or {name: value}


def measure_trainer(rank, folder, name, layout, reference, breaks, frozen, adapter):
    model = load(folder, frozen, adapter)
    layout = settle_layout(name, model, layout)
    engine = engines.built(
        name, model, layout, rank, engines.mesh(layout), adamw(lr=0.0, eps=EPSILON, weight_decay=0.1)
    )
    for shard, tensor in zip(engine.shards(), model.weights, strict=True):
        if tensor.role == "adapter":
            shard.tensor.copy_(adapter_values(tensor)[slices(shard.box)])
    breaks(engine)
    begun = {shard.name: shard.tensor.clone() for shard in engine.shards()}
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
    engine.train([packed], lambda made, _: (made.logp * shares(responses)[index]).sum(), ForwardRequest(1.0))
    found["gradient"] = abs(engine.step(StepRequest(RATE, 1e9)) / norm - 1)
    steps = [
        (shard.tensor - weights[shard.name][slices(shard.box)]).abs().max() / RATE
        for shard in engine.shards()
        if shard.tensor.numel() and shard.name in weights
    ]
    kept = {tensor.name for tensor in model.weights if tensor.frozen}
    assert all(torch.equal(shard.tensor, begun[shard.name]) for shard in engine.shards() if shard.name in kept)
    return found | {"step": max(steps)}


def measure_generator(rank, folder, name, layout, reference, breaks, frozen, adapter):
    model = load(folder)
    layout = settle_layout(name, model, layout)
    sizes = {"rows": ROWS, "prompts": ROWS, "prompt": 26, "response": 6, "samples": 2}
    work = Workload(model, layout, model.dtype, **sizes, on_host=True)
    engine = engines.built(name, model, layout, rank, engines.mesh(layout), work=work)
    breaks(engine)
    hf_modules.fill(model, shards := engine.allocate())
    if adapter:
        adapted = load(folder, adapter=adapter)
        merge = AdapterMerge(adapted, ENGINES[name].side(layout), rank, torch.float32, "cpu")
        tensors = {tensor.name: tensor for tensor in adapted.weights}
        for shard in merge.allocate():
            shard.tensor.copy_(adapter_values(tensors[shard.name])[slices(shard.box)])
        merge.merge(shards)
    engine.filled()
    prompts, _ = batch()
    own = np.arange(ROWS).reshape(layout.dp, -1)[layout.coordinates(rank).dp]
    rows = (own[:, None] * 2 + np.arange(2)).reshape(-1)
    sampling = Sampling(2, 6, 1.0, 1.0, 0, ends=())
    drawn, logps = collect_responses(engine.generate(GenerateRequest([prompts[r] for r in own], rows, sampling)))
    engine.release()
    reference = Reference(folder, (), adapter)
    return {"logp": compare_drawn(reference, [prompts[r // 2] for r in rows], drawn, logps)}


def compare_drawn(reference, prompts, drawn, logps):
    """Return the largest difference between the log-probabilities of drawn tokens and those of the reference."""
    with torch.no_grad():
        logits = reference.logits(prompts, drawn)
    tokens = torch.from_numpy(np.concatenate(drawn).astype(np.int64))
    wanted = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return (torch.from_numpy(np.concatenate(logps)) - wanted).abs().max()


# Ways to draw tokens: the likeliest, any, and with each filter.
SAMPLINGS = {
    "greedy": Sampling(1, 12, 0.0, 1.0, 0, ends=(1,)),
    "plain": Sampling(2, 12, 1.0, 1.0, 0, ends=(1,)),
    "top k and top p": Sampling(2, 12, 0.7, 0.9, 8, ends=(1,)),
    "min p": Sampling(2, 12, 1.5, 1.0, 0, ends=(1,), min_p=0.2),
}
UNDER_WAY = 3  # prompts: rows take the places of others that have ended


def generate(folder, sampling):
    """Return the tokens that the engine `hf` draws after each prompt, and their log-probabilities."""
    model = load(folder)
    engine = engines.generator(model, micro_batch=UNDER_WAY)
    hf_modules.fill(model, engine.allocate())
    prompts, _ = batch()
    return collect_responses(engine.generate(GenerateRequest([*prompts], list_keys(sampling), sampling)))


def list_keys(sampling):
    return noise.RandomStream(0, "token", "conformance").keys(0, np.arange(ROWS * sampling.samples))


def generate_by_transformers(folder, sampling):
    """Return the tokens that `generate` of transformers draws, one row at a time, with the same keys.

    The filters are transformers' own. A processor after them replaces its random numbers.
    """
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process

    net = read_by_transformers(folder)
    filters = []
    if sampling.temperature:
        filters.append(logits_process.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        filters.append(logits_process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(logits_process.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        filters.append(logits_process.MinPLogitsWarper(sampling.min_p))
    prompts, _ = batch()
    drawn = []
    for row, key in enumerate(list_keys(sampling)):
        prompt = torch.from_numpy(prompts[row // sampling.samples].astype(np.int64))[None]

        def draw(ids, scores, key=key, length=prompt.shape[1]):
            """Leave the one token that the row's random number means."""
            sums = scores[0].double().softmax(-1).cumsum(-1)
            token = (sums <= float(noise.uniform(key, ids.shape[1] - length)) * sums[-1]).sum()
            return torch.full_like(scores, -torch.inf).index_fill_(1, token[None], 0.0)

        processors = LogitsProcessorList([*filters, draw] if sampling.temperature else [])
        tokens = net.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            logits_processor=processors,
        )
        drawn.append(tokens[0, prompt.shape[1] :].tolist())
    return drawn


def measure_folder(folder):
    """Return the largest difference between transformers and the engine `hf`, in log-probabilities of drawn tokens."""
    sampling = SAMPLINGS["plain"]
    drawn, logps = generate(str(folder), sampling)
    prompts, _ = batch()
    repeated = [prompts[row // sampling.samples] for row in range(len(drawn))]
    return float(compare_drawn(Reference(str(folder)), repeated, drawn, logps))


def assert_saved(begun, saved):
    """Check that a run has changed the weights of a folder, and has saved all of them as transformers reads them."""
    from transformers import AutoModelForCausalLM

    first, last = (load_file(Path(folder) / "model.safetensors") for folder in (begun, saved))
    assert last.keys() == first.keys() and any((last[name] != first[name]).any() for name in first)
    net, information = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(information[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(value, last[name]) for name, value in net.state_dict().items() if name in last)


def change_nothing(engine):
    pass


def measure_cells(rank, _, folder, out, cases, breaks, frozen, adapter):
    """Write the largest differences of all ranks to `out`, for each case.

    A case is an engine and the name of a layout.
    """
    reference = Reference(folder, frozen, adapter).step()
    found = {}
    for name, layout in cases:
        compute = measure_generator if "generate" in ENGINES[name].verbs else measure_trainer
        own = compute(rank, folder, name, EVERY[layout], reference, breaks, frozen, adapter)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {what: float(value) for what, value in own.items()})
        names = {what for some in everyone for what in some}
        found[name, layout] = {what: max(some.get(what, 0.0) for some in everyone) for what in sorted(names)}
    if rank == 0:
        torch.save(found, out)
    gc.collect()  # engines are in reference cycles, and a later test of these ranks measures memory


def measure(family, names, folder, breaks=change_nothing, frozen=(), layouts=LAYOUTS, adapter=None):
    """Return the largest differences of a family's cells, by engine and layout.

    `breaks` changes an engine before it computes. `frozen` are parts of the model that are not trained. `adapter` is
    trained instead of the model.
    """
    weights = WRITTEN[family](folder / family)
    model = load(weights)
    cases = [(name, layout) for name in names for layout, at in layouts.items() if supports(name, model, at)]
    found = {}
    for world in (1, 2):
        some = [(name, layout) for name, layout in cases if layouts[layout].devices == world]
        ranks.run(world, measure_cells, weights, str(folder / "found"), some, breaks, frozen, adapter)
        found |= torch.load(folder / "found")
    return found


def assert_close(found, bars=OTHER_BARS):
    for cell, values in found.items():
        for what, value in values.items():
            assert value < bars[what], (cell, values)


def remove_head_norms(engine):
    for layer in engine.module.model.layers:
        layer.self_attn.q_norm.forward = lambda x: x


def remove_windows(engine):
    for layer in engine.module.model.layers:
        layer.self_attn.sliding_window = None
    config = engine.module.config
    config.layer_types = ["full_attention"] * config.num_hidden_layers


def remove_logits_scale(engine):
    engine.module.config.logits_scaling = 1.0


def remove_residual_scale(engine):
    for layer in engine.module.model.layers:
        layer.residual_multiplier = 1.0


def remove_attention_scale(engine):
    for layer in engine.module.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5


def remove_model_embedding_scale(engine):
    engine.module.model.embedding_multiplier = 1.0


def rotate_all_layers(engine):
    for layer in engine.module.model.layers:
        layer.self_attn.use_rope = 1


def remove_norms_of_outputs(engine):
    for layer in engine.module.model.layers:
        norm = getattr(layer, "post_mlp_layernorm", None) or layer.post_feedforward_layernorm
        norm.forward = lambda x: x


def remove_router_corrections(engine):
    for name, value in engine.module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.zero_()


def remove_sinks(engine):
    with torch.no_grad():
        for layer in engine.module.model.layers:
            layer.self_attn.sinks = torch.nn.Parameter(torch.full_like(layer.self_attn.sinks, -torch.inf))


def clamp_less(engine):
    for layer in engine.module.model.layers:
        layer.mlp.experts.activate.__self__.limit = 7.0


def swap_gate_and_up(engine):
    for layer in engine.module.model.layers:
        layer.mlp.gate_up_proj.forward.args[1].reverse()
        break  # all layers share the list


def rotate_halves(engine):
    """Rotate the halves of heads, as most families do, not adjacent elements."""
    from transformers.models.phi3 import modeling_phi3

    for layer in engine.module.model.layers:
        forward = layer.self_attn.forward
        cell = None
        if isinstance(forward, FunctionType):  # with tp, it takes a rank's own tokens
            cell = dict(zip(forward.__code__.co_freevars, forward.__closure__, strict=True))["forward"]
            forward = cell.cell_contents
        if isinstance(forward, MethodType):
            names = {**forward.__func__.__globals__, "apply_rotary_pos_emb": modeling_phi3.apply_rotary_pos_emb}
            code = unwrap(forward.__func__)
            broken = MethodType(
                FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__), layer.self_attn
            )
            if cell is None:
                layer.self_attn.forward = broken
            else:
                cell.cell_contents = broken


def rotate_less(engine):
    frequencies = engine.module.model.rotary_emb.inv_freq
    frequencies[len(frequencies) // 2 :] = 0


def remove_attention_caps(engine):
    for layer in engine.module.model.layers:
        layer.self_attn.attn_logit_softcapping = None


def remove_logits_cap(engine):
    engine.module.config.final_logit_softcapping = None


def rotate_alike(engine):
    """Rotate in layers of full attention as in those with windows."""
    rotary = engine.module.model.rotary_emb
    rotary.full_attention_inv_freq.copy_(rotary.sliding_attention_inv_freq)
    rotary.full_attention_attention_scaling = rotary.sliding_attention_attention_scaling


def remove_rotary_factors(engine):
    rotary = engine.module.model.rotary_emb
    factors = torch.tensor(engine.module.config.rope_parameters["short_factor"])
    rotary.inv_freq.mul_(factors)
    rotary.original_inv_freq.mul_(factors)


def remove_skips(engine):
    for layer in engine.module.model.layers:
        if hasattr(layer, "mamba"):
            zeros = torch.zeros(get_local_tensor(layer.mamba._parameters["D"]).shape)
            layer.mamba._parameters["D"] = torch.nn.Parameter(zeros)


def norm_halves_of_groups(engine):
    for layer in engine.module.model.layers:
        if hasattr(layer, "mamba"):
            layer.mamba.norm.group_size //= 2


def remove_shared_experts(engine):
    for layer in engine.module.model.layers:
        layer.mlp.shared_experts.forward = torch.zeros_like


def remove_embedding_scale(engine):
    engine.module.model.embed_tokens.embed_scale.fill_(1.0)
