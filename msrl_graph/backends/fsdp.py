"""Training and inference by torch FSDP2, DTensor tensor parallelism and context parallelism (context_parallel.py), on
any torch device.

Invariant: the weights at rest on a rank are the boxes of layout.shard, and the optimizer works on those local tensors
(optimizer/steps.py). ZeRO: 0 replicates, 1 divides the optimizer, 2 and 3 are FSDP2 without and with releasing the
gathered weights after forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..ir.optimizer_spec import OptimizerSpec
from ..sharding.layout import Layout, shard
from . import expert_placement, experts, hf_modules, kernels, peaks, prefix_tree
from .activations import Activations
from .context_parallel import ContextGroup
from .devices import local
from .kernels.modules import divide_rows, install
from .optimizer.gradients import Gradients
from .optimizer.steps import Steps, calls
from .spec import (
    Act,
    EngineSpec,
    ForwardRequest,
    Lint,
    Loss,
    MicroBatch,
    OperatorCalls,
    Outputs,
    Shard,
    Situation,
    Weights,
    compiled,
    offloads,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ..ir.graph import Node
    from ..ir.plan import Placement
    from ..model.architecture import Model
    from .devices import Devices
    from .kernels import Summed


def _lints(situation: Situation) -> Iterator[Lint]:
    if situation.verb == "update" and situation.layout.zero == 2 and situation.layout.dp > 1:
        message = (
            "zero 2 keeps the weights divided at rest and gathers them once a step: less memory than ZeRO 2 asks for"
        )
        yield Lint(message, "zero = 3 needs less memory still, zero = 1 less communication")


def _calls(act: Act, layout: Layout) -> OperatorCalls:
    """Counted by torch's profiler on Qwen2 models."""
    if act == "step":
        return calls(layout)
    # Where weights are divided, FSDP2's hooks around a layer, and around the whole, take Python as long as a hundred
    # operators for a forward pass, and as many for each collective of a backward pass; an operator on a DTensor as long
    # as three on tensors.
    if act == "update":
        hooks = SPEC.divided(layout) * (300 if layout.zero >= 3 else 200)
        found = OperatorCalls(232 + hooks, 83 + hooks)
    else:
        hooks = SPEC.divided(layout) * 100
        found = OperatorCalls(73 + hooks, 46 + hooks)
    if layout.tp > 1:
        found = OperatorCalls(3 * found.layer, 3 * found.rest)
    if layout.cp > 1:  # on tensors: of a ring by blocks, and what divides a tree and gathers outputs
        forward, both = (24 * layout.cp, 54 * layout.cp) if layout.cp_kind == "ring" else (18, 39)
        found = OperatorCalls(found.layer + (both if act == "update" else forward), found.rest + 30)
    return found


ENTROPY = 1 << 18  # logits whose entropies are computed at once
# Weights that all ranks of tp have, each for its own heads: their gradients are parts.
NORMS_OF_HEADS = ("q_norm.weight", "k_norm.weight")
# What ranks of tp have rows of, and columns of, in a layer's attention and its feed-forward network.
COLUMNS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


SPEC = EngineSpec(
    name="fsdp",
    verbs=("infer", "update"),
    axes=("tp", "cp", "dp", "ep"),
    build="msrl_graph.backends.fsdp:FsdpEngine",
    options=("micro_batch", "recompute", "dtype", "offload", "activations", "compile"),
    zero=(0, 1, 2, 3),
    divided_from=2,
    families=("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"),
    spread=expert_placement.WHOLE,
    lints=_lints,
    calls=_calls,
    shares_beginnings=("host", "device"),
    sums=(2, 5),  # q, k, v, gate and up each sum their input's gradient
    peaks=peaks.trainer,
    stored=peaks.stored,
    chosen=("host", "device"),
)


