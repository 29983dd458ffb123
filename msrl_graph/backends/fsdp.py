"""Training and inference by torch FSDP2 and DTensor tensor parallelism (torch.distributed), on any torch device.

Invariant: the weights at rest on a rank are the boxes of layout.shard; the optimizer works on those local tensors, element by element,
so that no layout changes what it computes. ZeRO: 0 replicates, 1 divides the optimizer, 2 and 3 are FSDP2 without and with releasing
the gathered weights after forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..architecture import Model
from ..engine import Act, Asked, Calls, EngineSpec, Lint, Outputs, Packed, Shard, Situation
from ..layout import Layout, shard
from . import peaks, prefixes, transformer
from .peaks import CHUNK

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


def _lints(situation: Situation) -> Iterator[Lint]:
    if situation.verb == "update" and situation.layout.zero == 2 and situation.layout.dp > 1:
        message = "zero 2 keeps the weights divided at rest and gathers them once a step: less memory than ZeRO 2 asks for"
        yield Lint(message, "zero = 3 needs less memory still, zero = 1 less communication")


def _calls(act: Act, layout: Layout) -> Calls:
    """Counted by torch's profiler on Qwen2 models (12 tensors a layer; an optimizer step goes by tensors)."""
    if act == "step":
        if layout.dp == 1:
            return Calls(108, 35)
        return (Calls(150, 49), Calls(230, 73), Calls(122, 43), Calls(122, 43))[layout.zero]
    # Where weights are divided, FSDP2's hooks around a layer, and around the whole, take Python as long as a hundred operators for a
    # forward pass, and as many for each collective of a backward pass; an operator on a DTensor as long as three on tensors.
    if act == "update":
        hooks = SPEC.divided(layout) * (300 if layout.zero >= 3 else 200)
        found = Calls(232 + hooks, 83 + hooks)
    else:
        hooks = SPEC.divided(layout) * 100
        found = Calls(73 + hooks, 46 + hooks)
    return found if layout.tp == 1 else Calls(3 * found.layer, 3 * found.rest)


SPEC = EngineSpec(
    name="fsdp",
    verbs=("infer", "update"),
    axes=("tp", "dp"),
    options={"micro_batch": "int", "recompute": ("none", "full"), "dtype": ("f32", "bf16")},
    zero=(0, 1, 2, 3),
    divided_from=2,
    lints=_lints,
    calls=_calls,
    shares_beginnings=True,
    sums=(2, 5),  # q, k, v, gate and up each sum their input's gradient
    peaks=peaks.trainer,
)


class Engine:
    """A model on this rank; `optimizer` holds AdamW's betas, eps and weight_decay where steps state none, None where nothing is updated."""

    def __init__(
        self, model: Model, layout: Layout, rank: int, mesh: DeviceMesh, recompute: bool, optimizer: dict[str, Any] | None
    ) -> None:
        self.model, self.layout, self.mesh = model, layout, mesh
        self.divided = SPEC.divided(layout)
        module = transformer.empty(model)
        if recompute:
            module.gradient_checkpointing_enable()
        module.requires_grad_(optimizer is not None)
        prefixes.prepare(module)
        if layout.tp > 1:
            _divide_tensors(module, mesh["tp"], model.scores)
            self._tie(module)
        module.forward = lambda *args: _outputs(module, *args)
        if self.divided:
            from torch.distributed.fsdp import fully_shard

            again = layout.zero >= 3 or optimizer is None
            for layer in module.model.layers:
                fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=again)
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=again)
        # Buffers are real already: to_empty would lose them.
        buffers = dict(module.named_buffers())
        module.to_empty(device="cpu")
        self._tie(module)
        for name, value in buffers.items():
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_buffer(leaf, value, persistent=False)
        self.module = module
        weights = transformer.named_weights(module)
        self._shards = [Shard(t.name, shard(t, SPEC.side(layout), rank), _local(weights[t.name])) for t in model.tensors]
        transformer.fill(model, self._shards)
        self._parameters = [weights[t.name] for t in model.tensors]
        self._optimizer = None if optimizer is None else _Optimizer(self, optimizer)

    def _tie(self, module: Any) -> None:
        """Makes head and embedding one parameter again, if they were: dividing and taking memory give each its own."""
        if self.model.tied:
            module.lm_head.weight = module.model.embed_tokens.weight

    def shards(self) -> list[Shard]:
        return self._shards

    def forward(self, packed: Packed, asked: Asked) -> Outputs:
        import torch

        found: Outputs = self.module(prefixes.tree(packed), packed.token, asked)
        if self.divided and self.layout.zero < 3 and not torch.is_grad_enabled():
            # No backward follows that would give the gathered weights back.
            for part in (*self.module.model.layers, self.module):
                part.reshard()
        return found

    def backward(self, loss: torch.Tensor) -> None:
        # FSDP2 averages over dp, the loss's parts add up.
        (loss * self.layout.dp if self.divided else loss).backward()  # type: ignore[no-untyped-call]

    def step(self, lr: float, clip_grad: float, sound: bool = True, options: Mapping[str, Any] = {}) -> float:
        assert self._optimizer is not None
        return self._optimizer.step({**options, "lr": lr}, clip_grad, sound)

    def moments(self) -> dict[str, list[Shard]]:
        return {} if self._optimizer is None else self._optimizer.moments()

    def restore(self, moments: dict[str, dict[str, torch.Tensor]], steps: int) -> None:
        assert self._optimizer is not None
        self._optimizer.restore(moments, steps)


