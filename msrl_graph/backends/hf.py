"""Generation by transformers, with tensor parallelism of its own over torch.distributed.

Invariant: what is drawn for a row depends on its prompt, the weights and the key (seed, iteration, row, step) alone.
The weights have memory only between `allocate` and `release`; their boxes are those of layout.shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..sharding.layout import Layout, shard
from . import experts, peaks, transformer
from .devices import release, take
from .draw import draw
from .spec import Act, Calls, EngineSpec, Sampling, Shard, Weights
from .stops import looks_for

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ..ir.plan import Placement
    from .devices import Devices


def _calls(act: Act, layout: Layout) -> Calls:
    """Counted by torch's profiler on Qwen2 models of 2 and 6 layers; the drawing of a token is part of it."""
    return Calls(63 if act == "prefill" else 55, (68 if act == "prefill" else 57) + 17 * (layout.tp > 1))


SPEC = EngineSpec(
    name="hf",
    verbs=("generate",),
    axes=("tp", "dp"),
    build="msrl_graph.backends.hf:Engine",
    options=("micro_batch", "dtype", "memory"),
    families=("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"),
    calls=_calls,
    shares_beginnings=("host", "device"),
    # attention reads it, a step's keys and values are put behind it in a copy, and what goes on is copied out of it
    cache_passes=5,
    peaks=peaks.generator,
    chosen=("host",),
)


