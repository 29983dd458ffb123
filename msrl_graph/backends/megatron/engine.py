"""Training and inference by Megatron-Core in the rank's own process.

On Ascend the engine uses MindSpeed. The engine has never run on Ascend, because no NPU was available.

Invariant: Megatron provides the layers, their tensor and pipeline parallelism, and the schedule. msrl_graph provides
the embedding, the head, the loss and the optimizer. So the terms of a loss get the same values as with any other
engine, and weights are updated by the same rules (optimizer/steps.py). Megatron's name for ZeRO 1 is "distributed
optimizer". Weights are never sharded over dp. A layout cannot have more tp ranks than the model has key-value heads:
Megatron would split a group of query heads that share a key-value head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...ir.workload import Recomputation
from ...model.architecture import is_copied
from ...sharding.layout import shard
from .. import adapters, hf_modules, kernels, policy_head, prefix_tree
from ..activations import Activations
from ..context_parallel import ContextGroup
from ..engine_protocols import ForwardRequest, Loss, MicroBatch, Outputs, Shard, StepRequest, Weights
from ..optimizer.gradients import Gradients, add_up
from ..optimizer.steps import Steps
from ..policy_head import HeadPart
from ..spec import gradient_type, optimizer_residency
from . import chunk, cpu, stage_adapters, stage_recompute, stage_routers
from .chunk_spec import ChunkSpec
from .layer_config import make_config
from .spec import SPEC

if TYPE_CHECKING:
    import torch

    from ...ir.plan import Placement
    from ...sharding.layout import Layout
    from ..devices import Devices


class MegatronEngine:
    """The engine `megatron` on one rank: it trains a model or computes its outputs.

    The rank has one chunk of the model's layers, or several chunks if pipeline stages interleave.
    """

    def __init__(self, weights: Weights, placement: Placement, devices: Devices) -> None:
        import torch

        self.model = weights.model
        self.layout = placement.layout
        self.devices = devices
        model = self.model
        layout = self.layout
        self.place = devices.device.place
        self.kernels = kernels.load(devices.device.kind)
        self.context = ContextGroup.from_layout(layout, devices)
        coordinates = layout.coordinates(devices.rank)
        self.first = coordinates.pp == 0
        self.last = coordinates.pp == layout.pp - 1
        chunk_layers = [range(*bounds) for bounds in layout.stage_layers(coordinates.pp, model.layers)]
        hf_model = hf_modules.build_empty_model(model)
        if devices.device.kind.plugin:
            # Must come before any import of Megatron: it replaces some of its functions.
            import_module("mindspeed.megatron_adaptor")
        with self._megatron_context():
            self.groups = _groups(devices, layout, bool(model.experts))
            _prepare()
            # The schedule needs the number of stages, and the setting that tensors between stages have varying lengths.
            # The schedule does not need the layers of each stage.
            self.config = make_config(
                model,
                layout,
                hf_model.config,
                layout.pp * layout.vpp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                pipeline_dtype=getattr(torch, hf_modules.DTYPES[model.dtype]),
                variable_seq_lengths=True,
            )
            recomputation = Recomputation.of_option(placement.engine.options.get("recompute"))
            self.chunks = []
            self._routers = []
            sharding_group = self.groups.tp if layout.tp > 1 else None
            specs = []
            for i, layers in enumerate(chunk_layers):
                first = self.first and i == 0
                last = self.last and i == len(chunk_layers) - 1
                whole = recomputation.count_of_chunk(layers.start, layers.stop, model.first_trained)
                config = make_config(model, layout, hf_model.config, len(layers), whole)
                spec = ChunkSpec(model, hf_model, config, layers, first, last, self.groups, self.place)
                specs.append(spec)
                module = chunk.build_stage(spec)
                self._routers += stage_routers.install(module, layers, model.expert_layers, sharding_group)
                module.config = self.config
                module.model_type = _get_model_type()
                module.vp_stage = i if layout.vpp > 1 else None
                offloads_activations = (
                    weights.optimizer is not None and placement.engine.options.get("activations") == "offload"
                )
                module.forward_context = (
                    Activations(devices.device, module.decoder.layers).offload_saved_tensors
                    if offloads_activations
                    else nullcontext
                )
                self.chunks.append(module)
        boxes = {tensor.name: shard(tensor, SPEC.side(layout), devices.rank) for tensor in model.weights}
        for module, spec in zip(self.chunks, specs, strict=True):
            stage_adapters.install(module, spec, boxes)
            stage_recompute.install(module, spec, recomputation.parts)
        self._shards = list(chunk.make_shards(list(zip(self.chunks, specs, strict=True)), boxes))
        hf_modules.fill(model, self._shards)
        self._optimizer = None
        self._pieces = _locate_pieces(self.chunks, self._shards)
        is_trained = {tensor.name: tensor.is_trained and weights.optimizer is not None for tensor in model.weights}
        for module in self.chunks:
            module.requires_grad_(False)
        for (parameters, _), piece in zip(self._pieces, self._shards, strict=True):
            for parameter in parameters:  # fused parameters may be trained in part
                parameter.requires_grad_(parameter.requires_grad or is_trained[piece.name])
        if weights.optimizer is not None:
            every_parameter = (parameter for module in self.chunks for parameter in module.parameters())
            self._gradient_dtype = getattr(torch, hf_modules.DTYPES[gradient_type(placement)])
            trained_parameters = (parameter for parameter in every_parameter if parameter.requires_grad)
            self._gradients = Gradients(trained_parameters, self._gradient_dtype)
            residency = optimizer_residency(placement)
            self._optimizer = Steps(weights.optimizer, model.weights, self._shards, layout, devices, False, residency)

    @contextmanager
    def _megatron_context(self) -> Iterator[None]:
        """Enter the context in which Megatron's code runs.

        On host cores, this context patches the functions of CUDA that Megatron calls (cpu.py).
        """
        with ExitStack() as stack:
            if self.devices.device.kind.is_host:
                stack.enter_context(cpu.patch_torch_cuda())
                if self.layout.pp > 1:
                    for patch in cpu.make_stage_patches():
                        stack.enter_context(patch)
            yield

    def shards(self) -> list[Shard]:
        return self._shards

    def score(self, micro_batches: Sequence[MicroBatch], request: ForwardRequest) -> list[Outputs]:
        import torch

        with torch.no_grad(), ExitStack() as stack:
            for module in self.chunks:
                stack.enter_context(adapters.disable(module, disabled=not request.adapter))
            return self._run(micro_batches, request, None)

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss, request: ForwardRequest) -> None:
        self._run(micro_batches, request, loss)

    def _run(self, micro_batches: Sequence[MicroBatch], request: ForwardRequest, loss: Loss | None) -> list[Outputs]:
        """Run all micro-batches by Megatron's schedule.

        Without a `loss`, run forward passes and return their outputs. With a `loss`, run forward and backward passes
        and return an empty list.
        """
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        number = len(micro_batches)
        if not number:
            return []

        def forward(numbers: Iterator[int], module: Any) -> tuple[torch.Tensor, Any]:
            i = next(numbers)
            micro_batch = micro_batches[i]
            # tp ranks must share the nodes evenly.
            whole = prefix_tree.build_tree(micro_batch, request.dropout)
            tree, known = self.context.share(whole, micro_batch, self.layout.tp)
            tree = tree.with_kernels(self.kernels).to(self.place)
            for router in self._routers:
                router.records = request.routes
            with module.forward_context():
                hidden = module(tree)

            def finish(hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
                gathered = self.context.gather_outputs(self._outputs(module, hidden, known, request), tree)
                if request.routes:
                    routes = torch.stack([router.take_recorded() for router in self._routers], 1)
                    gathered = gathered._replace(routes=self.context.gather_routes(routes, whole).cpu())
                # Megatron divides by the number of micro-batches.
                return gathered if loss is None else (loss(gathered, i) * number, {})

            return hidden, finish

        with self._megatron_context():
            vpp = self.layout.vpp if self.layout.vpp > 1 else None
            outputs: list[Outputs] = get_forward_backward_func(self.layout.pp, vpp)(
                forward_step_func=forward,
                data_iterator=[iter(range(number)) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=number,
                seq_length=self.layout.tp,  # unused: each message has its own length
                micro_batch_size=1,
                forward_only=loss is None,
                collect_non_loss_data=loss is None,
                p2p_communicator=P2PCommunicator(self.groups.pp, self.config) if self.layout.pp > 1 else None,
                pg_collection=self.groups,
            )
            chunk.release_buffers(self.chunks)
        return outputs if loss is None and self.last else []

    def _outputs(self, module: Any, hidden: torch.Tensor, micro_batch: MicroBatch, request: ForwardRequest) -> Outputs:
        import torch

        if self.model.scores:
            return Outputs(values=torch.nn.functional.linear(hidden, module.head).float()[:, 0])
        columns = micro_batch.to(self.place, non_blocking=True)
        stop = min(self.model.vocabulary, module.head_first + module.head.shape[0])
        rows = max(0, stop - module.head_first)
        weight = module.head if rows == len(module.head) else module.head[:rows]  # without padding
        group = self.groups.tp if self.layout.tp > 1 else None
        part = HeadPart(weight, first=module.head_first, group=group)
        return policy_head.compute_outputs(hidden, part, columns, request)

    def step(self, request: StepRequest) -> float:
        assert self._optimizer is not None
        gradients = []
        trained = [i for i, tensor in enumerate(self.model.weights) if tensor.is_trained]
        remaining = Counter(member for i in trained for member in self._pieces[i][0])
        for i in trained:
            parameters, _ = self._pieces[i]
            gradients.append(self._read_gradient(i))
            remaining.subtract(parameters)
            for parameter in parameters:
                if not remaining[parameter]:  # the gradient is freed as soon as all its shards are copied
                    self._gradients.take(parameter)
        for module in self.chunks:
            module.zero_grad(set_to_none=True)
        for experts, ranks, group in (
            (False, self.layout.tp, self.groups.tp),  # such as a norm, which sees a part of the tokens
            (True, self.layout.etp, self.groups.expt_tp),
        ):
            pairs = zip(gradients, self.model.trained, strict=True)
            copied = [gradient for gradient, tensor in pairs if is_copied(tensor) and tensor.experts is experts]
            if ranks > 1:
                add_up([gradient for gradient in copied if gradient.numel()], group)
        return self._optimizer.step(gradients, request)

    def _read_gradient(self, i: int) -> torch.Tensor:
        """Return the gradient of the i-th shard.

        The gradient of a norm covers only this rank's own tokens. The method `step` sums the gradients of norms over
        tp.
        """
        import torch
        from torch import distributed as dist

        tensor = self.model.weights[i]
        piece = self._shards[i]
        parameters, where = self._pieces[i]
        gradients = [self._gradients.read(parameter) for parameter in parameters]
        if not tensor.experts and gradients and gradients[0] is not None:
            gradient: torch.Tensor = gradients[0][where]  # a view
        else:
            gradient = torch.zeros(piece.tensor.shape, dtype=self._gradient_dtype, device=self.place)
            for expert, expert_gradient in enumerate(gradients):
                if expert_gradient is not None:
                    gradient[expert].copy_(expert_gradient[where])
        if tensor.tied and self.layout.pp > 1 and (self.first or self.last):
            dist.all_reduce(gradient, group=self.groups.embd)
        return gradient

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


def _groups(devices: Devices, layout: Layout, has_experts: bool) -> Any:
    """Create a layout's process groups; return Megatron's ProcessGroupCollection."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch import distributed as dist

    def new_group(ranks: list[int]) -> Any:
        return dist.new_group(ranks, use_local_synchronization=True)

    alone = new_group([dist.get_rank()])
    groups = ProcessGroupCollection()
    meshes = {name: devices.axis(name) for name in ("tp", "pp", "dp") if getattr(layout, name) > 1}
    for name in ("tp", "cp", "pp", "dp"):
        setattr(groups, name, meshes[name].get_group() if name in meshes else alone)
    groups.dp_cp = groups.dp
    groups.pos_embd = None
    groups.embd = None
    # Groups of experts: name, the axes on which a group's ranks have the same coordinate, size. Experts have a mesh of
    # their own.
    for name, shared_axes, size in (
        ("ep", ("etp", "edp"), layout.ep),
        ("expt_tp", ("ep", "edp"), layout.etp),
        ("tp_ep", ("edp",), layout.ep * layout.etp),
        ("expt_dp", ("ep", "etp"), layout.edp),
        ("tp_cp", ("dp",), layout.tp * layout.cp),
        ("tp_dp_cp", (), layout.stage_devices),
    ):
        setattr(groups, name, devices.make_group(layout, "pp", *shared_axes) if has_experts and size > 1 else alone)
    if layout.pp > 1:
        stages = meshes["pp"].mesh.tolist()
        # All ranks must create the same number of groups, because torch names the next one by their number.
        ends = dist.get_rank() in (stages[0], stages[-1])
        ends_group = new_group([stages[0], stages[-1]] if ends else [dist.get_rank()])
        groups.embd = ends_group if ends else None
    return groups


