"""Generation by vLLM in the rank's own process (vllm-ascend on Ascend).

The engine has never run on an NPU, because no NPU was available.

Invariant: the shards are views into vLLM's own parameters, so that resharding fills the parameters box by box (a box is
one index range per dimension). Parameters and cache have memory only between `allocate` and `release`. Tokens are drawn
by generation/sampling.py, not by vLLM. So a row gets the same tokens as with the engine `hf`, up to the rounding of
logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ...model.mlps import BLOCK_SPARSE
from ...sharding.layout import shard
from .. import hf_modules
from ..engine_protocols import GenerateRequest, Response, Shard, Weights
from ..generation.segments import generate_in_segments
from ..generation.stops import join_response, load_stops
from .core import (
    Replica,
    SampledBatch,
    TokenSampler,
    apply_model_settings,
    build_core,
    make_shards,
    repack_weights,
)
from .memory import EngineMemory, ResizedMemory, SleepingMemory
from .route_capture import RouteCapture
from .spec import SPEC
from .transformers_models import shard_fused_mlps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from vllm.sampling_params import SamplingParams

    from ...ir.plan import Placement
    from ..devices import Devices


class VllmEngine:
    """The engine `vllm` on one rank, which generates responses."""

    def __init__(self, weights: Weights, placement: Placement, devices: Devices) -> None:
        assert weights.work is not None
        self.model = weights.model
        self.generation = TokenSampler()
        self.replica = Replica(devices)
        with self.replica.as_world():
            group = self.replica.group
            self.generation.group = group if placement.layout.tp * placement.layout.pp > 1 else None
            self.core = build_core(weights.model, weights.work, devices, group, self.generation)
        worker = self.core.model_executor.driver_worker.worker
        runner = worker.model_runner
        kind = devices.device.kind
        self._memory: EngineMemory = (
            ResizedMemory(runner, placement.layout.pp) if kind.is_host else SleepingMemory(worker)
        )
        side = SPEC.side(placement.layout)
        boxes = {tensor.name: shard(tensor, side, devices.rank) for tensor in weights.model.weights}
        # As in the files, vLLM has another name for the experts of Mixtral.
        parameters = runner.model.named_parameters()
        named = {name.replace(f".{BLOCK_SPARSE}.", ".mlp."): parameter for name, parameter in parameters}
        for parameter in named.values():
            parameter.requires_grad_(False)
        apply_model_settings(runner.model, kind.is_host)
        shard_fused_mlps(runner.model)
        # This stage's tensors that no run changes; they sleep with the rest.
        buffers = hf_modules.load_buffers(weights.model)
        self._buffers = [(named.pop(name), value) for name, value in buffers.items() if name in named]
        fused = getattr(runner.model, "packed_modules_mapping", {}) | weights.model.fused
        self._shards = list(make_shards(boxes, named, fused, turned=bool(kind.plugin)))
        # Padding of the vocabulary, or of a rank's experts, which nothing fills.
        padded = [tensor.name for tensor in weights.model.weights if tensor.padded and tensor.name in named]
        self._padding = [named[name][boxes[name][0][1] - boxes[name][0][0] :] for name in padded]
        self._padding += [parameter for parameter in dict.fromkeys(named.values()) if parameter.ndim == 3]
        self._routes = None
        if weights.work.records_routes:
            spans = placement.layout.stage_layers(placement.layout.coordinates(devices.rank).pp, weights.model.layers)
            stage = {number for span in spans for number in range(*span)}
            group = self.replica.group if placement.layout.pp > 1 else None
            self._routes = RouteCapture(runner, weights.model, stage, group)
        self.module = runner.model
        self.runner = runner
        self.turned = bool(kind.plugin)
        self.longest = weights.work.prompt + weights.work.response  # tokens of a sequence
        self.preempted = 0  # times that a running sequence was preempted, in all calls
        if kind.groups_beside_sleep:
            self.release()

    def allocate(self) -> list[Shard]:
        self._memory.weights()
        for rows in self._padding:
            rows.zero_()
        for parameter, value in self._buffers:
            parameter.copy_(value)
        return self._shards

    def filled(self) -> None:
        repack_weights(self.module, self.runner.model_config.dtype, self.turned)
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        if not self.core.reset_prefix_cache():
            raise RuntimeError("cannot reset the prefix cache while a generation is running")

    def release(self) -> None:
        self._forget_prefixes()
        self._memory.give()

    def generate(self, request: GenerateRequest) -> Iterator[Response]:
        import numpy as np

        if request.stretch:  # the cache still has the whole blocks of running responses
            stops = load_stops(self.model.path, request.sampling.stop)
            yield from generate_in_segments(self.generate, request, stops)
            return
        self._memory.cache()
        drawn = self.generation.call = SampledBatch(request)
        self._capture = self._routes if request.routes else None
        if self._routes is not None:
            self._routes.active = request.routes
        self._prompts = request.response_prompts
        self._params: dict[int, SamplingParams] = {}
        self._running: set[str] = set()
        self._requests: dict[int, Any] = {}  # vLLM's
        self._ended_routes: dict[int, NDArray[np.int16]] = {}  # by row
        self._numbers = count()
        self._salts: dict[int, str] = {}  # by request
        rows_by_prompt: dict[bytes, list[int]] = {}
        for i, prompt in enumerate(self._prompts):
            rows_by_prompt.setdefault(prompt.tobytes(), []).append(i)
        try:
            with self._activate():
                for rows in rows_by_prompt.values():
                    self._add_request(np.array(rows), None)
            while self._running:
                with self._activate():
                    ended = self._step()
                for i in ended.tolist():
                    end = drawn.lengths[i]
                    routes = self._ended_routes.pop(i, None)
                    yield Response(i, drawn.tokens[i, :end].copy(), drawn.logps[i, :end].copy(), routes=routes)
        finally:
            with self._activate():
                self.core.abort_requests(list(self._running))  # none, unless a step raised or the caller stopped

    @contextmanager
    def _activate(self) -> Iterator[None]:
        """Within the context, make this engine's process groups current in vLLM.

        The context lasts for one step only, because other code of this process computes between steps.
        """
        import torch

        with torch.inference_mode(), self.replica.activate():
            yield

    def _add_request(self, rows: NDArray[np.int64], parent: int | None) -> None:
        """Add one request for `rows`, which have the same tokens up to the current step.

        `parent` is the request that computed these tokens; None at the beginning.
        """
        import numpy as np
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        drawn = self.generation.call
        number = next(self._numbers)
        length = int(drawn.lengths[rows[0]])
        tokens = np.concatenate([self._prompts[rows[0]], drawn.tokens[rows[0], :length]])
        room = int(drawn.room[rows].max()) - length
        if len(tokens) + room > self.longest:
            request_size = f"a prompt of {len(tokens)} tokens and {room} more"
            raise ValueError(f"{request_size} exceed the {self.longest} that the engine was built for")
        if room not in self._params:
            self._params[room] = SamplingParams(
                temperature=0.0,
                max_tokens=room,
                stop_token_ids=list(drawn.sampling.ends),
                ignore_eos=True,
                detokenize=False,
            )
        params = copy(self._params[room])  # cheaper than a new one
        params.extra_args = {"number": number}
        salt = None
        if self._capture is not None:
            self._capture.add(number, len(tokens) + room, parent)
            # No block of another prompt is reused, for the routes of its tokens are not known here.
            salt = self._salts[number] = str(uuid4()) if parent is None else self._salts[parent]
        request = EngineCoreRequest(
            request_id=str(number),
            prompt_token_ids=tokens.tolist(),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        drawn.rows_by_request[number] = rows
        self._running.add(request.request_id)
        self._requests[number], wave = self.core.preprocess_add_request(request)
        self.core.add_request(self._requests[number], wave)

    def _step(self) -> NDArray[np.int64]:
        """Compute one more token for each request that the scheduler chooses.

        Return the rows that end with this token. A request continues with one of the tokens that its rows have drawn. A
        row that has drawn another token moves to a new request. The new request reuses the full cache blocks of the
        tokens that it shares with the old request. A request without rows ends.
        """
        import numpy as np

        drawn = self.generation.call
        results, executed = self.core.step_fn()
        self.core.post_step(executed)
        outputs = [
            output for output in (results[0].outputs if results and 0 in results else ()) if output.new_token_ids
        ]
        if not outputs:
            return np.zeros(0, np.int64)
        numbers = [int(output.request_id) for output in outputs]
        rows, request_index = drawn.expand_requests(numbers)
        drawn.lengths[rows] += 1
        tokens = drawn.tokens[rows, drawn.lengths[rows] - 1].astype(np.int64)
        continuing = drawn.find_continuing(rows, tokens, drawn.lengths[rows])
        if stops := load_stops(self.model.path, drawn.sampling.stop):
            texts = [
                join_response(self._prompts[i], drawn.joined[i], drawn.tokens[i, : drawn.lengths[i]])
                for i in rows[continuing]
            ]
            continuing[continuing] = ~stops(texts)
        ended_rows: NDArray[np.int64] = rows[~continuing]
        if self._capture is not None:
            ended_requests = [numbers[index] for index in request_index[~continuing]]
            computed = [len(self._prompts[row]) + int(drawn.lengths[row]) - 1 for row in ended_rows]
            routes = self._capture.collect([*zip(ended_requests, computed, strict=True)])
            self._ended_routes |= dict(zip(ended_rows.tolist(), routes, strict=True))
        rows = rows[continuing]
        request_index = request_index[continuing]
        tokens = tokens[continuing]
        order = np.lexsort((tokens, request_index))
        parts = np.flatnonzero(np.diff(request_index[order]) | np.diff(tokens[order])) + 1
        without_rows = set(numbers)
        for group in np.split(order, parts) if len(order) else ():
            request = request_index[group[0]]
            if tokens[group[0]] == outputs[request].new_token_ids[-1]:
                drawn.rows_by_request[numbers[request]] = rows[group]
                without_rows.remove(numbers[request])
            else:
                self._add_request(rows[group], numbers[request])
        ended = {str(number) for number in without_rows}
        self._running -= ended
        self.core.abort_requests(
            [output.request_id for output in outputs if output.finish_reason is None and output.request_id in ended]
        )
        for number in without_rows:
            del drawn.rows_by_request[number]
            self.preempted += self._requests.pop(number).num_preemptions
            if self._capture is not None:
                self._capture.drop(number)
        return ended_rows
