"""Training and inference by Megatron-Core in the rank's own process (with MindSpeed on Ascend).

Invariant: layers, their tensor and pipeline parallelism and the schedule are Megatron's; embedding, head, loss and
optimizer are the project's, so that a program's terms see what they see by any engine and weights step by the same
rules (optimizer/steps.py: ZeRO 1 is what Megatron calls the distributed optimizer). Weights at rest are whole in each
data-parallel replica. More ranks than key-value heads are left out: Megatron then cuts within a group's heads.

On npu it has never run: none was at hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...ir.optimizer_spec import OptimizerSpec
from ...model.architecture import copied
from ...sharding.layout import shard
from .. import expert_placement, hf_modules, prefix_tree, vocab_parallel
from ..activations import Activations
from ..context_parallel import ContextGroup
from ..optimizer.gradients import Gradients, add_up
from ..optimizer.steps import Steps, calls
from ..spec import Act, EngineSpec, ForwardRequest, Loss, MicroBatch, OperatorCalls, Outputs, Shard, Weights, offloads
from . import chunk, cpu, latent_attention, peaks

if TYPE_CHECKING:
    import torch

    from ...ir.graph import Node
    from ...ir.plan import Placement
    from ...model.architecture import Model
    from ...sharding.layout import Layout
    from ..devices import Devices


# What a pass takes of Python beside its operators, in operators that take as long: of forward passes alone Megatron's
# modules and schedule, of an update those of both its passes. By processor time of models of 2 and 6 layers on two
# tokens, an operator being that of probes.launch.
PYTHON = {"infer": OperatorCalls(21, 90), "update": OperatorCalls(37, 176), "step": OperatorCalls(0, 0)}


def _calls(act: Act, layout: Layout) -> OperatorCalls:
    """Counted by torch's profiler on Qwen2 models of 2 and 6 layers, and what Python takes beside."""
    if act == "step":
        return calls(layout)
    found, python = (
        (OperatorCalls(198, 151), PYTHON["update"]) if act == "update" else (OperatorCalls(78, 96), PYTHON["infer"])
    )
    if layout.tp > 1:  # sequence parallelism, and the vocabulary's parts
        found = OperatorCalls(268, 183) if act == "update" else OperatorCalls(102, 114)
    return OperatorCalls(found.layer + python.layer, found.rest + python.rest)


SPEC = EngineSpec(
    name="megatron",
    verbs=("infer", "update"),
    axes=("tp", "cp", "pp", "dp", "ep", "etp", "vpp"),
    build="msrl_graph.backends.megatron.engine:MegatronEngine",
    options=("micro_batch", "recompute", "dtype", "offload", "activations"),
    zero=(0, 1),
    spread=expert_placement.MEGATRON,
    vocabulary_multiple=peaks.PADDED,
    families=("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"),
    needs=("megatron-core",),
    groups=lambda layout: (layout.pp > 1) + 2 * (layout.ep > 1) + (layout.etp > 1),  # of ends, of experts, and of both
    divides_sequence=True,
    peaks=peaks.moments,
    stored=peaks.stored,
    chosen=("device",),
    calls=_calls,
    fused=("device",),
    shares_beginnings=("host",),  # on devices, where it has not run, plans count rows as they come
)