def _prepare() -> None:
    """Set up the global state that Megatron's layers expect.

    The layers expect a gather buffer, and random states that they never use.
    """
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine the router uses a name that does not exist, and latent attention uses layers of
    # Transformer Engine.
    vars(moe_utils).setdefault("te_general_gemm", None)
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker = get_cuda_rng_tracker()
    if "model-parallel-rng" not in tracker.get_states():
        tracker.add("model-parallel-rng", 0)


def _get_model_type() -> Any:
    from megatron.core.enums import ModelType

    return ModelType.encoder_or_decoder


def _locate_pieces(chunks: Sequence[Any], shards: Sequence[Shard]) -> list[tuple[list[Any], slice]]:
    """Return, for each shard, the parameters and the rows that store the shard.

    A shard of a dense weight is stored in one parameter. A shard of experts is stored in one parameter per expert. The
    rows are the same slice in each of these parameters. A shard that is in no chunk has no parameters.
    """
    parameters_by_storage: dict[int, list[Any]] = {}
    for parameter in (parameter for module in chunks for parameter in module.parameters()):
        parameters_by_storage.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    pieces: list[tuple[list[Any], slice]] = []
    for piece in shards:
        parameters = parameters_by_storage.get(piece.tensor.untyped_storage()._cdata, [])
        if not parameters:
            pieces.append(([], slice(0, 0)))
            continue
        row = parameters[0].shape[1:].numel()  # the parameter may have no rows
        begin = piece.tensor.storage_offset() // row
        rows = piece.tensor.shape[-2 if piece.tensor.ndim > 2 else 0]
        pieces.append((parameters, slice(begin, begin + rows)))
    return pieces
