"""Installation of a device's kernels in a transformers model.

Invariant: where a kernel table has None, the model keeps its own operator. Only the modules of the given model change.
Classes and files of transformers stay unchanged, because another model of the process may be on another device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature, unwrap
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from ...model.layers import GroupedQueryAttention, MultiHeadLatentAttention
from .. import hf_modules
from . import Kernels, RmsNorm, Rotary, SwiGlu

if TYPE_CHECKING:
    import torch

    from ...model.architecture import Model


def install(module: Any, model: Model, kernels: Kernels) -> None:
    """Install the kernels for RMSNorm, SwiGLU and RoPE in a transformers model.

    The call must come before tensor parallelism or FSDP is applied to the model. The kernel for RoPE rotates halves of
    whole heads; a model with other rotary positions keeps its own operators.
    """
    for part in module.modules():
        if kernels.rms_norm is not None and hasattr(part, "variance_epsilon") and not _has_gate(part):
            part.forward = partial(_apply_norm, part, kernels.rms_norm)
        if kernels.swiglu is not None and hasattr(part, "gate_proj") and is_silu(getattr(part, "act_fn", None)):
            part.forward = partial(_apply_feed_forward, part, kernels.swiglu)
    if kernels.rotary is not None and not {"rope_partial", "rope_interleaved"} & {*model.features}:
        for mixer, part in hf_modules.list_mixers(module, model):
            if isinstance(mixer, MultiHeadLatentAttention) or (
                isinstance(mixer, GroupedQueryAttention) and not mixer.no_rope
            ):
                part.forward = _bind_rotary(part, kernels.rotary)


def _has_gate(norm: Any) -> bool:
    """Return whether a norm multiplies its result by a gate."""
    return "gate" in signature(type(norm).forward).parameters


def is_silu(activation: Any) -> bool:
    from transformers.activations import ACT2FN

    return isinstance(activation, type(ACT2FN["silu"]))


def _apply_norm(module: Any, kernel: RmsNorm, x: torch.Tensor) -> torch.Tensor:
    return kernel(x, module.weight, module.variance_epsilon)


def _apply_feed_forward(module: Any, kernel: SwiGlu, x: torch.Tensor) -> torch.Tensor:
    import torch

    # The concatenation must not have a name, or it would live too long.
    output: torch.Tensor = module.down_proj(kernel(torch.cat([module.gate_proj(x), module.up_proj(x)], dim=-1)))
    return output


def _bind_rotary(attention: Any, kernel: Rotary) -> Callable[..., Any]:
    """Return an attention module's forward that uses `kernel` for rotary embeddings.

    The result is a copy of the transformers method. In the copy, the global names of the rotary functions refer to
    functions that call `kernel`. Transformers has no other way to replace the rotary functions.
    """

    import torch

    def rotate_halves(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if 2 * cos.shape[-1] == q.shape[-1]:  # some families have the angles of one half only
            cos, sin = (torch.cat([angles, angles], dim=-1) for angles in (cos, sin))
        cos = cos.unsqueeze(1)
        sin = sin.unsqueeze(1)
        return kernel(q, cos, sin), kernel(k, cos, sin)

    def rotate_pairs(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # DeepSeek rotates adjacent elements. Reorder them into halves, as transformers returns them.
        q, k = (x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2) for x in (q, k))
        return rotate_halves(q, k, cos, sin)

    original = unwrap(type(attention).forward)
    names = {"apply_rotary_pos_emb": rotate_halves, "apply_rotary_pos_emb_interleave": rotate_pairs}
    if not names.keys() & {*original.__code__.co_names}:
        raise RuntimeError(f"{original.__qualname__} calls none of {', '.join(names)}")
    namespace = {**original.__globals__, **names}
    forward = FunctionType(original.__code__, namespace, original.__name__, original.__defaults__, original.__closure__)
    forward.__kwdefaults__ = original.__kwdefaults__
    return MethodType(forward, attention)