def _divide_tensors(module: Any, mesh: DeviceMesh, scores: bool) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layer = {
        **{f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"},
        "self_attn.o_proj": RowwiseParallel(),
        **{f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(),
    }
    for block in module.model.layers:
        parallelize_module(block, mesh, layer)
    ends: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    if not scores:  # one number: each rank makes it
        ends["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(module, mesh, ends)


def _outputs(module: Any, found: prefixes.Tree, token: torch.Tensor, asked: Asked) -> Outputs:
    """Stands in for the model's forward, so that FSDP2 gathers embedding and head around the whole of it. Logits are made only where a
    token is asked for, and in float32."""
    import torch

    hidden = prefixes.states(module.model, found).index_select(0, found.before)
    if hasattr(module, "score"):
        return Outputs(values=module.score(hidden).float()[:, 0].clone())  # FSDP2's hooks would be lost on a view
    logits = module.lm_head(hidden).float() / asked.temperature
    if not asked.entropy and not asked.best and asked.given is None:
        return Outputs(-torch.nn.functional.cross_entropy(logits, token, reduction="none"))
    logps = logits.log_softmax(-1)
    del logits
    best, ids = logps.detach().topk(asked.best) if asked.best else (None, None)
    return Outputs(
        logp=-torch.nn.functional.nll_loss(logps, token, reduction="none"),
        # A product of vectors keeps the two of them and makes no third.
        entropy=-(logps.exp()[:, None] @ logps[:, :, None]).flatten() if asked.entropy else None,
        given=None if asked.given is None else logps.gather(1, asked.given),
        best=best,
        ids=ids,
    )


def _local(parameter: Any) -> torch.Tensor:
    """The local tensor of a parameter, a DTensor or not, as it lies in memory."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()


def _gradient(parameter: Any) -> torch.Tensor:
    """The local gradient of a parameter; zeros where no rank made one."""
    import torch

    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(_local(parameter))
    # DTensor may leave a gradient otherwise placed than its parameter (a divided embedding's comes out whole).
    if hasattr(gradient, "placements") and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return _local(gradient)


class _Optimizer:
    """AdamW (arXiv:1711.05101) on the local shards, in float32."""

    def __init__(self, engine: Engine, options: dict[str, Any]) -> None:
        import torch

        self.engine = engine
        layout, shards = engine.layout, engine.shards()
        self.flat = layout.zero == 1 and layout.dp > 1  # ZeRO 1: each dp rank owns a stretch of all weights, laid end to end
        self.sizes = [s.tensor.numel() for s in shards]
        if self.flat:
            self.stretch = -(-sum(self.sizes) // layout.dp)
            self.dp_rank = engine.mesh["dp"].get_local_rank()
            self.masters = [self._stretch([s.tensor for s in shards])]
        else:
            self.masters = [s.tensor if s.tensor.dtype == torch.float32 else s.tensor.float() for s in shards]
        # In float32 the stretch is a copy of the weights: it lives only while a step lasts.
        self.copied = self.flat and all(s.tensor.dtype == torch.float32 for s in shards)
        self.adamw = torch.optim.AdamW(self.masters, lr=0.0, fused=True, **options)
        if self.copied:
            self.masters[0].untyped_storage().resize_(0)

    def _overlaps(self, tensors: list[torch.Tensor], start: int, stop: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """What lies between elements `start` and `stop` of all tensors end to end: where in the range, and the piece of the tensor."""
        at = 0
        for tensor, size in zip(tensors, self.sizes, strict=True):
            low, high = max(at, start), min(at + size, stop)
            if low < high:
                yield slice(low - start, high - start), tensor.reshape(-1)[low - at : high - at]
            at += size

    def _stretch(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """This rank's stretch of all tensors, in float32, its end padded with zeros."""
        import torch

        own = torch.zeros(self.stretch)
        for where, piece in self._overlaps(tensors, self.stretch * self.dp_rank, self.stretch * (self.dp_rank + 1)):
            own[where] = piece
        return own

    def step(self, options: Mapping[str, Any], clip_grad: float, sound: bool) -> float:
        gradients = []
        # From here on a gradient lives as long as it is in the list.
        for parameter in self.engine._parameters:
            gradients.append(_gradient(parameter))
            parameter.grad = None
        if not self.engine.divided and self.engine.layout.dp > 1:
            self._add_up(gradients)
        norm = self._norm(gradients, sound)
        if math.isfinite(norm):
            self._apply(gradients, min(1.0, clip_grad / (norm + 1e-6)) if clip_grad else 1.0, options)
        for master in self.masters:
            master.grad = None
        return norm

    def _add_up(self, gradients: list[torch.Tensor]) -> None:
        """Sums gradients over dp in place, bucket by bucket."""
        import torch
        from torch import distributed as dist

        bucket: list[torch.Tensor] = []
        for i, gradient in enumerate(gradients):
            bucket.append(gradient)
            if i + 1 == len(gradients) or sum(g.numel() for g in bucket) + gradients[i + 1].numel() > CHUNK:
                flat = torch.cat([g.reshape(-1) for g in bucket])
                dist.all_reduce(flat, group=self.engine.mesh["dp"].get_group())
                for g, total in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                    g.copy_(total.view(g.shape))
                bucket = []

    def _apply(self, gradients: list[torch.Tensor], scale: float, options: Mapping[str, Any]) -> None:
        if self.flat:
            gradients[:] = [self._stretch(gradients)]
        if self.copied:
            self.masters[0].untyped_storage().resize_(4 * self.stretch)
            self.masters[0].copy_(self._stretch([s.tensor for s in self.engine.shards()]))
        for master in self.masters:
            gradient = gradients.pop(0)
            master.grad = (gradient.mul_(scale) if scale != 1.0 else gradient).to(master.dtype)
        for group in self.adamw.param_groups:
            group.update({**self.adamw.defaults, **options})
        self.adamw.step()
        for master in self.masters:
            master.grad = None
        self._write_back()
        if self.copied:
            self.masters[0].untyped_storage().resize_(0)

    def moments(self) -> dict[str, list[Shard]]:
        """The moments of all steps so far, and the float32 masters where weights are bf16."""
        import torch
        from torch import distributed as dist

        if not self.adamw.state:
            return {}
        kinds = {kind: [self.adamw.state[m][kind] for m in self.masters] for kind in ("exp_avg", "exp_avg_sq")}
        shards = self.engine.shards()
        if any(s.tensor.dtype != torch.float32 for s in shards):
            kinds["master"] = self.masters
        if self.flat:
            for kind, (own,) in kinds.items():
                flat = torch.empty(self.stretch * self.engine.layout.dp)
                dist.all_gather_into_tensor(flat, own, group=self.engine.mesh["dp"].get_group())
                kinds[kind] = list(torch.split(flat[: sum(self.sizes)], self.sizes))
        return {
            kind: [Shard(s.name, s.box, t.view(s.tensor.shape)) for s, t in zip(shards, tensors, strict=True)]
            for kind, tensors in kinds.items()
        }

    def restore(self, moments: dict[str, dict[str, torch.Tensor]], steps: int) -> None:
        import torch

        self.adamw.state.clear()
        kinds = {kind: [tensors[s.name] for s in self.engine.shards()] for kind, tensors in moments.items()}
        if self.flat:
            kinds = {kind: [self._stretch(tensors)] for kind, tensors in kinds.items()}
        if "master" not in kinds and not self.copied:
            weights = [s.tensor for s in self.engine.shards()]
            kinds["master"] = [self._stretch(weights)] if self.flat else weights
        for i, master in enumerate(self.masters):
            if "master" in kinds and kinds["master"][i] is not master:
                master.copy_(kinds["master"][i])
            if steps:
                self.adamw.state[master] = {
                    "step": torch.tensor(float(steps)),
                    **{kind: kinds[kind][i] for kind in ("exp_avg", "exp_avg_sq")},
                }

    def _write_back(self) -> None:
        """From the masters to the weights."""
        import torch
        from torch import distributed as dist

        shards = self.engine.shards()
        if self.flat:
            for low in range(0, self.stretch, CHUNK):
                part = self.masters[0][low : low + CHUNK]
                parts = torch.empty(self.engine.layout.dp, len(part))
                dist.all_gather_into_tensor(parts.view(-1), part, group=self.engine.mesh["dp"].get_group())
                for rank, values in enumerate(parts):
                    start = self.stretch * rank + low
                    for where, weight in self._overlaps([s.tensor for s in shards], start, start + len(part)):
                        weight.copy_(values[where])
        else:
            for master, piece in zip(self.masters, shards, strict=True):
                if master is not piece.tensor:
                    piece.tensor.copy_(master)

    def _norm(self, gradients: list[torch.Tensor], sound: bool) -> float:
        """The 2-norm of the whole gradient: parts divided over tp or dp add up, copies count once. All ranks take part in all sums, so
        that they agree to the last bit, and on what is not finite."""
        import torch
        from torch import distributed as dist

        engine, layout = self.engine, self.engine.layout
        divided, copied = torch.full((2,), 0.0 if sound else math.nan, dtype=torch.float64)
        for gradient, tensor in zip(gradients, engine.model.tensors, strict=True):
            for part in torch.split(gradient.reshape(-1), CHUNK):
                (divided if tensor.tp_dim >= 0 else copied).add_(part.double().square().sum())
        total = divided + copied / layout.tp
        if layout.tp > 1:
            dist.all_reduce(total, group=engine.mesh["tp"].get_group())
        if layout.dp > 1:
            total = total if engine.divided else total / layout.dp
            dist.all_reduce(total, group=engine.mesh["dp"].get_group())
        return float(total.sqrt())
