"""A device's kernels give what the plain formulas give, and a model is computed by them.

Never run on an NPU: Ascend's operators are stood for by others, written from their documentation
(tests/support/recorded_operators.py).

Models get the kernels by backends/kernels/modules.py.
"""

import inspect
import json
from dataclasses import replace
from functools import partial

import engines
import numpy as np
import pytest
import torch
from contracts import FOLDER, signature, takes
from hypothesis import given
from hypothesis import strategies as st
from mixture import dense, latent, llama, mixture
from mixture_families import gpt_oss
from recorded_operators import Operators
from sample import examples

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import kernels
from msrl_graph.backends.devices import TorchDevice
from msrl_graph.backends.engine_protocols import ForwardRequest, StepRequest
from msrl_graph.backends.kernels import ascend, cuda, reference, torch_native
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.hardware.device_kinds import ASCEND, DEVICE_KINDS, HOST
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack

TABLES = {"torch's own": torch_native.KERNELS, "Ascend's": ascend.KERNELS}
# How far values may be from the formula's, by type, which is computed in float64 of the same numbers.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
table = pytest.mark.parametrize("table", TABLES)
dtypes = st.sampled_from([*CLOSE])
few = examples(25)


@pytest.fixture
def operators():
    with Operators().there() as found:
        yield found


def test_each_kind_has_its_table():
    assert {name: kernels.load(kind) for name, kind in DEVICE_KINDS.items()} == {
        "cpu": torch_native.KERNELS,
        "cuda": cuda.KERNELS,
        "ascend": ascend.KERNELS,
    }
    assert all(vars(ascend.KERNELS).values())


def agree(kernel, formula, tensors, *more):
    """Values and gradients of both, of tensors that are made of the same numbers."""
    found = []
    for function, dtype in ((kernel, None), (formula, torch.float64)):
        given = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
        out = function(*given, *more)
        slope = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        (out * slope.to(out.dtype)).sum().backward()
        found.append([out.detach(), *(x.grad for x in given)])
    for made, true in zip(*found, strict=True):
        assert made.dtype == tensors[0].dtype
        torch.testing.assert_close(made.double(), true, rtol=CLOSE[made.dtype], atol=CLOSE[made.dtype] * scale(true))


def with_sinks(function):
    return lambda q, k, v, sinks, *more: function(q, k, v, *more, sinks)


def scale(tensor):
    return max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0


def random(seed, dtype, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@table
@few
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([1, 4, 8]),
    st.none() | st.integers(1, 10),
    st.sampled_from([None, None, 0.7, 50.0]),
    st.booleans(),
    dtypes,
    st.integers(0, 99),
)
def test_attention_is_the_formula(table, rows, heads, each, width, size, window, cap, sinks, dtype, seed):
    q = random(seed, dtype, rows, width, heads * each, size).transpose(1, 2)
    k, v = (random(seed + i, dtype, rows, width, heads, size).transpose(1, 2) for i in (1, 2))
    rule = kernels.ScoreRule(0.4, window, cap)
    with Operators().there() as operators:
        if sinks:
            functions = (with_sinks(TABLES[table].attention), with_sinks(reference.attention))
            agree(*functions, (q, k, v, random(seed + 3, dtype, heads * each)), rule)
        else:
            agree(TABLES[table].attention, reference.attention, (q, k, v), rule)
    assert operators.calls == ({} if cap or sinks or table == "torch's own" else {"npu_fusion_attention": 1})


@table
@few
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 3), dtypes)
def test_grouped_products_are_the_formula(table, counts, inside, outside, dtype):
    """Also where groups have no rows, or none has."""
    inside, outside = 8 * inside, 8 * outside  # torch's own takes rows of 16 bytes
    rows = random(0, dtype, sum(counts), inside)
    weights = random(1, dtype, len(counts), outside, inside)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)

    def turned(function):
        return lambda rows, weights: function(rows, weights.transpose(1, 2), ends)

    with Operators().there() as operators:
        agree(turned(TABLES[table].grouped), turned(reference.grouped), (rows, weights))
    assert operators.calls == ({"npu_grouped_matmul": 3} if table == "Ascend's" and sum(counts) else {})


