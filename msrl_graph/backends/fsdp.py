"""Training and inference by torch FSDP2, on any torch device.

Tensor parallelism is in sequence_parallel.py, context parallelism in context_parallel.py.

Invariant: outside of forward and backward passes, a rank holds one box of each weight: one index range per dimension,
as computed by layout.shard. The boxes are called the weights at rest. The optimizer updates the weights at rest
(optimizer/steps.py). The ZeRO stages are:

- 0: everything is replicated.
- 1: the optimizer states are sharded.
- 2: FSDP2 shards the weights. It keeps the gathered weights after the forward pass.
- 3: FSDP2 shards the weights. It releases the gathered weights after the forward pass.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..ir.workload import Recomputation
from ..model.architecture import is_copied
from ..sharding.layout import Layout, shard
from . import (
    adapters,
    experts,
    hf_modules,
    joint_norms,
    kernels,
    policy_head,
    prefix_tree,
    recompute,
    sequence_parallel,
)
from .activations import Activations
from .context_parallel import ContextGroup
from .devices import get_local_tensor
from .engine_protocols import ForwardRequest, Loss, MicroBatch, Outputs, Shard, StepRequest, Weights
from .fsdp_spec import SPEC
from .kernels.modules import install
from .optimizer.gradients import Gradients, add_up
from .optimizer.steps import Steps
from .policy_head import HeadPart
from .recurrent import row_layout
from .recurrent.parameters import read_locally
from .routes import Routers
from .spec import gradient_type, is_compiled, optimizer_residency

if TYPE_CHECKING:
    import torch

    from ..ir.plan import Placement
    from ..model.architecture import Model
    from .devices import Devices
    from .sequence_parallel import TokenGroup


class FsdpEngine:
    """The engine `fsdp` on one rank: it trains a model or computes a model's outputs."""

    def __init__(self, weights: Weights, placement: Placement, devices: Devices) -> None:
        import torch

        model = weights.model
        layout = placement.layout
        rank = devices.rank
        optimizer = weights.optimizer
        self.model = model
        self.layout = layout
        self.place = devices.device.place
        self.divided = SPEC.divides_weights(layout)
        self.context = ContextGroup.from_layout(layout, devices)
        module = hf_modules.build_empty_model(model)
        self.kernels = kernels.load(devices.device.kind)
        experts.install(module, model, layout, devices, self.kernels)
        install(module, model, self.kernels)
        prefix_tree.prepare(module, is_compiled(placement))
        self._routers = Routers(module, model)
        self._tokens: TokenGroup | None = None
        if layout.tp > 1:
            self._tokens = sequence_parallel.shard_layers(module, model, devices.axis("tp"))
            joint_norms.install(module, model, self._tokens.group)
            hf_modules.count_local_heads(module, model, layout.tp)
            self._tie(module)
        self._token_keys = adapters.install(module, model, devices.axis("tp") if layout.tp > 1 else None)
        row_layout.install(module, model, is_compiled(placement))
        recomputation = Recomputation.of_option(
            None if optimizer is None else placement.engine.options.get("recompute")
        )
        recompute.install_in_mlps(module, model, recomputation, self.kernels)
        if self._tokens is not None:
            sequence_parallel.install(module, model)
        recompute.install(module, model, recomputation)
        _mark_trained(module, model, {tensor.name for tensor in model.trained} if optimizer is not None else ())
        module.forward = partial(_outputs, module, _find_first_id(model, layout, rank), self._tokens)
        self._gathered_modules = []
        if self.divided:
            self._gathered_modules = _divide_weights(module, model, layout, devices, optimizer is not None)
        # Buffers are real already; to_empty would lose them.
        buffers = dict(module.named_buffers())
        module.to_empty(device=self.place)
        self._tie(module)
        for name, value in buffers.items():
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_buffer(leaf, value.to(self.place), persistent=False)
        self.module = module
        if is_compiled(placement):
            _compile(module.model.layers)
        offloads_activations = optimizer is not None and placement.engine.options.get("activations") == "offload"
        self._forward_context = (
            Activations(devices.device, module.model.layers).offload_saved_tensors
            if offloads_activations
            else nullcontext
        )
        named = hf_modules.named_weights(module, model)
        self._shards = [
            Shard(tensor.name, shard(tensor, SPEC.side(layout), rank), get_local_tensor(named[tensor.name]).detach())
            for tensor in model.weights
        ]
        hf_modules.fill(model, self._shards)
        self._parameters = [named[tensor.name] for tensor in model.trained]
        self._optimizer = None
        if optimizer is not None:
            self._gradient_dtype = getattr(torch, hf_modules.DTYPES[gradient_type(placement)])
            self._gradients = Gradients(self._parameters, self._gradient_dtype)
            residency = optimizer_residency(placement)
            self._optimizer = Steps(optimizer, model.weights, self._shards, layout, devices, self.divided, residency)

    def _tie(self, module: Any) -> None:
        """Tie the head to the embedding, if the model has tied weights.

        The tie must be restored after sharding and after allocation, because each of these two operations creates a
        separate parameter for the head.
        """
        if self.model.tied:
            module.lm_head.weight = module.model.embed_tokens.weight

    def shards(self) -> list[Shard]:
        return self._shards

    def score(self, micro_batches: Sequence[MicroBatch], request: ForwardRequest) -> list[Outputs]:
        import torch

        with torch.no_grad(), adapters.disable(self.module, disabled=not request.adapter):
            return [self._forward(micro_batch, request) for micro_batch in micro_batches]

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss, request: ForwardRequest) -> None:
        for i in range(len(micro_batches)):
            total = loss(self._forward(micro_batches[i], request), i)
            # FSDP2 averages over dp, but the parts of the loss add up.
            (total * self.layout.dp if self.divided else total).backward()  # type: ignore[no-untyped-call]
            del total  # or its graph would exist next to the next micro-batch's

    def _forward(self, micro_batch: MicroBatch, request: ForwardRequest) -> Outputs:
        import torch

        whole = prefix_tree.build_tree(micro_batch, request.dropout)
        tree, known = self.context.share(whole, micro_batch, self.layout.tp)
        tree = tree.with_kernels(self.kernels).to(self.place)
        self._routers.records = request.routes
        given = tree.routes
        self._routers.given = given if given is None or self._tokens is None else self._tokens.take_own(given)
        self._token_keys.keys = tree.keys
        columns = known.to(self.place, non_blocking=True)
        with self._forward_context():
            outputs: Outputs = self.module(tree, columns, request)
        if not torch.is_grad_enabled():
            # No backward pass follows that would release the gathered weights.
            for part in self._gathered_modules:
                part.reshard()
        outputs = self.context.gather_outputs(outputs, tree)
        if not request.routes:
            return outputs
        routes = self._routers.take_recorded()
        if self._tokens is not None:
            routes = self._tokens.gather_routes(routes)
        return outputs._replace(routes=self.context.gather_routes(routes, whole).cpu())

    def step(self, request: StepRequest) -> float:
        import torch

        assert self._optimizer is not None
        gradients = []
        # A gradient must live only as long as it is in the list `gradients`.
        for tensor, parameter in zip(self.model.trained, self._parameters, strict=True):
            gradient = self._gradients.take(parameter)
            gradients.append(
                torch.zeros(get_local_tensor(parameter).shape, dtype=self._gradient_dtype, device=self.place)
                if gradient is None
                else gradient.detach()
            )
            del gradient
            if self.divided and tensor.experts:  # FSDP2 averaged the gradient over the copies of the experts
                gradients[-1].mul_(self.layout.edp / self.layout.dp)
        if self._tokens is not None:
            pairs = zip(gradients, self.model.trained, strict=True)
            copied = [gradient for gradient, tensor in pairs if is_copied(tensor) and not tensor.experts]
            add_up(copied, self._tokens.group)
        return self._optimizer.step(gradients, request)

    def fetch_states(self) -> None:
        if self._optimizer is not None:
            self._optimizer.fetch_states()

    def release_states(self) -> None:
        if self._optimizer is not None:
            self._optimizer.release_states()

    def moments(self) -> dict[str, list[Shard]]:
        return {} if self._optimizer is None else self._optimizer.moments()

    def restore(self, moments: dict[str, dict[str, torch.Tensor]], steps: int) -> None:
        assert self._optimizer is not None
        self._optimizer.restore(moments, steps)


