"""Training and inference by torch FSDP2, on any torch device.

Tensor parallelism is implemented with DTensor. Context parallelism is in context_parallel.py.

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
from typing import TYPE_CHECKING, Any

from ..ir.workload import Recomputation
from ..model.layers import RecurrentMixer
from ..sharding.layout import Layout, shard
from . import adapters, experts, hf_modules, joint_norms, kernels, policy_head, prefix_tree, recompute
from .activations import Activations
from .context_parallel import ContextGroup
from .devices import get_local_tensor
from .engine_protocols import ForwardRequest, Loss, MicroBatch, Outputs, Shard, StepRequest, Weights
from .fsdp_spec import SPEC
from .kernels.modules import divide_rows, install
from .optimizer.gradients import Gradients
from .optimizer.steps import Steps
from .policy_head import HeadPart
from .recurrent import parameters, row_layout
from .routes import Routers
from .spec import gradient_type, is_compiled, optimizer_residency

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from ..ir.plan import Placement
    from ..model.architecture import Model
    from .devices import Devices
    from .kernels import Summed


# Weights that all tp ranks have, and that each rank applies to its own heads: a rank's gradient is a partial sum.
PARTLY_APPLIED = (
    *("q_norm.weight", "k_norm.weight", "linear_attn.norm.weight"),
    *("conv_b.weight", "conv_b.bias", "conv_c.weight", "conv_c.bias"),
)
# Linear layers of attention and feed-forward that tp shards by columns, and by rows.
COLUMNS = (
    *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"),
    *(f"in_proj_{part}" for part in ("qkvz", "ba", "dt", *"qkvzbaxc")),
)
ROWS = ("o_proj", "out_proj", "down_proj")


class FsdpEngine:
    """The engine `fsdp` on one rank: it trains a model or computes a model's outputs."""

    def __init__(self, weights: Weights, placement: Placement, devices: Devices) -> None:
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
        if layout.tp > 1:
            self._tp = devices.axis("tp").get_group()
            # A fused sum uses the links within one host.
            summed = self.kernels.summed if devices.on_one_host("tp") and not model.lora else None
            _divide_tensors(module, model, devices.axis("tp"), summed)
            joint_norms.install(module, model, self._tp)
            hf_modules.count_local_heads(module, model, layout.tp)
            self._tie(module)
        self._token_keys = adapters.install(module, model, devices.axis("tp") if layout.tp > 1 else None)
        row_layout.install(module, model, is_compiled(placement))
        if optimizer is not None:
            recomputation = Recomputation.of_option(placement.engine.options.get("recompute"))
            recompute.install(module, model, recomputation, self.kernels)
        _mark_trained(module, model, {tensor.name for tensor in model.trained} if optimizer is not None else ())
        module.forward = partial(_outputs, module, _find_first_id(model, layout, rank))
        self._fsdp_modules = []
        if self.divided:
            self._fsdp_modules = _divide_weights(module, model, layout, devices, layout.zero >= 3 or optimizer is None)
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
        tree, known = self.context.share(whole, micro_batch)
        tree = tree.with_kernels(self.kernels).to(self.place)
        self._routers.records = request.routes
        self._routers.given = tree.routes
        self._token_keys.keys = tree.keys
        columns = known.to(self.place, non_blocking=True)
        with self._forward_context():
            outputs: Outputs = self.module(tree, columns, request)
        if self.divided and self.layout.zero < 3 and not torch.is_grad_enabled():
            # No backward pass follows that would release the gathered weights.
            for part in self._fsdp_modules:
                part.reshard()
        outputs = self.context.gather_outputs(outputs, tree)
        if not request.routes:
            return outputs
        return outputs._replace(routes=self.context.gather_routes(self._routers.take_recorded(), whole).cpu())

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
            if self.layout.tp > 1 and tensor.tp_dim < 0 and tensor.name.endswith(PARTLY_APPLIED):
                torch.distributed.all_reduce(gradients[-1], group=self._tp)
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