@few
@given(st.integers(1, 4), st.integers(1, 9), dtypes)
def test_norms_are_the_formula(tokens, size, dtype):
    x = random(0, dtype, 1, tokens, size)
    weight = random(1, dtype, size)
    with Operators().there():
        agree(ascend.rms_norm, reference.rms_norm, (x, weight), 1e-3)


@few
@given(st.integers(1, 4), st.integers(1, 9), dtypes)
def test_gates_are_the_formula(tokens, size, dtype):
    with Operators().there():
        agree(ascend.swiglu, reference.swiglu, (random(0, dtype, 1, tokens, 2 * size),))


@few
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), dtypes)
def test_turning_is_the_formula(nodes, heads, half, dtype):
    x = random(0, dtype, 1, heads, nodes, 2 * half)
    with Operators().there():
        for_angles = (random(1, dtype, 1, 1, nodes, 2 * half), random(2, dtype, 1, 1, nodes, 2 * half))
        agree(
            lambda x: ascend.rotary(x, *for_angles),
            lambda x: reference.rotary(x, *(a.to(x.dtype) for a in for_angles)),
            (x,),
        )


def test_what_transformers_computes_itself_are_the_formulas_too():
    from transformers.models.llama import modeling_llama as theirs
    from transformers.models.llama.configuration_llama import LlamaConfig

    norm = theirs.LlamaRMSNorm(8, 1e-3)
    torch.nn.init.normal_(norm.weight)
    x = random(0, torch.float32, 2, 3, 8)
    torch.testing.assert_close(norm(x), reference.rms_norm(x, norm.weight, 1e-3))
    feed = theirs.LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=2))
    joined = torch.cat([feed.gate_proj(x), feed.up_proj(x)], dim=-1)
    torch.testing.assert_close(feed(x), feed.down_proj(reference.swiglu(joined)))
    q = random(1, torch.float32, 1, 4, 3, 8)
    k = random(2, torch.float32, 1, 2, 3, 8)
    cos = random(3, torch.float32, 1, 3, 8)
    sin = random(4, torch.float32, 1, 3, 8)
    found = theirs.apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(found, tuple(reference.rotary(h, cos[:, None], sin[:, None]) for h in (q, k)))


# Whole models.


def asks():
    draw = np.random.default_rng(0)
    prompts = ragged([draw.integers(2, 16, n) for n in draw.integers(4, 7, 6)], np.int32)
    responses = ragged([draw.integers(2, 16, n) for n in draw.integers(1, 6, 6)], np.int32)
    return prompts, responses


def device(kernels_of):
    return TorchDevice(replace(HOST, kernels=kernels_of.kernels))


def computed(model, kind, layout=engines.ALONE, rank=0, mesh=None, per_host=0):
    """Log-probabilities, and the norm of a gradient."""
    rule = adamw(lr=0.0, weight_decay=0.0)
    engine = engines.built("fsdp", model, layout, rank, mesh, rule, device=device(kind), per_host=per_host)
    prompts, responses = asks()
    packed = pack([prompts], [responses], np.arange(6))
    with torch.no_grad():
        logp = engine.score([packed], ForwardRequest(1.0))[0].logp
    weight = torch.linspace(-1, 1, len(logp))
    engines.train(engine, packed, lambda made: (made.logp * weight).sum(), ForwardRequest(0.7))
    return logp, engine.step(StepRequest(1e-3, 1.0))


# By model: layers, layers with fused attention, RMSNorms, gates and grouped products of a forward pass. A backward pass
# has two for each of them.
MODELS = {
    llama: (2, 2, 2 * 2, 2, 0),
    dense: (4, 4, 4 * 4, 4, 0),
    mixture: (2, 2, 2 * 4, 2, 2 * 3),
    latent: (3, 3, 3 * 4, 1 + 2 * 2, 2 * 3),
    gpt_oss: (2, 0, 2 * 2, 0, 2 * 2),  # with sinks and gates that no operator has, and angles of half a head
}