def _find_first_id(model: Model, layout: Layout, rank: int) -> int:
    """Return the first id of the vocabulary that a rank's part of the head has."""
    side = replace(SPEC.side(layout), divided=False)  # as gathered over dp
    return shard(model.head, side, rank)[0][0]


def _mark_trained(module: Any, model: Model, trained: Container[str]) -> None:
    """Let autograd compute gradients of the weights `trained` only."""
    for name, parameter in hf_modules.named_weights(module, model).items():
        parameter.requires_grad_(name in trained)


def _compile(layers: Any) -> None:
    """Compile each layer in place, for inputs with a varying number of tokens.

    A layer's input has one token per node of a micro-batch's prefix tree (prefix_tree.py). The number of nodes differs
    from one micro-batch to the next.
    """
    from torch._inductor import config

    config.compile_threads = 1  # otherwise it starts its own processes
    for layer in layers:
        layer.compile(dynamic=True)


def _divide_weights(module: Any, model: Model, layout: Layout, devices: Devices, is_trained: bool) -> list[Any]:
    """Shard a model's weights by FSDP2, layer by layer.

    Returns the modules that stay gathered after a forward pass.

    Dense weights are sharded over dp, experts over the ranks that have the same experts. Where these are the same
    ranks, one all-gather has all weights of a layer. Where they differ, the weights of the next module are gathered
    while one computes: the host waits in each layer for the tokens' experts, and could not start the gather in time.
    In a backward pass FSDP2 does so itself.

    The embedding and the head, which a backward pass needs first, stay gathered. ZeRO 2 keeps all weights gathered.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    dense = devices.axis("dp")
    layers = module.model.layers
    experts: dict[int, Any] = {}
    if model.experts and layout.edp != layout.dp:
        group = devices.make_group(layout, "pp", "ep", "etp")
        expert_mesh = DeviceMesh.from_group(group, devices.device.kind.torch)
        experts = {number: layers[number].mlp.experts for number in model.expert_layers}
    releases = layout.zero >= 3 or not is_trained
    for part in experts.values():
        fully_shard(part, mesh=expert_mesh, reshard_after_forward=releases)
    for layer in layers:
        fully_shard(layer, mesh=dense, reshard_after_forward=releases)
    fully_shard(module, mesh=dense, reshard_after_forward=not is_trained)
    if experts and releases:
        parts = [part for i, layer in enumerate(layers) for part in (layer, experts.get(i)) if part is not None]
        for part, next_part in pairwise(parts):
            part.set_modules_to_forward_prefetch([next_part])
    kept = [] if releases else [*experts.values(), *layers]
    return [*kept, module] if is_trained else []


def _outputs(
    module: Any,
    first: int,
    tokens: TokenGroup | None,
    tree: prefix_tree.Tree,
    micro_batch: MicroBatch,
    request: ForwardRequest,
) -> Outputs:
    """Compute a model's outputs for the requested tokens of a micro-batch.

    The engine installs this function as the forward method of `module`. So FSDP2 gathers the weights of the embedding
    and the head for the call. Logits are computed only for the requested tokens, in float32. `first` is the first id of
    the vocabulary that this rank's part of the head has. `tokens` are the tp ranks.
    """
    is_scoring = hasattr(module, "score")
    states = prefix_tree.compute_states(module.model, tree)
    if tokens is not None:  # tp ranks have parts of a policy's head, but copies of a scoring model's
        states = tokens.gather_copies(states) if is_scoring else tokens.gather(states)
    states = states.index_select(0, tree.before)
    if is_scoring:
        return Outputs(values=module.score(states).float()[:, 0].clone())  # a view would lose FSDP2's hooks
    rule = hf_modules.find_logit_rule(module.config)
    weight = read_locally(module.lm_head, "weight")
    part = HeadPart(weight, rule) if tokens is None else HeadPart(weight, rule, first, tokens.group)
    return policy_head.compute_outputs(states, part, micro_batch, request)
