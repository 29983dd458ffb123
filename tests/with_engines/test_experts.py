"""What real engines hold of a mixture's experts on each rank is what the plan says of their layouts."""

import json

import engines
import pytest
import ranks
from mixture import mixture

from msrl_graph.backends import ENGINES
from msrl_graph.backends.expert_placement import ExpertPlacement
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.ir.workload import Workload
from msrl_graph.model import models
from msrl_graph.sharding.layout import Layout, Side, elements, shard


def planned(engine, layout, model, rank):
    """Elements of experts that the plan gives a rank."""
    spread: ExpertPlacement = ENGINES[engine].sharding.spread
    layout = spread.settle_etp(layout, model)
    assert spread.has(layout)
    return sum(elements(shard(t, Side(layout), rank)) for t in model.tensors if t.experts)


def _vllm(rank, _, layout, model):
    """vLLM as the engine makes it."""
    from msrl_graph.backends.devices import Devices, TorchDevice
    from msrl_graph.backends.vllm import core as vllm_core

    work = Workload(model, layout, model.dtype, rows=2, prompts=2, prompt=8, response=8, samples=2, on_host=True)
    devices = Devices(TorchDevice(), rank, engines.mesh(layout))
    replica = vllm_core.Replica(devices)
    with replica.as_world():
        core = vllm_core.build_core(model, work, devices, replica.group, vllm_core.TokenSampler())
        runner = core.model_executor.driver_worker.worker.model_runner
    named = dict(runner.model.named_parameters())
    held = {n: p for n, p in named.items() if n.endswith(("w13_weight", "w2_weight"))}
    assert len(held) == 2 * model.layers
    found = {n: tuple(p.shape) for n, p in held.items()}
    assert sum(p.numel() for p in held.values()) == planned("vllm", layout, model, rank), found
    number = model.expert_mlp.number // layout.ep
    assert {p.shape[0] for p in held.values()} == {number}, "whole experts, or parts of all"


@pytest.mark.parametrize("layout", [Layout(tp=2, etp=0), Layout(tp=2, ep=2, etp=0)], ids=str)
def test_vllm(layout, tmp_path):
    mixture(tmp_path)
    # Its kernel for the CPU pads a rank's part of an expert to a multiple of 32.
    config = json.loads((tmp_path / "config.json").read_text()) | {"moe_intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ranks.run(2, _vllm, layout, models.load(str(tmp_path), tmp_path, None, NOWHERE))


def _megatron(rank, _, stated, model):
    """A layer of experts as Megatron-Core makes it of the sizes that are stated; of no etp, its own."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from msrl_graph.backends.megatron import cpu as megatron_cpu

    routed = model.expert_mlp
    sizes = {
        "tensor_model_parallel_size": stated.tp,
        "expert_model_parallel_size": stated.ep,
        "expert_tensor_parallel_size": stated.etp or None,
    }
    with megatron_cpu.patch_torch_cuda():
        parallel_state.initialize_model_parallel(**sizes)
        try:
            config = TransformerConfig(
                **sizes,
                num_layers=model.layers,
                hidden_size=model.hidden,
                num_attention_heads=model.mixer.heads,
                num_query_groups=model.mixer.kv_heads,
                kv_channels=model.mixer.head_dim,
                ffn_hidden_size=routed.width,
                moe_ffn_hidden_size=routed.intermediate,
                num_moe_experts=routed.number,
                moe_router_topk=routed.active,
                moe_token_dispatcher_type="alltoall",
                gated_linear_unit=True,
                add_bias_linear=False,
                sequence_parallel=stated.tp > 1,
                normalization="RMSNorm",
                use_cpu_initialization=True,
                perform_initialization=False,
                bias_activation_fusion=False,
            )
            parts = get_moe_module_spec(use_te=False, num_experts=routed.number, moe_grouped_gemm=False).submodules
            layer = MoELayer(config, parts, layer_number=1)
            first = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
        finally:
            parallel_state.destroy_model_parallel()
    held = {n: p.numel() for n, p in layer.named_parameters() if "local_experts" in n}
    assert model.layers * sum(held.values()) == planned("megatron", stated, model, rank)
    layout = ENGINES["megatron"].sharding.spread.settle_etp(stated, model)
    at = layout.coordinates(rank)
    assert (at.ep, at.etp) == first, "the ranks of the mesh, as Megatron numbers them"


@pytest.mark.parametrize(
    "stated",
    [
        Layout(tp=2, etp=0),
        Layout(tp=2, dp=2, ep=2, etp=1),
        Layout(tp=2, dp=2, ep=2, etp=0),
        Layout(tp=2, dp=2, ep=4, etp=1),
    ],
    ids=["tp 2", "tp 2, ep 2, etp 1", "tp 2, ep 2", "tp 2, ep 4, etp 1"],
)
def test_megatron(stated, tmp_path):
    ranks.run(stated.devices, _megatron, stated, models.load(mixture(tmp_path), tmp_path, None, NOWHERE))