@pytest.mark.parametrize("made", MODELS, ids=lambda f: f.__name__)
def test_a_model_is_computed_by_the_table_of_its_device(operators, tmp_path, made):
    model = models.load(made(tmp_path / "model"), tmp_path, None, NOWHERE)
    own, norm = computed(model, HOST)
    assert operators.calls == {}
    found, other = computed(model, ASCEND)
    torch.testing.assert_close(found, own, rtol=0, atol=1e-5)
    assert other == pytest.approx(norm, rel=1e-4) and norm > 0.1
    layers, fused, norms, gates, routed = MODELS[made]
    calls = {  # of an inference and an update
        "npu_fusion_attention": 2 * fused,
        "npu_rms_norm": 2 * (norms + 1),
        "npu_swiglu": 2 * gates,
        "npu_rotary_mul": 2 * 2 * layers,
        "npu_grouped_matmul": (1 + 3) * routed,
    }
    assert operators.calls == {name: number for name, number in calls.items() if number}


def test_another_model_of_the_process_stays_transformers(operators, tmp_path):
    model = models.load(llama(tmp_path / "model"), tmp_path, None, NOWHERE)
    computed(model, ASCEND)
    operators.calls.clear()
    computed(model, HOST)
    assert operators.calls == {}


# What stands for torch_npu.

NAMES = sorted(n for n in vars(Operators) if n.startswith("npu_"))


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_for_an_operator_takes_what_its_schema_says(name):
    held = json.loads((FOLDER / "torch_npu.json").read_text())["names"]
    line = held[held[f"torch_npu.{name}"].removeprefix("= ")]
    ours = inspect.signature(getattr(Operators(), name)).parameters.values()
    plain = [p.name for p in ours if p.kind == p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in ours if p.kind == p.KEYWORD_ONLY]
    needed = sum(p.default is p.empty for p in ours)
    assert (plain, needed, named) in [(s.plain, s.needed, [*s.named]) for s in map(signature, takes(line))]


def refused(name, *arguments, **named):
    with pytest.raises(AssertionError):
        getattr(Operators(), name)(*arguments, **named)


def test_what_an_operator_is_documented_not_to_take_is_refused():
    q = torch.randn(1, 4, 3, 8)
    k = torch.randn(1, 2, 3, 8)
    later = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    attention = partial(refused, "npu_fusion_attention", input_layout="BNSD")
    attention(q, k, k, 4, sparse_mode=3)  # without a mask it would see everything
    attention(q, k, k, 4, sparse_mode=3, atten_mask=later.T)
    attention(q, k, k, 4, sparse_mode=3, atten_mask=later[:3, :3])
    attention(q, k, k, 2, sparse_mode=3, atten_mask=later)
    attention(q, k, k[..., :4], 4, sparse_mode=3, atten_mask=later)
    attention(q, k.bfloat16(), k, 4, sparse_mode=3, atten_mask=later)
    rows = torch.randn(4, 8)
    weights = torch.randn(2, 8, 8)
    ends = torch.tensor([1, 4])
    grouped = partial(refused, "npu_grouped_matmul", split_item=2, group_type=0)
    with torch.no_grad():
        grouped([rows], [weights], group_list=ends.int())
        grouped([rows], [weights], group_list=[1, 4])
        grouped([rows], [weights], group_list=torch.tensor([1, 3]))
        grouped([torch.randn(8, 4).T], [weights], group_list=ends)
        grouped([rows[:0]], [weights], group_list=ends * 0)
        grouped([rows.T.contiguous()], [rows], group_list=ends, group_type=2)
    grouped([rows], [weights], group_list=ends)  # a gradient of its own it has none
    refused("npu_rms_norm", rows, torch.ones(8, dtype=torch.bfloat16))
    refused("npu_rotary_mul", q[0], q[0], q[0])
