"""Attention of rows without padding is that of the formula for each row, and is used where operators support it.

Neither a GPU nor an NPU is at hand: torch's `varlen_attn` is stood for by a function that is written from its
documentation, torch_npu's operator by tests/support/recorded_operators.py.
"""

import inspect
from collections import Counter

import packed_reference
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from recorded_operators import Operators
from sample import examples
from torch.nn.attention import varlen

from msrl_graph.backends.kernels import ScoreRule, ascend, cuda
from msrl_graph.backends.prefix_tree import PackedRows

real = varlen.varlen_attn
real_signature = inspect.signature(real)
find_varlen_attention = cuda._find_varlen_attention.__wrapped__


class RecordedVarlen:
    """Stands for `varlen_attn`: how often it is called, with what it takes."""

    def __init__(self):
        self.calls = Counter()

    def __call__(self, *args, **options):
        real_signature.bind(*args, **options)
        return self.compute(*args, **options)

    def compute(self, query, key, value, begins, key_begins, longest, key_longest, *, scale, window_size, enable_gqa):
        self.calls["varlen_attn"] += 1
        left, right = window_size
        assert query.dtype in (torch.float16, torch.bfloat16) and query.dtype == key.dtype == value.dtype
        assert query.shape[2] <= 256 and query.shape[2] % 8 == 0 and right == 0 and left >= -1
        assert enable_gqa or query.shape[1] == key.shape[1]
        assert begins.dtype == key_begins.dtype == torch.int32 and torch.equal(begins, key_begins)
        assert begins[0] == 0 and begins[-1] == len(query) == len(key)
        assert longest == key_longest == int(begins.diff().max())
        window = None if left < 0 else left + 1  # a query sees its own key and those `left` before it
        rows = PackedRows(begins, begins, begins, tuple(begins[1:].tolist()), longest)
        compute = packed_reference.attention(query, rows, ScoreRule(scale, window))
        return compute(query.float(), key.float(), value.float()).to(query.dtype)


@pytest.fixture(scope="module", autouse=True)
def recorded():
    operators = Operators()
    operators.varlen = RecordedVarlen()
    with operators.there(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_find_varlen_attention", lambda device: operators.varlen)
        yield operators


def rows_of(lengths):
    ends = torch.tensor(lengths).cumsum(0)
    begins = torch.nn.functional.pad(ends, (1, 0)).int()
    everything = torch.arange(sum(lengths))
    return PackedRows(everything, everything, begins, tuple(ends.tolist()), max(lengths))


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(
    st.sampled_from(["cuda", "ascend"]), lengths, st.integers(1, 3), st.integers(1, 3), st.none() | st.integers(1, 10)
)
@example("cuda", [1], 1, 1, 1)
@examples(60)
def test_packed_attention_is_the_formula_for_each_row(recorded, name, lengths, kv_heads, repeats, window):
    recorded.calls.clear()
    recorded.varlen.calls.clear()
    rows = rows_of(lengths)
    rule = ScoreRule(0.4, window)
    draw = torch.Generator().manual_seed(len(lengths))
    shapes = [(sum(lengths), heads, 8) for heads in (kv_heads * repeats, kv_heads, kv_heads, kv_heads * repeats)]
    *states, slope = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)
    attention = {"cuda": cuda, "ascend": ascend}[name].KERNELS.packed_attention
    compute = attention(states[0], rows, rule)
    if name == "ascend" and window is not None and window < max(lengths):
        assert compute is None  # bands of several rows are not documented
        return
    found = [x.clone().requires_grad_() for x in states]
    right = [x.double().requires_grad_() for x in states]
    out = compute(*found)
    expected = packed_reference.attention(states[0], rows, rule)(*right)
    (out * slope).sum().backward()
    (expected * slope.double()).sum().backward()
    for one, other in zip((out, *(x.grad for x in found)), (expected, *(x.grad for x in right)), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=5e-2)
    assert (recorded.varlen.calls | recorded.calls).total() == 1  # for all rows


@pytest.mark.parametrize(
    ("kernels", "query", "rule", "sinks"),
    [
        (cuda, torch.zeros(1, 1, 8), ScoreRule(1.0), None),
        (cuda, torch.zeros(1, 1, 320, dtype=torch.bfloat16), ScoreRule(1.0), None),
        (cuda, torch.zeros(1, 1, 12, dtype=torch.bfloat16), ScoreRule(1.0), None),
        (cuda, torch.zeros(1, 1, 8, dtype=torch.bfloat16), ScoreRule(1.0, cap=30.0), None),
        (cuda, torch.zeros(1, 1, 8, dtype=torch.bfloat16), ScoreRule(1.0), torch.zeros(1)),
        (ascend, torch.zeros(1, 1, 8), ScoreRule(1.0, cap=30.0), None),
        (ascend, torch.zeros(1, 1, 8), ScoreRule(1.0), torch.zeros(1)),
    ],
)
def test_what_no_operator_computes_is_left_to_blocks(kernels, query, rule, sinks):
    assert kernels.packed_attention(query, rows_of([1]), rule, sinks) is None


def test_more_rows_than_the_operator_supports_are_left_to_blocks():
    query = torch.zeros(1, 1, 8)
    most = ascend.PACKED_ROWS
    assert ascend.packed_attention(query, rows_of([1] * most), ScoreRule(1.0)) is not None
    assert ascend.packed_attention(query, rows_of([1] * (most + 1)), ScoreRule(1.0)) is None


def test_flash_attention_needs_its_devices_and_a_torch_that_has_windows(monkeypatch):
    device = torch.device("cuda", 0)
    for capability, expected in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert find_varlen_attention(device) is (real if expected else None)
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale: query)
    assert find_varlen_attention(device) is None
