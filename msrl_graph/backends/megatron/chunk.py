"""A chunk of a model: consecutive layers, built from Megatron-Core's modules.

A pipeline stage has one chunk, or several chunks if stages interleave.

Invariant: one parameter of a layer contains the projections to queries, keys and values. Another parameter contains the
projections to gate and up. In such a parameter, each box that msrl_graph transfers (one index range per dimension of a
weight) is one range of rows. Megatron itself would order the rows by groups of query heads that share a key-value head.
A box would then be cut into one range of rows per group. A micro-batch is passed as the nodes of a prefix tree
(prefix_tree.py), [nodes, 1, hidden], so that no padding is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...model.architecture import EMBEDDING
from ...model.layers import MultiHeadLatentAttention
from ...sharding.layout import elements
from ...sharding.tensors import Box
from .. import prefix_tree
from ..engine_protocols import Shard
from ..hf_modules import DTYPES
from . import latent_attention, stage_adapters, stage_recompute, weight_names
from .chunk_spec import ChunkSpec

if TYPE_CHECKING:
    import torch

LAST_NORM = "model.norm.weight"


class Nodes:
    """The prefix tree and the rotary angles of a micro-batch, for attention.

    Megatron passes this object to its attention modules as `packed_seq_params`.
    """

    qkv_format = "nodes"

    def __init__(self, tree: prefix_tree.Tree, angles: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.tree = tree
        self.angles = angles


def build_stage(spec: ChunkSpec) -> Any:
    """Build the module of a chunk, whose parameters have no values yet.

    The embedding's row for the padding token gets no gradient from the embedding lookup.
    """
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = spec.model
    hf_model = spec.hf_model
    config = spec.config
    tp = spec.groups.tp
    mixer = model.mixer
    size = mixer.head_dim
    latent = mixer if isinstance(mixer, MultiHeadLatentAttention) else None
    scale = spec.hf_attention.scaling
    recomputes = config.recompute_granularity is not None and model.first_trained < spec.layers.stop

    class ChunkNorm(torch.nn.RMSNorm):
        """An RMSNorm for layers with sequence parallelism.

        Megatron's own norm rejects sequence parallelism. engine.py sums the gradients of norms over tp.
        """

        def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
            super().__init__(hidden_size, eps, dtype=config.params_dtype, device=spec.place)

    class RecomputedInput(torch.autograd.Function):
        """The input of a recomputed layer, as a part of the autograd graph.

        If the embedding is frozen, its output is not part of the graph, and Megatron would compute no gradients of a
        recomputed layer.
        """

        @staticmethod
        def forward(_: Any, states: torch.Tensor, _anchor: torch.Tensor) -> torch.Tensor:
            return states.view_as(states)

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient, None

    class Attend(torch.nn.Module):
        """Causal attention over the rows of a prefix tree.

        The rotary angles of a node depend on the node's depth in the tree.
        """

        def __init__(self, **_: Any) -> None:
            super().__init__()

        def forward(self, *states: Any, packed_seq_params: Nodes, **_: Any) -> torch.Tensor:
            tree = packed_seq_params.tree
            cosines, sines = packed_seq_params.angles
            q, k, v = (state[:, 0].transpose(0, 1)[None] for state in states[:3])  # [1, heads, nodes, size]
            if latent is None:  # latent attention rotates a part of each head itself
                q, k = apply_rotary_pos_emb(q, k, cosines, sines)
            out, _none = prefix_tree.attend(self, q, k, v, None, prefixes=tree, scaling=scale)
            return out[0].flatten(1)[:, None]

    class TreeAttention(SelfAttention):  # type: ignore[misc]
        def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
            qkv, _none = self.linear_qkv(hidden_states)
            heads = self.num_attention_heads_per_partition
            groups = self.num_query_groups_per_partition
            parts = torch.split(qkv, [heads * size, groups * size, groups * size], dim=-1)
            q, k, v = (part.reshape(*part.shape[:-1], -1, size) for part in parts)
            return (
                q if self.q_layernorm is None else self.q_layernorm(q),
                k if self.k_layernorm is None else self.k_layernorm(k),
                v,
            )

    class Stage(MegatronModule):  # type: ignore[misc]
        table: torch.Tensor  # set by `make_shards` where the embedding is, as is table_first
        table_first: int

        def __init__(self) -> None:
            super().__init__(config=config)
            experts = model.expert_mlp
            specs = {has_experts: self._layer(has_experts) for has_experts in (False, True)[: 2 if experts else 1]}
            layer_specs = [specs[number in model.expert_layers] for number in spec.layers]
            block = TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=ChunkNorm)
            self.decoder = TransformerBlock(
                config, block, pre_process=spec.first, post_process=spec.last, pg_collection=spec.groups
            )
            for part in self.decoder.modules():
                if hasattr(part, "token_dispatcher"):
                    part.register_forward_hook(stage_recompute.drop_router_weights)
            self.rotary = hf_model.model.rotary_emb.to(spec.place)
            for layer, number in zip(self.decoder.layers, spec.layers, strict=True):
                if experts is not None and experts.corrected and number in model.expert_layers:
                    router = layer.mlp.router
                    router.expert_bias.copy_(hf_model.model.layers[number].mlp.gate.e_score_correction_bias)
                    # Megatron would count tokens here, to update the bias; runs do not update the bias.
                    router._apply_expert_bias = lambda *_, **__: None

        def _layer(self, experts: bool) -> Any:
            """Return Megatron's spec of a layer.

            If `experts` is true, the layer has experts; otherwise the layer is dense.
            """
            layer = get_gpt_layer_local_spec(
                num_experts=config.num_moe_experts if experts else None,
                moe_grouped_gemm=False,
                qk_layernorm=config.qk_layernorm,
                multi_latent_attention=latent is not None,
                normalization="RMSNorm",
            )
            parts = layer.submodules
            attention = layer.submodules.self_attention
            parts.input_layernorm = parts.pre_mlp_layernorm = ChunkNorm
            attention.submodules.core_attention = Attend
            if latent is not None:
                latent_attention.specify(attention, latent, spec, ChunkNorm)
                return layer
            attention.module = TreeAttention
            if config.qk_layernorm:
                attention.submodules.q_layernorm = attention.submodules.k_layernorm = ChunkNorm
            return layer

        def set_input_tensor(self, tensors: list[torch.Tensor]) -> None:
            self.decoder.set_input_tensor(tensors[0])

        def forward(self, tree: prefix_tree.Tree) -> torch.Tensor:
            """Return hidden states for the nodes of a micro-batch's prefix tree.

            On the last pipeline stage, the result has only the nodes whose hidden states are needed to compute outputs
            (`Tree.before`). On every other stage, the result has all nodes.
            """
            hidden = self.look_up(tree.ids)[:, None] if spec.first else None
            if hidden is not None and recomputes and torch.is_grad_enabled():
                anchor = torch.empty(0, device=spec.place, requires_grad=True)
                hidden = RecomputedInput.apply(hidden, anchor)  # type: ignore[no-untyped-call]
            cosines, sines = self.rotary(tree.ids.new_zeros(1, dtype=config.params_dtype), tree.depth[None])
            output: torch.Tensor = self.decoder(
                hidden, attention_mask=None, packed_seq_params=Nodes(tree, (cosines, sines))
            )
            if not spec.last:
                return output
            if config.sequence_parallel:
                # Each rank has the whole gradient of a score head, and its own part of the logits' gradient.
                output = mappings.gather_from_sequence_parallel_region(output, not model.scores, group=tp)
            return output[:, 0].index_select(0, tree.before)

        def look_up(self, ids: torch.Tensor) -> torch.Tensor:
            local = ids - self.table_first
            outside = (local < 0) | (local >= self.table.shape[0])
            if len(self.table):
                padding = hf_model.model.embed_tokens.padding_idx
                own = padding is not None and 0 <= padding - self.table_first < len(self.table)
                padding = padding - self.table_first if own else None
                embeddings = torch.nn.functional.embedding(local.masked_fill(outside, 0), self.table, padding)
                embeddings = embeddings.masked_fill(outside[:, None], 0.0)
            else:  # a short vocabulary is on the first ranks only; backward must be the same on all
                embeddings = self.table.new_zeros(len(ids), self.table.shape[1]) + self.table.sum()
            if config.sequence_parallel:
                embeddings = mappings.reduce_scatter_to_sequence_parallel_region(embeddings, group=tp)
            return embeddings

    return Stage()


def release_buffers(chunks: Sequence[Any]) -> None:
    """Release the inputs that stages last received, and Megatron's gather buffer.

    Until the engine's next pass, other computations can use this memory.
    """
    from megatron.core.parallel_state import get_global_memory_buffer

    get_global_memory_buffer().buffer.clear()
    for module in chunks:
        module.set_input_tensor([None])


def make_shards(chunks: list[tuple[Any, ChunkSpec]], boxes: dict[str, Box]) -> Iterator[Shard]:
    """Yield this rank's shard of each weight, as a view of the chunks' parameters.

    The shards have the order of the model's weights. The parameters of the embedding and the head are created by this
    function. A weight that belongs to none of this rank's chunks gets an empty shard.
    """
    import torch

    first = chunks[0][1]
    model = first.model
    make = {"dtype": getattr(torch, DTYPES[model.dtype]), "device": first.place}
    sizes = {name: [stop - start for start, stop in box] for name, box in boxes.items()}
    tensors: dict[str, torch.Tensor] = {}
    names_of = weight_names.list_names(model)
    for module, spec in chunks:
        named = dict(module.decoder.named_parameters())
        for layer, number in enumerate(spec.layers):
            for theirs, ours in names_of.items():
                for kind in ("weight", "bias"):
                    parameter = named.pop(f"layers.{layer}.{theirs}.{kind}", None)
                    begin = 0
                    for name in (f"model.layers.{number}.{own}.{kind}" for own in ours if parameter is not None):
                        tensors[name] = parameter.detach()[begin : begin + sizes[name][0]]
                        begin += sizes[name][0]
                for matrix, name in stage_adapters.list_matrices(theirs, ours):
                    if (parameter := named.pop(f"layers.{layer}.{matrix}", None)) is not None:
                        tensors[f"model.layers.{number}.{name}"] = parameter.detach()
            for theirs, ours in weight_names.EXPERTS.items() if number in model.expert_layers else ():
                owner = f"layers.{layer}.mlp.experts.local_experts"
                own_experts = [f"model.layers.{number}.mlp.experts.*.{own}" for own in ours]
                names = [f"{name}.weight" for name in own_experts]
                parts = torch.split(
                    _stack_experts(named, owner, f"{theirs}.weight"), [sizes[name][1] for name in names], 1
                )
                tensors |= dict(zip(names, parts, strict=True))
                for matrix, name in stage_adapters.list_matrices(theirs, own_experts):
                    if name in sizes:
                        tensors[name] = _stack_experts(named, owner, matrix)
        if (norm := named.pop("final_layernorm.weight", None)) is not None:
            tensors[LAST_NORM] = norm.detach()
        if named:
            raise ValueError(f"Megatron has a weight that the model lacks: {min(named)}")
    ends = [(EMBEDDING, 0, first.first), (model.head.name, -1, chunks[-1][1].last)]
    for name, chunk_index, is_here in ends:
        if is_here:
            module = chunks[chunk_index][0]
            if name not in tensors:
                tensors[name] = torch.zeros(sizes[name], **make)
                module.register_parameter("table" if chunk_index == 0 else "head", torch.nn.Parameter(tensors[name]))
            elif chunk_index:
                module.head = chunks[0][0].table
            setattr(module, "table_first" if chunk_index == 0 else "head_first", boxes[name][0][0])
    for name, box in boxes.items():
        if name not in tensors and elements(box):
            raise ValueError(f"Megatron does not support the weight {name}")
        if name in tensors and list(tensors[name].shape) != sizes[name]:
            raise ValueError(f"Megatron has the weight {name} in another shape: {list(tensors[name].shape)}")
        yield Shard(name, box, tensors[name] if name in tensors else torch.empty(sizes[name], **make))


def _stack_experts(named: dict[str, Any], owner: str, leaf: str) -> torch.Tensor:
    """Stack the weights of a layer's experts into one tensor [experts, rows, columns].

    `named` has the parameters of a chunk by name; `{owner}.{i}.{leaf}` is the weight of expert i. The experts'
    parameters become views of the stacked tensor, and are removed from `named`.
    """
    import torch

    own: list[torch.Tensor] = []
    while (expert_weight := named.pop(f"{owner}.{len(own)}.{leaf}", None)) is not None:
        own.append(expert_weight)
    stacked = torch.stack([weight.detach() for weight in own])
    for parameter, part in zip(own, stacked, strict=True):
        parameter.data = part
    return stacked