class Engine:
    """A generator on this rank; the responses to `micro_batch` prompts are generated at once (0: all)."""

    def __init__(self, weights: Weights, placement: Placement, devices: Devices) -> None:
        import torch

        model, layout, rank = weights.model, placement.layout, devices.rank
        self.model, self.layout, self.place = model, layout, devices.device.place
        self.micro_batch = int(placement.engine.options.get("micro_batch") or 0)
        self.module = transformer.empty(model).eval().requires_grad_(False)
        experts.install(self.module, model, Layout(), devices)
        named = transformer.named_weights(self.module)
        dtype = next(iter(named.values())).dtype
        self._shards = []
        for tensor in model.tensors:
            box = shard(tensor, SPEC.side(layout), rank)
            local = torch.empty([b - a for a, b in box], dtype=dtype, device=self.place)
            release(local)
            self._shards.append(Shard(tensor.name, box, local))
            owner, _, leaf = transformer.parameter(tensor.name).rpartition(".")
            parameter = torch.nn.Parameter(local, requires_grad=False)
            setattr(self.module.get_submodule(owner), leaf, parameter)
        if model.tied:
            self.module.lm_head.weight = self.module.model.embed_tokens.weight
        self.group = devices.axis("tp").get_group() if layout.tp > 1 else None
        if self.group is not None:
            _join(self.module, self.group, layout.coordinates(rank).tp)

    def allocate(self) -> list[Shard]:
        for piece in self._shards:
            take(piece.tensor)
        return self._shards

    def filled(self) -> None:
        pass  # nothing outlives a call of `generate`

    def release(self) -> None:
        for piece in self._shards:
            release(piece.tensor)

    def generate(
        self,
        prompts: list[NDArray[np.int32]],
        rows: NDArray[np.int64],
        sampling: Sampling,
        begun: NDArray[np.int64] | None = None,
    ) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
        import numpy as np
        import torch

        tokens: list[NDArray[np.int32]] = []
        logps: list[NDArray[np.float32]] = []
        begun = np.zeros(len(rows), np.int64) if begun is None else begun
        each = len(rows) // len(prompts)
        wave = self.micro_batch * sampling.samples // each or len(prompts)
        with torch.inference_mode():
            for i in range(0, len(prompts), wave):
                some = slice(i * each, (i + wave) * each)
                drawn = self._wave(prompts[i : i + wave], rows[some], begun[some], sampling.of(some))
                tokens += drawn[0]
                logps += drawn[1]
        return tokens, logps

    def _wave(
        self, given: list[NDArray[np.int32]], rows: NDArray[np.int64], begun: NDArray[np.int64], sampling: Sampling
    ) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
        """Prefills each prompt once, left-padded, then decodes; rows that have drawn alike so far are one in the batch,
        and what has finished leaves it when half has."""
        import numpy as np
        import torch
        from transformers.cache_utils import DynamicCache

        alike = {prompt.tobytes(): i for i, prompt in reversed([*enumerate(given)])}
        first = sorted(alike.values())
        prompts = [given[i] for i in first]
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[i, width - len(prompt) :] = 1
        cache = DynamicCache(config=self.module.config)
        ids, mask = ids.to(self.place, non_blocking=True), mask.to(self.place, non_blocking=True)
        logits = self._logits(ids, mask, (mask.cumsum(1) - 1).clamp(min=0), cache)
        room = sampling.max_tokens - begun
        out = np.zeros((len(rows), room.max()), np.int32)
        logps = np.zeros((len(rows), room.max()), np.float32)
        lengths = np.zeros(len(rows), np.int64)
        running = np.arange(len(rows))
        # Where in the batch each running row is.
        place = np.repeat(np.searchsorted(first, [alike[p.tobytes()] for p in given]), len(rows) // len(given))
        for step in range(room.max()):
            drawn = logits[self._here(place)]
            token, logp = self._draw(drawn, rows[running], begun[running] + step, sampling.of(running))
            out[running, step] = token
            logps[running, step] = logp
            lengths[running] = step + 1
            going = ~np.isin(token, sampling.ends) & (step + 1 < room[running])
            if sampling.stop:
                going &= ~looks_for(self.model.path, sampling.stop)(out[running, : step + 1])
            running, place, token = running[going], place[going], token[going]
            if not len(running):
                break
            vocabulary = logits.shape[-1]
            distinct, which = np.unique(place * vocabulary + token, return_inverse=True)
            parent, token = np.divmod(distinct, vocabulary)
            if len(np.unique(parent)) == len(parent) and len(parent) * 2 > len(logits):
                # Nothing parts, and little has finished: to carry that along takes less than to copy the cache.
                fed = np.zeros(len(logits), np.int64)
                fed[parent] = token
            else:
                fed, place = token, which
                chosen = self._here(parent)
                cache.batch_select_indices(chosen)
                mask = mask[chosen]
            mask = torch.cat([mask, mask.new_ones(len(fed), 1)], 1)
            position = mask.sum(1, keepdim=True) - 1
            logits = self._logits(self._here(fed)[:, None], mask, position, cache)
        ends = list(enumerate(lengths))
        return [out[i, :n].copy() for i, n in ends], [logps[i, :n].copy() for i, n in ends]

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
        import torch
        from torch import distributed as dist

        seen = None if bool(mask.all()) else mask
        hidden = self.module.model(
            input_ids=ids, attention_mask=seen, position_ids=position, past_key_values=cache, use_cache=True
        )
        logits: torch.Tensor = self.module.lm_head(hidden.last_hidden_state[:, -1]).float()
        if self.group is not None:
            parts = [torch.empty_like(logits) for _ in range(self.layout.tp)]
            dist.all_gather(parts, logits.contiguous(), group=self.group)
            logits = torch.cat(parts, dim=-1)
        return logits

    def _draw(
        self, logits: torch.Tensor, rows: NDArray[np.int64], steps: NDArray[np.int64], sampling: Sampling
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        token, logp = draw(logits, rows, steps, sampling, self.group)
        return token.cpu().numpy(), logp.cpu().numpy()

    def _here(self, given: NDArray[Any]) -> torch.Tensor:
        import torch

        return torch.from_numpy(given).to(self.place, non_blocking=True)


def _join(module: Any, group: Any, index: int) -> None:
    """Adds the sums that tensor parallelism needs after a divided vocabulary and after row-divided products."""
    import torch
    from torch import distributed as dist

    def add_up(linear: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        # Each rank has a part of the sum, and the whole of the bias, which counts once.
        output = output.contiguous() if linear.bias is None else output - linear.bias
        dist.all_reduce(output, group=group)
        return output if linear.bias is None else output + linear.bias

    for layer in module.model.layers:
        layer.self_attn.o_proj.register_forward_hook(add_up)
        feed = getattr(layer.mlp, "shared_experts", layer.mlp)
        if hasattr(feed, "down_proj"):  # a router's experts are whole on each rank
            feed.down_proj.register_forward_hook(add_up)
    table = module.model.embed_tokens

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        first = index * table.weight.shape[0]
        local = ids - first
        outside = (local < 0) | (local >= table.weight.shape[0])
        found = torch.nn.functional.embedding(local.masked_fill(outside, 0), table.weight)
        found[outside] = 0.0
        dist.all_reduce(found, group=group)
        return found

    table.forward = look_up
