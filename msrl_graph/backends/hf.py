"""Generation by transformers, with tensor parallelism over torch.distributed.

Invariant: the tokens drawn for a row depend only on the row's prompt, the weights, the row's noise key and the step
(the number of the token in its response). The weights have memory only between `allocate` and `release`. Each rank
holds one box of each weight: one index range per dimension, as computed by layout.shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from ..sharding.layout import Layout, shard
from . import experts, hf_modules, joint_norms, kernels
from .devices import allocate, release
from .engine_protocols import GenerateRequest, Response, Sampling, Shard, Weights
from .generation.continuous import SequenceBatch
from .generation.sampling import draw
from .generation.segments import generate_in_segments
from .generation.stops import load_stops
from .hf_spec import SPEC
from .kernels.modules import install
from .routes import Routers

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ..ir.plan import Placement
    from ..model.architecture import Model
    from .devices import Devices


class HfEngine:
    """The engine `hf` on one rank, which generates responses.

    The engine generates `sequences` responses at a time, and at most those to `micro_batch` prompts. If a number is 0,
    it is no limit.
    """

    def __init__(self, weights: Weights, placement: Placement, devices: Devices) -> None:
        import torch

        model = weights.model
        layout = placement.layout
        rank = devices.rank
        self.model = model
        self.layout = layout
        self.place = devices.device.place
        self.micro_batch = placement.engine.read_count("micro_batch")
        self.sequences = placement.sequences
        self.module = hf_modules.build_empty_model(model).eval().requires_grad_(False)
        fused = kernels.load(devices.device.kind)
        experts.install(self.module, model, Layout(), devices, fused)
        install(self.module, model, fused)
        self.routers = Routers(self.module, model)
        named = hf_modules.named_weights(self.module, model)
        dtype = next(iter(named.values())).dtype
        self._shards = []
        for tensor in model.weights:
            box = shard(tensor, SPEC.side(layout), rank)
            local = torch.empty([stop - start for start, stop in box], dtype=dtype, device=self.place)
            release(local)
            self._shards.append(Shard(tensor.name, box, local))
            owner, _, leaf = hf_modules.parameter_path(tensor.name).rpartition(".")
            parameter = torch.nn.Parameter(local, requires_grad=False)
            setattr(self.module.get_submodule(owner), leaf, parameter)
        if model.tied:
            self.module.lm_head.weight = self.module.model.embed_tokens.weight
        self.group = devices.axis("tp").get_group() if layout.tp > 1 else None
        if self.group is not None:
            _install_tensor_parallel_sums(self.module, model, self.group, layout.coordinates(rank).tp)
            joint_norms.install(self.module, model, self.group)
            hf_modules.count_local_heads(self.module, model, layout.tp)

    def allocate(self) -> list[Shard]:
        for piece in self._shards:
            allocate(piece.tensor)
        return self._shards

    def filled(self) -> None:
        pass  # nothing outlives a call of `generate`

    def release(self) -> None:
        for piece in self._shards:
            release(piece.tensor)

    def generate(self, request: GenerateRequest) -> Iterator[Response]:
        import numpy as np
        import torch

        number = len(request.keys)
        stops = load_stops(self.model.path, request.sampling.stop)
        slots = min(self.micro_batch * request.sampling.samples or number, self.sequences or number)
        stretch = request.stretch
        if stretch and slots < number:  # a row that has drawn its stretch leaves its place to the next
            yield from generate_in_segments(self.generate, request, stops)
            return
        batches = [(np.arange(number), SequenceBatch(self, request, slots, stops))]
        if stretch and request.samples_per_prompt == 1:
            # Rows that continue have longer contexts than new ones: one batch would be as wide as the longest row.
            begun = np.broadcast_to(request.begun, number) > 0
            groups = [indices for indices in map(np.flatnonzero, (begun, ~begun)) if len(indices)]
            batches = [(group, SequenceBatch(self, request.select(group), slots, stops)) for group in groups]
        for step in count(1):
            for indices, batch in batches:
                self.routers.records = request.routes
                with torch.inference_mode():  # not while other code computes between two steps
                    parts = batch.step()
                if stretch and step % stretch == 0:
                    parts += batch.parts()
                yield from (part._replace(place=int(indices[part.place])) for part in parts)
            batches = [(indices, batch) for indices, batch in batches if batch.unfinished]
            if not batches:
                return

    def cache(self) -> Any:
        from transformers.cache_utils import DynamicCache

        return DynamicCache(config=self.module.config)

    def logits(self, ids: torch.Tensor, mask: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
        import torch
        from torch import distributed as dist

        attention_mask = None if bool(mask.all()) else mask
        hidden = self.module.model(
            input_ids=ids, attention_mask=attention_mask, position_ids=position, past_key_values=cache, use_cache=True
        )
        products = self.module.lm_head(hidden.last_hidden_state[:, -1])
        logits = hf_modules.find_logit_rule(self.module.config).apply(products)
        if self.group is not None:
            parts = [torch.empty_like(logits) for _ in range(self.layout.tp)]
            dist.all_gather(parts, logits.contiguous(), group=self.group)
            logits = torch.cat(parts, dim=-1)
        return logits

    def routes(self) -> NDArray[np.int16]:
        routes: NDArray[np.int16] = self.routers.take_recorded().cpu().numpy()
        return routes

    def draw(
        self, logits: torch.Tensor, keys: NDArray[np.uint64], steps: NDArray[np.int64], sampling: Sampling
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        token, logp = draw(logits, keys, steps, sampling, self.group)
        return token.cpu().numpy(), logp.cpu().numpy()


def _install_tensor_parallel_sums(module: Any, model: Model, group: Any, index: int) -> None:
    """Add the all-reduces of tensor parallelism to a transformers model.

    The all-reduces come after the sharded embedding and after the row-parallel linear layers. `group` is the group of
    tp ranks, and `index` is this rank's index in the group.
    """
    from torch import distributed as dist

    def add_up(linear: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        # Each rank has a part of the sum and the whole bias, which must count once.
        output = output.contiguous() if linear.bias is None else output - linear.bias
        dist.all_reduce(output, group=group)
        return output if linear.bias is None else output + linear.bias

    for mixer, part in hf_modules.list_mixers(module, model):
        getattr(part, mixer.output).register_forward_hook(add_up)
    for feed in hf_modules.list_shared_mlps(module):
        if hasattr(feed, "down_proj"):  # a router's experts are whole on each rank
            feed.down_proj.register_forward_hook(add_up)
    table = module.model.embed_tokens
    outside: list[torch.Tensor] = []  # of the ids that are being looked up

    def to_local(_table: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
        rows = table.weight.shape[0]
        local = args[0] - index * rows
        outside.append((local < 0) | (local >= rows))
        rows_here: torch.Tensor = local.masked_fill(outside[0], 0)
        return rows_here

    def sum_rows(_table: Any, _args: Any, embeddings: torch.Tensor) -> torch.Tensor:
        embeddings[outside.pop()] = 0.0
        dist.all_reduce(embeddings, group=group)
        return embeddings

    # The table keeps its own forward method, which may scale the rows that it looks up.
    table.register_forward_pre_hook(to_local)
    table.register_forward_hook(sum_rows)