class MegatronEngine:
    """A model on this rank: one chunk of its layers, or with interleaved stages several."""

    def __init__(self, weights: Weights, placement: Placement, devices: Devices) -> None:
        import torch

        self.model = weights.model
        self.layout = placement.layout
        self.devices = devices
        model = self.model
        layout = self.layout
        self.place = devices.device.place
        self.context = ContextGroup.of(layout, devices)
        at = layout.coordinates(devices.rank)
        self.first = at.pp == 0
        self.last = at.pp == layout.pp - 1
        stretches = [range(*s) for s in layout.stage_layers(at.pp, model.layers)]
        whole = hf_modules.empty(model)
        if devices.device.kind.plugin:
            # Before anything of Megatron is imported: it puts others in the place of its functions.
            import_module("mindspeed.megatron_adaptor")
        with self._megatron():
            self.groups = _groups(devices, layout, model.experts is not None)
            _prepare()
            # What the schedule knows of the model: how many stages, and that they hand on what has any length. The
            # layers of each it need not know.
            self.config = _config(
                model,
                layout,
                whole.config,
                layout.pp * layout.vpp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                pipeline_dtype=getattr(torch, hf_modules.DTYPES[model.dtype]),
                variable_seq_lengths=True,
            )
            self.chunks = []
            for i, layers in enumerate(stretches):
                first = self.first and i == 0
                last = self.last and i == len(stretches) - 1
                config = _config(
                    model, layout, whole.config, len(layers), placement.engine.options.get("recompute") == "full"
                )
                module = chunk.stage(model, config, whole, layers, first, last, self.groups, self.place)
                module.config = self.config
                module.model_type = _kind()
                module.vp_stage = i if layout.vpp > 1 else None
                away = weights.optimizer is not None and placement.engine.options.get("activations") == "offload"
                module.passing = Activations(devices.device, module.decoder.layers).kept_away if away else nullcontext
                self.chunks.append(module)
        boxes = {t.name: shard(t, SPEC.side(layout), devices.rank) for t in model.tensors}
        pairs = list(zip(self.chunks, stretches, strict=True))
        self._shards = list(chunk.views(pairs, boxes, self.first, self.last, model, self.place))
        hf_modules.fill(model, self._shards)
        self._rules = weights.optimizer
        self._optimizer = None
        self._pieces = _pieces(self.chunks, self._shards)
        for module in self.chunks:
            module.requires_grad_(weights.optimizer is not None)
        if weights.optimizer is not None:
            self._gradients = Gradients(p for module in self.chunks for p in module.parameters())
            away = offloads(placement, "optimizer")
            self._optimizer = Steps(weights.optimizer, model.tensors, self._shards, layout, devices, False, away)

    @contextmanager
    def _megatron(self) -> Iterator[None]:
        """Where Megatron's code runs."""
        with ExitStack() as stack:
            if self.devices.device.kind.is_host:
                stack.enter_context(cpu.answering())
                if self.layout.pp > 1:
                    for patch in cpu.stages_apart():
                        stack.enter_context(patch)
            yield

    def shards(self) -> list[Shard]:
        return self._shards

    def score(self, micro_batches: Sequence[MicroBatch], asked: ForwardRequest) -> list[Outputs]:
        import torch

        with torch.no_grad():
            return self._run(micro_batches, asked, None)

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss, asked: ForwardRequest) -> None:
        self._run(micro_batches, asked, loss)

    def _run(self, micro_batches: Sequence[MicroBatch], asked: ForwardRequest, loss: Loss | None) -> list[Outputs]:
        """Passes all micro-batches through, by Megatron's schedule."""
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        number = len(micro_batches)
        if not number:
            return []

        def forward(numbers: Iterator[int], module: Any) -> tuple[torch.Tensor, Any]:
            i = next(numbers)
            micro_batch = micro_batches[i]
            # As many nodes as tensor-parallel ranks can share evenly.
            tree, known = self.context.share(prefix_tree.tree(micro_batch), micro_batch, self.layout.tp)
            tree = tree.to(self.place)
            with module.passing():
                hidden = module(tree)

            def finish(hidden: torch.Tensor, non_loss_data: bool = False) -> Any:
                made = self.context.gather_outputs(self._outputs(module, hidden, known, asked), tree)
                # Megatron divides by the number of micro-batches.
                return made if loss is None else (loss(made, i) * number, {})

            return hidden, finish

        with self._megatron():
            vpp = self.layout.vpp if self.layout.vpp > 1 else None
            found: list[Outputs] = get_forward_backward_func(self.layout.pp, vpp)(
                forward_step_func=forward,
                data_iterator=[iter(range(number)) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=number,
                seq_length=self.layout.tp,  # whatever a micro-batch has: lengths are told with each message
                micro_batch_size=1,
                forward_only=loss is None,
                collect_non_loss_data=loss is None,
                p2p_communicator=P2PCommunicator(self.groups.pp, self.config) if self.layout.pp > 1 else None,
                pg_collection=self.groups,
            )
            chunk.forget(self.chunks)
        return found if loss is None and self.last else []

    def _outputs(self, module: Any, hidden: torch.Tensor, micro_batch: MicroBatch, asked: ForwardRequest) -> Outputs:
        import torch

        if self.model.scores:
            return Outputs(values=torch.nn.functional.linear(hidden, module.head).float()[:, 0])
        here = micro_batch.to(self.place, non_blocking=True)
        stop = min(self.model.vocabulary, module.head_first + module.head.shape[0])
        logits = torch.nn.functional.linear(hidden, module.head).float()[:, : max(0, stop - module.head_first)]
        logits = logits / here.get("temperature", asked.temperature)
        group = self.groups.tp if self.layout.tp > 1 else None
        return vocab_parallel.outputs(logits, module.head_first, here["token"], here.get("given", None), asked, group)

    def step(
        self,
        lr: float,
        clip_grad: float,
        sound: bool = True,
        optimizer: OptimizerSpec | None = None,
        node: Node | None = None,
    ) -> float:
        assert self._optimizer is not None and self._rules is not None
        gradients = []
        left = Counter(p for parameters, _ in self._pieces for p in parameters)
        for i, (parameters, _) in enumerate(self._pieces):
            gradients.append(self._gradient(i))
            left.subtract(parameters)
            for parameter in parameters:
                if not left[parameter]:  # what was copied of it goes at once
                    self._gradients.take(parameter)
        for module in self.chunks:
            module.zero_grad(set_to_none=True)
        if self.layout.tp > 1:  # a norm sees a part of the tokens
            every = zip(gradients, self.model.tensors, strict=True)
            add_up([g for g, t in every if copied(t) and g.numel()], self.groups.tp)
        return self._optimizer.step(gradients, lr, clip_grad, sound, optimizer or self._rules)

    def _gradient(self, i: int) -> torch.Tensor:
        """Of the i-th shard, or of a norm's what this rank's tokens make of it."""
        import torch
        from torch import distributed as dist

        tensor = self.model.tensors[i]
        piece = self._shards[i]
        parameters, where = self._pieces[i]
        made = [self._gradients.read(p) for p in parameters]
        if not tensor.experts and made and made[0] is not None:
            found: torch.Tensor = made[0][where]  # where it lies
        else:
            found = torch.zeros(piece.tensor.shape, device=self.place)
            for expert, whole in enumerate(made):
                if whole is not None:
                    found[expert].copy_(whole[where])
        if tensor.tied and self.layout.pp > 1 and (self.first or self.last):
            dist.all_reduce(found, group=self.groups.embd)
        return found

    def moments(self) -> dict[str, list[Shard]]:
        return {} if self._optimizer is None else self._optimizer.moments()

    def restore(self, moments: dict[str, dict[str, torch.Tensor]], steps: int) -> None:
        assert self._optimizer is not None
        self._optimizer.restore(moments, steps)


def _groups(devices: Devices, layout: Layout, has_experts: bool) -> Any:
    """The plan's groups as Megatron takes them."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch import distributed as dist

    def of(ranks: list[int]) -> Any:
        return dist.new_group(ranks, use_local_synchronization=True)

    alone = of([dist.get_rank()])
    groups = ProcessGroupCollection()
    found = {name: devices.axis(name) for name in ("tp", "pp", "dp") if getattr(layout, name) > 1}
    for name in ("tp", "cp", "pp", "dp"):
        setattr(groups, name, found[name].get_group() if name in found else alone)
    groups.dp_cp = groups.dp
    groups.pos_embd = None
    groups.embd = None
    # Of experts, by the axes on which a group's ranks stand alike: they lie in a mesh of their own.
    for name, alike, size in (
        ("ep", ("etp", "edp"), layout.ep),
        ("expt_tp", ("ep", "edp"), layout.etp),
        ("tp_ep", ("edp",), layout.ep * layout.etp),
        ("expt_dp", ("ep", "etp"), layout.edp),
        ("tp_cp", ("dp",), layout.tp * layout.cp),
        ("tp_dp_cp", (), layout.stage_devices),
    ):
        setattr(groups, name, devices.among(layout, "pp", *alike) if has_experts and size > 1 else alone)
    if layout.pp > 1:
        stages = found["pp"].mesh.tolist()
        # All ranks make as many groups, by whose number torch names the next one.
        ends = dist.get_rank() in (stages[0], stages[-1])
        made = of([stages[0], stages[-1]] if ends else [dist.get_rank()])
        groups.embd = made if ends else None
    return groups


def _config(model: Model, layout: Layout, stated: Any, layers: int, recompute: bool = False, **more: Any) -> Any:
    """So many layers, as a model of their own; `stated` is the whole model's config as transformers has it."""
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from transformers.activations import ACT2FN

    if model.latent:
        more |= latent_attention.sizes(model.latent)
    if found := model.experts:
        more |= {
            "num_moe_experts": found.number,
            "moe_router_topk": found.active,
            "moe_ffn_hidden_size": found.intermediate,
            # Weights of a token's experts: of all experts' softmax, or of these experts' alone.
            "moe_router_pre_softmax": not stated.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "moe_shared_expert_intermediate_size": found.shared or None,
        }
        if found.corrected:
            more |= latent_attention.router(found, stated)
    dtype = getattr(torch, hf_modules.DTYPES[model.dtype])
    return (MLATransformerConfig if model.latent else TransformerConfig)(
        **more,
        num_layers=layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=stated.rms_norm_eps,
        moe_token_dispatcher_type="alltoall",  # which it asks for where lengths vary, experts or not
        activation_func=ACT2FN[stated.hidden_act],
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.norms_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        params_dtype=dtype,
        bf16=model.dtype == "bf16",
        use_cpu_initialization=False,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def _prepare() -> None:
    """What Megatron's layers find in the process: a buffer for what they gather, and the random states that they enter,
    though nothing is drawn."""
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine the router asks for a name that is not there, and latent attention asks for its layers.
    vars(moe_utils).setdefault("te_general_gemm", None)
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker = get_cuda_rng_tracker()
    if "model-parallel-rng" not in tracker.get_states():
        tracker.add("model-parallel-rng", 0)


def _kind() -> Any:
    from megatron.core.enums import ModelType

    return ModelType.encoder_or_decoder


def _pieces(chunks: Sequence[Any], shards: Sequence[Shard]) -> list[tuple[list[Any], slice]]:
    """Of each shard the parameters that it is a piece of, one or one an expert, and which rows: by where they lie in
    memory."""
    held: dict[int, list[Any]] = {}
    for parameter in (p for module in chunks for p in module.parameters() if p.numel()):
        held.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
    found: list[tuple[list[Any], slice]] = []
    for piece in shards:
        if not piece.tensor.numel() or piece.tensor.untyped_storage().data_ptr() not in held:
            found.append(([], slice(0, 0)))
            continue
        parameters = held[piece.tensor.untyped_storage().data_ptr()]
        row = parameters[0][0].numel() if parameters[0].ndim > 1 else 1
        begin = piece.tensor.storage_offset() // row
        rows = piece.tensor.shape[-2 if piece.tensor.ndim > 2 else 0]
        found.append((parameters, slice(begin, begin + rows)))
    return found