class FsdpEngine:
    """A model on this rank."""

    def __init__(self, weights: Weights, placement: Placement, devices: Devices) -> None:
        model = weights.model
        layout = placement.layout
        rank = devices.rank
        optimizer = weights.optimizer
        self.model = model
        self.layout = layout
        self.place = devices.device.place
        self.divided = SPEC.divided(layout)
        self.context = ContextGroup.of(layout, devices)
        module = hf_modules.empty(model)
        if placement.engine.options.get("recompute") == "full":
            module.gradient_checkpointing_enable()
        self.kernels = kernels.load(devices.device.kind)
        experts.install(module, model, layout, devices, self.kernels)
        install(module, self.kernels)
        module.requires_grad_(optimizer is not None)
        prefix_tree.prepare(module)
        if layout.tp > 1:
            self._tp = devices.axis("tp").get_group()
            # A fused sum goes over the links of one host.
            summed = self.kernels.summed if devices.on_one_host("tp") else None
            _divide_tensors(module, devices.axis("tp"), model.scores, summed)
            self._tie(module)
        module.forward = lambda *args: _outputs(module, *args)
        self._wrapped = []
        if self.divided:
            self._wrapped = _divide_weights(module, model, layout, devices, layout.zero >= 3 or optimizer is None)
        # Buffers are real already: to_empty would lose them.
        buffers = dict(module.named_buffers())
        module.to_empty(device=self.place)
        self._tie(module)
        for name, value in buffers.items():
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_buffer(leaf, value.to(self.place), persistent=False)
        self.module = module
        if compiled(placement):
            _compile(module.model.layers)
        away = optimizer is not None and placement.engine.options.get("activations") == "offload"
        self._passing = Activations(devices.device, module.model.layers).kept_away if away else nullcontext
        named = hf_modules.named_weights(module)
        self._shards = [
            Shard(t.name, shard(t, SPEC.side(layout), rank), local(named[t.name]).detach()) for t in model.tensors
        ]
        hf_modules.fill(model, self._shards)
        self._parameters = [named[t.name] for t in model.tensors]
        self._rules = optimizer
        self._optimizer = None
        if optimizer is not None:
            self._gradients = Gradients(self._parameters)
            away = offloads(placement, "optimizer")
            self._optimizer = Steps(optimizer, model.tensors, self._shards, layout, devices, self.divided, away)

    def _tie(self, module: Any) -> None:
        """Makes head and embedding one parameter again, if they were: dividing and taking memory give each its own."""
        if self.model.tied:
            module.lm_head.weight = module.model.embed_tokens.weight

    def shards(self) -> list[Shard]:
        return self._shards

    def score(self, micro_batches: Sequence[MicroBatch], asked: ForwardRequest) -> list[Outputs]:
        import torch

        with torch.no_grad():
            return [self._forward(micro_batch, asked) for micro_batch in micro_batches]

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss, asked: ForwardRequest) -> None:
        for i in range(len(micro_batches)):
            total = loss(self._forward(micro_batches[i], asked), i)
            # FSDP2 averages over dp, the loss's parts add up.
            (total * self.layout.dp if self.divided else total).backward()  # type: ignore[no-untyped-call]
            del total  # or the next micro-batch would have its graph beside its own

    def _forward(self, micro_batch: MicroBatch, asked: ForwardRequest) -> Outputs:
        import torch

        tree, known = self.context.share(prefix_tree.tree(micro_batch), micro_batch)
        tree = replace(tree, attention=self.kernels.attention)
        tree = tree.to(self.place)
        here = known.to(self.place, non_blocking=True)
        heat = here.get("temperature", asked.temperature)
        with self._passing():
            found: Outputs = self.module(tree, here["token"], here.get("given", None), heat, asked)
        if self.divided and self.layout.zero < 3 and not torch.is_grad_enabled():
            # No backward follows that would give the gathered weights back.
            for part in self._wrapped:
                part.reshard()
        return self.context.gathered(found, tree)

    def step(
        self,
        lr: float,
        clip_grad: float,
        sound: bool = True,
        optimizer: OptimizerSpec | None = None,
        node: Node | None = None,
    ) -> float:
        import torch

        assert self._optimizer is not None and self._rules is not None
        gradients = []
        # From here on a gradient lives as long as it is in the list.
        for tensor, parameter in zip(self.model.tensors, self._parameters, strict=True):
            made = self._gradients.take(parameter)
            gradients.append(torch.zeros(local(parameter).shape, device=self.place) if made is None else made.detach())
            del made
            if self.divided and tensor.experts:  # of which FSDP2 took the average over their own copies
                gradients[-1].mul_(self.layout.edp / self.layout.dp)
            if self.layout.tp > 1 and tensor.name.endswith(NORMS_OF_HEADS):
                torch.distributed.all_reduce(gradients[-1], group=self._tp)
        return self._optimizer.step(gradients, lr, clip_grad, sound, optimizer or self._rules)

    def moments(self) -> dict[str, list[Shard]]:
        return {} if self._optimizer is None else self._optimizer.moments()

    def restore(self, moments: dict[str, dict[str, torch.Tensor]], steps: int) -> None:
        assert self._optimizer is not None
        self._optimizer.restore(moments, steps)


def _compile(layers: Any) -> None:
    """Each in place, whatever lengths come: trees differ from one micro-batch to the next."""
    from torch._inductor import config

    config.compile_threads = 1  # else it starts processes of its own
    for layer in layers:
        layer.compile(dynamic=True)


