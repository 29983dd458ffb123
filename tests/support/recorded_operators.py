"""torch_npu's fused operators, recorded: how often each is called, what it is documented to give, and what it is
documented to refuse. No NPU is at hand.

Invariant: the documentation in torch_npu 2.10.0.post4 says it (torch_npu/_op_plugin_docs.py, and for groups of an inner
dimension torch_npu/op_plugin/meta); parameters are those of the schemas that it registers, which test_kernels.py
compares. Written without a look at what the package calls: attention is a softmax of all scores, products are made
group by group. What has no gradient in torch_npu has none here, and a group without rows leaves what no one wrote.
"""

import sys
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from transformers.utils import is_torch_npu_available

with suppress(ImportError):  # transformers imports it, and it looks for torch_npu: not for what stands for it
    import accelerate  # noqa: F401

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
NO_LIMIT = 2147483647


def _alone():
    assert not torch.is_grad_enabled(), "this operator has no gradient: no graph is to be recorded through it"


class Operators(ModuleType):
    """Stands for the module `torch_npu`."""

    def __init__(self):
        super().__init__("torch_npu")
        self.calls = Counter()

    @contextmanager
    def there(self):
        """Within, it is what `import torch_npu` finds."""
        is_torch_npu_available()  # transformers asks once, and is not to look at what stands here
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "torch_npu", self)
            yield self

    def npu_rms_norm(self, input, gamma, epsilon=1e-06):
        self.calls["npu_rms_norm"] += 1
        assert input.dtype in FLOATS and gamma.dtype == input.dtype
        assert 2 <= input.dim() <= 8 and input.shape[-1:] == gamma.shape
        wide = input.float()
        turned = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
        return (wide * turned * gamma.float()).to(input.dtype), turned

    def npu_swiglu(self, input, dim=-1):
        self.calls["npu_swiglu"] += 1
        assert input.dtype in FLOATS and 1 <= input.dim() <= 8 and input.shape[dim] % 2 == 0
        half = input.shape[dim] // 2
        a = input.narrow(dim, 0, half)
        b = input.narrow(dim, half, half)
        return a / (1 + torch.exp(-a)) * b

    def npu_rotary_mul(self, input, r1, r2, rotary_mode="half", rotate=None):
        self.calls["npu_rotary_mul"] += 1
        assert rotary_mode == "half" and rotate is None
        assert input.dtype in FLOATS and input.dim() == r1.dim() == r2.dim() == 4
        rows, heads, nodes, size = input.shape
        assert size % 2 == 0 and size < 896 and rows < 1000 and heads < 1000
        for angle in (r1, r2):  # of BNSD: 11SD, B1SD, BNSD
            assert angle.shape[2:] == (nodes, size) and angle.shape[1] in (1, heads) and angle.shape[0] in (1, rows)
            assert not angle.requires_grad or rows * heads <= 1024
        half = size // 2
        turned = torch.cat([-input[..., half:], input[..., :half]], dim=-1)
        return r1 * input + r2 * turned

    def npu_fusion_attention(
        self,
        query,
        key,
        value,
        head_num,
        input_layout,
        pse=None,
        padding_mask=None,
        atten_mask=None,
        scale=1.0,
        keep_prob=1.0,
        pre_tockens=NO_LIMIT,
        next_tockens=NO_LIMIT,
        inner_precise=0,
        prefix=None,
        actual_seq_qlen=None,
        actual_seq_kvlen=None,
        sparse_mode=0,
        gen_mask_parallel=True,
        sync=False,
        softmax_layout="",
        sink=None,
        dropout_mask=None,
        seed=0,
        offset=0,
    ):
        if input_layout == "TND":
            ends = actual_seq_qlen
            assert isinstance(ends, list) and ends == actual_seq_kvlen and 1 <= len(ends) <= 2048
            assert sparse_mode == 3 and query.dim() == 3 and len(query) == len(key) == len(value) == ends[-1]
            outs = []
            for start, stop in pairwise([0, *ends]):
                assert start < stop
                row = (x[None, start:stop] for x in (query, key, value))
                out = self.npu_fusion_attention(
                    *row, head_num, "BSND", atten_mask=atten_mask, scale=scale, sparse_mode=sparse_mode
                )
                outs.append(out[0][0])
            self.calls["npu_fusion_attention"] -= len(ends) - 1
            return (torch.cat(outs), *out[1:])
        self.calls["npu_fusion_attention"] += 1
        assert query.dtype in FLOATS and query.dtype == key.dtype == value.dtype
        assert input_layout in ("BNSD", "BSND") and keep_prob == 1.0
        assert all(x is None for x in (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink))
        if input_layout == "BSND":
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        rows, heads, width, size = query.shape
        assert head_num == heads <= 256 and heads % key.shape[1] == 0, "wrong number of heads"
        assert key.shape == value.shape and len(key) == rows and key.shape[3] == size <= 768
        length = key.shape[2]
        at = torch.arange(width)[:, None]
        on = torch.arange(length)
        assert sparse_mode in (0, 1, 2, 3, 4)
        if atten_mask is None:
            assert sparse_mode == 0, "this mode is given no mask, and would see everything"
            masked = torch.zeros(width, length, dtype=torch.bool)
        else:
            assert atten_mask.dtype in (torch.bool, torch.uint8)
            atten_mask = atten_mask.bool()
            if sparse_mode in (2, 3, 4):
                later = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
                assert atten_mask.shape == later.shape and torch.equal(atten_mask, later), "no compressed mask"
            corner = 0 if sparse_mode in (0, 2) else length - width  # of the diagonal: left above, or right below
            ahead = on - at - corner
            if sparse_mode in (2, 3):
                masked = ahead > 0
            elif sparse_mode == 4:
                masked = (ahead > next_tockens) | (ahead < -pre_tockens)
            else:
                masked = atten_mask
                allowed = (ahead <= next_tockens) & (ahead >= -pre_tockens)
                assert sparse_mode == 1 or (masked | allowed).all(), "mask and tokens differ"
        times = heads // key.shape[1]
        key, value = (x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for x in (key, value))
        scores = torch.einsum("bnqd,bnkd->bnqk", query.float(), key.float()) * scale
        shares = scores.masked_fill(masked, -torch.inf).softmax(-1)
        out = torch.einsum("bnqk,bnkd->bnqd", shares, value.float()).to(query.dtype)
        told = torch.zeros(rows, heads, width, 8)
        return (
            out.transpose(1, 2) if input_layout == "BSND" else out,
            told,
            told,
            torch.empty(0),
            0,
            0,
            0,
        )

    def npu_grouped_matmul(
        self,
        x,
        weight,
        *,
        bias=None,
        scale=None,
        offset=None,
        antiquant_scale=None,
        antiquant_offset=None,
        per_token_scale=None,
        group_list=None,
        activation_input=None,
        activation_quant_scale=None,
        activation_quant_offset=None,
        split_item=0,
        group_type=None,
        group_list_type=0,
        act_type=0,
        tuning_config=None,
        output_dtype=None,
        x_dtype=None,
        weight_dtype=None,
        scale_dtype=None,
        per_token_scale_dtype=None,
    ):
        self.calls["npu_grouped_matmul"] += 1
        _alone()
        assert isinstance(x, list) and isinstance(weight, list) and len(x) == len(weight) == 1
        (left,), (right,) = x, weight
        assert left.dtype in FLOATS and left.dtype == right.dtype and left.dim() == 2 and left.numel()
        assert isinstance(group_list, torch.Tensor) and group_list.dtype == torch.int64 and group_list.dim() == 1
        assert 1 <= len(group_list) <= 1024 and group_list_type == 0 and split_item in (2, 3)
        begins = torch.cat([group_list.new_zeros(1), group_list[:-1]])
        assert (group_list >= begins).all(), "ends fall"
        spans = list(zip(begins.tolist(), group_list.tolist(), strict=True))
        if group_type == 0:
            assert left.is_contiguous(), "x is not to be turned"
            assert right.dim() == 3 and len(right) == len(group_list) and right.shape[1] == left.shape[1]
            assert right.is_contiguous() or right.transpose(1, 2).is_contiguous()
            assert spans[-1][1] == len(left), "the last group ends where the rows do"
            return [torch.cat([left[a:b] @ right[i] for i, (a, b) in enumerate(spans)])]
        assert group_type == 2
        assert left.T.is_contiguous() and right.is_contiguous() and right.dim() == 2, "x is to be turned, alone"
        assert left.shape[1] == len(right) == spans[-1][1]
        made = torch.full((len(spans), left.shape[0], right.shape[1]), torch.nan, dtype=left.dtype)
        for i, (a, b) in enumerate(spans):
            if b > a:
                made[i] = left[:, a:b] @ right[a:b]
        return [made]