def _divide_weights(
    module: Any, model: Model, layout: Layout, devices: Devices, release_after_forward: bool
) -> list[Any]:
    """Shard a model's weights by FSDP2, layer by layer; return the sharded modules.

    Dense weights are sharded over dp. Experts are sharded over the ranks that have the same experts. With
    `release_after_forward`, FSDP2 releases gathered weights after the forward pass.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    expert_meshes: list[tuple[Any, Any]] = []
    dense = devices.axis("dp")
    layers = module.model.layers
    if model.experts:
        group = devices.make_group(layout, "pp", "ep", "etp")
        mesh = DeviceMesh.from_group(group, devices.device.kind.torch)
        expert_meshes += [(layers[number].mlp.experts, mesh) for number in model.expert_layers]
    for part, part_mesh in (*expert_meshes, *((layer, dense) for layer in layers), (module, dense)):
        fully_shard(part, mesh=part_mesh, reshard_after_forward=release_after_forward)
    return [part for part, _ in expert_meshes] + [*layers, module]


def _divide_tensors(module: Any, model: Model, mesh: DeviceMesh, summed: Summed | None) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _distinguish_masks()
    mixers = [*hf_modules.list_mixers(module, model)]
    copied = {name for mixer, _ in mixers if isinstance(mixer, RecurrentMixer) for name in mixer.copied}
    for part in (*(part for _, part in mixers), *hf_modules.list_shared_mlps(module)):
        names = [name for name, child in part.named_children() if name in COLUMNS + ROWS and name not in copied]
        if summed is not None:
            for name in [linear for linear in names if linear in ROWS]:
                divide_rows(getattr(part, name), mesh, summed)
                names.remove(name)
        if names:  # a mixture of only routed experts has none
            plan: dict[str, Any] = {
                linear: ColwiseParallel() if linear in COLUMNS else RowwiseParallel() for linear in names
            }
            parallelize_module(part, mesh, plan)
    for mixer, module_of_mixer in mixers:
        if isinstance(mixer, RecurrentMixer):
            for name, part in module_of_mixer.named_children():
                if name in mixer.copied:
                    if name.startswith("in_proj"):
                        _sum_gradients(part, mesh)
                elif name.startswith("conv"):
                    _divide_heads(part, [leaf for leaf, _ in part.named_parameters()], mesh)
            _divide_heads(module_of_mixer, mixer.by_head, mesh)
            parameters.make_local(module_of_mixer, mixer.by_head)
            if mixer.norm_by_head:
                norm = getattr(module_of_mixer, mixer.norm)
                _divide_heads(norm, ["weight"], mesh)
                parameters.make_local(norm, ["weight"])
        if hasattr(module_of_mixer, "sinks"):
            _divide_heads(module_of_mixer, ["sinks"], mesh)
        if hasattr(module_of_mixer, "kv_a_proj_with_mqa"):  # all heads share the rotary key
            _sum_gradients(module_of_mixer.kv_a_proj_with_mqa, mesh, module_of_mixer.kv_lora_rank)
    ends: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    if not model.scores:  # one number per token: each rank computes it
        ends["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(module, mesh, ends)


def _divide_heads(part: Any, names: Sequence[str], mesh: DeviceMesh) -> None:
    """Shard parameters of a module by heads, their first dim."""
    from torch.distributed.tensor import Shard as ShardedDim
    from torch.distributed.tensor import distribute_tensor
    from torch.nn import Parameter

    for name in names:
        setattr(part, name, Parameter(distribute_tensor(getattr(part, name), mesh, [ShardedDim(0)])))


def _distinguish_masks() -> None:
    """Patch torch to distinguish the masks of different sharded embeddings.

    A mask (MaskPartial) is a DTensor placement. Torch 2.10 treats two masks as equal if their embeddings have the same
    size, even if the embeddings belong to different models. With the patch, masks are equal only if their mask buffers
    are the same object.
    """
    from torch.distributed.tensor import placement_types

    if (mask := getattr(placement_types, "MaskPartial", None)) is None:
        return

    def identify(placement: Any) -> tuple[Any, ...]:
        return placement.reduce_op, placement.offset_shape, placement.offset_dim, id(placement.mask_buffer)

    mask.__eq__ = lambda one, other: isinstance(other, mask) and identify(one) == identify(other)
    mask.__hash__ = lambda one: hash(identify(one))


def _sum_gradients(projection: Any, mesh: DeviceMesh, start: int = 0) -> None:
    """Sum gradients of a projection's outputs over tp, of those from `start` on.

    All heads share these outputs, but each tp rank has only some of the heads, so each rank computes only a part of the
    gradient.
    """
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate

    def sum_gradient(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        shared = DTensor.from_local(output[..., start:], mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        return torch.cat([output[..., :start], shared], dim=-1) if start else shared

    projection.register_forward_hook(sum_gradient)


def _outputs(
    module: Any, first: int, tree: prefix_tree.Tree, micro_batch: MicroBatch, request: ForwardRequest
) -> Outputs:
    """Compute a model's outputs for the requested tokens of a micro-batch.

    The engine installs this function as the forward method of `module`. So FSDP2 gathers the weights of the embedding
    and the head for the call. Logits are computed only for the requested tokens, in float32. `first` is the first id of
    the vocabulary that this rank's part of the head has.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    hidden = prefix_tree.compute_states(module.model, tree).index_select(0, tree.before)
    if hasattr(module, "score"):
        return Outputs(values=module.score(hidden).float()[:, 0].clone())  # a view would lose FSDP2's hooks
    weight = module.lm_head.weight
    rule = hf_modules.find_logit_rule(module.config)
    if not isinstance(weight, DTensor):
        return policy_head.compute_outputs(hidden, HeadPart(weight, rule), micro_batch, request)
    # Each tp rank computes its part of the states' gradient.
    mesh = weight.device_mesh
    hidden = DTensor.from_local(hidden, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    part = HeadPart(weight.to_local(), rule, first, mesh.get_group())
    return policy_head.compute_outputs(hidden, part, micro_batch, request)