def _divide_weights(module: Any, model: Model, layout: Layout, devices: Devices, again: bool) -> list[Any]:
    """Divides the weights at rest by FSDP2, layer by layer, experts over the ranks that have the same; what it
    divided. `again`: gathered weights are released after the forward pass."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    found: list[tuple[Any, Any]] = []
    dense = devices.axis("dp")
    layers = module.model.layers
    if model.experts is not None:
        group = devices.among(layout, "pp", "ep", "etp")
        mesh = DeviceMesh.from_group(group, devices.device.kind.torch)
        found += [(layer.mlp.experts, mesh) for layer in layers[model.experts.first :]]
    for part, over in (*found, *((layer, dense) for layer in layers), (module, dense)):
        fully_shard(part, mesh=over, reshard_after_forward=again)
    return [part for part, _ in found] + [*layers, module]


def _divide_tensors(module: Any, mesh: DeviceMesh, scores: bool, summed: Summed | None) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _tell_masks_apart()
    for block in module.model.layers:
        for part in (block.self_attn, getattr(block.mlp, "shared_experts", block.mlp)):
            names = [name for name, child in part.named_children() if name in COLUMNS + ROWS]
            if summed is not None:
                for name in [n for n in names if n in ROWS]:
                    divide_rows(getattr(part, name), mesh, summed)
                    names.remove(name)
            if names:  # a mixture of routed experts alone has none
                plan: dict[str, Any] = {n: ColwiseParallel() if n in COLUMNS else RowwiseParallel() for n in names}
                parallelize_module(part, mesh, plan)
        if hasattr(block.self_attn, "kv_a_proj_with_mqa"):
            _share_key(block.self_attn, mesh)
    ends: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    if not scores:  # one number: each rank makes it
        ends["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(module, mesh, ends)


def _tell_masks_apart() -> None:
    """Torch 2.10 takes the mask of one divided embedding for that of another of its size, as of a model in another
    type; later ones go by whose buffer it is."""
    from torch.distributed.tensor import placement_types

    if (mask := getattr(placement_types, "MaskPartial", None)) is None:
        return

    def told_by(of: Any) -> tuple[Any, ...]:
        return of.reduce_op, of.offset_shape, of.offset_dim, id(of.mask_buffer)

    mask.__eq__ = lambda one, other: isinstance(other, mask) and told_by(one) == told_by(other)
    mask.__hash__ = lambda one: hash(told_by(one))


def _share_key(attention: Any, mesh: DeviceMesh) -> None:
    """The rotary key of latent attention is one for all heads, of which a rank of tp has some: its gradient is the sum
    of theirs."""
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate

    def shared(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        latent, key = torch.split(output, [attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
        key = DTensor.from_local(key, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        return torch.cat([latent, key], dim=-1)

    attention.kv_a_proj_with_mqa.register_forward_hook(shared)


def _outputs(
    module: Any,
    found: prefix_tree.Tree,
    token: torch.Tensor,
    given: torch.Tensor | None,
    heat: float | torch.Tensor,
    asked: ForwardRequest,
) -> Outputs:
    """Stands in for the model's forward, so that FSDP2 gathers embedding and head around the whole of it. Logits are
    made only where a token is asked for, and in float32."""
    import torch

    hidden = prefix_tree.states(module.model, found).index_select(0, found.before)
    if hasattr(module, "score"):
        return Outputs(values=module.score(hidden).float()[:, 0].clone())  # FSDP2's hooks would be lost on a view
    logits = module.lm_head(hidden).float() / heat
    if not asked.entropy and not asked.best and given is None:
        entropy = _entropy(logits) if torch.is_grad_enabled() else None
        return Outputs(-torch.nn.functional.cross_entropy(logits, token, reduction="none"), entropy=entropy)
    told = _entropy(logits) if torch.is_grad_enabled() and not asked.entropy else None
    logps = logits.log_softmax(-1)
    del logits
    best, ids = logps.detach().topk(asked.best) if asked.best else (None, None)
    return Outputs(
        logp=-torch.nn.functional.nll_loss(logps, token, reduction="none"),
        # A product of vectors keeps the two of them and makes no third.
        entropy=-(logps.exp()[:, None] @ logps[:, :, None]).flatten() if asked.entropy else told,
        given=None if given is None else logps.gather(1, given),
        best=best,
        ids=ids,
    )


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """The entropy of each token's distribution, apart from any graph. A few tokens at a time, so that at no moment as
    much is held as a cross-entropy takes."""
    import torch

    with torch.no_grad():
        each = max(1, min(len(logits) // 4, ENTROPY // logits.shape[-1]))
        parts = (part.log_softmax(-1) for part in torch.split(logits, each))
        return (
            torch.cat([-torch.linalg.vecdot(part.exp(), part) for part in parts])
            if len(logits)
            else logits.new_zeros(0)
        )
